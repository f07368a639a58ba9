//! Shares, sizes and times as people write and read them: the same on the command line and in files.
//!
//! | quantity | written | meaning |
//! |---|---|---|
//! | share | `50%`, `0.5` | part of a device, 0 to 1 |
//! | size | `8G`, `8g`, `8Gi`, `8GiB` | 8 × 2³⁰ bytes, as `docker --memory` and Kubernetes' `Gi`; K, M and T likewise |
//! | | `8GB` | 8 × 10⁹ bytes |
//! | time | `30s`, `5min`, `1h30m`, `500ms` | a number alone is in the unit that the setting names |

use std::{fmt, time::Duration};

use serde::{Deserialize, Deserializer, de};

/// Why a text is not a quantity.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QuantityError {
    /// Not a share at all.
    #[error("`{0}` is not a share: use one such as 50% or 0.5")]
    NotAShare(String),
    /// A share of more than a whole, or less than nothing.
    #[error("`{0}` is out of range: a share is 0% to 100%, such as 50% or 0.5")]
    ShareOutOfRange(String),
    /// Not a size at all.
    #[error("`{0}` is not a size: use one such as 512MiB or 8GiB")]
    NotASize(String),
    /// Too few bytes for anything that has a size here.
    #[error("`{0}` is only {0} bytes: give a unit, such as {0}GiB")]
    NoUnit(String),
    /// Not a time at all.
    #[error("`{0}` is not a time: use one such as 30s, 5min or 1h30m")]
    NotATime(String),
}

/// Shares that sum to a hair more than the whole are all right: thirds.
pub(crate) const ROUNDING: f64 = 1e-9;
pub(crate) const GIB: u64 = 1 << 30;
/// Sizes without a unit are bytes. Less than this is a unit that was forgotten.
const LEAST_BYTES: u64 = 1 << 10;

/// A share of a device: `50%` or `0.5`.
///
/// # Errors
/// When it is none, or not within 0 to 1.
pub fn parse_share(text: &str) -> Result<f64, QuantityError> {
    let (number, whole) = match text.trim().strip_suffix('%') {
        Some(percent) => (percent.trim_end(), 100.0),
        None => (text.trim(), 1.0),
    };
    let share = number.parse::<f64>().map(|value| value / whole);
    match share {
        Ok(share) if (0.0..=1.0).contains(&share) => Ok(share),
        Ok(share) if share.is_finite() => Err(QuantityError::ShareOutOfRange(text.to_owned())),
        _ => Err(QuantityError::NotAShare(text.to_owned())),
    }
}

/// A size in bytes: see the [module](self).
///
/// # Errors
/// When it is none, or so small that its unit was forgotten.
pub fn parse_bytes(text: &str) -> Result<u64, QuantityError> {
    let wrong = || QuantityError::NotASize(text.to_owned());
    let trimmed = text.trim();
    let end = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.');
    let (number, unit) = trimmed.split_at(end.unwrap_or(trimmed.len()));
    let unit = unit.trim_start().to_ascii_lowercase();
    let (power, base): (i32, f64) = match unit.as_str() {
        "" | "b" => (0, 1.0),
        "k" | "ki" | "kib" => (1, 1024.0),
        "m" | "mi" | "mib" => (2, 1024.0),
        "g" | "gi" | "gib" => (3, 1024.0),
        "t" | "ti" | "tib" => (4, 1024.0),
        "kb" => (1, 1000.0),
        "mb" => (2, 1000.0),
        "gb" => (3, 1000.0),
        "tb" => (4, 1000.0),
        _ => return Err(wrong()),
    };
    // Whole numbers exactly, whatever their size.
    let bytes = match number.parse::<u64>() {
        Ok(whole) if unit.is_empty() || unit == "b" => whole,
        _ => {
            let value = number.parse::<f64>().map_err(|_| wrong())? * base.powi(power);
            if !(value.is_finite() && value < 1e15) {
                return Err(wrong());
            }
            value as u64
        }
    };
    match unit.is_empty() && (1..LEAST_BYTES).contains(&bytes) {
        true => Err(QuantityError::NoUnit(trimmed.to_owned())),
        false => Ok(bytes),
    }
}

/// A time: `30s`, `5min`, `1h30m`, `500ms`; a number alone counts `unit`s.
///
/// # Errors
/// When it is none, or negative.
pub fn parse_time(text: &str, unit: Duration) -> Result<Duration, QuantityError> {
    let wrong = || QuantityError::NotATime(text.to_owned());
    let trimmed = text.trim();
    if let Ok(number) = trimmed.parse::<f64>() {
        let seconds = number * unit.as_secs_f64();
        return Duration::try_from_secs_f64(seconds).map_err(|_| wrong());
    }
    let span: jiff::SignedDuration = trimmed.parse().map_err(|_| wrong())?;
    span.try_into().map_err(|_| wrong())
}

/// A share in a file: a number, or a text such as `"50%"`. Whether a number is a share is checked where it is used.
///
/// # Errors
/// When it is neither, or the text is no share.
pub fn read_share<'de, D: Deserializer<'de>>(value: D) -> Result<f64, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "use a share such as 0.5 or \"50%\"")]
    enum Written {
        Number(f64),
        Text(String),
    }
    match Written::deserialize(value)? {
        Written::Number(share) => Ok(share),
        Written::Text(text) => parse_share(&text).map_err(de::Error::custom),
    }
}

/// The same, where it may be left out.
///
/// # Errors
/// As above.
pub fn read_some_share<'de, D: Deserializer<'de>>(value: D) -> Result<Option<f64>, D::Error> {
    read_share(value).map(Some)
}

/// A time in a file that may be left out: a number of seconds, or a text such as `"5min"`.
///
/// # Errors
/// When it is neither, or the text is no time.
pub fn read_some_seconds<'de, D: Deserializer<'de>>(value: D) -> Result<Option<u64>, D::Error> {
    #[derive(Deserialize)]
    #[serde(
        untagged,
        expecting = "use a number of seconds, or a time such as \"5min\""
    )]
    enum Written {
        Seconds(u64),
        Text(String),
    }
    match Written::deserialize(value)? {
        Written::Seconds(seconds) => Ok(Some(seconds)),
        Written::Text(text) => parse_time(&text, Duration::from_secs(1))
            .map(|time| Some(time.as_secs()))
            .map_err(de::Error::custom),
    }
}

/// Prints a share as percent: `50%`, `12.5%`.
#[derive(Clone, Copy, Debug)]
pub struct Percent(pub f64);

impl fmt::Display for Percent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tenths = (self.0 * 1000.0).round();
        let text = match tenths % 10.0 == 0.0 {
            true => format!("{:.0}%", tenths / 10.0),
            false => format!("{:.1}%", tenths / 10.0),
        };
        f.pad(&text)
    }
}

/// Prints bytes with a unit: `512 MiB`, `7.5 GiB`.
#[derive(Clone, Copy, Debug)]
pub struct Size(pub u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const MIB: f64 = (1 << 20) as f64;
        let mib = self.0 as f64 / MIB;
        let text = match self.0 {
            0 => "0".to_owned(),
            bytes if bytes < 1 << 10 => format!("{bytes} B"),
            bytes if bytes < 1 << 20 => format!("{:.0} KiB", bytes as f64 / 1024.0),
            _ if mib.round() < 1024.0 => format!("{mib:.0} MiB"),
            _ => format!("{:.1} GiB", mib / 1024.0),
        };
        f.pad(&text)
    }
}

/// Prints a time with a unit: `250 µs`, `4.9 ms`, `12 s`, `5m20s`, `3h05m`, `2d04h`.
#[derive(Clone, Copy, Debug)]
pub struct Time(pub Duration);

impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (us, s) = (self.0.as_micros() as f64, self.0.as_secs());
        let text = match s {
            _ if us < 1e3 => format!("{us:.0} µs"),
            _ if us < 99_950.0 => format!("{:.1} ms", us / 1e3),
            _ if us < 999_500.0 => format!("{:.0} ms", us / 1e3),
            0..10 => format!("{:.1} s", us / 1e6),
            10..60 => format!("{s} s"),
            60..3600 => format!("{}m{:02}s", s / 60, s % 60),
            3600..86400 => format!("{}h{:02}m", s / 3600, s % 3600 / 60),
            _ => format!("{}d{:02}h", s / 86400, s % 86400 / 3600),
        };
        f.pad(&text)
    }
}

/// A share of compute, or memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Quantity {
    /// A share, 0 to 1.
    Compute(f64),
    /// Bytes.
    Memory(u64),
}

impl fmt::Display for Quantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            // Downwards, so that what is said to be free can be had.
            Self::Compute(share) => Percent(((share + ROUNDING) * 1000.0).floor() / 1000.0).fmt(f),
            Self::Memory(bytes) if bytes >= GIB => Size(bytes / (GIB / 10) * (GIB / 10)).fmt(f),
            Self::Memory(bytes) => Size(bytes).fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn shares_are_percent_or_fraction() {
        for (text, share) in [
            ("50%", 0.5),
            ("0.5", 0.5),
            ("100%", 1.0),
            ("1", 1.0),
            ("0", 0.0),
        ] {
            assert_eq!(parse_share(text), Ok(share), "{text}");
        }
        for wrong in ["50", "-1", "101%", "1.5"] {
            let error = parse_share(wrong).unwrap_err();
            assert!(
                matches!(error, QuantityError::ShareOutOfRange(_)),
                "{error}"
            );
        }
        for wrong in ["", "half", "%", "NaN", "inf", "5%%"] {
            assert!(parse_share(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn sizes_are_binary_unless_they_end_in_b_alone() {
        for (text, bytes) in [
            ("0", 0),
            ("8G", 8 << 30),
            ("8g", 8 << 30),
            ("8Gi", 8 << 30),
            ("8GiB", 8 << 30),
            ("8GB", 8_000_000_000),
            ("8 gb", 8_000_000_000),
            ("1.5 MiB", 3 << 19),
            ("512m", 512 << 20),
            ("64424509440", 60 << 30),
            ("7B", 7),
        ] {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
        let error = parse_bytes("40").unwrap_err().to_string();
        assert_eq!(error, "`40` is only 40 bytes: give a unit, such as 40GiB");
        for wrong in [
            "",
            "GiB",
            "-1GiB",
            "8 giga",
            "1e99GiB",
            "1.2.3",
            "99999999T",
        ] {
            assert!(parse_bytes(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn times_have_units_or_the_settings_own() {
        let second = Duration::from_secs(1);
        for (text, ms) in [
            ("30s", 30_000),
            ("5min", 300_000),
            ("5m", 300_000),
            ("1h30m", 5_400_000),
            ("1h 30m", 5_400_000),
            ("500ms", 500),
            ("7", 7_000),
            ("0.5", 500),
            ("0s", 0),
        ] {
            let time = parse_time(text, second);
            assert_eq!(time, Ok(Duration::from_millis(ms)), "{text}");
        }
        let us = parse_time("300", Duration::from_micros(1));
        assert_eq!(us, Ok(Duration::from_micros(300)));
        for wrong in ["", "-1", "-5s", "soon", "NaN", "5 parsecs", "1e99"] {
            assert!(parse_time(wrong, second).is_err(), "{wrong}");
        }
    }

    #[test]
    fn quantities_are_printed_in_peoples_units() {
        let us = |us| Time(Duration::from_micros(us)).to_string();
        assert_eq!(
            [us(250), us(4_900), us(250_000)],
            ["250 µs", "4.9 ms", "250 ms"]
        );
        assert_eq!([us(4_900_000), us(12_000_000)], ["4.9 s", "12 s"]);
        let s = |s| Time(Duration::from_secs(s)).to_string();
        assert_eq!([s(320), s(11_100), s(187_200)], ["5m20s", "3h05m", "2d04h"]);
        assert_eq!(
            [Percent(0.5), Percent(0.125)].map(|it| it.to_string()),
            ["50%", "12.5%"]
        );
        let sizes = [0, 7, 2048, 512 << 20, (1 << 30) - 1, 15 << 29].map(|it| Size(it).to_string());
        assert_eq!(
            sizes,
            ["0", "7 B", "2 KiB", "512 MiB", "1.0 GiB", "7.5 GiB"]
        );
    }

    proptest! {
        #[test]
        fn what_is_printed_is_read_again(share in 0.0..=1.0_f64, bytes in 1_u64 << 10..1 << 45, us in 1_u64..1 << 40) {
            let read = parse_share(&Percent(share).to_string()).unwrap();
            prop_assert!((read - share).abs() <= 0.000_5 + 1e-9);
            let read = parse_bytes(&Size(bytes).to_string()).unwrap();
            prop_assert!(read.abs_diff(bytes) <= bytes / 2 + 1024);
            let read = parse_time(&Time(Duration::from_micros(us)).to_string(), Duration::from_secs(1));
            // Days are no part of a time that a machine measures.
            prop_assert!(read.is_ok() || us >= 86_400_000_000);
        }

        #[test]
        fn no_text_makes_the_parsers_panic(text in ".{0,12}") {
            let _ = (parse_share(&text), parse_bytes(&text), parse_time(&text, Duration::from_secs(1)));
        }
    }
}
