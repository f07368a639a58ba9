//! The programs under test, and a daemon that only listens.

#![allow(dead_code)] // each test file uses its part

use std::{
    io::{BufRead, BufReader, Read, Write},
    os::fd::{AsFd, OwnedFd},
    path::PathBuf,
    process::{Child, ChildStderr, ChildStdin, ChildStdout, Command, Stdio},
    time::{Duration, Instant},
};

use gpumux_rm::{Group, RmControls, emulated::EmulatedFile};
use gpumux_tests::built;
use gpumux_wire::{Daemon, PROTOCOL, Shim, page::Page, socket};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    net::{RecvFlags, SendFlags, SocketFlags},
};

/// The bound of every wait: far beyond what a loaded machine needs.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

pub(crate) fn shim() -> PathBuf {
    built().join("libgpumux.so")
}

pub(crate) fn example(name: &str) -> PathBuf {
    built().join("examples").join(name)
}

/// A place for one test: socket, log, and what programs get about them.
pub(crate) struct Place {
    dir: tempfile::TempDir,
}

impl Place {
    pub(crate) fn new() -> Self {
        Self {
            dir: tempfile::tempdir().unwrap(),
        }
    }

    pub(crate) fn dir(&self) -> PathBuf {
        self.dir.path().to_owned()
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.dir.path().join("session.sock")
    }

    /// What the driver received, a line each.
    pub(crate) fn log(&self) -> Vec<String> {
        let log = std::fs::read_to_string(self.dir.path().join("log")).unwrap_or_default();
        log.lines().map(str::to_owned).collect()
    }

    /// Waits until the driver has been told all of these, in any order, since line `from`.
    pub(crate) fn await_log(&self, from: usize, wanted: &[&str]) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let log = self.log();
            if wanted
                .iter()
                .all(|wanted| log.iter().skip(from).any(|line| line == wanted))
            {
                return;
            }
            assert!(
                Instant::now() < deadline,
                "the driver received {log:#?}, not {wanted:#?}"
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Has the driver refuse to set timeslices from now on, or not.
    pub(crate) fn refuse_timeslices(&self, refuse: bool) {
        let file = self.dir.path().join("log.refuse");
        match refuse {
            true => std::fs::write(file, "").unwrap(),
            false => std::fs::remove_file(file).unwrap(),
        }
    }

    /// A program under the shim, with the driver's stand-in behind it.
    pub(crate) fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new(program);
        command
            .env(
                "LD_PRELOAD",
                format!(
                    "{}:{}",
                    shim().display(),
                    example("libfake_rm.so").display()
                ),
            )
            .env("GPUMUX_SOCKET", self.socket())
            .env("FAKE_RM_LOG", self.dir.path().join("log"))
            .env_remove("GPUMUX_TENANT")
            .env_remove("GPUMUX_STRICT")
            .env_remove("GPUMUX_TRACE");
        command
    }

    pub(crate) fn tenant(&self) -> Tenant {
        Tenant::start(&mut self.command(example("tenant")))
    }

    /// The same with a context, whose groups begin a session.
    pub(crate) fn tenant_with_context(&self) -> Tenant {
        let mut tenant = self.tenant();
        tenant.tell("open");
        tenant.tell("context 100");
        tenant
    }

    pub(crate) fn listen(&self) -> Listener {
        let _ = std::fs::remove_file(self.socket());
        Listener(socket::listen(&self.socket(), 16).unwrap())
    }
}

/// A running `examples/tenant.rs`.
pub(crate) struct Tenant {
    pub(crate) child: Child,
    commands: ChildStdin,
    answers: BufReader<ChildStdout>,
    errors: BufReader<ChildStderr>,
}

impl Tenant {
    pub(crate) fn start(command: &mut Command) -> Self {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        Self {
            commands: child.stdin.take().unwrap(),
            answers: BufReader::new(child.stdout.take().unwrap()),
            errors: BufReader::new(child.stderr.take().unwrap()),
            child,
        }
    }

    /// Gives a command; `None` when the program has ended instead of answering.
    pub(crate) fn try_tell(&mut self, command: &str) -> Option<String> {
        writeln!(self.commands, "{command}").ok()?;
        let mut answer = String::new();
        self.answers.read_line(&mut answer).unwrap();
        answer.ends_with('\n').then(|| answer.trim_end().to_owned())
    }

    pub(crate) fn tell(&mut self, command: &str) -> String {
        self.try_tell(command)
            .unwrap_or_else(|| panic!("the program ended at {command:?}"))
    }

    /// The next line that it writes to standard error.
    pub(crate) fn error_line(&mut self) -> String {
        if self.errors.buffer().is_empty() {
            await_input(&self.errors.get_ref().as_fd());
        }
        let mut line = String::new();
        self.errors.read_line(&mut line).unwrap();
        line
    }

    /// How often the agent has gone to sleep so far.
    pub(crate) fn agents_sleeps(&self) -> u64 {
        let threads = format!("/proc/{}/task", self.child.id());
        let status = |it: std::io::Result<std::fs::DirEntry>| {
            std::fs::read_to_string(it.unwrap().path().join("status")).unwrap()
        };
        let mut all = std::fs::read_dir(threads).unwrap().map(status);
        let agent = all.find(|it| it.starts_with("Name:\tgpumux\n"));
        let agent = agent.expect("there is an agent");
        let count = |it: &str| {
            it.strip_prefix("voluntary_ctxt_switches:")?
                .trim()
                .parse()
                .ok()
        };
        agent.lines().find_map(count).unwrap()
    }

    /// Ends it; what else it wrote to standard error, and its exit code.
    pub(crate) fn end(mut self) -> (Vec<String>, Option<i32>) {
        drop(self.commands);
        let mut errors = String::new();
        self.errors.read_to_string(&mut errors).unwrap();
        let code = self.child.wait().unwrap().code();
        (errors.lines().map(str::to_owned).collect(), code)
    }
}

/// The daemon's side of the session socket.
pub(crate) struct Listener(OwnedFd);

impl Listener {
    /// The next connection.
    pub(crate) fn accept(&self) -> Connection {
        await_input(&self.0);
        let flags = SocketFlags::CLOEXEC;
        Connection(rustix::net::accept_with(&self.0, flags).unwrap())
    }

    /// The next session, welcomed; what its hello said.
    pub(crate) fn session(&self) -> (Connection, Option<String>, Page) {
        self.session_under(None)
    }

    /// The same, with this file as the lease.
    pub(crate) fn session_under(
        &self,
        lease: Option<&OwnedFd>,
    ) -> (Connection, Option<String>, Page) {
        let connection = self.accept();
        let (tenant, page) = connection.hello();
        let welcome = Daemon::Welcome {
            protocol: PROTOCOL,
            tenant: "test".into(),
            memory: false,
        };
        let lease = lease.map(AsFd::as_fd);
        socket::send(&connection.0, &welcome, lease, SendFlags::empty()).unwrap();
        (connection, tenant, page)
    }
}

pub(crate) struct Connection(OwnedFd);

impl Connection {
    pub(crate) fn hello(&self) -> (Option<String>, Page) {
        match self.recv() {
            Some((
                Shim::Hello {
                    protocol, tenant, ..
                },
                Some(page),
            )) => {
                assert_eq!(protocol, PROTOCOL);
                (tenant, Page::open(page).unwrap())
            }
            other => panic!("not a hello: {other:?}"),
        }
    }

    pub(crate) fn recv(&self) -> Option<(Shim, Option<OwnedFd>)> {
        await_input(&self.0);
        match socket::recv(&self.0, RecvFlags::empty()) {
            Ok(packet) => packet,
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => None,
            Err(error) => panic!("{error}"),
        }
    }

    /// The next packet; it must not be the end.
    pub(crate) fn packet(&self) -> Shim {
        self.recv().expect("the session ended").0
    }

    pub(crate) fn send(&self, packet: &Daemon) {
        socket::send(&self.0, packet, None, SendFlags::empty()).unwrap();
    }

    pub(crate) fn send_file(&self, packet: &Daemon, file: &OwnedFd) {
        socket::send(&self.0, packet, Some(file.as_fd()), SendFlags::empty()).unwrap();
    }

    pub(crate) fn send_bytes(&self, bytes: &[u8]) {
        rustix::net::send(&self.0, bytes, SendFlags::NOSIGNAL).unwrap();
    }
}

fn await_input(fd: &impl AsFd) {
    let timeout = Timespec {
        tv_sec: PATIENCE.as_secs() as i64,
        tv_nsec: 0,
    };
    let ready = poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(&timeout)).unwrap();
    assert_eq!(ready, 1, "nothing came in {PATIENCE:?}");
}

/// Key, engine and handles of the next packet, which must announce a group, and its controls.
pub(crate) fn group(connection: &Connection) -> (u32, u32, Group, RmControls<EmulatedFile>) {
    match connection.recv() {
        Some((
            Shim::Group {
                key,
                engine,
                client,
                subdevice,
                group,
                channels,
                timeslice_us,
                shared: false,
            },
            Some(file),
        )) => {
            assert_eq!(timeslice_us, if engine == 1 { 2048 } else { 1024 });
            let group = Group {
                client,
                subdevice,
                group,
                channels,
            };
            let controls = RmControls::new(EmulatedFile::new(file).unwrap(), group.clone());
            (key, engine, group, controls)
        }
        other => panic!("not a group: {other:?}"),
    }
}

/// Both groups of a context: its compute group and its copy group.
pub(crate) fn context(connection: &Connection) -> [(u32, u32, Group, RmControls<EmulatedFile>); 2] {
    let mut both = [group(connection), group(connection)];
    both.sort_by_key(|(_, engine, ..)| *engine);
    both
}

pub(crate) fn end_quietly(tenant: Tenant) {
    assert_eq!(tenant.end(), (vec![], Some(0)));
}
