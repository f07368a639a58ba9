//! What the driver must remember across restarts: one file, one line for each claim, each with a checksum.
//!
//! A claim is written before anything is made for it, and its line is the last thing to go, so that whatever a crash
//! leaves behind can be found. Claims that come together reach the disk together: one flush serves all that were
//! written before it. A claim goes by one byte that is changed in place, which works on a full disk too. During a rolling
//! update two instances work on the file, under a lock; a number at its beginning tells each what the other did.

use std::{
    collections::BTreeMap,
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use crate::{
    claim::{ClaimRef, Share},
    model::{Book, Overbooked},
};

/// How the file begins; a later version that changes the format changes it. A number of 16 hexadecimal digits
/// follows that grows with each change.
const MAGIC: &str = "gpumux-claims-v1 ";
/// Length of the first line.
const HEADER: u64 = MAGIC.len() as u64 + 17;
/// First byte of a line that counts, and of one that does not any more.
const LIVE: u8 = b'+';
const DEAD: u8 = b'-';
/// Lines that do not count may take so many bytes before the file is written anew.
const MOST_DEAD: u64 = 256 << 10;

/// A prepared claim, or one that is being prepared.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Which.
    pub claim: ClaimRef,
    /// Pods that may use it: name and uid.
    pub pods: Vec<(String, String)>,
    /// What it has.
    pub shares: Vec<Share>,
    /// The tenants made for it; each share names one by index.
    pub tenants: Vec<TenantRecord>,
    /// For each share, its tenant's index; none: it only looks at its device.
    pub tenant_of: Vec<Option<usize>>,
    /// Whether everything was made.
    pub ready: bool,
    /// The annotation that is in force, if any.
    pub patch: Option<String>,
}

/// A tenant as the daemon has it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TenantRecord {
    /// Its name.
    pub name: String,
    /// Its secret.
    pub token: String,
    /// What else its processes need in their environment, as the daemon answered.
    #[serde(default)]
    pub environment: BTreeMap<String, String>,
}

/// Why nothing was remembered.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The disk.
    #[error("cannot keep the claim in {path}: {source}")]
    Io {
        /// Where.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Others hold what this claim was allocated.
    #[error("{error}; it is held by {holders}")]
    Overbooked {
        /// By how much.
        error: Overbooked,
        /// By whom.
        holders: String,
    },
}

/// The file of records. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Store {
    dir: PathBuf,
    lock: Arc<File>,
    log: Arc<Mutex<Log>>,
    synced: Arc<Mutex<Synced>>,
    /// Sees to it that a file is on disk; tests have one that fails.
    flush: fn(&File) -> io::Result<()>,
}

/// What is on disk.
#[derive(Debug, Default)]
struct Synced {
    /// So many of this process's changes.
    changes: u64,
    /// The disk has refused some since. The system takes them for written from then on, so that a later flush succeeds without them.
    lost: bool,
}

/// The file as last read.
#[derive(Debug)]
struct Log {
    file: File,
    inode: u64,
    /// The number at the file's beginning.
    generation: u64,
    /// Where the next line goes.
    end: u64,
    /// Bytes in lines that do not count.
    dead: u64,
    lines: BTreeMap<String, Line>,
    /// Changes by this process.
    changes: u64,
}

#[derive(Debug)]
struct Line {
    at: u64,
    length: u64,
    record: Arc<Record>,
}

impl Store {
    /// Opens the file in a directory, and makes both if need be.
    ///
    /// # Errors
    /// They cannot be made, or something else is there.
    pub fn open(dir: impl Into<PathBuf>) -> Result<Self, CheckpointError> {
        let dir = dir.into();
        let open = || {
            let mut builder = fs::DirBuilder::new();
            builder.recursive(true).mode(0o700).create(&dir)?;
            let lock = private().open(dir.join("claims.lock"))?;
            flock(&lock, FlockOperation::LockExclusive)?;
            let log = Log::open(&dir.join(FILE));
            flock(&lock, FlockOperation::Unlock)?;
            Ok((lock, log?))
        };
        let (lock, log) = open().map_err(|e| failed(&dir, e))?;
        Ok(Self {
            lock: Arc::new(lock),
            log: Arc::new(Mutex::new(log)),
            synced: Arc::default(),
            flush: File::sync_data,
            dir,
        })
    }

    /// The record of a claim.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn get(&self, uid: &str) -> Result<Option<Arc<Record>>, CheckpointError> {
        self.with(|log| Ok(log.lines.get(uid).map(|line| line.record.clone())))
    }

    /// All records.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn all(&self) -> Result<Vec<Arc<Record>>, CheckpointError> {
        self.with(|log| Ok(log.records().cloned().collect()))
    }

    /// Enters a claim if its guarantees fit on its devices beside all other claims. Not on disk before [`Self::sync`].
    ///
    /// # Errors
    /// Others hold what it needs, or it cannot be written.
    pub fn admit(&self, record: &Record) -> Result<(), CheckpointError> {
        self.with(|log| {
            let others: Vec<_> = log
                .records()
                .filter(|other| other.claim.uid != record.claim.uid)
                .collect();
            if let Err(overbooked) = book(&others, record) {
                return Ok(Err(overbooked));
            }
            log.append(record).map(Ok)
        })?
    }

    /// Writes a record whole or not at all. Not on disk before [`Self::sync`].
    ///
    /// # Errors
    /// It cannot be written.
    pub fn write(&self, record: &Record) -> Result<(), CheckpointError> {
        self.with(|log| log.append(record))
    }

    /// Forgets a claim; one that is not there is forgotten already. Not on disk before [`Self::sync`].
    ///
    /// # Errors
    /// The disk.
    pub fn remove(&self, uid: &str) -> Result<(), CheckpointError> {
        self.with(|log| log.remove(uid))
    }

    /// Returns when all that was written before would survive a power failure. Blocks.
    ///
    /// # Errors
    /// The disk.
    pub fn sync(&self) -> Result<(), CheckpointError> {
        let changes = || {
            self.log
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .changes
        };
        let own = changes();
        // A caller that waited here while another flushed finds that done, or flushes for all callers behind it.
        let mut synced = self.synced.lock().unwrap_or_else(PoisonError::into_inner);
        if synced.changes >= own {
            return Ok(());
        }
        let path = self.dir.join(FILE);
        let until = if synced.lost {
            self.with(|log| {
                log.compact(&path, self.flush)?;
                Ok(log.changes)
            })?
        } else {
            let (file, until) = {
                let log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
                (log.file.try_clone(), log.changes)
            };
            if let Err(error) = file.and_then(|file| (self.flush)(&file)) {
                synced.lost = true;
                return Err(failed(&path, error));
            }
            until
        };
        *synced = Synced {
            changes: until,
            lost: false,
        };
        Ok(())
    }

    /// Holds others off one claim, in this process and in another instance. Blocks.
    ///
    /// # Errors
    /// The lock file cannot be made.
    pub fn lock_claim(&self, uid: &str) -> Result<File, CheckpointError> {
        // Few files, whatever the number of claims: those that meet in one wait for each other.
        let shard = uid.bytes().fold(0u32, |sum, byte| {
            sum.wrapping_mul(31).wrapping_add(byte.into())
        }) % 256;
        let path = self.dir.join(format!("claim-{shard:03}.lock"));
        let file = private().open(&path).map_err(|e| failed(&path, e))?;
        flock(&file, FlockOperation::LockExclusive).map_err(|e| failed(&path, e.into()))?;
        Ok(file)
    }

    /// Works on the file as it is now, while no other process does.
    fn with<T>(&self, work: impl FnOnce(&mut Log) -> io::Result<T>) -> Result<T, CheckpointError> {
        let path = self.dir.join(FILE);
        let mut log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        let locked = || {
            flock(&self.lock, FlockOperation::LockExclusive)?;
            log.refresh(&path)?;
            let done = work(&mut log)?;
            if log.dead > MOST_DEAD {
                log.compact(&path, self.flush)?;
            }
            Ok(done)
        };
        let done = locked();
        let unlocked = flock(&self.lock, FlockOperation::Unlock);
        done.and_then(|done| unlocked.map(|()| done).map_err(Into::into))
            .map_err(|e| failed(&path, e))
    }
}

const FILE: &str = "claims.log";

impl Log {
    /// Opens the file, or makes an empty one, and reads it.
    fn open(path: &Path) -> io::Result<Self> {
        if !path.try_exists()? {
            write_whole(path, header(0).as_bytes(), File::sync_all)?;
        }
        let mut log = Self {
            file: OpenOptions::new().read(true).write(true).open(path)?,
            inode: 0,
            generation: 0,
            end: 0,
            dead: 0,
            lines: BTreeMap::new(),
            changes: 0,
        };
        log.read()?;
        Ok(log)
    }

    /// Reads the file again if another instance has changed it.
    fn refresh(&mut self, path: &Path) -> io::Result<()> {
        if fs::metadata(path)?.ino() != self.inode {
            self.file = OpenOptions::new().read(true).write(true).open(path)?;
            return self.read();
        }
        match self.read_generation()? == self.generation {
            true => Ok(()),
            false => self.read(),
        }
    }

    fn read_generation(&self) -> io::Result<u64> {
        let mut first = [0; HEADER as usize];
        // A shorter file has no header either.
        let read = match self.file.read_exact_at(&mut first, 0) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(()),
            read => read,
        };
        read?;
        std::str::from_utf8(&first)
            .ok()
            .and_then(|text| text.strip_prefix(MAGIC)?.strip_suffix('\n'))
            .and_then(|digits| u64::from_str_radix(digits, 16).ok())
            .ok_or_else(|| {
                let why = format!("it does not begin with `{MAGIC}`: move it away");
                io::Error::new(io::ErrorKind::InvalidData, why)
            })
    }

    fn read(&mut self) -> io::Result<()> {
        let metadata = self.file.metadata()?;
        (self.inode, self.generation) = (metadata.ino(), self.read_generation()?);
        let mut bytes = vec![0; usize::try_from(metadata.len() - HEADER).unwrap_or(0)];
        self.file.read_exact_at(&mut bytes, HEADER)?;
        (self.end, self.dead) = (HEADER, 0);
        self.lines.clear();
        // What has no end was being written when its writer was killed.
        for line in bytes.split_inclusive(|&byte| byte == b'\n') {
            let Some(text) = line.strip_suffix(b"\n") else {
                break;
            };
            let (at, length) = (self.end, line.len() as u64);
            self.end += length;
            match decode(text) {
                Ok(Some(record)) => {
                    let uid = record.claim.uid.clone();
                    let record = Arc::new(record);
                    // Of two, the earlier one's writer was killed before it said so.
                    if let Some(older) = self.lines.insert(uid, Line { at, length, record }) {
                        self.bury(&older)?;
                    }
                }
                Ok(None) => self.dead += length,
                Err(why) => {
                    tracing::warn!(at, why, "a claim is unknown until it is prepared again");
                }
            }
        }
        Ok(())
    }

    fn records(&self) -> impl Iterator<Item = &Arc<Record>> {
        self.lines.values().map(|line| &line.record)
    }

    /// Writes a line; it counts instead of an earlier one of the same claim.
    fn append(&mut self, record: &Record) -> io::Result<()> {
        let line = encode(record);
        self.change()?;
        // Nothing stays of a line that a full disk or a killed writer cut off.
        self.file.set_len(self.end)?;
        self.file
            .write_all_at(&line, self.end)
            .inspect_err(|_| drop(self.file.set_len(self.end)))?;
        let (at, length) = (self.end, line.len() as u64);
        self.end += length;
        let record = Arc::new(record.clone());
        let new = Line { at, length, record };
        if let Some(older) = self.lines.insert(new.record.claim.uid.clone(), new) {
            self.bury(&older)?;
        }
        Ok(())
    }

    fn remove(&mut self, uid: &str) -> io::Result<()> {
        if let Some(line) = self.lines.get(uid) {
            let (at, length) = (line.at, line.length);
            self.change()?;
            self.file.write_all_at(&[DEAD], at)?;
            self.dead += length;
            self.lines.remove(uid);
        }
        Ok(())
    }

    fn bury(&mut self, line: &Line) -> io::Result<()> {
        self.dead += line.length;
        self.file.write_all_at(&[DEAD], line.at)
    }

    /// Tells other instances that they must read again. Comes first: a process killed after it has done no harm.
    fn change(&mut self) -> io::Result<()> {
        self.file
            .write_all_at(header(self.generation + 1).as_bytes(), 0)?;
        self.generation += 1;
        self.changes += 1;
        Ok(())
    }

    /// Writes the file anew without the lines that do not count. Those that cannot be read stay.
    fn compact(&mut self, path: &Path, flush: fn(&File) -> io::Result<()>) -> io::Result<()> {
        let old = fs::read(path)?;
        let mut new = header(self.generation + 1).into_bytes();
        for line in old[HEADER as usize..self.end as usize].split_inclusive(|&byte| byte == b'\n') {
            if line[0] != DEAD {
                new.extend_from_slice(line);
            }
        }
        // `sync_data` need not write a folder's entries.
        write_whole(path, &new, |it| flush(it).and_then(|()| it.sync_all()))?;
        self.refresh(path)
    }
}

fn header(generation: u64) -> String {
    format!("{MAGIC}{generation:016x}\n")
}

/// Whether the devices of a claim can keep what it was allocated beside what the others have.
fn book(others: &[&Arc<Record>], record: &Record) -> Result<(), CheckpointError> {
    let mut book = Book::default();
    for share in others.iter().flat_map(|other| &other.shares) {
        book.enter(&share.of.uuid, share.usage);
    }
    for (index, share) in record.shares.iter().enumerate() {
        let overbooked = |error| {
            let holds = |other: &&&Arc<Record>| {
                let mut shares = other.shares.iter();
                shares.any(|it| it.of.is(&share.of) || it.of.overlaps(&share.of))
            };
            let holders: Vec<_> = others
                .iter()
                .filter(holds)
                .map(|other| format!("{}/{}", other.claim.namespace, other.claim.name))
                .take(8)
                .collect();
            CheckpointError::Overbooked {
                error,
                holders: holders.join(", "),
            }
        };
        if share.of.offer.is_some() {
            let before = others.iter().flat_map(|other| &other.shares);
            let mut before = before.chain(&record.shares[..index]);
            if let Some(other) = before.find(|it| it.of.overlaps(&share.of)) {
                return Err(overbooked(Overbooked::Overlap {
                    device: share.device.clone(),
                    other: other.device.clone(),
                }));
            }
            continue;
        }
        let whole = share.of.capacity();
        book.admit(&share.of.uuid, whole, share.usage)
            .map_err(overbooked)?;
    }
    Ok(())
}

/// Opens a file that only root reads, and makes it if need be.
fn private() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(false).mode(0o600);
    options
}

/// Replaces a file. Each instance has a name of its own for the new one.
pub(crate) fn write_whole(
    path: &Path,
    bytes: &[u8],
    flush: impl Fn(&File) -> io::Result<()>,
) -> io::Result<()> {
    let beside = path.with_extension(format!("tmp-{}", std::process::id()));
    gpumux_daemon::replace(path, &beside, bytes, flush)
}

fn failed(path: &Path, source: io::Error) -> CheckpointError {
    CheckpointError::Io {
        path: path.to_owned(),
        source,
    }
}

fn encode(record: &Record) -> Vec<u8> {
    let body = serde_json::to_string(record).unwrap_or_default();
    let mut line = vec![LIVE];
    line.extend(format!("{:08x} {body}\n", crc32fast::hash(body.as_bytes())).into_bytes());
    line
}

/// The record of a line without its end; none if it does not count.
fn decode(line: &[u8]) -> Result<Option<Record>, String> {
    let (first, text) = line.split_first().ok_or("it is empty")?;
    let text = std::str::from_utf8(text).map_err(|e| e.to_string())?;
    match (*first, text.split_once(' ')) {
        (DEAD, _) => Ok(None),
        (LIVE, Some((sum, body))) if sum == format!("{:08x}", crc32fast::hash(body.as_bytes())) => {
            serde_json::from_str(body)
                .map(Some)
                .map_err(|e| e.to_string())
        }
        (LIVE, _) => Err("the checksum is wrong".into()),
        _ => Err("it begins with neither + nor -".into()),
    }
}

#[cfg(test)]
mod damage;

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::{
        model::{Amounts, Use},
        share::GpuShare,
        slices::tests::device,
    };

    pub(crate) fn record(uid: &str, compute: u64) -> Record {
        Record {
            claim: ClaimRef {
                namespace: "ns".into(),
                name: format!("claim-{uid}"),
                uid: uid.into(),
            },
            pods: vec![("pod".into(), "p1".into())],
            shares: vec![Share {
                request: "gpu".into(),
                pool: "node1".into(),
                device: "gpu-0".into(),
                share_id: Some("s".into()),
                of: device(0),
                usage: Use::Shared(Amounts {
                    compute,
                    memory: 1 << 30,
                    clients: 1,
                }),
                parameters: GpuShare::default(),
            }],
            tenants: vec![TenantRecord {
                name: format!("k8s-{uid}-0"),
                token: "0".repeat(32),
                environment: BTreeMap::new(),
            }],
            tenant_of: vec![Some(0)],
            ready: false,
            patch: None,
        }
    }

    /// As an earlier version wrote it, which made no MIG instances.
    #[test]
    fn record_without_instances_to_make_is_read() {
        let line = String::from_utf8(encode(&record("a", 500))).unwrap();
        let (_, body) = line.split_once(' ').unwrap();
        let earlier = body.trim_end().replace(r#""offer":null,"#, "");
        assert_ne!(earlier, body.trim_end());
        let line = format!("+{:08x} {earlier}", crc32fast::hash(earlier.as_bytes()));
        let read = decode(line.as_bytes()).unwrap().unwrap();
        assert_eq!(read, record("a", 500));
    }

    #[test]
    fn two_claims_never_have_one_memory_slice() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        let of = |uid: &str, gpu: &str, profile: &str, start, memory_slices| {
            let place = crate::mig::Place {
                gpu: gpu.into(),
                profile: profile.into(),
                start,
                memory_slices,
            };
            let mut record = record(uid, 0);
            record.shares[0].device = format!("{profile}-at-{start}");
            record.shares[0].usage = Use::Whole;
            record.shares[0].of.offer = Some(crate::mig::Offer {
                place,
                slices: 1,
                slices_free: 7,
                most: 7,
                recorded: true,
            });
            record
        };
        store.admit(&of("a", "GPU-0", "1g.10gb", 3, 1)).unwrap();
        store.admit(&of("a", "GPU-0", "1g.10gb", 3, 1)).unwrap();
        let error = store.admit(&of("b", "GPU-0", "3g.40gb", 0, 4)).unwrap_err();
        let error = error.to_string();
        assert!(
            error.contains("3g.40gb-at-0 has memory slices of 1g.10gb-at-3")
                && error.contains("held by ns/claim-a"),
            "{error}"
        );
        store.admit(&of("c", "GPU-0", "3g.40gb", 4, 4)).unwrap();
        store.admit(&of("d", "GPU-1", "3g.40gb", 0, 4)).unwrap();
        let mut twice = of("e", "GPU-2", "1g.10gb", 0, 1);
        twice.shares.push(twice.shares[0].clone());
        store.admit(&twice).unwrap_err();
    }

    /// Where a disk refuses a write, the system takes it for written: another flush tells nothing.
    #[test]
    fn claim_that_a_flush_lost_is_written_anew_before_it_counts() {
        let dir = tempfile::tempdir().unwrap();
        let mut store = Store::open(dir.path()).unwrap();
        let inode = || fs::metadata(dir.path().join(FILE)).unwrap().ino();
        let names = || {
            let mut all: Vec<_> = fs::read_dir(dir.path()).unwrap().flatten().collect();
            all.sort_by_key(fs::DirEntry::file_name);
            all.iter().map(|it| it.file_name()).collect::<Vec<_>>()
        };
        let (first, files) = (inode(), names());
        store.admit(&record("a", 500)).unwrap();
        let broken: fn(&File) -> io::Result<()> = |_| Err(io::ErrorKind::StorageFull.into());
        store.flush = broken;
        for _ in 0..3 {
            store.sync().unwrap_err();
            assert_eq!((inode(), names()), (first, files.clone()));
        }
        store.flush = File::sync_data;
        store.sync().unwrap();
        assert_ne!(inode(), first, "it was written anew");
        let other = Store::open(dir.path()).unwrap();
        assert_eq!(*other.get("a").unwrap().unwrap(), record("a", 500));
        // From then on changes are flushed as ever.
        let second = inode();
        store.remove("a").unwrap();
        store.sync().unwrap();
        assert_eq!(inode(), second);
    }

    #[test]
    fn a_record_comes_back_and_goes() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        store.admit(&record("a", 500)).unwrap();
        store.sync().unwrap();
        let other = Store::open(dir.path()).unwrap();
        assert_eq!(*other.get("a").unwrap().unwrap(), record("a", 500));
        let ready = Record {
            ready: true,
            ..record("a", 500)
        };
        other.write(&ready).unwrap();
        assert_eq!(*store.get("a").unwrap().unwrap(), ready);
        store.remove("a").unwrap();
        store.remove("a").unwrap();
        assert_eq!(other.get("a").unwrap(), None);
    }

    #[test]
    fn what_two_instances_admit_never_exceeds_the_device() {
        let dir = tempfile::tempdir().unwrap();
        let stores = [
            Store::open(dir.path()).unwrap(),
            Store::open(dir.path()).unwrap(),
        ];
        std::thread::scope(|scope| {
            for (index, store) in stores.iter().enumerate() {
                scope.spawn(move || {
                    for n in 0..10 {
                        let _ = store.admit(&record(&format!("{index}-{n}"), 300));
                        store.sync().unwrap();
                    }
                });
            }
        });
        assert_eq!(stores[0].all().unwrap().len(), 3);
        let error = stores[1]
            .admit(&record("late", 300))
            .unwrap_err()
            .to_string();
        assert!(error.contains("has 100 of 1000 compute left"), "{error}");
        assert!(error.contains("held by ns/claim-"), "{error}");
        // The same claim once more takes nothing more.
        let again = stores[0].all().unwrap()[0].as_ref().clone();
        stores[1].admit(&again).unwrap();
    }

    #[test]
    fn what_went_is_cleared_away_under_the_feet_of_another_instance() {
        let dir = tempfile::tempdir().unwrap();
        let stores = [
            Store::open(dir.path()).unwrap(),
            Store::open(dir.path()).unwrap(),
        ];
        let size = || fs::metadata(dir.path().join(FILE)).unwrap().len();
        stores[0].admit(&record("stays", 100)).unwrap();
        let one = size() - HEADER;
        for n in 0..2 * MOST_DEAD / one {
            let store = &stores[n as usize % 2];
            store.write(&record("goes", 100)).unwrap();
            store.remove("goes").unwrap();
        }
        assert!(size() < HEADER + MOST_DEAD + 3 * one, "{}", size());
        for store in &stores {
            assert_eq!(*store.all().unwrap()[0], record("stays", 100));
            store.sync().unwrap();
        }
    }

    #[test]
    fn a_claim_written_twice_goes_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(FILE);
        let store = Store::open(dir.path()).unwrap();
        store.write(&record("a", 100)).unwrap();
        let first = fs::read(&path).unwrap()[HEADER as usize..].to_vec();
        store.write(&record("a", 200)).unwrap();
        // As if the writer had been killed before it marked the first line.
        let mut both = fs::read(&path).unwrap();
        both[HEADER as usize..HEADER as usize + first.len()].copy_from_slice(&first);
        fs::write(&path, both).unwrap();
        let store = Store::open(dir.path()).unwrap();
        assert_eq!(*store.get("a").unwrap().unwrap(), record("a", 200));
        store.remove("a").unwrap();
        assert_eq!(Store::open(dir.path()).unwrap().get("a").unwrap(), None);
    }

    #[test]
    fn killed_writer_leaves_no_harm() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(FILE);
        Store::open(dir.path())
            .unwrap()
            .admit(&record("a", 500))
            .unwrap();
        let whole = fs::read(&path).unwrap();
        for length in HEADER as usize..whole.len() {
            fs::write(&path, &whole[..length]).unwrap();
            let store = Store::open(dir.path()).unwrap();
            assert_eq!(store.get("a").unwrap(), None, "length {length}");
            store.admit(&record("b", 500)).unwrap();
            let again = Store::open(dir.path()).unwrap();
            assert_eq!(again.all().unwrap(), [Arc::new(record("b", 500))]);
        }
    }

    #[test]
    fn damage_is_found_at_every_byte() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(FILE);
        let store = Store::open(dir.path()).unwrap();
        store.admit(&record("a", 500)).unwrap();
        let end = fs::read(&path).unwrap().len();
        store.admit(&record("b", 500)).unwrap();
        let good = fs::read(&path).unwrap();
        for index in HEADER as usize..end {
            let mut bad = good.clone();
            bad[index] ^= 1;
            fs::write(&path, bad).unwrap();
            let store = Store::open(dir.path()).unwrap();
            assert_eq!(store.get("a").unwrap(), None, "byte {index}");
            // Only without its end does a line take the next one with it.
            assert_eq!(
                store.get("b").unwrap().is_some(),
                index + 1 < end,
                "byte {index}"
            );
        }
    }
}
