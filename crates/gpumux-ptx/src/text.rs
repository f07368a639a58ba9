//! What `printf` writes.

/// A part of a format.
pub(crate) enum Piece<'a> {
    Plain(&'a [u8]),
    Value(Spec),
}

/// A conversion.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Spec {
    minus: bool,
    zero: bool,
    plus: bool,
    space: bool,
    sharp: bool,
    width: usize,
    precision: Option<usize>,
    long: bool,
    kind: u8,
}

/// Widest that a field may be.
const MOST: usize = 512;

/// The parts of a format.
pub(crate) fn pieces(format: &[u8]) -> Vec<Piece<'_>> {
    let mut found = Vec::new();
    let mut rest = format;
    while let Some(at) = rest.iter().position(|it| *it == b'%') {
        found.push(Piece::Plain(&rest[..at]));
        match Spec::parse(&rest[at + 1..]) {
            Some((spec, length)) => {
                found.push(if spec.kind == b'%' {
                    Piece::Plain(b"%")
                } else {
                    Piece::Value(spec)
                });
                rest = &rest[at + 1 + length..];
            }
            None => {
                found.push(Piece::Plain(b"%"));
                rest = &rest[at + 1..];
            }
        }
    }
    found.push(Piece::Plain(rest));
    found
}

impl Spec {
    fn parse(text: &[u8]) -> Option<(Self, usize)> {
        let mut spec = Self::default();
        let mut at = 0;
        let number = |at: &mut usize| {
            let mut value = 0;
            while let Some(digit) = text.get(*at).filter(|it| it.is_ascii_digit()) {
                value = (value * 10 + usize::from(digit - b'0')).min(MOST);
                *at += 1;
            }
            value
        };
        loop {
            match text.get(at)? {
                b'-' => spec.minus = true,
                b'0' => spec.zero = true,
                b'+' => spec.plus = true,
                b' ' => spec.space = true,
                b'#' => spec.sharp = true,
                _ => break,
            }
            at += 1;
        }
        spec.width = number(&mut at);
        if text.get(at) == Some(&b'.') {
            at += 1;
            spec.precision = Some(number(&mut at));
        }
        while let Some(b'l' | b'h' | b'z' | b'j' | b't' | b'q') = text.get(at) {
            spec.long |= text[at] != b'h';
            at += 1;
        }
        spec.kind = *text.get(at)?;
        b"diuxXocsfFeEgGp%"
            .contains(&spec.kind)
            .then_some((spec, at + 1))
    }

    /// Bytes that the value takes among the arguments.
    pub(crate) fn size(&self) -> u32 {
        match self.kind {
            b'f' | b'F' | b'e' | b'E' | b'g' | b'G' | b's' | b'p' => 8,
            _ if self.long => 8,
            _ => 4,
        }
    }

    /// Whether the value is the address of text.
    pub(crate) fn is_text(&self) -> bool {
        self.kind == b's'
    }

    /// The value as text; `text` is what it points to.
    pub(crate) fn show(&self, value: u64, text: &[u8]) -> Vec<u8> {
        let signed = if self.long {
            value as i64
        } else {
            i64::from(value as i32)
        };
        let float = f64::from_bits(value);
        let (negative, digits) = match self.kind {
            b'd' | b'i' => (signed < 0, signed.unsigned_abs().to_string()),
            b'u' => (false, value.to_string()),
            b'x' => (
                false,
                format!("{}{value:x}", if self.sharp { "0x" } else { "" }),
            ),
            b'X' => (
                false,
                format!("{}{value:X}", if self.sharp { "0X" } else { "" }),
            ),
            b'o' => (false, format!("{value:o}")),
            b'p' => (false, format!("{value:#x}")),
            b'c' => return self.pad(vec![value as u8], b' '),
            b's' => {
                let length = self.precision.unwrap_or(text.len()).min(text.len());
                return self.pad(text[..length].to_vec(), b' ');
            }
            kind => (
                float.is_sign_negative() && !float.is_nan(),
                self.float(kind, float.abs()),
            ),
        };
        let whole = b"diuxXo".contains(&self.kind);
        let digits = match self.precision {
            Some(least) if whole => format!("{digits:0>least$}"),
            _ => digits,
        };
        let sign = match () {
            () if negative => "-",
            () if self.plus && self.kind != b'u' => "+",
            () if self.space && self.kind != b'u' => " ",
            () => "",
        };
        let finite = whole || self.kind == b'p' || float.is_finite();
        if self.zero && !self.minus && finite && (self.precision.is_none() || !whole) {
            let width = self.width.saturating_sub(sign.len());
            return format!("{sign}{digits:0>width$}").into_bytes();
        }
        self.pad(format!("{sign}{digits}").into_bytes(), b' ')
    }

    fn pad(&self, mut text: Vec<u8>, with: u8) -> Vec<u8> {
        let missing = self.width.saturating_sub(text.len());
        let padding = std::iter::repeat_n(with, missing);
        if self.minus {
            text.extend(padding);
            return text;
        }
        padding.chain(text).collect()
    }

    fn float(&self, kind: u8, value: f64) -> String {
        let precision = self.precision.unwrap_or(6);
        let upper = kind.is_ascii_uppercase();
        let text = if !value.is_finite() {
            if value.is_nan() {
                "nan".to_owned()
            } else {
                "inf".to_owned()
            }
        } else {
            match kind.to_ascii_lowercase() {
                b'f' => format!("{value:.precision$}"),
                b'e' => exponential(value, precision),
                _ => {
                    let precision = precision.max(1);
                    let scientific = exponential(value, precision - 1);
                    let exponent: i32 = scientific
                        .split_once('e')
                        .and_then(|(_, exponent)| exponent.parse().ok())
                        .unwrap_or(0);
                    if exponent < -4 || exponent >= precision as i32 {
                        let (digits, exponent) =
                            scientific.split_once('e').unwrap_or((&scientific, "+00"));
                        format!("{}e{exponent}", self.trim(digits))
                    } else {
                        let places = (precision as i32 - 1 - exponent).max(0) as usize;
                        self.trim(&format!("{value:.places$}")).to_owned()
                    }
                }
            }
        };
        if upper { text.to_uppercase() } else { text }
    }

    fn trim<'a>(&self, digits: &'a str) -> &'a str {
        if self.sharp || !digits.contains('.') {
            return digits;
        }
        digits.trim_end_matches('0').trim_end_matches('.')
    }
}

/// As C writes it: a sign and at least two digits of the exponent.
fn exponential(value: f64, precision: usize) -> String {
    let text = format!("{value:.precision$e}");
    let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn show(format: &str, value: u64) -> String {
        let format = format.as_bytes();
        let mut out = Vec::new();
        for piece in pieces(format) {
            match piece {
                Piece::Plain(bytes) => out.extend_from_slice(bytes),
                Piece::Value(spec) => out.extend(spec.show(value, b"text")),
            }
        }
        String::from_utf8_lossy(&out).into_owned()
    }

    #[test]
    fn as_c_does() {
        for (format, value, expected) in [
            ("%d|", (-5_i32) as u32 as u64, "-5|"),
            ("%5u|", 7, "    7|"),
            ("%-5u|", 7, "7    |"),
            ("%05d", (-7_i32) as u32 as u64, "-0007"),
            ("%x %%", 255, "ff %"),
            ("%#llX", 255, "0XFF"),
            ("%s!", 1, "text!"),
            ("%.2s", 1, "te"),
            ("%c", 65, "A"),
            ("%f", 1.5_f64.to_bits(), "1.500000"),
            ("%.2f", 2.34567_f64.to_bits(), "2.35"),
            ("%g", 0.0001_f64.to_bits(), "0.0001"),
            ("%g", 1e10_f64.to_bits(), "1e+10"),
            ("%g", 100000.0_f64.to_bits(), "100000"),
            ("%e", 12345.678_f64.to_bits(), "1.234568e+04"),
            ("%8.3f|", (-2.5_f64).to_bits(), "  -2.500|"),
            ("%lld", (-3_i64) as u64, "-3"),
            ("100%", 0, "100%"),
            ("%", 0, "%"),
        ] {
            assert_eq!(show(format, value), expected, "{format}");
        }
    }

    proptest::proptest! {
        #[test]
        fn no_format_panics(format in "[%a-z0-9.#+ -]{0,30}", value: u64) {
            show(&format, value);
        }
    }
}
