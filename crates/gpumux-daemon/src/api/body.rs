//! Requests' bodies: all of one is there, and bounded, before anything is done for it.

use std::time::Duration;

use axum::{
    body::{Body, Bytes},
    extract::Request,
    http::StatusCode,
    middleware::Next,
    response::{IntoResponse, Response},
};
use http_body_util::BodyExt;

use super::refused::Refused;

/// Largest request body in bytes.
pub(super) const MAX_BODY: usize = 64 * 1024;
/// Of a longer one, so many times as much is read at most.
const READ_ON: usize = 16;
/// How long a request's body may take to come.
const BODY: Duration = Duration::from_secs(10);

/// Takes a request's body before anything is done for it: one that never ends must not keep a place.
pub(super) async fn whole_body(request: Request, next: Next) -> Response {
    let (head, body) = request.into_parts();
    match take_body(body, BODY).await {
        Ok(bytes) => next.run(Request::from_parts(head, bytes.into())).await,
        Err(refused) => refused.into_response(),
    }
}

async fn take_body(body: Body, patience: Duration) -> Result<Bytes, Refused> {
    match tokio::time::timeout(patience, whole(body)).await {
        Ok(Some(bytes)) => Ok(bytes),
        Ok(None) => {
            let why = format!("the request's body is broken, or longer than {MAX_BODY} bytes");
            Err(Refused(StatusCode::PAYLOAD_TOO_LARGE, why))
        }
        Err(_) => {
            let why = format!("the request's body has not come within {patience:?}");
            Err(Refused(StatusCode::REQUEST_TIMEOUT, why))
        }
    }
}

/// All of a body; none of one that is broken or too long. That is read on for a while: with what was not read when the connection is
/// closed, the kernel drops the answer, too.
async fn whole(mut body: Body) -> Option<Bytes> {
    let (mut bytes, mut length) = (Vec::new(), 0);
    while let Some(frame) = body.frame().await
        && length <= MAX_BODY * READ_ON
    {
        let Ok(data) = frame.ok()?.into_data() else {
            continue;
        };
        length += data.len();
        if length <= MAX_BODY {
            bytes.extend_from_slice(&data);
        }
    }
    (length <= MAX_BODY).then(|| bytes.into())
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[tokio::test]
    async fn request_whose_body_does_not_end_is_refused() {
        let status = |it: Result<Bytes, Refused>| it.err().map(|it| it.0);
        let endless = Body::from_stream(futures_util::stream::pending::<io::Result<Bytes>>());
        let late = take_body(endless, Duration::ZERO).await;
        assert_eq!(status(late), Some(StatusCode::REQUEST_TIMEOUT));
        let long = take_body(vec![0; MAX_BODY + 1].into(), BODY).await;
        assert_eq!(status(long), Some(StatusCode::PAYLOAD_TOO_LARGE));
        let good = take_body(vec![7; MAX_BODY].into(), BODY).await;
        assert!(good.is_ok_and(|it| it.len() == MAX_BODY));
    }
}
