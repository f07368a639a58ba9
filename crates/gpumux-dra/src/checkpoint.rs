//! What the driver must remember across restarts: one file per claim, with a checksum.
//!
//! A claim is written before anything is made for it, and its file is the last thing to go, so that whatever a crash
//! leaves behind can be found. During a rolling update two instances work on the same files: what is
//! promised is read and entered under one file lock.

use std::{
    collections::{BTreeMap, HashMap},
    fs::{self, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use crate::{
    claim::{ClaimRef, Share},
    model::{self, Book, Overbooked},
};

/// First word of every file; a later version that changes the format changes it.
const MAGIC: &str = "gpumux-claim-v1";

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
    /// For each share, its tenant's index.
    pub tenant_of: Vec<usize>,
    /// Whether everything was made.
    pub ready: bool,
    /// The annotation that is in force, if any.
    pub patch: Option<String>,
}

/// A tenant as the daemon knows it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TenantRecord {
    /// Its name.
    pub name: String,
    /// Its secret.
    pub token: String,
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
    /// The file is not what was written.
    #[error("{path} is damaged ({why})")]
    Damaged {
        /// Which.
        path: PathBuf,
        /// What is wrong.
        why: String,
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

/// The directory of records.
#[derive(Clone, Debug)]
pub struct Store {
    dir: PathBuf,
    cache: Arc<Mutex<Cache>>,
}

/// Records as last read, by file.
type Cache = HashMap<PathBuf, (Identity, Arc<Record>)>;

/// Tells one version of a file from another: inode, seconds and nanoseconds of its last change, size.
type Identity = (u64, i64, i64, u64);

impl Store {
    /// Opens the directory, and makes it if need be.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn open(dir: impl Into<PathBuf>) -> Result<Self, CheckpointError> {
        let dir = dir.into();
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&dir)
            .map_err(|e| failed(&dir, e))?;
        Ok(Self {
            dir,
            cache: Arc::default(),
        })
    }

    /// The record of a claim.
    ///
    /// # Errors
    /// It is damaged, or cannot be read.
    pub fn get(&self, uid: &str) -> Result<Option<Arc<Record>>, CheckpointError> {
        self.read(&self.path(uid))
    }

    /// All records that can be read, and the errors of those that cannot.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn all(&self) -> Result<(Vec<Arc<Record>>, Vec<CheckpointError>), CheckpointError> {
        let (mut records, mut errors) = (BTreeMap::new(), Vec::new());
        let entries = fs::read_dir(&self.dir).map_err(|e| failed(&self.dir, e))?;
        for path in entries.flatten().map(|entry| entry.path()) {
            if path
                .extension()
                .is_none_or(|extension| extension != "claim")
            {
                continue;
            }
            match self.read(&path) {
                Ok(Some(record)) => drop(records.insert(path, record)),
                // Another instance took it away meanwhile.
                Ok(None) => {}
                Err(error) => errors.push(error),
            }
        }
        Ok((records.into_values().collect(), errors))
    }

    /// Enters a claim if its devices can keep the promise beside all other claims. Not on disk before [`Self::sync`].
    ///
    /// # Errors
    /// Others hold what it needs, or it cannot be written.
    pub fn admit(&self, record: &Record) -> Result<(), CheckpointError> {
        let _lock = self.lock()?;
        let (others, _) = self.all()?;
        let others: Vec<_> = others
            .into_iter()
            .filter(|other| other.claim.uid != record.claim.uid)
            .collect();
        let mut book = Book::default();
        for share in others.iter().flat_map(|other| &other.shares) {
            book.enter(&share.of.uuid, share.usage);
        }
        for share in &record.shares {
            let whole = model::capacity(share.of.memory_bytes);
            book.admit(&share.of.uuid, whole, share.usage)
                .map_err(|error| {
                    let holds = |other: &&Arc<Record>| {
                        other.shares.iter().any(|s| s.of.uuid == share.of.uuid)
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
                })?;
        }
        self.write(record)
    }

    /// Writes a record whole or not at all. Not on disk before [`Self::sync`].
    ///
    /// # Errors
    /// It cannot be written.
    pub fn write(&self, record: &Record) -> Result<(), CheckpointError> {
        let path = self.path(&record.claim.uid);
        let written = write_whole(&path, &encode(record)).map_err(|e| failed(&path, e))?;
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        cache.insert(path, (identity(&written), Arc::new(record.clone())));
        Ok(())
    }

    /// Returns when the record would survive a power failure.
    ///
    /// # Errors
    /// The disk.
    pub fn sync(&self, uid: &str) -> Result<(), CheckpointError> {
        let path = self.path(uid);
        File::open(&path)
            .and_then(|file| file.sync_all())
            .and_then(|()| File::open(&self.dir)?.sync_all())
            .map_err(|e| failed(&path, e))
    }

    /// Forgets a claim; one that is not there is forgotten already.
    ///
    /// # Errors
    /// The disk.
    pub fn remove(&self, uid: &str) -> Result<(), CheckpointError> {
        let path = self.path(uid);
        self.cache
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&path);
        match fs::remove_file(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            result => result.map_err(|e| failed(&path, e))?,
        }
        File::open(&self.dir)
            .and_then(|dir| dir.sync_all())
            .map_err(|e| failed(&path, e))
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
        self.lock_file(&format!("claim-{shard:03}.lock"))
    }

    fn lock(&self) -> Result<File, CheckpointError> {
        self.lock_file("book.lock")
    }

    fn lock_file(&self, name: &str) -> Result<File, CheckpointError> {
        let path = self.dir.join(name);
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(false).mode(0o600);
        let file = options.open(&path).map_err(|e| failed(&path, e))?;
        flock(&file, FlockOperation::LockExclusive).map_err(|e| failed(&path, e.into()))?;
        Ok(file)
    }

    fn path(&self, uid: &str) -> PathBuf {
        self.dir.join(format!("{uid}.claim"))
    }

    fn read(&self, path: &Path) -> Result<Option<Arc<Record>>, CheckpointError> {
        let metadata = match fs::metadata(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            other => other.map_err(|e| failed(path, e))?,
        };
        let identity = identity(&metadata);
        let cached = |cache: &Cache| {
            cache
                .get(path)
                .filter(|(known, _)| *known == identity)
                .map(|(_, record)| record.clone())
        };
        if let Some(record) = cached(&self.cache.lock().unwrap_or_else(PoisonError::into_inner)) {
            return Ok(Some(record));
        }
        let bytes = match fs::read(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            other => other.map_err(|e| failed(path, e))?,
        };
        let record = decode(&bytes)
            .map_err(|why| CheckpointError::Damaged {
                path: path.to_owned(),
                why,
            })
            .map(Arc::new)?;
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        cache.insert(path.to_owned(), (identity, record.clone()));
        Ok(Some(record))
    }
}

fn identity(file: &fs::Metadata) -> Identity {
    (file.ino(), file.mtime(), file.mtime_nsec(), file.size())
}

/// Writes a file beside its place and moves it there. Nothing stays behind if the disk is full.
pub(crate) fn write_whole(path: &Path, bytes: &[u8]) -> io::Result<fs::Metadata> {
    let beside = path.with_extension(format!("tmp-{}", std::process::id()));
    let write = || {
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(true).mode(0o600);
        let mut file = options.open(&beside)?;
        file.write_all(bytes)?;
        fs::rename(&beside, path)?;
        file.metadata()
    };
    write().inspect_err(|_| drop(fs::remove_file(&beside)))
}

fn failed(path: &Path, source: io::Error) -> CheckpointError {
    CheckpointError::Io {
        path: path.to_owned(),
        source,
    }
}

fn encode(record: &Record) -> Vec<u8> {
    let body = serde_json::to_string(record).unwrap_or_default();
    format!("{MAGIC} {:08x}\n{body}\n", crc32(body.as_bytes())).into_bytes()
}

fn decode(bytes: &[u8]) -> Result<Record, String> {
    let text = std::str::from_utf8(bytes).map_err(|e| e.to_string())?;
    let (head, body) = text.split_once('\n').ok_or("it ends early")?;
    let body = body.strip_suffix('\n').ok_or("it ends early")?;
    match head.split_once(' ') {
        Some((MAGIC, sum)) if sum == format!("{:08x}", crc32(body.as_bytes())) => {}
        Some((MAGIC, _)) => return Err("the checksum is wrong".into()),
        _ => return Err(format!("it does not begin with {MAGIC}")),
    }
    serde_json::from_str(body).map_err(|e| e.to_string())
}

/// CRC-32 as in IEEE 802.3.
fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| {
            (crc >> 1) ^ (0xEDB8_8320 & (crc & 1).wrapping_neg())
        })
    })
}

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
            }],
            tenant_of: vec![0],
            ready: false,
            patch: None,
        }
    }

    #[test]
    fn a_record_comes_back_and_goes() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        store.admit(&record("a", 500)).unwrap();
        store.sync("a").unwrap();
        let other = Store::open(dir.path()).unwrap();
        assert_eq!(*other.get("a").unwrap().unwrap(), record("a", 500));
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
                    }
                });
            }
        });
        assert_eq!(stores[0].all().unwrap().0.len(), 3);
        let error = stores[1]
            .admit(&record("late", 300))
            .unwrap_err()
            .to_string();
        assert!(error.contains("has 100 of 1000 compute left"), "{error}");
        assert!(error.contains("held by ns/claim-"), "{error}");
        // The same claim once more takes nothing more.
        let again = stores[0].all().unwrap().0[0].as_ref().clone();
        stores[1].admit(&again).unwrap();
    }

    #[test]
    fn damage_is_found_at_every_byte() {
        let good = encode(&record("a", 500));
        assert!(decode(&good).is_ok());
        for index in 0..good.len() {
            let mut bad = good.clone();
            bad[index] ^= 1;
            assert!(decode(&bad).is_err(), "byte {index}");
            assert!(decode(&good[..index]).is_err(), "length {index}");
        }
        assert_eq!(crc32(b"123456789"), 0xCBF4_3926);
    }
}
