//! Whether a library can be preloaded into a program.

use std::{
    env,
    ffi::OsStr,
    fs::File,
    io::Read,
    path::{Path, PathBuf},
};

/// Bytes of a program that are looked at: its head and its table of segments.
const HEAD: u64 = 64 << 10;

/// Whether a program is known to be statically linked, so that nothing can be preloaded into it.
pub(crate) fn is_static_program(program: &OsStr) -> bool {
    head(program, HEAD).is_some_and(|head| is_static(&head))
}

/// Whether a program is a script that names its interpreter.
pub(crate) fn is_script(program: &OsStr) -> bool {
    head(program, 2).is_some_and(|head| head == b"#!")
}

/// So many bytes of a program's beginning, or all.
fn head(program: &OsStr, bytes: u64) -> Option<Vec<u8>> {
    let mut head = Vec::new();
    File::open(find(program)?)
        .ok()?
        .take(bytes)
        .read_to_end(&mut head)
        .ok()?;
    Some(head)
}

/// The file that a shell would start.
pub(crate) fn find(program: &OsStr) -> Option<PathBuf> {
    if Path::new(program).components().count() > 1 {
        return Some(program.into());
    }
    let path = env::var_os("PATH")?;
    let mut files = env::split_paths(&path).map(|dir| dir.join(program));
    files.find(|file| file.is_file())
}

/// Whether this is the head of a 64-bit program for Linux without an interpreter (ELF: no segment of type PT_INTERP).
fn is_static(head: &[u8]) -> bool {
    let number = |at: usize, size: usize| -> Option<u64> {
        let bytes = head.get(at..at.checked_add(size)?)?;
        Some(
            bytes
                .iter()
                .rev()
                .fold(0, |all, byte| all << 8 | u64::from(*byte)),
        )
    };
    let segments = || -> Option<Vec<u64>> {
        let (start, size, count) = (number(32, 8)?, number(54, 2)?, number(56, 2)?);
        (0..count)
            .map(|n| number(usize::try_from(start + n * size).ok()?, 4))
            .collect()
    };
    // 64-bit, little-endian; a program, or one at any address.
    let is_program = head.starts_with(b"\x7fELF\x02\x01") && matches!(number(16, 2), Some(2 | 3));
    const INTERPRETER: u64 = 3;
    is_program && segments().is_some_and(|all| !all.is_empty() && !all.contains(&INTERPRETER))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn program(segments: &[u32]) -> Vec<u8> {
        let mut head = vec![0; 64 + 56 * segments.len()];
        head[..6].copy_from_slice(b"\x7fELF\x02\x01");
        (head[16], head[32], head[54], head[56]) = (3, 64, 56, segments.len() as u8);
        for (n, kind) in segments.iter().enumerate() {
            head[64 + 56 * n..][..4].copy_from_slice(&kind.to_le_bytes());
        }
        head
    }

    #[test]
    fn programs_without_interpreter_are_static() {
        assert!(is_static(&program(&[6, 1, 1])));
        assert!(!is_static(&program(&[6, 3, 1])));
        assert!(!is_static(&program(&[])), "it is no program");
        assert!(!is_static(b"#!/bin/sh\n"));
        assert!(!is_static(&program(&[6, 1])[..100]), "cut short");
        let own = env::current_exe().unwrap();
        assert!(!is_static_program(own.as_os_str()));
        assert!(!is_static_program(
            "gpumux-there-is-no-such-program".as_ref()
        ));
    }
}
