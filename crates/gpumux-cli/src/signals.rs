//! Signals by name.

use nix::sys::signal::Signal;

/// The number of a signal: `TERM`, `SIGTERM`, `term` or `15`.
pub(crate) fn parse(text: &str) -> Result<i32, String> {
    let upper = text.trim().to_ascii_uppercase();
    let name = upper.strip_prefix("SIG").unwrap_or(&upper);
    let known = format!("SIG{name}")
        .parse()
        .ok()
        .map(|it: Signal| it as i32);
    // The daemon sends no other than those that have a name.
    let number = || name.parse().ok().filter(|it| Signal::try_from(*it).is_ok());
    known
        .or_else(number)
        .ok_or_else(|| "use a name such as TERM, INT or USR1, or a number from 1 to 31".into())
}

/// The name of a signal, if it has one.
pub(crate) fn name(signal: i32) -> String {
    Signal::try_from(signal).map_or_else(|_| format!("signal {signal}"), |it| it.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_have_names_and_numbers() {
        for text in ["TERM", "SIGTERM", "term", "15"] {
            assert_eq!(parse(text), Ok(15), "{text}");
        }
        for wrong in ["", "SIG", "0", "34", "-9", "DIE"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
        assert_eq!([name(9), name(40)], ["SIGKILL", "signal 40"]);
    }
}
