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
    let number = || name.parse().ok().filter(|number| (1..=64).contains(number));
    known
        .or_else(number)
        .ok_or_else(|| "use a name or number such as TERM, INT, USR1 or 15".into())
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
        for wrong in ["", "SIG", "0", "65", "-9", "DIE"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
        assert_eq!([name(9), name(40)], ["SIGKILL", "signal 40"]);
    }
}
