//! The daemon's side of a session, played by a test.

use std::{
    os::fd::{AsFd, OwnedFd},
    path::PathBuf,
    time::Duration,
};

use gpumux_rm::{Controls, Group, RmControls, control_file, layout::engine};
use gpumux_wire::{Daemon, PROTOCOL, Shim, socket};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    net::{RecvFlags, SendFlags},
};

use crate::{Node, Options, PATIENCE, Patience, Process, real};

/// A session socket that a test serves itself.
#[derive(Debug)]
pub struct Listener {
    socket: OwnedFd,
    /// Where it is.
    pub path: PathBuf,
}

/// A node whose daemon is the test: it holds the sessions of the programs itself.
#[derive(Debug)]
pub struct Puppet {
    /// The node.
    pub node: Node,
    listener: Listener,
}

impl Puppet {
    /// Starts the node.
    #[track_caller]
    #[expect(clippy::new_without_default, reason = "it starts processes")]
    pub fn new() -> Self {
        let node = Node::with(Options {
            without_daemon: true,
            ..Options::default()
        });
        let listener = Listener::new(node.session_socket());
        Self { node, listener }
    }

    /// Starts a program under the shim, and waits until its compute group is known.
    #[track_caller]
    pub fn start(&self, program: &str) -> (Process, Session, Box<dyn Controls>) {
        let mut command = self.node.shimmed(program, &self.listener.path);
        let process = Process::start(&mut command);
        let (session, controls) = self.listener.controls();
        (process, session, controls)
    }
}

/// One process's connection.
#[derive(Debug)]
pub struct Session(OwnedFd);

impl Listener {
    /// Listens at `path`.
    #[track_caller]
    pub fn new(path: PathBuf) -> Self {
        let socket = socket::listen(&path, 16).expect("a free path");
        Self { socket, path }
    }

    /// Waits for a process and answers its hello with `answer`.
    #[track_caller]
    pub fn accept(&self, answer: &Daemon) -> Session {
        assert!(readable(&self.socket, PATIENCE), "no connection came");
        let session = Session(
            rustix::net::accept_with(&self.socket, rustix::net::SocketFlags::CLOEXEC)
                .expect("a connection"),
        );
        match session.receive() {
            Some((Shim::Hello { .. }, Some(_page))) => {}
            other => panic!("no hello with a page: {other:?}"),
        }
        socket::send(&session.0, answer, None, SendFlags::empty()).expect("it listens");
        session
    }

    /// Waits for a process, welcomes it, and waits until its compute group is known.
    #[track_caller]
    pub fn controls(&self) -> (Session, Box<dyn Controls>) {
        let welcome = Daemon::Welcome {
            protocol: PROTOCOL,
            tenant: "test".into(),
            memory: false,
        };
        let session = self.accept(&welcome);
        loop {
            let (message, file) = session.receive().expect("the process lives");
            let Shim::Group {
                engine: engine::GR0,
                client,
                subdevice,
                group,
                channels,
                ..
            } = message
            else {
                continue;
            };
            let file = file.expect("a group comes with its file");
            let group = Group {
                client,
                subdevice,
                group,
                channels,
            };
            let file = control_file(file, !real()).expect("a control file");
            return (session, Box::new(RmControls::new(file, group)));
        }
    }
}

impl Session {
    /// Says something to the process.
    #[track_caller]
    pub fn send(&self, message: &Daemon) {
        socket::send(&self.0, message, None, SendFlags::empty()).expect("it listens");
    }

    /// The files of all packets that have come.
    pub fn files(&self) -> Vec<OwnedFd> {
        let mut files = Vec::new();
        while readable(&self.0, Duration::ZERO) {
            match self.receive() {
                Some((_, file)) => files.extend(file),
                None => break,
            }
        }
        files
    }

    /// The next packet and its file; `None` when the process has closed the session.
    #[track_caller]
    pub fn receive(&self) -> Option<(Shim, Option<OwnedFd>)> {
        assert!(readable(&self.0, PATIENCE), "nothing came");
        socket::recv(&self.0, RecvFlags::empty()).expect("a packet of our protocol")
    }
}

/// Waits until there is something to read, or the other side has closed.
pub fn readable(fd: impl AsFd, patience: Duration) -> bool {
    let mut left = Patience::new(patience);
    let moment = Timespec {
        tv_sec: 0,
        tv_nsec: 20_000_000,
    };
    loop {
        match poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&moment)) {
            Ok(0) if left.lasts() => {}
            Ok(count) => return count > 0,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => panic!("poll: {error}"),
        }
    }
}
