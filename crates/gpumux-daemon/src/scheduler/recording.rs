//! Writes what the planners are given and decide to a file, where that is asked for (`gpumux daemon --record`).

use std::{
    fs::File,
    io::{self, BufWriter, Write},
    path::Path,
    sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel},
    thread,
};

use gpumux_core::recording::Line;

/// Most that is written, in bytes.
const MOST: usize = 64 << 20;

/// Lines that may wait for the disk.
const WAITING: usize = 65_536;

/// The way to a recording. It never waits: a recording that cannot go on ends, since one with gaps cannot be replayed.
#[derive(Clone, Debug)]
pub(super) struct Recording(Option<SyncSender<Line>>);

impl Recording {
    /// Begins one in this file, whatever was in it.
    ///
    /// # Errors
    /// When the file cannot be made, or no thread.
    pub(super) fn start(path: &Path) -> io::Result<Self> {
        let cannot =
            |error| io::Error::other(format!("cannot record to {}: {error}", path.display()));
        let file = BufWriter::new(File::create(path).map_err(cannot)?);
        let (lines, received) = sync_channel(WAITING);
        thread::Builder::new()
            .name("recording".into())
            .spawn(move || {
                if let Err(error) = write(file, &received) {
                    tracing::warn!(%error, "the recording of the planners ends");
                }
            })?;
        Ok(Self(Some(lines)))
    }

    pub(super) fn add(&mut self, line: Line) {
        let Some(lines) = &self.0 else {
            return;
        };
        match lines.try_send(line) {
            Ok(()) => {}
            Err(error) => {
                if matches!(error, TrySendError::Full(_)) {
                    tracing::warn!("the recording of the planners ends: the disk is too slow");
                }
                self.0 = None;
            }
        }
    }
}

fn write(mut file: BufWriter<File>, lines: &Receiver<Line>) -> io::Result<()> {
    let mut written = 0;
    for first in lines {
        for line in [first].into_iter().chain(lines.try_iter()) {
            let mut line = serde_json::to_vec(&line)?;
            line.push(b'\n');
            written += line.len();
            if written > MOST {
                file.flush()?;
                return Err(io::Error::other(format!("it has {} MiB", MOST >> 20)));
            }
            file.write_all(&line)?;
        }
        file.flush()?;
    }
    file.flush()
}
