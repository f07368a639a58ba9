//! A connection whose answer may come before the question.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, Waker},
};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// A stream of which nothing is read before something was written, or could not be. A daemon that has no place for a connection sends
/// the reason at once and closes; to an HTTP client that is an error before it has sent its request, and a broken pipe after that.
pub(super) struct WriteFirst<S> {
    stream: S,
    written: bool,
    reader: Option<Waker>,
}

impl<S> WriteFirst<S> {
    pub(super) fn new(stream: S) -> Self {
        Self {
            stream,
            written: false,
            reader: None,
        }
    }

    fn begin_to_read(&mut self) {
        self.written = true;
        if let Some(reader) = self.reader.take() {
            reader.wake();
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for WriteFirst<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if !self.written {
            self.reader = Some(context.waker().clone());
            return Poll::Pending;
        }
        match Pin::new(&mut self.stream).poll_read(context, buffer) {
            // The request was not read; the end of what was sent is the end.
            Poll::Ready(Err(error)) if error.kind() == io::ErrorKind::ConnectionReset => {
                Poll::Ready(Ok(()))
            }
            read => read,
        }
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for WriteFirst<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = match Pin::new(&mut self.stream).poll_write(context, bytes) {
            // What it was sent tells why.
            Poll::Ready(Err(error)) if error.kind() == io::ErrorKind::BrokenPipe => Ok(bytes.len()),
            Poll::Ready(written) => written,
            Poll::Pending => return Poll::Pending,
        };
        self.begin_to_read();
        Poll::Ready(written)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
