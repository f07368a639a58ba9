//! The same mistake in the arguments has the same exit code in every command.

use std::process::Command;

use gpumux_tests::{Run, binary};

const ABSENT: &str = "/nonexistent/file";

/// Wrong usage ends with 2, a message on the standard error, and before anything starts.
#[test]
fn mistakes_of_usage_have_one_exit_code() {
    let unreadable = "cannot read";
    let cases: [(&[&str], &str); 12] = [
        (&["sim", ABSENT], unreadable),
        (&["daemon", "--config", ABSENT], unreadable),
        (&["daemon", "--check", "--config", ABSENT], unreadable),
        (
            &["fleet", "place", "--nodes", ABSENT, "--pods", ABSENT],
            unreadable,
        ),
        (&["emu", "--profile", ABSENT, "--", "true"], unreadable),
        (&["profile", "NOSUCH"], "cannot run NOSUCH"),
        (&["profile", ABSENT], "cannot run /nonexistent/file"),
        (&["profile", "--points", "50", "--", "true"], "at least two"),
        (
            &["run", "--guaranteed", "60%", "--limit", "50%", "--", "true"],
            "--limit 50%",
        ),
        (&["run", "--weight", "x", "--", "true"], "use a number"),
        (&["set", "web", "--weight", "-1"], "use a number"),
        (&["nosuch"], "unrecognized subcommand"),
    ];
    for (args, message) in cases {
        let finished = Command::new(binary()).args(args).run();
        assert_eq!(finished.code(), 2, "{args:?}: {finished:#?}");
        assert!(finished.err.contains(message), "{args:?}: {finished:#?}");
        assert!(
            finished.err.starts_with("error: "),
            "{args:?}: {finished:#?}"
        );
        assert_eq!(finished.out, "", "{args:?}: {finished:#?}");
    }
}
