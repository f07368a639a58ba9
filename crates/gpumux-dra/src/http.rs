//! Serving HTTP to any client, with bounds: on connections, on the time that a request's head may take, and on a connection's life.

use std::{sync::Arc, time::Duration};

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, UnixListener},
    sync::Semaphore,
};

/// Connections at one time; more are closed at once. A scraper needs one.
const CONNECTIONS: usize = 32;
/// How long the head of a request may take, and a connection wait for its next request.
const HEAD: Duration = Duration::from_secs(5);
/// How long a connection may last: a client that scrapes each minute connects anew.
const LIFE: Duration = Duration::from_secs(60);
/// How long to wait when no connection can be accepted, as without file descriptors.
const AGAIN: Duration = Duration::from_millis(100);

/// Where connections come from.
pub(crate) trait Accept {
    /// A connection.
    type Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static;

    /// The next one.
    fn next(&self) -> impl Future<Output = std::io::Result<Self::Stream>> + Send;
}

impl Accept for TcpListener {
    type Stream = tokio::net::TcpStream;

    async fn next(&self) -> std::io::Result<Self::Stream> {
        Ok(self.accept().await?.0)
    }
}

impl Accept for UnixListener {
    type Stream = tokio::net::UnixStream;

    async fn next(&self) -> std::io::Result<Self::Stream> {
        Ok(self.accept().await?.0)
    }
}

/// Serves until it is dropped.
pub(crate) async fn serve(listener: impl Accept, router: Router) {
    let free = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let stream = match listener.next().await {
            Ok(stream) => stream,
            Err(error) => {
                tracing::debug!(%error, "no connection");
                tokio::time::sleep(AGAIN).await;
                continue;
            }
        };
        let Ok(place) = Arc::clone(&free).try_acquire_owned() else {
            continue;
        };
        let service = TowerToHyperService::new(router.clone());
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEAD)
            .serve_connection(TokioIo::new(stream), service);
        tokio::spawn(async move {
            let _place = place;
            let _ = tokio::time::timeout(LIFE, connection).await;
        });
    }
}
