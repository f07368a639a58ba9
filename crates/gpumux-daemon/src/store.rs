//! Files that outlive the daemon: JSON behind a line with its checksum, replaced whole or not at all. One
//! that makes no sense is moved aside, because a daemon without its past is better than none.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use rustix::fs::OFlags;
use serde::{Serialize, de::DeserializeOwned};

/// What the first line begins with; the checksum (CRC-32, hexadecimal) follows.
const HEAD: &str = "gpumux 1 ";

/// How long a caller waits for a disk: less than clients wait for the daemon.
const PATIENCE: Duration = Duration::from_secs(3);

/// Whether a file must be on the disk before the daemon goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sync {
    /// It means something after the machine has lost its power.
    Disk,
    /// It speaks of living processes.
    No,
}

/// Opens a regular file, with more flags. Another kind, which could keep its reader waiting, is an error.
pub(crate) fn open_regular(
    file: &Path,
    options: &mut OpenOptions,
    flags: OFlags,
) -> io::Result<File> {
    let flags = (OFlags::NONBLOCK | flags).bits().cast_signed();
    let open = options.custom_flags(flags).open(file)?;
    match open.metadata()?.is_file() {
        true => Ok(open),
        false => Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "it is no regular file",
        )),
    }
}

fn bytes(file: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open_regular(file, File::options().read(true), OFlags::empty())?.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// What a file says; nothing if there is none, or none that makes sense.
pub(crate) fn read<T: DeserializeOwned + Default>(file: &Path) -> T {
    let problem = match bytes(file) {
        Ok(bytes) => match parse(&bytes) {
            Ok(value) => return value,
            Err(problem) => problem,
        },
        Err(error) if error.kind() == io::ErrorKind::NotFound => return T::default(),
        Err(error) => error.to_string(),
    };
    let aside = file.with_extension("json.bad");
    tracing::warn!(
        problem,
        "{} cannot be read: moved to {}, and begun anew",
        file.display(),
        aside.display()
    );
    let _ = fs::rename(file, aside);
    T::default()
}

fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, String> {
    let text = std::str::from_utf8(bytes).map_err(|error| error.to_string())?;
    let parts = text
        .strip_prefix(HEAD)
        .and_then(|rest| rest.split_once('\n'));
    let (sum, body) = parts.ok_or("its first line is not one of gpumux")?;
    if sum != checksum(body) {
        return Err("its checksum is wrong".into());
    }
    serde_json::from_str(body).map_err(|error| error.to_string())
}

/// Replaces a file. Only its owner can read it: there are secrets in some.
///
/// # Errors
/// The disk. Then the old one is still there, or the new one, of which it is not known whether it outlasts a power failure.
pub(crate) fn write(file: &Path, value: &impl Serialize, sync: Sync) -> io::Result<()> {
    match sync {
        Sync::Disk => write_flushed(file, value, File::sync_all),
        Sync::No => write_flushed(file, value, |_| Ok(())),
    }
}

fn write_flushed(
    file: &Path,
    value: &impl Serialize,
    flush: impl Fn(&File) -> io::Result<()>,
) -> io::Result<()> {
    let body = serde_json::to_string(value)?;
    let text = format!("{HEAD}{}\n{body}", checksum(&body));
    let new = file.with_extension("json.new");
    replace(file, &new, text.as_bytes(), flush)
}

/// Writes a file that only its owner can read, as `new`, and moves it to its place. `flush` is called for it before that, and then for its folder.
///
/// # Errors
/// The disk. Then the old one is still there, or the new one, of which it is not known whether it outlasts a power failure.
pub fn replace(
    file: &Path,
    new: &Path,
    bytes: &[u8],
    flush: impl Fn(&File) -> io::Result<()>,
) -> io::Result<()> {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(0o600);
    let written = || {
        let mut out = options.open(new)?;
        out.write_all(bytes)?;
        flush(&out)?;
        fs::rename(new, file)
    };
    // On a full disk, what was begun takes room that others need.
    written().inspect_err(|_| drop(fs::remove_file(new)))?;
    match file.parent() {
        Some(dir) => flush(&File::open(dir)?),
        None => Ok(()),
    }
}

/// Writes one file that must be on the disk, beside the runtime's threads and once at a time: a disk may take long, or hang. No lock is
/// held meanwhile that others need.
#[derive(Debug)]
pub(crate) struct Writer {
    file: PathBuf,
    /// Held while the file is written. To its end, or another would write, too.
    alone: Arc<tokio::sync::Mutex<()>>,
    /// What the file is to hold has changed since it was taken.
    unsaved: Arc<AtomicBool>,
}

impl Writer {
    pub(crate) fn new(file: PathBuf) -> Self {
        Self {
            file,
            alone: Arc::default(),
            unsaved: Arc::default(),
        }
    }

    /// What the file is to hold has changed.
    pub(crate) fn changed(&self) {
        self.unsaved.store(true, Ordering::SeqCst);
    }

    /// Writes what `take` returns, unless it was written since it changed.
    ///
    /// # Errors
    /// The disk, also when it has not answered in time: then it is written when the disk answers.
    pub(crate) async fn write<T: Serialize + Send + 'static>(
        &self,
        take: impl Future<Output = T>,
    ) -> io::Result<()> {
        let written = async {
            let alone = Arc::clone(&self.alone).lock_owned().await;
            if !self.unsaved.load(Ordering::SeqCst) {
                return Ok(());
            }
            self.unsaved.store(false, Ordering::SeqCst);
            let value = take.await;
            let (file, unsaved) = (self.file.clone(), Arc::clone(&self.unsaved));
            let write = move || {
                let _alone = alone;
                write(&file, &value, Sync::Disk)
                    .inspect_err(|_| unsaved.store(true, Ordering::SeqCst))
            };
            let written = tokio::task::spawn_blocking(write).await;
            written.unwrap_or_else(|error| Err(io::Error::other(error)))
        };
        let late = |_| {
            let why = format!("the disk has not answered for {PATIENCE:?}");
            Err(io::Error::new(io::ErrorKind::TimedOut, why))
        };
        tokio::time::timeout(PATIENCE, written)
            .await
            .unwrap_or_else(late)
    }
}

/// Reads such a file's bytes; what is understood is understood again when it is written anew. `sealed`: the bytes are the body, and get
/// the first line that goes with them, since no random bytes have a right checksum. For fuzzing.
///
/// # Panics
/// When what was understood is not understood again.
pub(crate) fn read_again<T: DeserializeOwned + Serialize>(bytes: &[u8], sealed: bool) {
    let seal = |body: &[u8]| {
        let head = format!("{HEAD}{:08x}\n", crc32fast::hash(body));
        [head.as_bytes(), body].concat()
    };
    let file = if sealed {
        seal(bytes)
    } else {
        bytes.to_owned()
    };
    if let Ok(value) = parse::<T>(&file) {
        let body = serde_json::to_vec(&value).expect("it was read from JSON");
        let again = parse::<T>(&seal(&body));
        assert!(again.is_ok(), "{:?}", again.err());
    }
}

fn checksum(body: &str) -> String {
    format!("{:08x}", crc32fast::hash(body.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: [u32; 0] = [];

    fn numbers(file: &Path) -> Vec<u32> {
        read(file)
    }

    #[test]
    fn flush_that_fails_is_reported_and_leaves_the_old_file() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("some.json");
        write(&file, &[1, 2], Sync::Disk).unwrap();
        let broken = || Err(io::ErrorKind::StorageFull.into());
        write_flushed(&file, &[3], |_| broken()).unwrap_err();
        assert_eq!(numbers(&file), [1, 2]);
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 1, "nothing else stays");
        // The file is on the disk, and its folder is not.
        let of_folder = |it: &File| it.metadata().is_ok_and(|it| it.is_dir());
        write_flushed(&file, &[3], |it| match of_folder(it) {
            true => broken(),
            false => Ok(()),
        })
        .unwrap_err();
        assert_eq!(numbers(&file), [3]);
    }

    #[test]
    fn what_was_written_is_read_and_what_was_damaged_is_moved_aside() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("some.json");
        assert_eq!(numbers(&file), NONE);
        for sync in [Sync::No, Sync::Disk] {
            write(&file, &[1, 2], sync).unwrap();
            assert_eq!(numbers(&file), [1, 2]);
        }
        let good = fs::read(&file).unwrap();
        // Each bit, and each length, matters.
        for at in 0..good.len() {
            let mut flipped = good.clone();
            flipped[at] ^= 1;
            for bad in [&flipped[..], &good[..at]] {
                fs::write(&file, bad).unwrap();
                assert_eq!(numbers(&file), NONE, "{at}");
                assert_eq!(fs::read(dir.path().join("some.json.bad")).unwrap(), bad);
                assert!(!file.exists());
            }
        }
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &file,
            rustix::fs::FileType::Fifo,
            0o600.into(),
            0,
        )
        .unwrap();
        assert_eq!(
            numbers(&file),
            NONE,
            "a reader without a writer does not wait"
        );
        assert!(!file.exists());
        // What is of another kind is no better.
        write(&file, &"text", Sync::No).unwrap();
        assert_eq!(numbers(&file), NONE);
        assert!(!file.exists());
    }
}
