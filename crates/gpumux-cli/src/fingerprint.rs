//! The name under which the daemon remembers a program's scaling profile.

use std::{
    ffi::{OsStr, OsString},
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};

use crate::elf;

/// Characters of the program's own name in a fingerprint.
const SHOWN: usize = 40;

/// The fingerprint of a command: its executable and its arguments, where the first that is a file (the script) counts with its
/// whole path and the others as they are written, for they may name files that the program makes. What is in the files does not count,
/// nor does the environment: a program that was changed a little does much the same.
pub(crate) fn of(command: &[OsString]) -> String {
    let program = command.first().map_or(OsStr::new(""), |it| it.as_os_str());
    let arguments = command.get(1..).unwrap_or_default();
    let script = arguments.iter().position(|it| Path::new(it).is_file());
    let word = |(at, word): (usize, &OsString)| match script == Some(at) {
        true => whole(Path::new(word)),
        false => word.into(),
    };
    let words = std::iter::once(executable(program)).chain(arguments.iter().enumerate().map(word));
    let hash = words.fold(BASIS, |hash, word| {
        // No word has a zero in it.
        let bytes = word.as_os_str().as_bytes().iter().chain([&0]);
        bytes.fold(hash, |hash, byte| {
            (hash ^ u64::from(*byte)).wrapping_mul(PRIME)
        })
    });
    // `train.py` tells people more than `python3`.
    let name = script.map_or(program, |at| &arguments[at]);
    let name = Path::new(name)
        .file_name()
        .unwrap_or_default()
        .to_string_lossy();
    let name: String = (name.chars())
        .filter(|c| c.is_ascii_alphanumeric() || "._-".contains(*c))
        .skip_while(|c| !c.is_ascii_alphanumeric())
        .take(SHOWN)
        .collect();
    match name.is_empty() {
        true => format!("program-{hash:016x}"),
        false => format!("{name}-{hash:016x}"),
    }
}

/// FNV-1a with 64 bits (<http://www.isthe.com/chongo/tech/comp/fnv/>): the same in every version, as a name must be.
const BASIS: u64 = 0xcbf2_9ce4_8422_2325;
const PRIME: u64 = 0x0100_0000_01b3;

fn whole(word: &Path) -> PathBuf {
    match word.is_file() {
        true => word.canonicalize().unwrap_or_else(|_| word.to_owned()),
        false => word.to_owned(),
    }
}

/// The file that is executed under this name.
fn executable(program: &OsStr) -> PathBuf {
    whole(&elf::find(program).unwrap_or_else(|| program.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fingerprint(words: &[&str]) -> String {
        of(&words.iter().map(OsString::from).collect::<Vec<_>>())
    }

    #[test]
    fn the_same_command_has_the_same_and_another_another() {
        let train = fingerprint(&["/bin/sh", "train", "--lr", "1"]);
        assert_eq!(train, fingerprint(&["sh", "train", "--lr", "1"]));
        assert!(train.starts_with("sh-"), "{train}");
        for other in [
            &["sh", "train", "--lr", "2"][..],
            &["sh", "train", "--lr1"],
            &["cat", "train", "--lr", "1"],
            &["sh", "train", "--lr", "1", ""],
        ] {
            assert_ne!(train, fingerprint(other), "{other:?}");
        }
    }

    #[test]
    fn files_count_with_their_paths_and_give_the_name() {
        let dir = tempfile::tempdir().unwrap();
        let script = |name: &str| {
            let path = dir.path().join(name);
            std::fs::write(&path, "").unwrap();
            path.display().to_string()
        };
        let (one, other) = (script("train.py"), script("_ö.py"));
        let detour = format!("{}/./train.py", dir.path().display());
        let named = fingerprint(&["sh", &one]);
        assert!(named.starts_with("train.py-"), "{named}");
        assert_eq!(named, fingerprint(&["sh", &detour]));
        assert!(fingerprint(&["sh", &other]).starts_with("py-"));
        let writes = || fingerprint(&["sh", &one, "--out", &format!("{detour}.out")]);
        let before = writes();
        script("train.py.out");
        assert_eq!(before, writes(), "made by its first run");
        assert!(fingerprint(&["__"]).starts_with("program-"));
        assert!(fingerprint(&["x".repeat(500).as_str()]).len() <= 64);
    }
}
