//! The output of a program that runs detached: written to its log, and what cannot be written is counted and reported.

use std::{
    io::{self, Read, Write},
    process::Command,
    sync::mpsc::{Receiver, Sender, channel},
    thread::{self, JoinHandle},
    time::Duration,
};

use gpumux_core::quantity::Size;
use gpumux_daemon::api::types::LostOutput;

use super::client;
use crate::logs::Log;

/// The least time between two reports to the daemon.
const PAUSE: Duration = Duration::from_secs(1);

/// Writes what a program prints to a log, until all that can print have ended.
pub(super) struct Collector {
    writer: JoinHandle<()>,
    reporter: JoinHandle<()>,
}

impl Collector {
    /// For a program that is not started yet.
    ///
    /// # Errors
    /// When there are no files or threads left.
    pub(super) fn start(log: Log, tenant: &str, program: &mut Command) -> io::Result<Self> {
        let (mut reader, writer) = io::pipe()?;
        program.stdout(writer.try_clone()?).stderr(writer);
        let (tell, told) = channel();
        let mut output = Output::new(log, tell);
        let copy = move || {
            let mut buffer = [0; 16 << 10];
            while let Ok(count @ 1..) = reader.read(&mut buffer) {
                output.write(&buffer[..count]);
            }
        };
        let tenant = tenant.to_owned();
        let thread = |name: &str| thread::Builder::new().name(name.into());
        Ok(Self {
            writer: thread("log").spawn(copy)?,
            // The daemon may take its time, and the program must not wait for it.
            reporter: thread("report").spawn(move || report(&tenant, &told))?,
        })
    }

    /// Whether all is written, and what was lost is reported.
    pub(super) fn is_finished(&self) -> bool {
        self.writer.is_finished() && self.reporter.is_finished()
    }
}

/// Reports the newest of what was lost.
fn report(tenant: &str, told: &Receiver<LostOutput>) {
    while let Ok(first) = told.recv() {
        let lost = told.try_iter().last().unwrap_or(first);
        // A daemon that is away is asked again with what is lost next.
        let _ = client::block(async |client| client.report_lost_output(tenant, &lost).await);
        thread::sleep(PAUSE);
    }
}

/// A log, and what could not be written there.
struct Output<W> {
    log: W,
    /// Of the program's output, how many bytes in all, and since something could be written.
    lost: u64,
    missing: u64,
    why: String,
    tell: Sender<LostOutput>,
}

impl<W: Write> Output<W> {
    fn new(log: W, tell: Sender<LostOutput>) -> Self {
        Self {
            log,
            lost: 0,
            missing: 0,
            why: String::new(),
            tell,
        }
    }

    /// Writes it, as far as there is room: a full disk must not stop the program.
    fn write(&mut self, mut bytes: &[u8]) {
        let written = self.mark_the_gap().and_then(|()| {
            while !bytes.is_empty() {
                match self.log.write(bytes) {
                    Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                    Ok(count) => bytes = &bytes[count..],
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => return Err(error),
                }
            }
            Ok(())
        });
        let Err(error) = written else { return };
        self.lost += bytes.len() as u64;
        self.missing += bytes.len() as u64;
        self.why = error.to_string();
        let _ = self.tell.send(LostOutput {
            bytes: self.lost,
            why: self.why.clone(),
        });
    }

    /// Where output is missing, a line tells how much.
    fn mark_the_gap(&mut self) -> io::Result<()> {
        if self.missing == 0 {
            return Ok(());
        }
        let line = format!(
            "\ngpumux: {} of the output are missing here: {}\n",
            Size(self.missing),
            self.why
        );
        self.log.write_all(line.as_bytes())?;
        self.missing = 0;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A disk with room for so many bytes.
    #[derive(Default)]
    struct Disk {
        room: usize,
        text: Vec<u8>,
    }

    impl Write for Disk {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let count = bytes.len().min(self.room);
            if count == 0 {
                return Err(io::ErrorKind::StorageFull.into());
            }
            self.room -= count;
            self.text.extend_from_slice(&bytes[..count]);
            Ok(count)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn lost_output_is_counted_reported_and_marked() {
        let (tell, told) = channel();
        let disk = Disk {
            room: 8,
            ..Disk::default()
        };
        let mut output = Output::new(disk, tell);
        output.write(b"first\n");
        assert!(told.try_recv().is_err());
        output.write(b"second\n");
        output.write(b"third\n");
        let reports: Vec<u64> = told.try_iter().map(|it| it.bytes).collect();
        assert_eq!(reports, [5, 11]);
        output.log.room = 1000;
        output.write(b"fourth\n");
        assert!(told.try_recv().is_err());
        let text = String::from_utf8(output.log.text).unwrap();
        let full = io::Error::from(io::ErrorKind::StorageFull);
        assert_eq!(
            text,
            format!("first\nse\ngpumux: 11 B of the output are missing here: {full}\nfourth\n")
        );
    }
}
