//! Lets the kubelet's registration reach an HTTP/2 server that is strict about authorities.
//!
//! The kubelet dials the registration socket by its bare path, so its gRPC library sends the escaped path as
//! `:authority` (`%2Fvar%2Flib%2Fkubelet…`). That is no valid authority, and the server's library resets the stream
//! before any client can see it. [`Lenient`] sits in front of the server: it passes frames through, but rewrites
//! header blocks so that such an authority becomes `localhost`.

use std::{
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::Pin,
    task::{Context, Poll, ready},
};

use fluke_hpack::Decoder;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::UnixStream,
};
use tonic::transport::server::{Connected, UdsConnectInfo};

/// What a client sends first.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Largest frame: the default, which the server does not raise.
const MAX_FRAME: usize = 16_384;
/// Largest header block, before and after rewriting.
const MAX_BLOCK: usize = 16_384;
const FRAME_HEADER: usize = 9;
const HEADERS: u8 = 1;
const CONTINUATION: u8 = 9;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
const PADDED: u8 = 8;
const PRIORITY: u8 = 32;

/// A connection whose incoming header blocks are made acceptable.
pub(crate) struct Lenient {
    stream: UnixStream,
    rewriter: Rewriter,
    /// Rewritten, and given out up to here.
    out: Vec<u8>,
    given: usize,
}

impl Lenient {
    /// Around an accepted connection.
    pub(crate) fn new(stream: UnixStream) -> Self {
        Self {
            stream,
            rewriter: Rewriter::default(),
            out: Vec::new(),
            given: 0,
        }
    }
}

impl AsyncRead for Lenient {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        loop {
            if this.given < this.out.len() {
                let count = buf.remaining().min(this.out.len() - this.given);
                buf.put_slice(&this.out[this.given..this.given + count]);
                this.given += count;
                return Poll::Ready(Ok(()));
            }
            this.out.clear();
            this.given = 0;
            let mut chunk = [0; 4096];
            let mut read = ReadBuf::new(&mut chunk);
            ready!(Pin::new(&mut this.stream).poll_read(cx, &mut read))?;
            if read.filled().is_empty() {
                return Poll::Ready(Ok(()));
            }
            this.rewriter.feed(read.filled(), &mut this.out)?;
        }
    }
}

impl AsyncWrite for Lenient {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

impl Connected for Lenient {
    type ConnectInfo = UdsConnectInfo;

    fn connect_info(&self) -> Self::ConnectInfo {
        self.stream.connect_info()
    }
}

struct Rewriter {
    buffer: Vec<u8>,
    preface_seen: bool,
    /// The client's compression state, which every block moves on.
    decoder: Decoder<'static>,
    /// A header block whose end has not come: flags and stream of its first frame, and what came of it.
    open: Option<(u8, [u8; 4], Vec<u8>)>,
}

impl Default for Rewriter {
    fn default() -> Self {
        Self {
            buffer: Vec::new(),
            preface_seen: false,
            decoder: Decoder::new(),
            open: None,
        }
    }
}

impl Rewriter {
    /// Takes what came from the client and appends what the server is to see. Holds back incomplete frames.
    fn feed(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> io::Result<()> {
        self.buffer.extend_from_slice(bytes);
        let mut at = 0;
        if !self.preface_seen {
            if self.buffer.len() < PREFACE.len() {
                return Ok(());
            }
            if !self.buffer.starts_with(PREFACE) {
                return Err(bad("no HTTP/2 preface"));
            }
            out.extend_from_slice(PREFACE);
            self.preface_seen = true;
            at = PREFACE.len();
        }
        while let Some(&[a, b, c, kind, flags, s0, s1, s2, s3]) =
            self.buffer[at..].first_chunk::<FRAME_HEADER>()
        {
            let length = u32::from_be_bytes([0, a, b, c]) as usize;
            if length > MAX_FRAME {
                return Err(bad("a frame is too large"));
            }
            let end = at + FRAME_HEADER + length;
            if end > self.buffer.len() {
                break;
            }
            let frame = &self.buffer[at..end];
            let payload = &frame[FRAME_HEADER..];
            match (kind, self.open.take()) {
                (HEADERS, None) => {
                    self.open = Some((flags, [s0, s1, s2, s3], block(flags, payload)?.to_vec()))
                }
                (CONTINUATION, Some((first, stream, mut block))) if stream == [s0, s1, s2, s3] => {
                    block.extend_from_slice(payload);
                    self.open = Some((first | (flags & END_HEADERS), stream, block));
                }
                (HEADERS | CONTINUATION, _) | (_, Some(_)) => {
                    return Err(bad("frames in a header block"));
                }
                (_, None) => out.extend_from_slice(frame),
            }
            match self.open.take() {
                Some((flags, stream, block)) if flags & END_HEADERS != 0 => {
                    self.rewrite(flags, stream, &block, out)?;
                }
                Some((.., block)) if block.len() > MAX_BLOCK => {
                    return Err(bad("a header block is too large"));
                }
                open => self.open = open,
            }
            at = end;
        }
        self.buffer.drain(..at);
        Ok(())
    }

    fn rewrite(
        &mut self,
        flags: u8,
        stream: [u8; 4],
        block: &[u8],
        out: &mut Vec<u8>,
    ) -> io::Result<()> {
        // The decoder panics at some blocks that end early; the connection ends with it either way.
        let decoded = catch_unwind(AssertUnwindSafe(|| self.decoder.decode(block)));
        let headers = decoded
            .map_err(|_| bad("a header block ends early"))?
            .map_err(|error| bad(&format!("{error:?}")))?;
        let mut plain = Vec::with_capacity(block.len() * 2);
        for (name, value) in headers {
            let strange = name == b":authority" && value.contains(&b'%');
            literal(&mut plain, &name);
            text(&mut plain, if strange { b"localhost" } else { &value });
        }
        if plain.len() > MAX_BLOCK {
            return Err(bad("a header block is too large"));
        }
        out.extend_from_slice(&u32::try_from(plain.len()).unwrap_or(0).to_be_bytes()[1..]);
        out.extend_from_slice(&[HEADERS, (flags & END_STREAM) | END_HEADERS]);
        out.extend_from_slice(&stream);
        out.append(&mut plain);
        Ok(())
    }
}

/// The header block in a HEADERS frame, without padding and priority.
fn block(flags: u8, payload: &[u8]) -> io::Result<&[u8]> {
    let mut rest = payload;
    let mut padding = 0;
    if flags & PADDED != 0 {
        let (&length, after) = rest
            .split_first()
            .ok_or_else(|| bad("an empty padded frame"))?;
        (padding, rest) = (usize::from(length), after);
    }
    if flags & PRIORITY != 0 {
        rest = rest.get(5..).ok_or_else(|| bad("a short frame"))?;
    }
    let end = rest
        .len()
        .checked_sub(padding)
        .ok_or_else(|| bad("too much padding"))?;
    Ok(&rest[..end])
}

/// A header that is not to be indexed: so the server's compression state never matters.
fn literal(out: &mut Vec<u8>, name: &[u8]) {
    out.push(0);
    text(out, name);
}

/// A string without Huffman coding: its length in seven bits or more, and its bytes (RFC 7541, 5.1 and 5.2).
fn text(out: &mut Vec<u8>, bytes: &[u8]) {
    let mut length = bytes.len();
    if length < 127 {
        out.push(length as u8);
    } else {
        out.push(127);
        length -= 127;
        while length >= 128 {
            out.push((length % 128) as u8 | 128);
            length /= 128;
        }
        out.push(length as u8);
    }
    out.extend_from_slice(bytes);
}

fn bad(why: &str) -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        format!("not HTTP/2 as expected: {why}"),
    )
}

#[cfg(test)]
mod tests {
    use fluke_hpack::Encoder;
    use proptest::prelude::*;

    use super::*;

    fn frame(kind: u8, flags: u8, stream: u8, payload: &[u8]) -> Vec<u8> {
        let mut frame = (payload.len() as u32).to_be_bytes()[1..].to_vec();
        frame.extend_from_slice(&[kind, flags, 0, 0, 0, stream]);
        frame.extend_from_slice(payload);
        frame
    }

    fn headers(encoder: &mut Encoder<'_>, authority: &str) -> Vec<u8> {
        let long = "x".repeat(300);
        encoder.encode([
            (&b":method"[..], &b"POST"[..]),
            (b":authority", authority.as_bytes()),
            (b"user-agent", b"grpc-go/1.72"),
            (b"x-long", long.as_bytes()),
        ])
    }

    #[test]
    fn escaped_path_becomes_localhost_in_every_request() {
        let (mut encoder, mut rewriter, mut out) =
            (Encoder::new(), Rewriter::default(), Vec::new());
        let path = "%2Fvar%2Flib%2Fkubelet%2Fplugins_registry%2Fgpumux.dev-reg.sock";
        let mut sent = PREFACE.to_vec();
        sent.extend(frame(4, 0, 0, &[]));
        let first = headers(&mut encoder, path);
        // Padded, with priority, in two frames.
        let (head, tail) = first.split_at(5);
        let mut padded = vec![3, 0, 0, 0, 0, 16];
        padded.extend_from_slice(head);
        padded.extend_from_slice(&[0; 3]);
        sent.extend(frame(HEADERS, PADDED | PRIORITY | END_STREAM, 1, &padded));
        sent.extend(frame(CONTINUATION, END_HEADERS, 1, tail));
        // The second request refers to what the first put into the table.
        sent.extend(frame(HEADERS, END_HEADERS, 3, &headers(&mut encoder, path)));
        sent.extend(frame(0, END_STREAM, 3, b"body"));
        for byte in sent {
            rewriter.feed(&[byte], &mut out).unwrap();
        }
        let mut decoder = Decoder::new();
        let mut rest = &out[PREFACE.len() + FRAME_HEADER..];
        for (stream, flags) in [(1, END_STREAM | END_HEADERS), (3, END_HEADERS)] {
            let length = usize::from(rest[1]) * 256 + usize::from(rest[2]);
            assert_eq!(rest[3..9], [HEADERS, flags, 0, 0, 0, stream]);
            let decoded = decoder.decode(&rest[9..9 + length]).unwrap();
            assert_eq!(decoded[1], (b":authority".to_vec(), b"localhost".to_vec()));
            assert_eq!(decoded[2].1, b"grpc-go/1.72");
            assert_eq!(decoded[3].1.len(), 300);
            rest = &rest[9 + length..];
        }
        assert_eq!(rest, frame(0, END_STREAM, 3, b"body"));
    }

    #[test]
    fn a_block_that_ends_early_ends_the_connection() {
        let mut rewriter = Rewriter {
            preface_seen: true,
            ..Rewriter::default()
        };
        let cut = frame(HEADERS, END_HEADERS, 1, &[63, 128, 128, 128, 128]);
        assert!(rewriter.feed(&cut, &mut Vec::new()).is_err());
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let mut rewriter = Rewriter { preface_seen: true, ..Rewriter::default() };
            let _ = rewriter.feed(&bytes, &mut Vec::new());
        }

        #[test]
        fn header_frames_of_any_content_do_not_panic(
            flags in any::<u8>(),
            bytes in proptest::collection::vec(any::<u8>(), 0..100),
        ) {
            let mut rewriter = Rewriter { preface_seen: true, ..Rewriter::default() };
            let _ = rewriter.feed(&frame(HEADERS, flags, 1, &bytes), &mut Vec::new());
        }
    }
}
