//! The console sessions that README and book print: each command is executed, and its output has the shape of the printed one.

use std::{fmt::Write, fs, path::Path};

use gpumux_tests::{Node, Options, PATIENCE, Process, Run, binary, program, real, wait_for};

use crate::docs;

/// Stands in for the users' programs: a server with requests, and work without an end.
const PYTHON: &str = "#!/bin/sh\ncase $1 in\n\
    *serve*) exec gpumux workload latency --kernel-us 2000 --kernels 1 --period-us 20000 --seconds 600 ;;\n\
    *) exec gpumux scratch ;;\nesac\n";
/// What differs from moment to moment, or follows from that: only the label of such a line is compared.
const MOMENTARY: [&str; 3] = ["received:", "why:", "to do:"];
const STATES: [&str; 4] = ["starting", "idle", "running", "queued"];
const UNITS: [&str; 8] = ["µs", "ms", "s", "min", "B", "KiB", "MiB", "GiB"];

/// A command of a session, and what it prints.
#[derive(Debug)]
struct Step {
    command: String,
    prints: Vec<String>,
}

/// The sessions of a page.
fn sessions(text: &str) -> Vec<Vec<Step>> {
    let consoles = docs::blocks(text).filter(|(kind, _)| *kind == "console");
    let session = |(_, body): (&str, &str)| {
        let mut steps: Vec<Step> = Vec::new();
        for line in body.lines() {
            match (line.strip_prefix("$ "), steps.last_mut()) {
                (Some(command), _) => steps.push(Step {
                    command: command.to_owned(),
                    prints: Vec::new(),
                }),
                (None, Some(step)) => step.prints.push(line.to_owned()),
                (None, None) => panic!("a session begins with a command: {line}"),
            }
        }
        steps
    };
    consoles.map(session).collect()
}

/// A line without what differs from run to run: quantities, states, identifiers of devices, folders, and how wide columns are.
fn shape(line: &str) -> String {
    let mut shape = String::new();
    for word in line.split_whitespace() {
        let inner = word.trim_matches(|it: char| "(),;:`".contains(it));
        let after_number = shape.ends_with("# ");
        let _ = match inner {
            unit if after_number && UNITS.contains(&unit) => continue,
            "-" => write!(shape, "# "),
            state if STATES.contains(&state) => write!(shape, "STATE "),
            id if id.starts_with("GPU-") => write!(shape, "{} ", word.replace(id, "GPU-#")),
            path if path.starts_with('/') => write!(shape, "{} ", word.replace(path, "/…")),
            number if number.starts_with(|it: char| it.is_ascii_digit()) => write!(shape, "# "),
            _ => write!(shape, "{word} "),
        };
    }
    shape
}

/// The cells of a row of a table: columns are two blanks or more apart.
fn cells(line: &str) -> Vec<&str> {
    (line.split("  ").map(str::trim))
        .filter(|it| !it.is_empty())
        .collect()
}

/// Whether a line is the head of a table: its titles are upper case.
fn is_head(line: &str) -> bool {
    let cells = cells(line);
    let upper = |it: &&str| it.chars().all(|c| c.is_ascii_uppercase() || c == ' ');
    cells.len() > 2 && cells.iter().all(upper)
}

/// What is wrong with an output, beside the printed one.
fn difference(printed: &[String], actual: &str) -> Option<String> {
    let actual: Vec<&str> = actual.lines().collect();
    if printed.len() != actual.len() {
        return Some(format!(
            "{} lines are printed, not {}",
            printed.len(),
            actual.len()
        ));
    }
    let mut user = None;
    for (printed, actual) in printed.iter().zip(actual) {
        let label = MOMENTARY.iter().find(|label| printed.starts_with(**label));
        if is_head(printed) {
            user = cells(printed).iter().position(|title| *title == "USER");
        }
        let same = match label {
            Some(label) => actual.starts_with(label) && actual.len() > label.len() + 5,
            None => {
                let mut actual: Vec<String> = cells(actual).into_iter().map(shape).collect();
                let printed: Vec<String> = cells(printed).into_iter().map(shape).collect();
                // The page's user is root.
                if let Some(name) = user.and_then(|at| actual.get_mut(at))
                    && *name != "USER "
                {
                    "root ".clone_into(name);
                }
                actual == printed
            }
        };
        if !same {
            return Some(format!("`{printed}` is printed, not `{actual}`"));
        }
    }
    None
}

/// What `gpumux doctor` prints outside all sandboxes: tests may run in one, the pages' sessions do not.
fn outside(out: &str) -> String {
    const SANDBOXES: [&str; 6] = [
        "container ",
        "user namespace ",
        "seccomp ",
        "gVisor ",
        "vGPU ",
        "WSL2 ",
    ];
    let mut within = false;
    let outside = out.lines().filter(|line| {
        within = SANDBOXES.iter().any(|it| line.starts_with(it))
            || within && line.starts_with("        ");
        !within
    });
    outside.map(|line| format!("{line}\n")).collect()
}

/// Executes the sessions of a page on a node, with a python that stands in for the users' programs.
fn execute(page: &str, node: &Node) {
    let bin = node.dir().join("bin");
    fs::create_dir_all(&bin).unwrap();
    program(&bin.join("python"), PYTHON);
    let built = binary().parent().unwrap().display().to_string();
    let path = format!(
        "{}:{built}:{}",
        bin.display(),
        std::env::var("PATH").unwrap()
    );
    let shell = |line: &str| {
        let mut shell = node.on_device(["bash", "-euo", "pipefail", "-c", line]);
        shell.env("PATH", &path).env("HOME", node.dir());
        shell.env("XDG_STATE_HOME", node.dir().join("state"));
        shell.current_dir(node.dir());
        shell
    };
    let text = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(page);
    let sessions = sessions(&fs::read_to_string(text).unwrap());
    assert!(!sessions.is_empty(), "{page} has no session");
    // Until the end of the session.
    let mut background = Vec::new();
    for step in sessions.into_iter().flatten() {
        println!("$ {}", step.command);
        let started = step.command.split_once("--name ");
        match step.command.strip_suffix('&') {
            Some(line) => background.push(Process::start(&mut shell(&format!("exec {line}")))),
            None => {
                let done = shell(&step.command).run().ok();
                if let Some(wrong) = difference(&step.prints, &outside(&done.out)) {
                    panic!("{page}: `{}`: {wrong}\n{}", step.command, done.out);
                }
            }
        }
        if let Some((_, rest)) = started {
            let name = rest.split(' ').next().unwrap();
            node.wait_tenant(name, |tenant| tenant["domains"][0].is_object());
        }
    }
}

#[test]
fn session_of_the_readme_prints_what_it_shows() {
    if real() {
        eprintln!("SKIPPED: the page's output is that of the emulated device");
        return;
    }
    execute("README.md", &Node::start());
}

#[test]
fn sessions_of_the_book_print_what_they_show() {
    if real() {
        eprintln!("SKIPPED: the pages' output is that of the emulated device");
        return;
    }
    for page in ["docs/getting-started.md", "docs/lifecycle.md"] {
        execute(page, &Node::start());
    }
}

#[test]
fn session_about_memory_prints_what_it_shows() {
    if real() {
        eprintln!("SKIPPED: the page's output is that of the emulated device");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("gpumux.toml");
    fs::write(&file, "[host_memory]\nlimit = \"64GiB\"\n").unwrap();
    let node = Node::with(Options {
        daemon: vec!["--config".to_owned(), file.display().to_string()],
        ..Options::default()
    });
    let start = |options: &str| {
        let idle = "gpumux workload idle --seconds 600";
        Process::start(&mut node.tenant(options, idle))
    };
    let mut tenants = Vec::new();
    for (name, options) in [
        ("serve", "--memory-guaranteed 16GiB"),
        ("train", "--memory-guaranteed 8GiB --memory-limit 40GiB"),
        ("chat", ""),
    ] {
        tenants.push(start(&format!("--name {name} {options}")));
        node.wait_tenant(name, |tenant| tenant["domains"][0].is_object());
    }
    wait_for("the sleep of chat", PATIENCE, || {
        let slept = node.gpumux(["sleep", "chat"]).run();
        slept.status.success().then_some(())
    });
    execute("docs/memory.md", &node);
}

#[test]
fn session_about_moves_prints_what_it_shows() {
    if real() {
        eprintln!("SKIPPED: the page's output is that of the emulated device");
        return;
    }
    let node = Node::with(Options {
        devices: 2,
        ..Options::default()
    });
    execute("docs/move.md", &node);
}

/// All sessions of the book are executed here.
#[test]
fn every_page_with_a_session_is_executed() {
    let with: Vec<String> = (docs::pages().into_iter())
        .filter(|(_, text)| !sessions(text).is_empty())
        .map(|(page, _)| page.file_name().unwrap().to_string_lossy().into_owned())
        .collect();
    let known = [
        "README.md",
        "getting-started.md",
        "lifecycle.md",
        "memory.md",
        "move.md",
    ];
    assert_eq!(with, known);
    // Output belongs into a session.
    for (page, text) in docs::pages() {
        let shown = docs::blocks(&text)
            .filter(|(kind, _)| *kind != "console")
            .find(|(_, body)| body.lines().any(|line| line.starts_with("$ ")));
        assert_eq!(shown, None, "{}: shown, not executed", page.display());
    }
}

#[test]
fn difference_finds_lines_columns_and_words() {
    let printed = |text: &str| text.lines().map(str::to_owned).collect::<Vec<_>>();
    let table = printed("NAME  USER  STATE    SHARE\nweb   root  running  95%\n");
    let found = |actual: &str| difference(&table, actual);
    assert_eq!(
        found("NAME  USER   STATE   SHARE\nweb   alice  queued  -\n"),
        None
    );
    for wrong in [
        "NAME  USER  STATE    SHARE\n",
        "NAME  USER  STATE    WAIT\nweb   root  running  95%\n",
        "NAME  USER  STATE    SHARE\nother  root  running  95%\n",
        "NAME  USER  STATE    SHARE\nweb   root  frozen  95%\n",
        "NAME  USER  STATE    SHARE\nweb   root  running  95%  1\n",
    ] {
        assert!(found(wrong).is_some(), "{wrong}");
    }
    let line = printed("host: 12.2 GiB of at most 64.0 GiB kept in /dev/shm\n");
    assert_eq!(
        difference(&line, "host: 0 of at most 1.0 KiB kept in /tmp/x\n"),
        None
    );
    assert!(difference(&line, "host: 0 of at most 1 kept\n").is_some());
}
