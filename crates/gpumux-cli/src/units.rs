//! Values of flags: one parser for each kind, so that a mistake has one message and one exit code (2) everywhere.

use std::{ffi::OsStr, fs, ops::RangeInclusive, path::Path, time::Duration};

pub(crate) use gpumux_core::quantity::{parse_bytes as size, parse_share as share};
use gpumux_core::{
    MAX_NAME, TenantSpec, is_name,
    quantity::{self, Percent, QuantityError, Size},
};
use gpumux_daemon::api::types::NewHint;

use crate::elf;

/// A value, or none: what was set before is cleared.
pub(crate) type OrNone = Option<u64>;

/// A mistake in the arguments that only their combination shows: printed, and ended, as clap does its own.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Usage(pub(crate) String);

/// The text of a file that the arguments name.
///
/// # Errors
/// When it cannot be read.
pub(crate) fn text_of(file: &Path) -> Result<String, Usage> {
    fs::read_to_string(file)
        .map_err(|error| Usage(format!("cannot read {}: {error}", file.display())))
}

/// A program that is to be started several times.
///
/// # Errors
/// When there is none of this name.
pub(crate) fn program(name: &OsStr) -> Result<(), Usage> {
    match elf::find(name).is_some_and(|file| file.is_file()) {
        true => Ok(()),
        false => Err(Usage(format!(
            "cannot run {}: there is no such program",
            name.display()
        ))),
    }
}

/// A name of a tenant, a trust domain or a program.
pub(crate) fn name(text: &str) -> Result<String, String> {
    match is_name(text) {
        true => Ok(text.to_owned()),
        false => Err(format!(
            "use 1 to {MAX_NAME} letters, digits, `.`, `_`, `-`"
        )),
    }
}

/// A device, of which more may be known where there is a daemon.
pub(crate) fn device(text: &str) -> Result<String, String> {
    match text.is_empty() {
        true => Err("use a number, a UUID, or all".into()),
        false => Ok(text.to_owned()),
    }
}

/// Seconds between two looks.
pub(crate) fn interval(text: &str) -> Result<f64, String> {
    number(text, 0.1..=60.0)
}

/// Seconds of the past.
pub(crate) fn past(text: &str) -> Result<f64, String> {
    // What the API takes.
    number(text, 0.001..=3600.0)
}

/// A weight.
pub(crate) fn weight(text: &str) -> Result<f64, String> {
    number(text, TenantSpec::WEIGHTS)
}

/// A whole number.
pub(crate) fn whole(range: RangeInclusive<u32>) -> impl Fn(&str) -> Result<u32, String> + Clone {
    move |text| {
        let value = text.trim().parse().ok();
        value.filter(|it| range.contains(it)).ok_or_else(|| {
            let (least, most) = (range.start(), range.end());
            format!("use a whole number from {least} to {most}")
        })
    }
}

fn number(text: &str, range: RangeInclusive<f64>) -> Result<f64, String> {
    let value = text.trim().parse::<f64>().ok();
    value.filter(|it| range.contains(it)).ok_or_else(|| {
        format!(
            "use a number from {} to {}, such as 1",
            range.start(),
            range.end()
        )
    })
}

/// A time, in whole seconds; a number alone is in seconds.
pub(crate) fn seconds(text: &str) -> Result<u64, QuantityError> {
    quantity::parse_time(text, Duration::from_secs(1)).map(|time| time.as_secs_f64().ceil() as u64)
}

/// A limit of memory, or none.
pub(crate) fn size_or_none(text: &str) -> Result<OrNone, String> {
    match text {
        "none" => Ok(None),
        _ => match size(text) {
            Ok(0) => Err("no program runs with 0: use a size such as 8GiB, or none".into()),
            Ok(bytes) => Ok(Some(bytes)),
            Err(error) => Err(format!("{error}, or none")),
        },
    }
}

/// A time in seconds, or never.
pub(crate) fn seconds_or_never(text: &str) -> Result<OrNone, String> {
    match text {
        "never" => Ok(None),
        _ => seconds(text)
            .map(Some)
            .map_err(|error| format!("{error}, or never")),
    }
}

/// A latency objective in µs, or none; a number alone is in ms.
pub(crate) fn objective(text: &str) -> Result<OrNone, String> {
    if text == "none" {
        return Ok(None);
    }
    let time = quantity::parse_time(text, Duration::from_millis(1));
    let us = time.map(|time| time.as_micros() as u64);
    match us {
        Ok(us) if TenantSpec::OBJECTIVES_US.contains(&us) => Ok(Some(us)),
        Ok(_) => Err("use more than 0 and at most 1h, such as 20ms, or none".into()),
        Err(_) => Err(format!(
            "`{text}` is not a time: use one such as 20ms, or none"
        )),
    }
}

/// How far ahead a hint is, in µs; a number alone is in µs.
pub(crate) fn ahead(text: &str) -> Result<u32, String> {
    let time = quantity::parse_time(text, Duration::from_micros(1));
    let us = time.map_err(|error| error.to_string())?.as_micros();
    match u32::try_from(us) {
        Ok(us) if us <= NewHint::FARTHEST_US => Ok(us),
        _ => Err("use at most 1s, such as 300us".into()),
    }
}

/// What the parts of a spec say about each other.
///
/// # Errors
/// When a guarantee is above its limit.
pub(crate) fn consistent(
    guaranteed: (Option<f64>, Option<f64>),
    memory: (Option<u64>, Option<u64>),
) -> Result<(), Usage> {
    if let (Some(guaranteed), Some(limit)) = guaranteed
        && guaranteed > limit
    {
        let (guaranteed, limit) = (Percent(guaranteed), Percent(limit));
        return Err(Usage(format!(
            "--guaranteed {guaranteed} is more than --limit {limit}: raise the limit or lower the guarantee"
        )));
    }
    if let (Some(guaranteed), Some(limit)) = memory
        && guaranteed > limit
    {
        let (guaranteed, limit) = (Size(guaranteed), Size(limit));
        return Err(Usage(format!(
            "--memory-guaranteed {guaranteed} is more than --memory-limit {limit}: raise the limit or lower the guarantee"
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_devices_are_checked_before_anything_starts() {
        assert_eq!(name("web-1.a").as_deref(), Ok("web-1.a"));
        for wrong in ["", "a b", "../x", "-x", &"x".repeat(65)] {
            assert!(
                name(wrong).unwrap_err().contains("1 to 64 letters"),
                "{wrong}"
            );
        }
        assert_eq!(device("all").as_deref(), Ok("all"));
        assert!(device("").is_err());
        assert_eq!(interval("2"), Ok(2.0));
        assert!(interval("x").is_err() && interval("0").is_err());
    }

    #[test]
    fn settings_can_be_cleared_by_a_word() {
        assert_eq!(size_or_none("none"), Ok(None));
        assert_eq!(size_or_none("1GiB"), Ok(Some(1 << 30)));
        assert!(size_or_none("0").unwrap_err().contains("none"));
        assert!(size_or_none("much").unwrap_err().ends_with("8GiB, or none"));
        assert_eq!(seconds_or_never("never"), Ok(None));
        assert_eq!(seconds_or_never("5min"), Ok(Some(300)));
        assert_eq!(
            seconds_or_never("500ms"),
            Ok(Some(1)),
            "at least what was asked"
        );
        assert!(seconds_or_never("none").unwrap_err().ends_with("or never"));
        assert_eq!(objective("none"), Ok(None));
        for text in ["20", "20ms", "0.02s"] {
            assert_eq!(objective(text), Ok(Some(20_000)), "{text}");
        }
        assert!(objective("0").is_err() && objective("2h").is_err());
    }

    #[test]
    fn weights_and_hints_have_a_range() {
        assert_eq!(whole(10..=600)("25"), Ok(25));
        for wrong in ["9", "-1", "25.5", "many", "99999999999"] {
            assert!(whole(10..=600)(wrong).is_err(), "{wrong}");
        }
        assert_eq!(weight("3"), Ok(3.0));
        for wrong in ["0", "-1", "1001", "NaN", "heavy"] {
            assert!(weight(wrong).is_err(), "{wrong}");
        }
        for text in ["300", "300us", "0.3ms"] {
            assert_eq!(ahead(text), Ok(300), "{text}");
        }
        assert!(ahead("2s").is_err());
    }

    #[test]
    fn guarantee_above_its_limit_is_a_usage_error() {
        assert!(consistent((Some(0.5), Some(0.5)), (None, None)).is_ok());
        let error = consistent((Some(0.2), Some(0.1)), (None, None)).unwrap_err();
        assert!(error.to_string().contains("20% is more than --limit 10%"));
        let error = consistent((None, None), (Some(80 << 30), Some(40 << 30))).unwrap_err();
        assert!(
            error.to_string().contains("80.0 GiB is more than"),
            "{error}"
        );
    }
}
