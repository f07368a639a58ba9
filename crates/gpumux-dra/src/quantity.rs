//! Kubernetes quantities: `80Gi`, `1k`, `500`. What the driver deals in are whole numbers; a fraction in a
//! request (`500m`) rounds up, as the API server does when it turns a quantity into an integer.

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

/// Not a quantity, or one that is no count of anything here.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is not a quantity from 0 to 9223372036854775807: write a number such as 500, or 40Gi"
)]
pub struct QuantityError(pub String);

/// Suffixes with the power that they stand for: base, exponent.
const SUFFIXES: [(&str, u128, u32); 15] = [
    ("Ki", 2, 10),
    ("Mi", 2, 20),
    ("Gi", 2, 30),
    ("Ti", 2, 40),
    ("Pi", 2, 50),
    ("Ei", 2, 60),
    ("k", 10, 3),
    ("M", 10, 6),
    ("G", 10, 9),
    ("T", 10, 12),
    ("P", 10, 15),
    ("E", 10, 18),
    ("m", 10, 0),
    ("u", 10, 0),
    ("n", 10, 0),
];

/// The whole number that a quantity means, rounded up.
///
/// # Errors
/// It is no number, negative, or beyond 63 bits.
pub fn parse(quantity: &Quantity) -> Result<u64, QuantityError> {
    parse_str(&quantity.0, 1).ok_or_else(|| QuantityError(quantity.0.clone()))
}

/// The same in thousandths, as of CPUs.
///
/// # Errors
/// As of [`parse`], for a thousand times as much.
pub fn milli(quantity: &Quantity) -> Result<u64, QuantityError> {
    parse_str(&quantity.0, 1000).ok_or_else(|| QuantityError(quantity.0.clone()))
}

fn parse_str(text: &str, times: u128) -> Option<u64> {
    let (number, multiply, divide) = split(text)?;
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let digits = |s: &str| s.bytes().all(|b| b.is_ascii_digit());
    if (whole.is_empty() && fraction.is_empty()) || !digits(whole) || !digits(fraction) {
        return None;
    }
    // Nothing that fits 63 bits is written with more digits than this.
    if whole.len() + fraction.len() > 36 {
        return None;
    }
    let mantissa: u128 = format!("0{whole}{fraction}").parse().ok()?;
    let divide = divide.checked_mul(10u128.checked_pow(u32::try_from(fraction.len()).ok()?)?)?;
    let value = mantissa
        .checked_mul(multiply)?
        .checked_mul(times)?
        .div_ceil(divide);
    u64::try_from(value)
        .ok()
        .filter(|&value| value <= i64::MAX as u64)
}

/// Mantissa, multiplier and divisor.
fn split(text: &str) -> Option<(&str, u128, u128)> {
    let text = text.strip_prefix('+').unwrap_or(text);
    if let Some(&(suffix, base, exponent)) =
        SUFFIXES.iter().find(|(suffix, ..)| text.ends_with(suffix))
    {
        let number = &text[..text.len() - suffix.len()];
        let divide = match suffix {
            "m" => 1_000,
            "u" => 1_000_000,
            "n" => 1_000_000_000,
            _ => 1,
        };
        return Some((number, base.pow(exponent), divide));
    }
    if let Some((number, exponent)) = text.split_once(['e', 'E']) {
        let exponent: i32 = exponent.parse().ok()?;
        let power = 10u128.checked_pow(exponent.unsigned_abs())?;
        return Some(if exponent < 0 {
            (number, 1, power)
        } else {
            (number, power, 1)
        });
    }
    Some((text, 1, 1))
}

/// A count as the API server writes it back: `1k` for 1000.
pub fn count(value: u64) -> Quantity {
    Quantity(shorten(value, 1000, ["", "k", "M", "G", "T", "P", "E"]))
}

/// A number of bytes as the API server writes it back: `80Gi`.
pub fn bytes(value: u64) -> Quantity {
    Quantity(shorten(
        value,
        1024,
        ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"],
    ))
}

fn shorten(mut value: u64, base: u64, suffixes: [&str; 7]) -> String {
    let mut power = 0;
    while value > 0 && value.is_multiple_of(base) && power + 1 < suffixes.len() {
        value /= base;
        power += 1;
    }
    format!("{value}{}", suffixes[power])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn quantities_are_read_as_the_api_server_reads_them() {
        for (text, value) in [
            ("0", Some(0)),
            ("1k", Some(1000)),
            ("80Gi", Some(80 << 30)),
            ("500m", Some(1)),
            ("1.5Gi", Some(3 << 29)),
            ("1e3", Some(1000)),
            ("12E", None),
            ("5E", Some(5_000_000_000_000_000_000)),
            ("+7", Some(7)),
            ("15e-1", Some(2)),
            ("", None),
            ("Gi", None),
            ("-1", None),
            ("1 Gi", None),
            ("9223372036854775808", None),
        ] {
            assert_eq!(parse(&Quantity(text.into())).ok(), value, "{text}");
        }
    }

    #[test]
    fn thousandths_of_a_quantity_keep_its_fraction() {
        for (text, value) in [
            ("500m", Some(500)),
            ("2", Some(2000)),
            ("0.25", Some(250)),
            ("100u", Some(1)),
            ("9223372036854775807", None),
        ] {
            assert_eq!(milli(&Quantity(text.into())).ok(), value, "{text}");
        }
    }

    proptest! {
        #[test]
        fn what_is_written_reads_back(value in 0..=i64::MAX as u64) {
            prop_assert_eq!(parse(&count(value)), Ok(value));
            prop_assert_eq!(parse(&bytes(value)), Ok(value));
        }

        #[test]
        fn no_text_panics(text in "\\PC{0,40}") {
            let _ = parse(&Quantity(text));
        }
    }
}
