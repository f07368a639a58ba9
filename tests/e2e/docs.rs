//! Every command of the book, of the README and of every `--help` is executed, line by line: on a node where the
//! tenants that they speak of run, with stand-ins for the programs that they speak of.

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use gpumux_tests::{
    Node, Options, PATIENCE, Patience, Process, Run, binary, program, real, wait_for,
};
use rustix::process::Signal;

/// What is not executed, and why.
const EXCEPTIONS: [(&str, &str); 8] = [
    ("cargo ", CARGO),
    ("pip install .", CARGO),
    ("pip ", FRESH),
    ("sudo apt ", FRESH),
    ("sudo dnf ", FRESH),
    ("sudo systemctl ", FRESH),
    ("tar -xzf gpumux-", FRESH),
    ("sudo gpumux-", FRESH),
];
const CARGO: &str =
    "CI itself runs cargo; in here it would build all again, or wait for its own lock";
const FRESH: &str = "the tests in `fresh` do that in a fresh system";
/// What is replaced, so that it is short, stays in the test's folder, or needs no screen.
const REPLACED: [(&str, &str); 16] = [
    ("gpumux demo --seconds 40", "gpumux demo"),
    // On a busy device it refuses to run.
    ("gpumux demo", "gpumux demo --emulated --seconds 10"),
    // Half a minute, unoptimised.
    ("scenarios/hour.toml", "scenarios/hog.toml"),
    ("127.0.0.1:9440", "127.0.0.1:0"),
    ("--port 9441", "--port 0"),
    ("/usr/local/share", "share"),
    ("/tmp/emu.sock", "emu.sock"),
    ("/etc/cdi/", "cdi/"),
    (
        "check --memory 256MiB --seconds 2",
        "check --memory 16MiB --seconds 0.2",
    ),
    (
        "--read 16 --memory 256MiB",
        "--read 16 --memory 16MiB --seconds 0.3",
    ),
    // It measures for seconds what runs for minutes.
    ("--points 10,25,50,100", "--points 50,100"),
    (
        "gpumux profile -- python train.py",
        "gpumux profile --points 50,100 --warmup 0.1 --seconds 0.3 -- gpumux workload batch --seconds 600",
    ),
    (
        "--warmup 30 -- python train.py",
        "--warmup 0.1 --seconds 0.3 -- gpumux workload batch --seconds 600",
    ),
    // Both of them run until they are stopped.
    ("watch -n 1 ", ""),
    (
        "gpumux workload latency --",
        "gpumux workload latency --seconds 0.3 --",
    ),
    (
        "gpumux workload batch --k",
        "gpumux workload batch --seconds 0.3 --k",
    ),
];

/// Where the commands run.
struct Stage {
    busy: Node,
    /// For tenants whose names are taken on the other one.
    idle: Node,
    /// With two devices, for a tenant that moves between them.
    pair: Node,
    /// Without a daemon, for those that the commands start.
    bare: Node,
    _tenants: Vec<Process>,
    dir: tempfile::TempDir,
}

impl Stage {
    fn new() -> Self {
        let (busy, tenants) = crate::seen::busy();
        let mut tenants = Vec::from(tenants);
        for (name, class) in [("serve", "latency"), ("train", "batch"), ("a", "standard")] {
            let options = format!("--name {name} --class {class}");
            let program = "gpumux workload idle --seconds 600";
            tenants.push(Process::start(&mut busy.tenant(&options, program)));
            busy.wait_tenant(name, |tenant| tenant["domains"][0].is_object());
        }
        let pair = Node::with(Options {
            devices: 2,
            ..Options::default()
        });
        let idle = "gpumux workload idle --seconds 600";
        tenants.push(Process::start(&mut pair.tenant("--name train", idle)));
        pair.wait_tenant("train", |tenant| tenant["domains"][0].is_object());
        let dir = tempfile::tempdir().unwrap();
        let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let put = |name: &str, script: &str| {
            let file = dir.path().join(name);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            program(&file, &format!("#!/bin/sh\n{script}\n"));
        };
        let load = "exec gpumux workload batch --seconds 0.2";
        for program in ["python", "podman", "docker", "vllm", "ollama", "torchrun"] {
            put(&format!("bin/{program}"), load);
        }
        for program in ["solver", "job", "cuda-program"] {
            put(program, load);
        }
        put("bin/sudo", r#"exec "$@""#);
        put("bin/man", r#"exec test -s "$1""#);
        // Where shells look for completions.
        for folder in [
            ".local/share/bash-completion/completions",
            ".zfunc",
            ".config/fish/completions",
        ] {
            fs::create_dir_all(dir.path().join(folder)).unwrap();
        }
        symlink(repository.join("scenarios"), dir.path().join("scenarios")).unwrap();
        fs::copy(
            repository.join("deploy/gpumux.toml"),
            dir.path().join("gpumux.toml"),
        )
        .unwrap();
        // The beginning of a public trace that is too large to keep.
        fs::write(
            dir.path().join("AzureLLMInferenceTrace_conv.csv"),
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n\
             2023-11-16 18:15:50.9951690,396,109\n2023-11-16 18:15:51.2224670,879,55\n",
        )
        .unwrap();
        // Where a user's own daemon is.
        symlink(busy.dir(), dir.path().join("gpumux")).unwrap();
        Self {
            busy,
            idle: Node::start(),
            pair,
            bare: Node::with(Options {
                without_daemon: true,
                ..Options::default()
            }),
            _tenants: tenants,
            dir,
        }
    }

    fn shell(&self, line: &str) -> Command {
        let words = ["bash", "-euo", "pipefail", "-c", line];
        let mut shell = if line.contains("gpumux emu") {
            // It brings a device of its own.
            let mut shell = Command::new(words[0]);
            shell.args(&words[1..]);
            for variable in ["GPUMUX_EMU_SOCKET", "GPUMUX_RUNTIME_DIR", "LD_PRELOAD"] {
                shell.env_remove(variable);
            }
            shell
        } else if line.starts_with("gpumux run") || line.starts_with("gpumux profile") {
            self.idle.on_device(words)
        } else if line.starts_with("gpumux move") {
            self.pair.on_device(words)
        } else if line.contains("gpumux daemon") {
            self.bare.on_device(words)
        } else {
            self.busy.on_device(words)
        };
        self.dress(&mut shell);
        shell
    }

    fn dress(&self, command: &mut Command) {
        let (own, built) = (self.dir.path().join("bin"), binary());
        let path = std::env::var("PATH").unwrap();
        let built = built.parent().unwrap().display();
        command
            .env("PATH", format!("{}:{built}:{path}", own.display()))
            .env("HOME", self.dir.path())
            .env("XDG_RUNTIME_DIR", self.dir.path())
            .current_dir(self.dir.path());
    }

    /// Executes a line as it stands in the book, but for what is replaced.
    fn execute(&self, line: &str) {
        if let Some((_, why)) = EXCEPTIONS.iter().find(|(begin, _)| line.starts_with(begin)) {
            println!("not executed ({why}): {line}");
            return;
        }
        let mut line = shortened(line);
        if line.contains("| jq") && Command::new("jq").arg("--version").output().is_err() {
            println!("SKIPPED: no jq is installed, so without it:");
            line.truncate(line.find("| jq").unwrap());
        }
        println!("$ {line}");
        if line.contains("gpumux daemon") && !line.contains("--check") {
            self.daemon(&line);
        } else if line.starts_with("gpumux demo") {
            // It brings all that it needs: what a page and a help have in common is shown by one of them.
            static SHOWN: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
            let mut shown = SHOWN.lock().unwrap_or_else(PoisonError::into_inner);
            let first = shown.insert(line.clone());
            drop(shown);
            if first {
                self.shell(&line).run().ok();
            }
        } else if line.starts_with("gpumux page") {
            // Runs until it is stopped, once it has printed its address.
            let mut page = Process::start(&mut self.shell(&format!("exec {line}")));
            page.wait_lines(1);
            page.kill();
        } else if line.starts_with("gpumux top") {
            self.screen(&line);
        } else {
            self.shell(&line).run().ok();
        }
    }

    /// Runs until SIGTERM, and then ends well.
    fn daemon(&self, line: &str) {
        let dir = tempfile::Builder::new()
            .prefix("gm")
            .tempdir_in("/tmp")
            .unwrap();
        let mut shell = self.shell(&format!("exec env {line}"));
        let mut daemon = Process::start(shell.env("GPUMUX_RUNTIME_DIR", dir.path()));
        wait_for("the daemon's socket", PATIENCE, || {
            assert!(daemon.poll().is_none(), "{line}: {}", daemon.err());
            dir.path().join("api.sock").exists().then_some(())
        });
        daemon.signal(Signal::TERM);
        daemon.finish().ok();
    }

    /// Runs in a terminal until `q` is pressed.
    fn screen(&self, line: &str) {
        let mut terminal = self.shell("true");
        terminal = {
            let mut script = Command::new("script");
            for (name, value) in terminal.get_envs() {
                match value {
                    Some(value) => script.env(name, value),
                    None => script.env_remove(name),
                };
            }
            script.args([
                "-qec",
                &format!("stty rows 24 cols 80; {line}"),
                "/dev/null",
            ]);
            script.env("TERM", "xterm").current_dir(self.dir.path());
            script
        };
        let mut screen = Process::start(&mut terminal);
        // The picture has no line ends; a picture is there when the terminal received one.
        let mut left = Patience::new(PATIENCE);
        while screen.poll().is_none() {
            screen.write("q");
            assert!(left.lasts(), "{:?} {:?}", screen.out(), screen.err());
            // Like a user who presses the key again.
            std::thread::sleep(Duration::from_millis(200));
        }
        screen.finish_within(Duration::from_secs(60)).ok();
    }
}

/// A line with what is replaced in it.
pub(crate) fn shortened(line: &str) -> String {
    let replace = |line: String, (from, to): (&str, &str)| line.replace(from, to);
    REPLACED.into_iter().fold(line.to_owned(), replace)
}

/// The lines of a script, each with what is in the background before it.
pub(crate) fn commands<'a>(lines: impl Iterator<Item = &'a str>) -> Vec<String> {
    let mut commands = Vec::new();
    let mut before = String::new();
    for line in lines {
        let line = line.split(" #").next().unwrap_or_default().trim();
        if let Some(start) = line.strip_suffix('&') {
            // What comes next needs it.
            before = format!(
                "{start}& trap \"kill $!\" EXIT; until [ -S emu.sock ]; do sleep 0.02; done; "
            );
        } else if !line.is_empty() {
            commands.push(std::mem::take(&mut before) + line);
        }
    }
    assert_eq!(before, "", "what is in the background is used");
    commands
}

/// The code blocks of a page: their kind, and what is in them.
pub(crate) fn blocks(text: &str) -> impl Iterator<Item = (&str, &str)> {
    // Every second piece is a block.
    let pieces = text.split("\n```").skip(1).step_by(2);
    pieces.filter_map(|block| block.split_once('\n'))
}

pub(crate) fn pages() -> Vec<(PathBuf, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let book = fs::read_dir(root.join("docs")).unwrap().flatten();
    let book = book.map(|entry| entry.path());
    let mut pages: Vec<PathBuf> = book
        .filter(|page| page.extension().is_some_and(|it| it == "md"))
        // Made of the commands' help.
        .filter(|page| !page.ends_with("commands.md"))
        .collect();
    pages.push(root.join("README.md"));
    pages.sort();
    let read = |page: PathBuf| {
        let text = fs::read_to_string(&page).unwrap();
        (page, text)
    };
    pages.into_iter().map(read).collect()
}

#[test]
fn every_page_is_in_the_book() {
    let all = pages();
    let named = |end: &str| all.iter().find(|(page, _)| page.ends_with(end));
    let summary = &named("SUMMARY.md").unwrap().1;
    for (page, _) in &all {
        let name = page.file_name().unwrap().to_str().unwrap();
        let listed = ["SUMMARY.md", "README.md"].contains(&name);
        assert!(listed || summary.contains(&format!("({name})")), "{name}");
    }
}

#[test]
fn the_commands_of_the_book_work() {
    if real() {
        eprintln!("SKIPPED: it needs two devices");
        return;
    }
    let stage = Stage::new();
    let (mut count, mut done) = (0, BTreeSet::new());
    for (page, text) in pages() {
        println!("{}", page.display());
        for (kind, body) in blocks(&text) {
            if kind != "sh" {
                let shown = body.lines().find(|line| line.starts_with("gpumux "));
                assert_eq!(shown, None, "{}: shown, not executed", page.display());
                continue;
            }
            for command in commands(body.lines()) {
                count += 1;
                if done.insert(shortened(&command)) {
                    stage.execute(&command);
                }
            }
        }
    }
    assert!(count > 20, "{count}");
}

#[test]
fn a_node_tells_what_it_would_offer_to_kubernetes() {
    let node = Node::start();
    let words = ["dra", "--node-name", "n1", "--print-slices"];
    let slices = node.gpumux(words).run().ok().json();
    let slice = &slices[0]["spec"];
    assert_eq!(
        (&slice["nodeName"], &slice["driver"]),
        (&"n1".into(), &"gpumux.dev".into())
    );
    let empty = tempfile::tempdir().unwrap();
    let mut alone = node.gpumux(words);
    let refused = alone.env("GPUMUX_RUNTIME_DIR", empty.path()).run();
    assert!(
        !refused.status.success() && refused.err.contains("start `gpumux daemon`"),
        "{refused:?}"
    );
}

#[test]
fn the_examples_of_every_help_work() {
    if real() {
        eprintln!("SKIPPED: it needs two devices");
        return;
    }
    let stage = Stage::new();
    let help = |words: &[&str]| {
        let mut command = Command::new(binary());
        command.args(words).arg("--help").run().ok().out
    };
    let all = help(&[]);
    let list = all.split_once("Commands:\n").unwrap().1;
    let list = list.split_once("\n\n").unwrap().0;
    let mut names: Vec<&str> = list
        .lines()
        .filter(|line| line.starts_with("  ") && !line.starts_with("   "))
        .filter_map(|line| line.split_whitespace().next())
        .collect();
    assert!(names.len() > 10, "{names:?}");
    // `hint` before `set`, which switches hints off.
    names.retain(|name| *name != "help");
    names.reverse();
    let (mut pages, mut done) = (vec![("gpumux".to_owned(), all.clone())], BTreeSet::new());
    pages.extend(names.iter().map(|name| ((*name).to_owned(), help(&[name]))));
    for (name, text) in pages {
        let examples = text.split_once("Examples:\n");
        let (_, examples) = examples.unwrap_or_else(|| panic!("{name} has no example"));
        println!("{name}");
        // Also what follows the examples may name a command, but not a list with a title, as `Exit codes:`.
        let mut listed = false;
        let examples = examples.lines().filter_map(|line| {
            if !line.starts_with(' ') && !line.is_empty() {
                listed = line.ends_with(':') && line.split_whitespace().count() <= 2;
            }
            line.strip_prefix("  ").filter(|_| !listed)
        });
        let without_comment = |line: &'_ str| -> String {
            let command = line.split("  ").next().unwrap_or_default();
            let background = line.contains(" & ") && !command.ends_with('&');
            command.to_owned() + if background { " &" } else { "" }
        };
        let examples: Vec<String> = examples.map(without_comment).collect();
        let examples = commands(examples.iter().map(String::as_str));
        assert!(!examples.is_empty(), "{name}");
        for command in examples {
            if done.insert(shortened(&command)) {
                stage.execute(&command);
            }
        }
    }
}

/// The names of all tests of this repository, and of the modules that have some.
fn tests_and_modules() -> BTreeSet<String> {
    fn read(dir: &Path, into: &mut BTreeSet<String>) {
        for path in fs::read_dir(dir).unwrap().flatten().map(|it| it.path()) {
            if path.is_dir() {
                read(&path, into);
            } else if path.extension().is_some_and(|it| it == "rs") {
                let text = fs::read_to_string(&path).unwrap();
                // Each attribute of a test is followed by its function, maybe after others.
                for after in text
                    .split("#[test]")
                    .skip(1)
                    .chain(text.split("#[tokio::test").skip(1))
                {
                    let name = after.split_once("fn ").map(|(_, name)| name);
                    let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
                    into.extend(
                        name.and_then(|it| it.split(|c| !word(c)).next())
                            .map(str::to_owned),
                    );
                }
                into.extend(path.file_stem().map(|it| it.to_string_lossy().into_owned()));
            }
        }
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut all = BTreeSet::new();
    read(&root.join("crates"), &mut all);
    read(&root.join("tests"), &mut all);
    all
}

#[test]
fn tests_that_documents_name_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let all = tests_and_modules();
    for (page, least) in [("SPECIFICATION.md", 60), ("docs/security.md", 50)] {
        let text = fs::read_to_string(root.join(page)).unwrap();
        // What stands in the last column of a table.
        let rows = text
            .lines()
            .filter_map(|line| line.strip_suffix(" |")?.rsplit(" | ").next());
        let quoted = rows.flat_map(|cell| cell.split('`').skip(1).step_by(2));
        let is_name = |it: &&str| {
            let word = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "_:".contains(c);
            it.chars().all(word) && (it.contains("::") || it.matches('_').count() > 1)
        };
        let names: Vec<&str> = quoted.filter(is_name).collect();
        assert!(names.len() >= least, "{page} names {} tests", names.len());
        for name in names {
            let parts: Vec<&str> = name.split("::").collect();
            let missing = parts
                .iter()
                .find(|it| !all.contains(**it) && **it != "tests");
            assert_eq!(missing, None, "{page} names the test {name}");
        }
    }
}
