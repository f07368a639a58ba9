//! Signals by name.

/// Names and numbers.
const SIGNALS: [(&str, i32); 20] = [
    ("HUP", libc::SIGHUP),
    ("INT", libc::SIGINT),
    ("QUIT", libc::SIGQUIT),
    ("ABRT", libc::SIGABRT),
    ("KILL", libc::SIGKILL),
    ("USR1", libc::SIGUSR1),
    ("USR2", libc::SIGUSR2),
    ("PIPE", libc::SIGPIPE),
    ("ALRM", libc::SIGALRM),
    ("TERM", libc::SIGTERM),
    ("CHLD", libc::SIGCHLD),
    ("CONT", libc::SIGCONT),
    ("STOP", libc::SIGSTOP),
    ("TSTP", libc::SIGTSTP),
    ("TTIN", libc::SIGTTIN),
    ("TTOU", libc::SIGTTOU),
    ("URG", libc::SIGURG),
    ("XCPU", libc::SIGXCPU),
    ("WINCH", libc::SIGWINCH),
    ("SEGV", libc::SIGSEGV),
];

/// The number of a signal: `TERM`, `SIGTERM`, `term` or `15`.
pub(crate) fn parse(text: &str) -> Result<i32, String> {
    let upper = text.trim().to_ascii_uppercase();
    let name = upper.strip_prefix("SIG").unwrap_or(&upper);
    let known = SIGNALS.iter().find(|(known, _)| *known == name);
    let number = name.parse().ok().filter(|number| (1..=64).contains(number));
    known
        .map(|(_, number)| *number)
        .or(number)
        .ok_or_else(|| "use a name or number such as TERM, INT, USR1 or 15".into())
}

/// The name of a signal, if it has one.
pub(crate) fn name(signal: i32) -> String {
    let known = SIGNALS.iter().find(|(_, number)| *number == signal);
    known.map_or_else(
        || format!("signal {signal}"),
        |(name, _)| format!("SIG{name}"),
    )
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
