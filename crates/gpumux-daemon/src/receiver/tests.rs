//! Files whose end takes as long as a user likes, and a receiver that ends.

use std::{
    io::{Read, Write},
    net::TcpStream,
    os::{fd::AsRawFd, unix::net::UnixStream},
    time::Duration,
};

use gpumux_tests::hanging::lingering;
use gpumux_wire::{Daemon, Shim, socket};
use rustix::net::SocketFlags;
use tempfile::TempDir;

use super::*;

const MINUTE: Duration = Duration::from_secs(60);
/// Connections that a receiver of these tests may have.
const MANY: usize = 100;

/// Listening sockets, before a receiver accepts what comes there.
struct Listening {
    dir: TempDir,
    listeners: [OwnedFd; 2],
}

struct Sockets {
    dir: TempDir,
    arrivals: Arrivals,
}

fn setting(connections: usize) -> Setting {
    Setting {
        place: Place::Threads,
        emulated: None,
        connections,
    }
}

impl Listening {
    fn new() -> Self {
        let dir = TempDir::new().unwrap();
        let sessions = socket::listen(&dir.path().join("session.sock"), 16).unwrap();
        let api = crate::api::listen(&dir.path().join("api.sock")).unwrap();
        let listeners = [sessions, api];
        Self { dir, listeners }
    }

    fn receive(self, connections: usize) -> Sockets {
        let [sessions, api] = self.listeners;
        let first = Receiver::start(&setting(connections), sessions, api).unwrap();
        let arrivals = receive(first, || unreachable!("it does not end"));
        let dir = self.dir;
        Sockets { dir, arrivals }
    }

    /// Connects, sends a packet with a file that lingers, and closes its own reference: the one in the socket is the last.
    fn linger(&self, name: &str) -> (OwnedFd, TcpStream) {
        let path = self.dir.path().join(name);
        let socket = match name {
            "api.sock" => UnixStream::connect(&path).unwrap().into(),
            _ => socket::connect(&path, SocketFlags::empty()).unwrap(),
        };
        let (file, other) = lingering(MINUTE);
        socket::send(&socket, &gone(1), Some(file.as_fd()), SendFlags::empty()).unwrap();
        drop(file);
        (socket, other)
    }
}

impl Sockets {
    fn receive() -> Self {
        Listening::new().receive(MANY)
    }

    fn session(&self) -> OwnedFd {
        socket::connect(&self.dir.path().join("session.sock"), SocketFlags::empty()).unwrap()
    }
}

async fn soon<T>(what: impl Future<Output = T>) -> T {
    let soon = tokio::time::timeout(Duration::from_secs(20), what).await;
    soon.expect("it does not wait for what hangs")
}

/// The next packet of the daemon's end, and its first file.
async fn packet(socket: &OwnedFd) -> Option<(Shim, Option<OwnedFd>)> {
    let events = readable(socket.as_fd()).unwrap();
    loop {
        let mut ready = events.readable().await.unwrap();
        if let Ok(packet) = ready.try_io(|it| socket::recv(it.get_ref(), RecvFlags::DONTWAIT)) {
            return packet.unwrap();
        }
    }
}

fn gone(key: u32) -> Shim {
    Shim::Gone { key }
}

#[tokio::test]
async fn a_file_that_lingers_stops_only_its_own_session() {
    let listening = Listening::new();
    let (hostile, _other) = listening.linger("session.sock");
    let mut sockets = listening.receive(MANY);
    let own = soon(sockets.arrivals.sessions.recv()).await.unwrap();
    let other = sockets.session();
    socket::send(&other, &gone(2), None, SendFlags::empty()).unwrap();
    let others = soon(sockets.arrivals.sessions.recv()).await.unwrap();
    let (message, file) = soon(packet(&others.socket)).await.unwrap();
    assert!(message == gone(2) && file.is_none());
    assert_eq!(others.peer.pid, std::process::id());
    // The end of the session itself waits for nothing.
    drop(hostile);
    drop(own);
    drop(other);
    assert!(soon(packet(&others.socket)).await.is_none());
}

#[tokio::test]
async fn a_file_that_lingers_stops_only_its_own_request() {
    let listening = Listening::new();
    let (_hostile, _other) = listening.linger("api.sock");
    let mut sockets = listening.receive(MANY);
    let _own = soon(sockets.arrivals.api.recv()).await.unwrap();
    let mut other = UnixStream::connect(sockets.dir.path().join("api.sock")).unwrap();
    other.write_all(b"GET / HTTP/1.1").unwrap();
    let others = soon(sockets.arrivals.api.recv()).await.unwrap();
    let mut daemon = tokio::net::UnixStream::from_std(others.socket.into()).unwrap();
    let mut request = [0; 14];
    let read = tokio::io::AsyncReadExt::read_exact(&mut daemon, &mut request);
    soon(read).await.unwrap();
    assert_eq!(&request, b"GET / HTTP/1.1");
    let write = tokio::io::AsyncWriteExt::write_all(&mut daemon, b"HTTP/1.1 200 OK");
    soon(write).await.unwrap();
    drop(daemon);
    let mut answer = String::new();
    other.read_to_string(&mut answer).unwrap();
    assert_eq!(answer, "HTTP/1.1 200 OK");
}

#[tokio::test]
async fn only_files_whose_end_waits_for_no_user_pass() {
    let mut sockets = Sockets::receive();
    let session = sockets.session();
    let connection = soon(sockets.arrivals.sessions.recv()).await.unwrap();
    let (hello, _, page) = crate::fake::hello(None);
    let (end, _other) = std::io::pipe().unwrap();
    let zero = std::fs::File::open("/dev/zero").unwrap();
    let disk = std::fs::File::open("/proc/self/exe").unwrap();
    for (file, passes) in [
        (page.as_fd(), true),
        (end.as_fd(), false),
        (zero.as_fd(), false),
        (disk.as_fd(), false),
        (session.as_fd(), false),
    ] {
        socket::send(&session, &hello, Some(file), SendFlags::empty()).unwrap();
        let (message, file) = soon(packet(&connection.socket)).await.unwrap();
        assert_eq!(message, hello);
        assert_eq!(file.is_some(), passes, "{file:?}");
    }
}

#[tokio::test]
async fn last_packets_of_a_process_arrive_before_its_end() {
    let mut sockets = Sockets::receive();
    let session = sockets.session();
    let connection = soon(sockets.arrivals.sessions.recv()).await.unwrap();
    // What it did not read makes its end a reset.
    socket::send(&connection.socket, &gone(0), None, SendFlags::empty()).unwrap();
    for key in 1..=5 {
        socket::send(&session, &gone(key), None, SendFlags::empty()).unwrap();
    }
    drop(session);
    for key in 1..=5 {
        assert_eq!(soon(packet(&connection.socket)).await.unwrap().0, gone(key));
    }
    assert!(soon(packet(&connection.socket)).await.is_none());
}

#[tokio::test]
async fn a_receiver_that_ends_is_replaced() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("session.sock");
    // This one has no receiver at its other end.
    let (control, theirs) = pair(SocketType::SEQPACKET).unwrap();
    rustix::io::ioctl_fionbio(&control, true).unwrap();
    drop(theirs);
    let broken = Receiver {
        control,
        child: None,
    };
    let listen = (path.clone(), dir.path().join("api.sock"));
    let mut arrivals = receive(broken, move || {
        let sessions = socket::listen(&listen.0, 16)?;
        let api = crate::api::listen(&listen.1)?;
        Receiver::start(&setting(MANY), sessions, api)
    });
    let connected = async {
        loop {
            if let Ok(connected) = socket::connect(&path, SocketFlags::empty()) {
                break connected;
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    let _connected = soon(connected).await;
    let arrived = soon(arrivals.sessions.recv()).await.unwrap();
    assert!(arrived.socket.as_raw_fd() > 0);
}

#[tokio::test]
async fn closed_connections_take_no_process_and_delay_no_other() {
    let listening = Listening::new();
    let path = listening.dir.path().join("session.sock");
    let connect = || socket::connect(&path, SocketFlags::empty()).unwrap();
    for _ in 0..12 {
        drop(connect());
    }
    let living = connect();
    socket::send(&living, &gone(7), None, SendFlags::empty()).unwrap();
    // With a place for one relay only.
    let mut sockets = listening.receive(1);
    let arrived = soon(sockets.arrivals.sessions.recv()).await.unwrap();
    assert_eq!(packet(&arrived.socket).await.unwrap().0, gone(7));
}

/// Sends files until the kernel passes on no more for this thread's user.
fn fill_with_files() -> Vec<(OwnedFd, OwnedFd)> {
    let file = std::fs::File::open("/dev/null").unwrap();
    let mut pairs = Vec::new();
    loop {
        let (into, from) = pair(SocketType::SEQPACKET).unwrap();
        let files = [file.as_fd(); 4];
        let sent = std::iter::repeat_with(|| send_bytes(&into, &[0], &files, SendFlags::DONTWAIT));
        let error = sent.skip_while(Result::is_ok).find_map(Result::err);
        pairs.push((into, from));
        let full = rustix::io::Errno::TOOMANYREFS.raw_os_error();
        if error.and_then(|error| error.raw_os_error()) == Some(full) {
            return pairs;
        }
    }
}

#[tokio::test]
async fn connection_that_cannot_be_passed_on_is_refused_alone() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: only root can act as another user");
        return;
    }
    // Other tests of this process do, perhaps meanwhile.
    crate::serve::raise_file_limit();
    let listening = Listening::new();
    let [sessions, api] = listening.listeners;
    let (started, receiver) = std::sync::mpsc::channel();
    let (go, wait) = std::sync::mpsc::channel::<()>();
    let (filled, full) = std::sync::mpsc::channel();
    // A user of its own, of this thread and the receiver's: the kernel counts files on their way by user.
    std::thread::spawn(move || {
        let own = rustix::fs::Uid::from_raw(54_321);
        rustix::thread::set_thread_res_uid(own, own, own).unwrap();
        let receiver = Receiver::start(&setting(MANY), sessions, api).unwrap();
        started.send(receiver).unwrap();
        wait.recv().unwrap();
        filled.send(fill_with_files()).unwrap();
    });
    let first = receiver.recv().unwrap();
    let mut arrivals = receive(first, || unreachable!("it does not end"));
    let path = listening.dir.path().join("session.sock");
    let connect = || socket::connect(&path, SocketFlags::empty()).unwrap();
    let before = connect();
    soon(arrivals.sessions.recv()).await.unwrap();
    go.send(()).unwrap();
    let files = full.recv().unwrap();
    let reason = refusal(&connect());
    assert!(reason.contains("Too many references"), "{reason}");
    drop(files);
    let after = connect();
    soon(arrivals.sessions.recv()).await.unwrap();
    drop((before, after));
}

/// The reason that a refused process receives.
fn refusal(session: &OwnedFd) -> String {
    assert!(gpumux_tests::readable(session, Duration::from_secs(20)));
    let receive = || socket::recv::<Daemon>(session, RecvFlags::DONTWAIT);
    // First that what it sent was not read, if it sent something.
    match receive().or_else(|_| receive()).unwrap() {
        Some((Daemon::Refused { reason }, _)) => reason,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn connection_beyond_the_bound_is_refused_until_another_ends() {
    let mut sockets = Listening::new().receive(2);
    let first = sockets.session();
    let _first = soon(sockets.arrivals.sessions.recv()).await.unwrap();
    let _second = sockets.session();
    let _theirs = soon(sockets.arrivals.sessions.recv()).await.unwrap();
    let reason = refusal(&sockets.session());
    assert!(reason.contains("connections to the daemon"), "{reason}");
    let mut request = UnixStream::connect(sockets.dir.path().join("api.sock")).unwrap();
    let mut answer = String::new();
    request.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 429 "), "{answer}");
    assert!(answer.contains(&reason), "{answer}");
    drop(first);
    let served = async {
        loop {
            let session = sockets.session();
            tokio::select! {
                arrived = sockets.arrivals.sessions.recv() => return (session, arrived.unwrap()),
                () = tokio::time::sleep(Duration::from_millis(20)) => {}
            }
        }
    };
    soon(served).await;
}

#[tokio::test]
async fn refused_connections_with_files_that_linger_stop_no_other() {
    let listening = Listening::new();
    let mut hanging: Vec<_> = (0..3).map(|_| listening.linger("session.sock")).collect();
    let mut sockets = listening.receive(2);
    let served = [
        soon(sockets.arrivals.sessions.recv()).await.unwrap(),
        soon(sockets.arrivals.sessions.recv()).await.unwrap(),
    ];
    let (third, _other) = hanging.pop().unwrap();
    refusal(&third);
    drop(third);
    // Its closer hangs: the next wait for that, then for another.
    for _ in 0..refused::MOST * 2 {
        refusal(&sockets.session());
    }
    drop(served);
}
