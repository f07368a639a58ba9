//! Starting several processes together: files that show which processes are ready, and when to start.

use std::{
    fs::{self, File, OpenOptions},
    io::Write as _,
    path::PathBuf,
    str::FromStr,
    sync::atomic::AtomicBool,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};

use crate::pace::wait_until;

/// When to begin, after everything is prepared and warm.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Gate {
    /// Create this file once ready (`check` and `fault`: once the kernel runs, `sweep`: after the first pass)
    #[arg(long, value_name = "PATH")]
    pub ready_file: Option<PathBuf>,
    /// Begin when this file exists
    #[arg(long, value_name = "PATH")]
    pub start_file: Option<PathBuf>,
    /// Begin when N processes have come to the barrier file PATH (which must not exist before)
    #[arg(long, value_name = "N:PATH")]
    pub barrier: Option<Barrier>,
    /// Give up waiting for the start after so many seconds
    #[arg(long, value_name = "S", default_value_t = 120.0)]
    pub start_timeout: f64,
}

/// Processes to wait for, and the file that counts them (one byte each).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Barrier {
    /// How many processes meet.
    pub count: u64,
    /// Where they meet.
    pub path: PathBuf,
}

impl FromStr for Barrier {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("`{text}` is no barrier: use N:PATH, such as 3:/tmp/barrier");
        let (count, path) = text.split_once(':').ok_or_else(wrong)?;
        let count = count.parse().map_err(|_| wrong())?;
        if path.is_empty() {
            return Err(wrong());
        }
        Ok(Self {
            count,
            path: path.into(),
        })
    }
}

impl Gate {
    /// Says that this process is ready.
    ///
    /// # Errors
    /// When the file cannot be made.
    pub fn ready(&self) -> anyhow::Result<()> {
        if let Some(path) = &self.ready_file {
            File::create(path).with_context(|| format!("ready file {}", path.display()))?;
        }
        Ok(())
    }

    /// Waits for the start. False when told to stop.
    ///
    /// # Errors
    /// When the start does not come in time, or the barrier file cannot be written.
    pub fn wait(&self, stop: &AtomicBool) -> anyhow::Result<bool> {
        if let Some(path) = &self.start_file {
            let what = || format!("start file {}", path.display());
            if !self.wait_for(stop, what, || path.exists())? {
                return Ok(false);
            }
        }
        let Some(Barrier { count, path }) = &self.barrier else {
            return Ok(true);
        };
        OpenOptions::new()
            .create(true)
            .append(true)
            .open(path)
            .and_then(|mut file| file.write_all(b"."))
            .with_context(|| format!("barrier {}", path.display()))?;
        let come = || fs::metadata(path).map_or(0, |data| data.len());
        let what = || format!("barrier {}: {} of {count} came", path.display(), come());
        self.wait_for(stop, what, || come() >= *count)
    }

    fn wait_for(
        &self,
        stop: &AtomicBool,
        what: impl Fn() -> String,
        come: impl Fn() -> bool,
    ) -> anyhow::Result<bool> {
        let begin = Instant::now();
        while !come() {
            if begin.elapsed().as_secs_f64() > self.start_timeout {
                bail!("no start after {} s: {}", self.start_timeout, what());
            }
            if !wait_until(Instant::now() + Duration::from_millis(1), false, stop) {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{sync::Arc, sync::atomic::Ordering, thread};

    fn gate(barrier: Barrier, start_timeout: f64) -> Gate {
        Gate {
            barrier: Some(barrier),
            start_timeout,
            ..Gate::default()
        }
    }

    #[test]
    fn barrier_is_read_from_text() {
        let barrier: Barrier = "3:/tmp/b:c".parse().unwrap();
        assert_eq!(barrier.count, 3);
        assert_eq!(barrier.path, PathBuf::from("/tmp/b:c"));
        for wrong in ["", "3", "3:", "x:/tmp/b", "-1:/tmp/b"] {
            assert!(wrong.parse::<Barrier>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn gate_opens_when_all_processes_came() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("barrier");
        let alone = gate(
            Barrier {
                count: 2,
                path: path.clone(),
            },
            0.02,
        );
        let error = alone.wait(&AtomicBool::new(false)).unwrap_err().to_string();
        assert!(error.contains("1 of 2 came"), "{error}");
        // The one that gave up is counted: the second completes the pair.
        let second = gate(Barrier { count: 2, path }, 60.0);
        assert!(second.wait(&AtomicBool::new(false)).unwrap());
    }

    #[test]
    fn all_pass_together_and_stop_ends_a_wait() {
        let dir = tempfile::tempdir().unwrap();
        let barrier = Barrier {
            count: 4,
            path: dir.path().join("barrier"),
        };
        let threads: Vec<_> = (0..4)
            .map(|_| {
                let gate = gate(barrier.clone(), 60.0);
                thread::spawn(move || gate.wait(&AtomicBool::new(false)).unwrap())
            })
            .collect();
        assert!(threads.into_iter().all(|thread| thread.join().unwrap()));

        let stop = Arc::new(AtomicBool::new(false));
        let gate = Gate {
            start_file: Some(dir.path().join("never")),
            start_timeout: 60.0,
            ..Gate::default()
        };
        let waiting = thread::spawn({
            let stop = Arc::clone(&stop);
            move || gate.wait(&stop).unwrap()
        });
        stop.store(true, Ordering::Relaxed);
        assert!(!waiting.join().unwrap());
    }
}
