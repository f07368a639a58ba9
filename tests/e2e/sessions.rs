//! The console sessions of the README and the book: their commands are typed, and what these print has the shape of what the page
//! shows: the same lines and columns, with other numbers.

use std::{fs, path::Path, process::Command};

use gpumux_tests::{Node, Process, Run, binary, program, real};

use crate::docs;

/// Units that may differ with their number.
const UNITS: [&str; 12] = [
    "s", "ms", "µs", "min", "h", "B", "KiB", "MiB", "GiB", "MHz", "W", "°C",
];

/// States of tenants, which change from moment to moment.
const STATES: [&str; 6] = [
    "starting", "idle", "running", "queued", "swapped", "blocked",
];

/// The lines of `gpumux explain`: what is said in them differs from moment to moment.
const EXPLAINED: [&str; 5] = ["entitled:", "received:", "why:", "others:", "to do:"];

/// A line without what differs from run to run: numbers with their units, paths, tenants' states, sentences of `gpumux explain`, and how
/// wide columns are.
fn shape(line: &str) -> String {
    if let Some(label) = EXPLAINED.iter().find(|label| line.starts_with(**label)) {
        return (*label).to_owned();
    }
    let mut words: Vec<&str> = Vec::new();
    // The stand-in has an argument of its own behind the command that it stands for.
    for word in line.split_whitespace().filter(|it| *it != "scratch") {
        let bare = word.trim_end_matches([',', ';', '.', ':', ')']);
        let number = word.contains(|letter: char| letter.is_ascii_digit()) || word == "-";
        if UNITS.contains(&bare) && words.last() == Some(&"#") {
            continue;
        }
        words.push(if number || word.starts_with('/') {
            "#"
        } else if STATES.contains(&word) {
            "state"
        } else {
            word
        });
    }
    words.join(" ")
}

/// Whether lines have the shape of those that are shown, in which `…` stands for any lines.
fn fits(shown: &[String], printed: &[String]) -> bool {
    match shown.split_first() {
        None => printed.is_empty(),
        Some((first, rest)) if first == "…" => {
            (0..=printed.len()).any(|skipped| fits(rest, &printed[skipped..]))
        }
        Some((first, rest)) => printed
            .split_first()
            .is_some_and(|(own, others)| own == first && fits(rest, others)),
    }
}

/// Where a session is typed: a node, and a folder in which `python` is a program that works until the session ends.
struct Terminal {
    node: Node,
    dir: tempfile::TempDir,
    background: Vec<Process>,
}

impl Terminal {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("bin")).unwrap();
        let script = "#!/bin/bash\nexec -a \"python $*\" gpumux scratch > /dev/null\n";
        program(&dir.path().join("bin/python"), script);
        Self {
            node: Node::start(),
            dir,
            background: Vec::new(),
        }
    }

    fn shell(&self, line: &str) -> Command {
        let mut shell = self
            .node
            .on_device(["bash", "-c", &format!("exec 2>&1; {line}")]);
        let built = binary();
        let built = built.parent().unwrap().display();
        let path = std::env::var("PATH").unwrap();
        let own = self.dir.path().join("bin");
        shell.env("PATH", format!("{}:{built}:{path}", own.display()));
        shell.current_dir(self.dir.path());
        shell
    }

    /// What a command prints; of one in the background, nothing, but its tenant has a context afterwards.
    fn type_in(&mut self, line: &str) -> Vec<String> {
        let Some(line) = line.strip_suffix('&') else {
            let printed = self.shell(&docs::shortened(line)).run().out;
            return printed
                .lines()
                .map(shape)
                .filter(|it| !it.is_empty())
                .collect();
        };
        let started = Process::start(&mut self.shell(&format!("exec {line}")));
        self.background.push(started);
        let mut words = line.split_whitespace().skip_while(|word| *word != "--name");
        let name = words
            .nth(1)
            .expect("a program in the background has a --name");
        self.node
            .wait_tenant(name, |it| it["domains"][0].is_object());
        Vec::new()
    }
}

/// The commands of a session, each with the shapes of what is shown below it.
fn typed(session: &str) -> Vec<(&str, Vec<String>)> {
    let mut found: Vec<(&str, Vec<String>)> = Vec::new();
    for line in session.lines() {
        match (line.strip_prefix("$ "), found.last_mut()) {
            (Some(command), _) => found.push((command.trim(), Vec::new())),
            (None, Some((_, shown))) if !line.trim().is_empty() => shown.push(shape(line)),
            (None, _) => {}
        }
    }
    found
}

#[test]
fn sessions_of_the_book_print_what_is_shown() {
    if real() {
        eprintln!("SKIPPED: the sessions are of the emulated device");
        return;
    }
    let mut count = 0;
    for (page, text) in docs::pages() {
        for (_, body) in docs::blocks(&text).filter(|(kind, _)| *kind == "console") {
            let mut terminal = Terminal::new();
            for (command, shown) in typed(body) {
                let printed = terminal.type_in(command);
                let page = Path::display(&page);
                assert!(
                    fits(&shown, &printed),
                    "{page}: `{command}` shows\n{}\nbut prints\n{}",
                    shown.join("\n"),
                    printed.join("\n")
                );
                count += 1;
            }
        }
    }
    assert!(count > 0, "no page has a session");
}

#[test]
fn shape_keeps_words_and_columns_alone() {
    for (one, other) in [
        (
            "web  latency  66 MiB  1000000 µs  95%",
            "web latency 1.5 GiB  2 s  5%",
        ),
        (
            "in the last second it received 3%, beside",
            "in the last second it received 45%, beside",
        ),
        (
            "ok   libgpumux.so: /usr/lib/libgpumux.so",
            "ok libgpumux.so: /opt/lib/libgpumux.so",
        ),
        ("night  batch  -  4s", "night  batch  12 MiB  1.5s"),
        ("why:      It has its turn.", "why:      It is frozen."),
    ] {
        assert_eq!(shape(one), shape(other));
    }
    for (one, other) in [
        ("web  running", "web  faulty"),
        ("NAME  CLASS  STATE", "NAME  CLASS"),
        ("web  3%", "web  3%  4%"),
    ] {
        assert_ne!(shape(one), shape(other));
    }
    let lines = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
    assert!(fits(&lines("a … c"), &lines("a b b c")) && fits(&lines("a …"), &lines("a")));
    assert!(!fits(&lines("a … c"), &lines("a b")) && !fits(&lines("a"), &lines("a b")));
}
