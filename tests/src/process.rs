//! Child processes whose output is collected, whose end is bounded, and which never outlive their test.

use std::{
    io::{BufRead, BufReader, ErrorKind, Read, Write},
    os::unix::process::ExitStatusExt,
    process::{Child, Command, ExitStatus, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use rustix::process::{Pid, Signal};
use serde_json::Value;

use crate::{PATIENCE, Patience, wait_for};

/// What a process that has ended left behind.
#[derive(Debug)]
pub struct Finished {
    /// How it ended.
    pub status: ExitStatus,
    /// Its standard output.
    pub out: String,
    /// Its standard error.
    pub err: String,
}

impl Finished {
    /// The exit code as a shell would show it: 128 + signal for a signal.
    pub fn code(&self) -> i32 {
        match (self.status.code(), self.status.signal()) {
            (Some(code), _) => code,
            (None, Some(signal)) => 128 + signal,
            (None, None) => unreachable!("it has ended"),
        }
    }

    /// Asserts success.
    #[track_caller]
    pub fn ok(self) -> Self {
        assert!(self.status.success(), "it failed: {self:#?}");
        self
    }

    /// Its standard output as JSON.
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error}: {self:#?}"))
    }
}

/// A running child in a process group of its own; the whole group is killed when this is dropped.
#[derive(Debug)]
pub struct Process {
    child: Child,
    out: Stream,
    err: Stream,
    ended: Option<ExitStatus>,
    /// Lines of output that were taken.
    taken: usize,
}

impl Process {
    /// Starts it with its output collected.
    #[track_caller]
    pub fn start(command: &mut Command) -> Self {
        use std::os::unix::process::CommandExt;
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()
            .unwrap_or_else(|error| panic!("{command:?}: {error}"));
        let out = Stream::of(child.stdout.take().expect("piped"));
        let err = Stream::of(child.stderr.take().expect("piped"));
        Self {
            child,
            out,
            err,
            ended: None,
            taken: 0,
        }
    }

    /// Its pid.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal to the process alone.
    pub fn signal(&self, signal: Signal) {
        let pid = Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).expect("the process is ours and not reaped");
    }

    /// Writes to its standard input.
    pub fn write(&mut self, text: &str) {
        let input = self.child.stdin.as_mut().expect("piped");
        match input.write_all(text.as_bytes()) {
            // One that has just ended reads no more; what came of it is looked at later.
            Err(error) if error.kind() == ErrorKind::BrokenPipe => {}
            written => written.expect("it reads"),
        }
    }

    /// Closes its standard input.
    pub fn close_input(&mut self) {
        self.child.stdin = None;
    }

    /// Lines of standard output so far.
    pub fn lines(&self) -> usize {
        self.out.lines.load(Ordering::Acquire)
    }

    /// Standard output so far.
    pub fn out(&self) -> String {
        self.out.text()
    }

    /// Standard error so far.
    pub fn err(&self) -> String {
        self.err.text()
    }

    /// Waits for the next line of its output.
    #[track_caller]
    pub fn next_line(&mut self) -> String {
        self.wait_lines(self.taken + 1);
        self.taken += 1;
        let out = self.out();
        out.lines().nth(self.taken - 1).unwrap_or_default().into()
    }

    /// How many lines of its output were taken.
    pub const fn taken(&self) -> usize {
        self.taken
    }

    /// Waits until it has written `count` lines of output.
    #[track_caller]
    pub fn wait_lines(&mut self, count: usize) {
        let mut left = Patience::new(PATIENCE);
        while self.lines() < count {
            // What it wrote last is read a moment after its end.
            if self.poll().is_some() && self.out.whole().lines().count() < count {
                panic!(
                    "it ended after {} lines: {}{}",
                    self.lines(),
                    self.out(),
                    self.err()
                );
            }
            assert!(
                left.lasts(),
                "it wrote {} lines, not {count}: {}{}",
                self.lines(),
                self.out(),
                self.err()
            );
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// How it ended, if it has.
    pub fn poll(&mut self) -> Option<ExitStatus> {
        if self.ended.is_none() {
            self.ended = self.child.try_wait().expect("the child is ours");
        }
        self.ended
    }

    /// Waits for its end.
    #[track_caller]
    pub fn finish(mut self) -> Finished {
        self.close_input();
        self.finish_within(Duration::from_secs(60))
    }

    /// Waits for its end, no longer than `patience`, with its input left open.
    #[track_caller]
    pub fn finish_within(mut self, patience: Duration) -> Finished {
        let pid = self.pid();
        let status = wait_for(&format!("the end of process {pid}"), patience, || {
            self.poll()
        });
        Finished {
            status,
            out: self.out.whole(),
            err: self.err.whole(),
        }
    }

    /// Kills it at once and waits until it is gone.
    #[track_caller]
    pub fn kill(mut self) {
        self.kill_group();
    }

    fn kill_group(&mut self) {
        // A group that has ended altogether is no error.
        let _ = rustix::process::kill_process_group(Pid::from_child(&self.child), Signal::KILL);
        let _ = self.child.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill_group();
    }
}

/// Starting and waiting in one.
pub trait Run {
    /// Runs it to its end with no input.
    fn run(&mut self) -> Finished;
}

impl Run for Command {
    #[track_caller]
    fn run(&mut self) -> Finished {
        Process::start(self).finish()
    }
}

/// One output of a child, read by a thread as it comes.
#[derive(Debug)]
struct Stream {
    text: Arc<Mutex<String>>,
    lines: Arc<AtomicUsize>,
    reader: Option<std::thread::JoinHandle<()>>,
}

impl Stream {
    fn of(from: impl Read + Send + 'static) -> Self {
        let (text, lines) = (
            Arc::<Mutex<String>>::default(),
            Arc::<AtomicUsize>::default(),
        );
        let (into, count) = (text.clone(), lines.clone());
        let reader = std::thread::spawn(move || {
            let mut from = BufReader::new(from);
            let mut line = Vec::new();
            while matches!(from.read_until(b'\n', &mut line), Ok(1..)) {
                into.lock()
                    .expect("no panic")
                    .push_str(&String::from_utf8_lossy(&line));
                count.fetch_add(1, Ordering::AcqRel);
                line.clear();
            }
        });
        Self {
            text,
            lines,
            reader: Some(reader),
        }
    }

    fn text(&self) -> String {
        self.text.lock().expect("no panic").clone()
    }

    /// All of it, after the child's end. A grandchild that holds the pipe open is not waited for long.
    fn whole(&mut self) -> String {
        if let Some(reader) = self.reader.take() {
            // Counted in rounds: time in which the whole machine stands still is none to read in.
            for _ in 0..2000 {
                if reader.is_finished() {
                    break;
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        self.text()
    }
}
