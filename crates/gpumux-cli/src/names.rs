//! What a tenant is called that was given no name: after the script or module that it runs, not after the interpreter.

use std::{ffi::OsString, path::Path};

/// Programs that run another one, named by their first argument that is no option or assignment.
const WRAPPERS: [&str; 5] = ["env", "nohup", "nice", "setsid", "stdbuf"];
const SHELLS: [&str; 4] = ["sh", "bash", "dash", "zsh"];
/// Launchers of Python scripts, with options of their own.
const LAUNCHERS: [&str; 6] = [
    "torchrun",
    "accelerate",
    "deepspeed",
    "uv",
    "poetry",
    "horovodrun",
];
/// Modules that are launchers.
const LAUNCHER_MODULES: [&str; 4] = [
    "torch.distributed.run",
    "torch.distributed.launch",
    "accelerate.commands.launch",
    "deepspeed.launcher.runner",
];
/// Options of Python that have a value.
const WITH_VALUE: [&str; 3] = ["-W", "-X", "--check-hash-based-pycs"];

/// The name of a command.
pub(crate) fn of(command: &[OsString]) -> String {
    let words: Vec<String> = (command.iter())
        .map(|word| word.to_string_lossy().into_owned())
        .collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let fallback = words.first().map(|word| base(word)).unwrap_or_default();
    find(&words).unwrap_or(fallback).to_owned()
}

/// Whether a command runs Python, a launcher of its scripts, or a shell's script.
pub(crate) fn may_run_python(command: &[OsString]) -> bool {
    let words: Vec<_> = command.iter().map(|word| word.to_string_lossy()).collect();
    let mut words: Vec<&str> = words.iter().map(|word| &**word).collect();
    while let Some(inner) = wrapped(&words) {
        words.drain(..=inner);
    }
    words.split_first().is_some_and(|(word, rest)| {
        let program = base(word);
        let script = || rest.first().is_some_and(|word| !word.starts_with('-'));
        is_python(program) || LAUNCHERS.contains(&program) || SHELLS.contains(&program) && script()
    })
}

/// Where the command begins that a wrapper runs, after the wrapper.
fn wrapped(words: &[&str]) -> Option<usize> {
    let (program, rest) = words.split_first()?;
    let is_inner =
        |word: &&str| !word.starts_with('-') && !word.contains('=') && word.parse::<i64>().is_err();
    (WRAPPERS.contains(&base(program)))
        .then(|| rest.iter().position(is_inner))
        .flatten()
}

fn find<'a>(words: &[&'a str]) -> Option<&'a str> {
    let (program, rest) = words.split_first()?;
    let program = base(program);
    if is_python(program) {
        python(program, rest)
    } else if WRAPPERS.contains(&program) {
        let inner = wrapped(words)?;
        find(&rest[inner..])
    } else if LAUNCHERS.contains(&program) {
        launched(rest)
    } else {
        // A script that is a program itself, or that a shell runs.
        let script = match SHELLS.contains(&program) {
            true => rest.first().filter(|word| !word.starts_with('-')),
            false => words.first(),
        };
        script.map(|script| stem(script))
    }
}

fn python<'a>(program: &'a str, arguments: &[&'a str]) -> Option<&'a str> {
    let mut rest = arguments;
    while let Some((word, after)) = rest.split_first() {
        rest = match *word {
            "-m" => return module(after),
            // What follows are arguments of the command.
            "-c" | "-" => return Some(program),
            option if WITH_VALUE.contains(&option) => after.get(1..)?,
            option if option.starts_with('-') => after,
            script => return Some(stem(script)),
        };
    }
    Some(program)
}

fn module<'a>(words: &[&'a str]) -> Option<&'a str> {
    let (module, rest) = words.split_first()?;
    if LAUNCHER_MODULES.contains(module) {
        return launched(rest);
    }
    let module = module.strip_suffix(".__main__").unwrap_or(module);
    module.rsplit('.').next()
}

/// The script among a launcher's arguments: its options may have values that look like one.
fn launched<'a>(words: &[&'a str]) -> Option<&'a str> {
    let script = words.iter().find(|word| word.ends_with(".py"));
    if let Some(script) = script {
        return Some(stem(script));
    }
    let at = words
        .iter()
        .position(|word| ["-m", "--module"].contains(word));
    at.and_then(|at| module(&words[at + 1..]))
}

fn is_python(program: &str) -> bool {
    let version = program
        .strip_prefix("python")
        .or(program.strip_prefix("pypy"));
    version.is_some_and(|version| version.bytes().all(|b| b.is_ascii_digit() || b == b'.'))
}

fn base(path: &str) -> &str {
    path.trim_end_matches('/')
        .rsplit('/')
        .next()
        .unwrap_or(path)
}

/// A file's name without the ending of a script.
fn stem(path: &str) -> &str {
    let name = base(path);
    let ending = Path::new(name).extension().and_then(|it| it.to_str());
    match ending {
        Some("py" | "pyw" | "pyz" | "sh") => &name[..name.len() - ending.map_or(0, str::len) - 1],
        _ => name,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_that_may_run_python_are_known() {
        let may = |command: &str| {
            let words: Vec<OsString> = command.split_whitespace().map(Into::into).collect();
            may_run_python(&words)
        };
        for command in [
            "python3 serve.py",
            "/usr/bin/python3.12 -m pkg",
            "env A=b nice -n 5 python serve.py",
            "uv run serve.py",
            "bash serve.sh",
        ] {
            assert!(may(command), "{command}");
        }
        for command in [
            "./solver python",
            "env A=b ./solver",
            "env",
            "gpumux workload idle",
            "bash -c serve",
        ] {
            assert!(!may(command), "{command}");
        }
    }

    #[test]
    fn tenants_are_named_after_the_script() {
        for (command, name) in [
            ("python train.py", "train"),
            ("/usr/bin/python3.11 -u /home/a/train.py --lr 0.1", "train"),
            ("python -W ignore -X dev train.py", "train"),
            ("python -m pkg.mod", "mod"),
            ("python -m pkg.__main__", "pkg"),
            ("python -c pass", "python"),
            ("python3", "python3"),
            (
                "python -m torch.distributed.run --nproc-per-node 2 train.py",
                "train",
            ),
            ("torchrun --nproc_per_node=2 train.py --epochs 3", "train"),
            ("torchrun --nproc-per-node 2 -m pkg.train", "train"),
            ("accelerate launch --config c.yaml src/run.py", "run"),
            ("uv run train.py", "train"),
            ("uv run python -m pkg.mod", "mod"),
            ("env A=b nice -n 5 python train.py", "train"),
            ("bash train.sh", "train"),
            ("sh -c true", "sh"),
            ("./solver", "solver"),
            ("./train.py --x", "train"),
            ("vllm serve model", "vllm"),
            ("/opt/a.b/tool.bin", "tool.bin"),
            ("torchrun --help", "torchrun"),
            ("env", "env"),
            ("pythonic a.py", "pythonic"),
        ] {
            let words: Vec<OsString> = command.split(' ').map(Into::into).collect();
            assert_eq!(of(&words), name, "{command}");
        }
        assert_eq!(of(&[]), "");
    }
}
