//! Files whose end takes as long as a user likes, and a receiver that ends.

use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    os::{fd::AsRawFd, unix::net::UnixStream},
    time::Duration,
};

use gpumux_wire::{Shim, socket};
use tempfile::TempDir;

use super::*;

/// A connection with unsent data whose end takes a minute, and its other side, which reads nothing. Another test that starts a
/// program at this moment may have to wait for that.
fn lingering() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut own = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (other, _) = listener.accept().unwrap();
    own.set_nonblocking(true).unwrap();
    while own.write(&[0; 65536]).is_ok() {}
    own.set_nonblocking(false).unwrap();
    let minute = Some(Duration::from_secs(60));
    rustix::net::sockopt::set_socket_linger(&own, minute).unwrap();
    (own, other)
}

/// Listening sockets, before a receiver accepts what comes there.
struct Listening {
    dir: TempDir,
    listeners: [OwnedFd; 2],
}

struct Sockets {
    dir: TempDir,
    arrivals: Arrivals,
}

impl Listening {
    fn new() -> Self {
        let dir = TempDir::new().unwrap();
        let sessions = socket::listen(&dir.path().join("session.sock"), 16).unwrap();
        let api = crate::api::listen(&dir.path().join("api.sock")).unwrap();
        let listeners = [sessions, api];
        Self { dir, listeners }
    }

    fn receive(self) -> Sockets {
        let [sessions, api] = self.listeners;
        let first = Receiver::start(Place::Threads, None, sessions, api).unwrap();
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
        let (file, other) = lingering();
        socket::send(&socket, &gone(1), Some(file.as_fd()), SendFlags::empty()).unwrap();
        drop(file);
        (socket, other)
    }
}

impl Sockets {
    fn receive() -> Self {
        Listening::new().receive()
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
    let mut sockets = listening.receive();
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
    let mut sockets = listening.receive();
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
        Receiver::start(Place::Threads, None, sessions, api)
    });
    let connected = async {
        while socket::connect(&path, SocketFlags::empty()).is_err() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    soon(connected).await;
    let arrived = soon(arrivals.sessions.recv()).await.unwrap();
    assert!(arrived.socket.as_raw_fd() > 0);
}
