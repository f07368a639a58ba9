//! Processes that behave, and processes that do not, on a real socket.

mod controls;
mod limits;
mod processes;
mod vendor;

use std::{
    io::{BufRead, BufReader},
    os::fd::BorrowedFd,
    process::{Command, Stdio},
};

use gpumux_rm::RmStatus;
use gpumux_wire::{
    lease::{LOOK, LOOKS, Leased},
    message::encode,
};
use rustix::net::SocketFlags;
use tempfile::TempDir;

use super::*;
use crate::{
    api::types,
    fake::{self, Driver},
    receiver::{self, Receiver},
    scheduler,
};

/// A daemon without an API, and a driver.
struct Node {
    dir: TempDir,
    driver: Driver,
    sessions: Arc<Sessions>,
    tenants: Arc<Tenants>,
    scheduler: Handle,
    stop: watch::Sender<bool>,
    /// Nothing serves them.
    _requests: mpsc::Receiver<Connection>,
}

impl Node {
    async fn start(max_sessions: usize) -> Self {
        Self::with(max_sessions, Mechanism::Auto).await
    }

    async fn with(max_sessions: usize, mechanism: Mechanism) -> Self {
        Self::of(verify::nvidia, max_sessions, mechanism).await
    }

    async fn of(vendor: Vendor, max_sessions: usize, mechanism: Mechanism) -> Self {
        let dir = TempDir::new().unwrap();
        let driver = Driver::start(dir.path(), "driver.sock");
        let config = Config {
            emulated: Some(driver.socket.clone()),
            mechanism,
            max_sessions,
            defaults: gpumux_core::admission::UserRules {
                max_sessions: Some(max_sessions),
                ..Default::default()
            },
            ..Config::default()
        };
        let scheduler = scheduler::start(Arc::new(config.clone())).unwrap();
        let files = crate::tenants::Files {
            tenants: dir.path().join("tenants.json"),
            programs: dir.path().join("programs.json"),
            settings: dir.path().join("settings.json"),
        };
        let groups = crate::groups::Groups::load(
            &config,
            dir.path(),
            crate::examine::Examiner::new(crate::receiver::Place::Threads),
        );
        let users = crate::users::Users::new(config.clone().into());
        let tenants = Tenants::load(files, String::new(), scheduler.clone(), groups, users)
            .await
            .unwrap();
        crate::tenants::watch(&tenants).await.unwrap();
        let hello = Duration::from_secs(3);
        let mut sessions = Sessions::new(&config, hello, Arc::clone(&tenants), scheduler.clone());
        Arc::get_mut(&mut sessions).unwrap().vendor = vendor;
        let listener = socket::listen(&dir.path().join("session.sock"), 4096).unwrap();
        let api = crate::api::listen(&dir.path().join("api.sock")).unwrap();
        let place = receiver::Place::Threads;
        let setting = receiver::Setting {
            place,
            emulated: config.emulated.clone(),
            connections: 4096,
        };
        let receiver = Receiver::start(&setting, listener, api).unwrap();
        let arrivals = receiver::receive(receiver, || unreachable!("it does not end"));
        let (stop, stopped) = watch::channel(false);
        tokio::spawn(Arc::clone(&sessions).serve(arrivals.sessions, stopped));
        Self {
            dir,
            driver,
            sessions,
            tenants,
            scheduler,
            stop,
            _requests: arrivals.api,
        }
    }

    fn connect(&self) -> OwnedFd {
        socket::connect(&self.dir.path().join("session.sock"), SocketFlags::NONBLOCK).unwrap()
    }

    /// A session that has been welcomed.
    async fn session(&self) -> OwnedFd {
        let session = self.connect();
        let (hello, _, page) = fake::hello(None);
        send(&session, &hello, Some(page.as_fd()));
        let answer = answer(&session).await;
        assert!(matches!(answer, Some(Daemon::Welcome { .. })), "{answer:?}");
        session
    }

    async fn domains(&self) -> Vec<types::Domain> {
        let view = self.scheduler.ask(scheduler::Command::View).await.unwrap();
        view.domains.into_iter().map(|(_, domain)| domain).collect()
    }

    /// Waits until the daemon manages so many domains.
    async fn until_domains(&self, count: usize) -> Vec<types::Domain> {
        let wait = async {
            loop {
                let domains = self.domains().await;
                if domains.len() == count {
                    return domains;
                }
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), wait)
            .await
            .expect("so many domains")
    }

    async fn until(&self, what: &str, condition: impl Fn(&Self) -> bool) {
        let wait = async {
            while !condition(self) {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), wait)
            .await
            .expect(what);
    }
}

fn send(session: &OwnedFd, message: &Shim, file: Option<BorrowedFd<'_>>) {
    socket::send(session, message, file, SendFlags::empty()).unwrap();
}

/// The daemon's next message; none if it has closed.
async fn answer(session: &OwnedFd) -> Option<Daemon> {
    let events = readable(session.as_fd()).unwrap();
    let receive = async {
        loop {
            let mut ready = events.readable().await.unwrap();
            let packet = ready.try_io(|fd| socket::recv(fd.get_ref(), RecvFlags::DONTWAIT));
            match packet {
                Ok(Ok(packet)) => return packet.map(|(message, _)| message),
                Ok(Err(error)) if error.kind() == io::ErrorKind::ConnectionReset => return None,
                Ok(Err(error)) => panic!("{error}"),
                Err(_would_block) => {}
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(20), receive)
        .await
        .expect("an answer")
}

/// The daemon refuses, for this reason, and closes.
async fn refused(session: &OwnedFd, reason: &str) {
    match answer(session).await {
        Some(Daemon::Refused { reason: said }) => assert!(said.contains(reason), "{said}"),
        other => panic!("{other:?} instead of a refusal ({reason})"),
    }
    assert_eq!(answer(session).await, None);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_brings_its_groups_and_takes_them_away() {
    let node = Node::start(16).await;
    let session = node.session().await;
    let file = node.driver.open();
    send(&session, &fake::group(0, 1), Some(file.as_fd()));
    let domains = node.until_domains(1).await;
    assert_eq!(domains[0].device, "GPU-0");
    assert_eq!(domains[0].pid, std::process::id());
    send(&session, &Shim::Gone { key: 0 }, None);
    node.until_domains(0).await;
    send(&session, &fake::group(1, 1), Some(file.as_fd()));
    node.until_domains(1).await;
    drop(file);
    assert!(
        node.driver.clients().contains_key(&1),
        "the daemon's file keeps it"
    );
    drop(session);
    node.until_domains(0).await;
    node.until("the daemon has closed its files", |node| {
        node.driver.clients().is_empty()
    })
    .await;
    node.until("its place is free", |node| node.sessions.count() == 0)
        .await;
}

/// A kernel in the middle of its work would touch memory that is not there.
#[tokio::test(flavor = "multi_thread")]
async fn group_whose_memory_is_away_never_runs() {
    let node = Node::start(16).await;
    for (client, swapped) in [(1, 0), (2, 1 << 20)] {
        let session = node.session().await;
        let file = node.driver.open();
        let holds = Shim::Holds {
            device: "GPU-0".into(),
            total: 1 << 30,
            movable: 0,
            pinned: 0,
            swapped,
        };
        send(&session, &holds, None);
        send(&session, &fake::group(0, client), Some(file.as_fd()));
        node.until_domains(1).await;
        let frozen = |node: &Node| node.driver.clients()[&client].frozen;
        if swapped > 0 {
            node.until("it is frozen", frozen).await;
        }
        let thaws = node.driver.clients()[&client].thaws;
        assert_eq!(
            thaws > 0,
            swapped == 0,
            "an earlier daemon may have frozen it"
        );
        drop(session);
        node.until_domains(0).await;
    }
}

/// The welcome that a library of this revision gets, and its lease.
async fn welcome(node: &Node, revision: u64) -> (OwnedFd, Option<OwnedFd>) {
    let session = node.connect();
    let (hello, _, page) = fake::hello(None);
    // The page's third word.
    rustix::io::pwrite(&page, &revision.to_ne_bytes(), 16).unwrap();
    send(&session, &hello, Some(page.as_fd()));
    let events = readable(session.as_fd()).unwrap();
    events.readable().await.unwrap().retain_ready();
    let packet = socket::recv::<Daemon>(&session, RecvFlags::empty()).unwrap();
    let (message, lease) = packet.unwrap();
    assert!(matches!(
        message,
        Daemon::Welcome {
            protocol: PROTOCOL,
            ..
        }
    ));
    drop(events);
    (session, lease)
}

#[tokio::test(flavor = "multi_thread")]
async fn lease_comes_with_the_welcome_and_is_renewed_during_sessions() {
    let node = Node::start(16).await;
    let (old, none) = welcome(&node, 0).await;
    assert!(none.is_none(), "a library of revision 0 knows no lease");
    drop(old);
    let (_session, lease) = welcome(&node, gpumux_wire::REVISION.into()).await;
    let mut lease = Leased::open(lease.expect("a lease")).unwrap();
    assert_eq!(lease.revision(), gpumux_wire::REVISION);
    // Twice the looks in a row after which it would have expired, without any group or job. (The scheduling thread of a busy
    // machine may be late.)
    let mut kept = 0;
    while kept < 2 * LOOKS {
        tokio::time::sleep(LOOK).await;
        kept = if lease.look() { 0 } else { kept + 1 };
    }
    // A scheduling thread that does not come to its next step renews nothing.
    let (stop, stopped) = std::sync::mpsc::channel::<()>();
    let stall = (node.scheduler).ask(|answer| scheduler::Command::Stall(stopped, answer));
    let look = async {
        while !lease.look() {
            tokio::time::sleep(LOOK).await;
        }
        drop(stop);
    };
    let (stalled, ()) = tokio::join!(stall, look);
    stalled.unwrap();
}

/// A refusal would keep the process away for as long as it waits for memory.
#[tokio::test(flavor = "multi_thread")]
async fn process_whose_lease_expired_is_not_refused() {
    let node = Node::start(16).await;
    let session = node.connect();
    let (hello, page, file) = fake::hello(None);
    send(&session, &hello, Some(file.as_fd()));
    let welcome = answer(&session).await;
    assert!(
        matches!(welcome, Some(Daemon::Welcome { .. })),
        "{welcome:?}"
    );
    // An expiry is believed if the lease was not renewed.
    let (stop, stopped) = std::sync::mpsc::channel::<()>();
    let stall = (node.scheduler).ask(|answer| scheduler::Command::Stall(stopped, answer));
    let expire = async {
        tokio::time::sleep(2 * LOOKS * LOOK).await;
        page.expire();
        drop(stop);
    };
    let (stalled, ()) = tokio::join!(stall, expire);
    stalled.unwrap();
    let device = node.driver.open();
    send(&session, &fake::group(0, 1), Some(device.as_fd()));
    assert_eq!(answer(&session).await, Some(Daemon::Bye));
    assert_eq!(answer(&session).await, None);
    drop(node.session().await);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_no_hello_is_refused() {
    let node = Node::start(16).await;
    let (hello, _, page) = fake::hello(None);
    let bytes = encode(&hello).unwrap();
    for packet in [
        &[0xff; 40][..],
        &bytes[..3],
        &[0; 200_000],
        &[0],
        b"GET / HTTP/1.1\r\n\r\n",
    ] {
        let session = node.connect();
        rustix::net::send(&session, packet, SendFlags::empty()).unwrap();
        refused(&session, "cannot be understood").await;
    }
    let session = node.connect();
    send(&session, &hello, None);
    refused(&session, "first packet").await;
    let session = node.connect();
    send(&session, &fake::group(0, 1), Some(page.as_fd()));
    refused(&session, "first packet").await;
    let session = node.connect();
    let other = Shim::Hello {
        protocol: 99,
        version: "9".into(),
        tenant: None,
    };
    send(&session, &other, Some(page.as_fd()));
    refused(&session, "protocol 99").await;
    let session = node.connect();
    let null = std::fs::File::open("/dev/null").unwrap();
    send(&session, &hello, Some(null.as_fd()));
    refused(&session, "page of counters").await;
    let session = node.connect();
    let (guess, _, page) = fake::hello(Some("0123456789abcdef0123456789abcdef"));
    send(&session, &guess, Some(page.as_fd()));
    refused(&session, "secret is unknown").await;
    // No other session noticed.
    node.session().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn client_without_an_introduction_loses_its_connection() {
    let node = Node::start(16).await;
    let silent = node.connect();
    node.session().await;
    refused(&silent, "no hello").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn files_that_are_no_control_files_are_refused() {
    let node = Node::start(64).await;
    let (stream, _other) = std::os::unix::net::UnixStream::pair().unwrap();
    let (pipe, _end) = rustix::pipe::pipe().unwrap();
    let file = |path| std::fs::File::open(path).unwrap().into();
    let files: [OwnedFd; 4] = [
        file("/dev/null"),
        file("/proc/self/maps"),
        stream.into(),
        pipe,
    ];
    for file in files {
        let session = node.session().await;
        send(&session, &fake::group(0, 1), Some(file.as_fd()));
        refused(&session, "control file of ").await;
    }
    let session = node.session().await;
    send(&session, &fake::group(0, 1), None);
    refused(&session, "without a control file").await;
    assert_eq!(node.domains().await, []);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_last_word_is_goodbye_and_comes_after_the_thaw() {
    let node = Node::start(16).await;
    let session = node.session().await;
    let file = node.driver.open();
    send(&session, &fake::group(0, 1), Some(file.as_fd()));
    node.until_domains(1).await;
    let tenants = node.tenants.list().await;
    let change = types::SpecChange {
        class: Some(gpumux_core::Class::Batch),
        ..Default::default()
    };
    node.tenants
        .change(0, &tenants[0].name, &change)
        .await
        .unwrap();
    let other = node.session().await;
    let files = node.driver.open();
    send(&other, &fake::group(0, 2), Some(files.as_fd()));
    node.until_domains(2).await;
    node.scheduler
        .ask(scheduler::Command::Restore)
        .await
        .unwrap();
    node.stop.send(true).unwrap();
    assert_eq!(answer(&session).await, Some(Daemon::Bye));
    for client in node.driver.clients().values() {
        assert!(!client.frozen && client.slice == 2048, "{client:?}");
    }
}
