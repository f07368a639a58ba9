//! Connections to the API: whose they are, how many a user may have, and how long one may be slow.

use std::{
    future::Future,
    io,
    net::IpAddr,
    os::{fd::OwnedFd, unix::net::UnixListener},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use axum::{
    Extension, Router,
    extract::Request,
    http::{StatusCode, header},
    middleware::{self, Next},
    response::{IntoResponse, Response},
};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf},
    net::{TcpListener, UnixStream},
    sync::{mpsc, watch},
};

use super::refused::Refused;
use crate::{
    paths,
    quota::{ON_TCP, Place, Quota},
    receiver::{Connection, STALLED, no_place},
};

/// How long a connection may take for the head of its first request, and of the next one.
const HEADERS: Duration = Duration::from_secs(10);
/// Most connections of one user, and of all; so many more are for root.
const MAX_CONNECTIONS: (usize, usize, usize) = (256, 1024, 64);
/// Most connections there are.
pub(crate) const CONNECTIONS: usize = MAX_CONNECTIONS.1 + MAX_CONNECTIONS.2;
/// Why a connection finds no place.
const FULL: &str = "too many connections to the daemon are open: close some, or try again later";

/// Serves the API until told to stop.
pub(crate) async fn serve(
    router: Router,
    mut arrivals: mpsc::Receiver<Connection>,
    mut stop: watch::Receiver<bool>,
) {
    let users = Quota::default();
    loop {
        let arrived = tokio::select! {
            arrived = arrivals.recv() => arrived,
            _ = stop.wait_for(|stop| *stop) => return,
        };
        let Some(Connection { socket, peer }) = arrived else {
            return;
        };
        let Ok(mut stream) = UnixStream::from_std(socket.into()) else {
            continue;
        };
        let Ok(place) = take(&users, peer.uid) else {
            refuse(&mut stream).await;
            continue;
        };
        let service = TowerToHyperService::new(router.clone().layer(Extension(Arc::new(peer))));
        tokio::spawn(converse(stream, service, place, HEADERS));
    }
}

/// Serves clients that only read, on TCP, until it is stopped.
pub(crate) async fn serve_tcp(
    mut router: Router,
    listener: TcpListener,
    mut stop: watch::Receiver<bool>,
) {
    let local = listener
        .local_addr()
        .is_ok_and(|own| own.ip().is_loopback());
    if local {
        router = router.layer(middleware::from_fn(only_by_address));
    }
    let stopped = async move { drop(stop.wait_for(|stop| *stop).await) };
    serve_router(listener, router, stopped).await;
}

/// Serves a TCP address until `stopped`.
pub(crate) async fn serve_router(
    listener: TcpListener,
    router: Router,
    stopped: impl Future<Output = ()>,
) {
    tokio::pin!(stopped);
    let users = Quota::default();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = &mut stopped => return,
        };
        let Ok((mut stream, _)) = accepted else {
            tokio::time::sleep(Duration::from_millis(50)).await;
            continue;
        };
        let Ok(place) = take(&users, ON_TCP) else {
            refuse(&mut stream).await;
            continue;
        };
        let service = TowerToHyperService::new(router.clone());
        tokio::spawn(converse(stream, service, place, HEADERS));
    }
}

/// A page of another site could have its name point to this machine, and then read what it finds
/// here: its requests still carry that name.
async fn only_by_address(request: Request, next: Next) -> Response {
    let host = request.headers().get(header::HOST);
    let host = host.and_then(|host| host.to_str().ok()).unwrap_or_default();
    if is_local_name(host) {
        return next.run(request).await;
    }
    let message = format!("this daemon is not called `{host}`: use localhost or an address");
    Refused(StatusCode::MISDIRECTED_REQUEST, message).into_response()
}

/// Whether a request's `Host` names this machine as no other site can: `localhost` or an address.
pub(crate) fn is_local_name(host: &str) -> bool {
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|b| b.is_ascii_digit()) => name,
        _ => host,
    };
    let address = name.trim_start_matches('[').trim_end_matches(']');
    name == "localhost" || address.parse::<IpAddr>().is_ok()
}

/// Sends the reason to a connection that finds no place. A new one has room for that; it is only not known before the runtime has looked.
async fn refuse(stream: &mut (impl AsyncWrite + Unpin)) {
    let _ = stream.write_all(no_place(FULL).as_bytes()).await;
}

async fn converse(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    service: TowerToHyperService<Router>,
    _place: Place,
    headers: Duration,
) {
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(headers)
        .serve_connection(TokioIo::new(Patient::new(stream)), service);
    if let Err(error) = connection.await {
        tracing::debug!(%error, "a request went wrong");
    }
}

/// A stream whose reader may not stop reading for longer than [`STALLED`].
struct Patient<S> {
    stream: S,
    /// While a write waits: until when.
    until: Option<Pin<Box<tokio::time::Sleep>>>,
}

impl<S> Patient<S> {
    fn new(stream: S) -> Self {
        Self {
            stream,
            until: None,
        }
    }

    /// What a write came to, unless it has waited for too long.
    fn unless_stalled<T>(
        &mut self,
        context: &mut Context<'_>,
        written: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.until = None;
            return written;
        }
        let until = self
            .until
            .get_or_insert_with(|| Box::pin(tokio::time::sleep(STALLED)));
        match until.as_mut().poll(context) {
            Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Patient<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Patient<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.unless_stalled(context, written)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(context);
        self.unless_stalled(context, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

/// A connection's place among its user's; none when too many are taken.
fn take(users: &Quota, uid: u32) -> Result<Place, ()> {
    // Root must be able to see, and to end, the processes that fill the others.
    let (most_own, most) = match uid {
        0 => (usize::MAX, CONNECTIONS),
        _ => (MAX_CONNECTIONS.0, MAX_CONNECTIONS.1),
    };
    users.take(uid, |taken| {
        match taken.own < most_own && taken.all < most {
            true => Ok(()),
            false => Err(()),
        }
    })
}

/// Listens where the API shall be.
///
/// # Errors
/// When the socket cannot be made.
pub(crate) fn listen(socket: &std::path::Path) -> io::Result<OwnedFd> {
    let listener = UnixListener::bind(socket)?;
    listener.set_nonblocking(true)?;
    paths::open_to_all(socket)?;
    Ok(listener.into())
}

#[cfg(test)]
mod tests {
    use axum::routing::get;
    use tokio::io::AsyncReadExt;

    use super::*;
    use crate::peer::Peer;

    #[test]
    fn users_who_fill_all_places_leave_some_to_root() {
        let users = Quota::default();
        let most = |uid| std::iter::from_fn(|| take(&users, uid).ok()).collect::<Vec<_>>();
        let of_users: Vec<_> = (1000..1010).map(most).collect();
        let places: Vec<usize> = of_users.iter().map(Vec::len).collect();
        assert_eq!(places, [256, 256, 256, 256, 0, 0, 0, 0, 0, 0]);
        assert_eq!(most(0).len(), MAX_CONNECTIONS.2);
        drop(of_users);
        assert_eq!(most(0).len(), MAX_CONNECTIONS.1 + MAX_CONNECTIONS.2);
    }

    #[tokio::test]
    async fn connection_without_a_place_gets_the_reason() {
        crate::serve::raise_file_limit();
        let (arrive, arrivals) = mpsc::channel(1);
        let (_stop, stopped) = watch::channel(false);
        tokio::spawn(serve(Router::new(), arrivals, stopped));
        let mut clients = Vec::new();
        for _ in 0..=MAX_CONNECTIONS.0 {
            let (client, server) = std::os::unix::net::UnixStream::pair().unwrap();
            client.set_nonblocking(true).unwrap();
            server.set_nonblocking(true).unwrap();
            let peer = Peer {
                uid: 1,
                pid: 0,
                process: None,
                fd: None,
            };
            let socket = server.into();
            let connection = Connection { socket, peer };
            assert!(arrive.send(connection).await.is_ok());
            clients.push(client);
        }
        let last = clients.pop().unwrap();
        let mut answer = String::new();
        let mut last = UnixStream::from_std(last).unwrap();
        let read = last.read_to_string(&mut answer);
        tokio::time::timeout(HEADERS, read).await.unwrap().unwrap();
        assert!(answer.starts_with("HTTP/1.1 429 "), "{answer}");
        assert!(answer.contains(FULL), "{answer}");
    }

    #[tokio::test]
    async fn slow_headers_and_idle_connections_are_closed() {
        let router = Router::new().route("/", get(async || "here"));
        let whole = "GET / HTTP/1.1\r\nhost: gpumux\r\n\r\n";
        for sent in ["", "GET / HT", whole] {
            let (mut client, server) = tokio::io::duplex(1024);
            client.write_all(sent.as_bytes()).await.unwrap();
            let users = Quota::default();
            let place = take(&users, 1).unwrap();
            let service = TowerToHyperService::new(router.clone());
            let served = converse(server, service, place, Duration::from_millis(10));
            let ended = tokio::time::timeout(HEADERS, served).await;
            assert!(ended.is_ok(), "{sent:?}");
            assert!(users.all() == 0);
            let mut answer = String::new();
            client.read_to_string(&mut answer).await.unwrap();
            assert_eq!(answer.contains("here"), sent == whole, "{answer}");
        }
    }

    #[tokio::test]
    async fn reader_that_stops_reading_loses_its_connection() {
        let (mut stream, _reader) = tokio::io::duplex(8);
        stream.write_all(&[0; 8]).await.unwrap();
        let mut patient = Patient {
            stream,
            until: Some(Box::pin(tokio::time::sleep(Duration::ZERO))),
        };
        let stalled = patient.write(&[0]).await.unwrap_err();
        assert_eq!(stalled.kind(), io::ErrorKind::TimedOut);
        let (stream, _reader) = tokio::io::duplex(8);
        let mut patient = Patient {
            stream,
            until: Some(Box::pin(tokio::time::sleep(Duration::ZERO))),
        };
        assert_eq!(patient.write(&[0; 8]).await.unwrap(), 8);
        assert!(
            patient.until.is_none(),
            "whoever reads has all the time again"
        );
    }
}
