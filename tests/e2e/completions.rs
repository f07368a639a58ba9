//! `gpumux completions`, in each shell: names of tenants, and the program behind `--`.

use std::{fs, process::Command};

use gpumux_tests::{Node, Process, Run, binary};

/// What a shell prints that runs this script, where `$FILE` is what `gpumux completions` prints for it; none where the shell is
/// missing.
fn printed(node: &Node, shell: &str, script: &str) -> Option<String> {
    if Command::new(shell).arg("--version").output().is_err() {
        eprintln!("SKIPPED: {shell} is not installed");
        return None;
    }
    let file = node.dir().join(format!("completions.{shell}"));
    let text = node.gpumux(["completions", shell]).run().ok().out;
    fs::write(&file, text).unwrap();
    let built = binary();
    let folder = built.parent().unwrap().display();
    let path = format!("{folder}:{}", std::env::var("PATH").unwrap());
    let mut command = node.on_device([shell, "-c", script]);
    command.env("PATH", path).env("FILE", file);
    Some(command.env("TERM", "dumb").run().ok().out)
}

/// What each shell completes the last word of this line to. zsh completes in an interactive shell only: the line runs there, with
/// what follows the completed word.
fn completed(node: &Node, line: &str, rest: &str) -> Vec<(&'static str, String)> {
    let (at, len) = (line.split(' ').count() - 1, line.len());
    let with = |more: &str| {
        format!(
            "{more}; source \"$FILE\"; COMP_WORDS=({line}); COMP_CWORD={at}; COMP_LINE='{line}'; COMP_POINT={len}
            _gpumux_with_tenants gpumux; printf '%s\\n' \"${{COMPREPLY[@]}}\""
        )
    };
    // Debian's and Fedora's package of further completions, which knows programs' arguments.
    let package = "/usr/share/bash-completion/bash_completion";
    let fish = format!("source $FILE; complete -C '{line}'");
    let zsh = format!(
        "zmodload zsh/zpty; zpty shell zsh -f -i
        zpty -w shell \"autoload -U compinit; compinit -u -D; source $FILE; compdef _gpumux gpumux\"
        zpty -w shell $'{line}\\t{rest}; exit'
        while zpty -r shell line; do print -r -- $line; done"
    );
    let mut scripts = vec![("bash", with(":")), ("fish", fish), ("zsh", zsh)];
    if fs::exists(package).unwrap() {
        scripts.push(("bash", with(&format!("source {package}"))));
    }
    (scripts.into_iter())
        .filter_map(|(shell, script)| Some((shell, printed(node, shell, &script)?)))
        .collect()
}

fn training(node: &Node) -> Process {
    let mut tenant = node.tenant("--name training", "sh -c");
    let mut tenant = Process::start(tenant.arg("echo; read line"));
    tenant.wait_lines(1);
    tenant
}

#[test]
fn shells_complete_names_of_tenants() {
    let node = Node::start();
    let _tenant = training(&node);
    for (shell, found) in completed(&node, "gpumux explain tr", "") {
        match shell {
            "zsh" => assert!(found.contains("entitled: "), "{found}"),
            _ => assert!(
                found.lines().any(|it| it.trim() == "training"),
                "{shell}: {found}"
            ),
        }
    }
}

#[test]
fn shells_complete_the_program_that_run_starts() {
    let node = Node::start();
    for line in [
        "gpumux run -- gpum",
        "gpumux run --name x --class batch -- gpum",
        "gpumux profile -- gpum",
        "gpumux emu -- gpum",
    ] {
        let profile = line.contains("profile");
        for (shell, found) in completed(&node, line, " --version") {
            match shell {
                // A profile of a program that ends at once fails.
                "zsh" if profile => {}
                "zsh" => assert!(found.contains("gpumux 0."), "{line}: {found}"),
                _ => {
                    let of_a_program = |it: &str| it.split('\t').next() == Some("gpumux");
                    assert!(found.lines().any(of_a_program), "{shell}: {line}: {found}");
                }
            }
        }
    }
}
