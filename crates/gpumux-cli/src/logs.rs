//! Files of the output of programs that run detached: one for each name, in the user's own folder, of a bounded size.

use std::{
    env,
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use anyhow::Context;

/// Bytes after which a file becomes the old one, of which one is kept.
pub(crate) const MAX: u64 = 8 << 20;

/// Where the files are: `$XDG_STATE_HOME/gpumux/logs`, or `~/.local/state/gpumux/logs`.
///
/// # Errors
/// When the user has no home.
pub(crate) fn folder() -> anyhow::Result<PathBuf> {
    let absolute = |name: &str| {
        let path = env::var_os(name).map(PathBuf::from);
        path.filter(|path| path.is_absolute())
    };
    let state = absolute("XDG_STATE_HOME")
        .or_else(|| Some(absolute("HOME")?.join(".local/state")))
        .context("neither XDG_STATE_HOME nor HOME names a folder for the output of the program")?;
    Ok(state.join("gpumux/logs"))
}

/// A tenant's file in a folder.
pub(crate) fn file(folder: &Path, name: &str) -> PathBuf {
    folder.join(format!("{name}.log"))
}

/// The file that the old contents of another one go to.
pub(crate) fn old(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".1");
    name.into()
}

/// Where it is noted how a tenant's program ended: its daemon may end soon after it.
pub(crate) fn exit(path: &Path) -> PathBuf {
    path.with_extension("exit")
}

/// A file of bounded size that is written to.
#[derive(Debug)]
pub(crate) struct Log {
    path: PathBuf,
    file: File,
    written: u64,
    max: u64,
}

impl Log {
    /// Begins a new file; what was there becomes the old one, and how its program ended is forgotten.
    ///
    /// # Errors
    /// When it cannot be made.
    pub(crate) fn begin(path: PathBuf) -> io::Result<Self> {
        let _ = fs::remove_file(exit(&path));
        Self::bounded(path, MAX)
    }

    fn bounded(path: PathBuf, max: u64) -> io::Result<Self> {
        if let Some(folder) = path.parent() {
            DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(folder)?;
        }
        let file = Self::anew(&path)?;
        Ok(Self {
            path,
            file,
            written: 0,
            max,
        })
    }

    fn anew(path: &Path) -> io::Result<File> {
        match fs::rename(path, old(path)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        OpenOptions::new()
            .append(true)
            .create(true)
            .mode(0o600)
            .open(path)
    }

    /// Where it is.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The file as it is now.
    ///
    /// # Errors
    /// When there are no files left.
    pub(crate) fn try_clone_file(&self) -> io::Result<File> {
        self.file.try_clone()
    }
}

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.written > 0 && self.written + bytes.len() as u64 > self.max {
            self.file = Self::anew(&self.path)?;
            self.written = 0;
        }
        let count = self.file.write(bytes)?;
        self.written += count as u64;
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// The last lines of a text.
pub(crate) fn last_lines(text: &[u8], count: usize) -> &[u8] {
    let end = text.strip_suffix(b"\n").unwrap_or(text);
    let starts = end.iter().enumerate().rev();
    let mut starts = starts
        .filter(|(_, byte)| **byte == b'\n')
        .map(|(at, _)| at + 1);
    match count.checked_sub(1) {
        None => &[],
        Some(before) => &text[starts.nth(before).unwrap_or(0)..],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_is_bounded_and_keeps_one_old_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = file(&dir.path().join("a/b"), "train");
        let read = |path: &Path| fs::read_to_string(path).unwrap_or_default();
        let mut log = Log::bounded(path.clone(), 10).unwrap();
        for text in ["12345", "67890", "abc", "a line that is longer"] {
            log.write_all(text.as_bytes()).unwrap();
        }
        assert_eq!(
            (read(&old(&path)), read(&path)),
            ("abc".into(), "a line that is longer".into())
        );
        let _next = Log::bounded(path.clone(), 10).unwrap();
        assert_eq!(
            (read(&old(&path)), read(&path)),
            ("a line that is longer".into(), String::new())
        );
    }

    #[test]
    fn last_lines_are_whole() {
        let text = b"one\ntwo\nthree\n";
        for (count, expected) in [
            (0, ""),
            (1, "three\n"),
            (2, "two\nthree\n"),
            (9, "one\ntwo\nthree\n"),
        ] {
            assert_eq!(last_lines(text, count), expected.as_bytes(), "{count}");
        }
        assert_eq!(last_lines(b"one\ntwo", 1), b"two");
        assert_eq!(last_lines(b"", 1), b"");
    }
}
