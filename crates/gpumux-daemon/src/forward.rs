//! The web page for one user: a local TCP address that forwards to the daemon's Unix socket, where the kernel names the user to the daemon.
//!
//! Every process of the machine reaches a local TCP address, and so does every site in the user's browser. So each request but the
//! one for the page itself, which holds no data, must carry a secret of this address. The page gets it behind the `#` of its URL,
//! which browsers send to no server and in no referer, and sends it in a header, which no other site can set.

use std::{net::SocketAddr, path::PathBuf, sync::Arc};

use axum::{
    Json, Router,
    body::Body,
    extract::{Request, State},
    response::{IntoResponse, Response},
};
use hyper::{
    HeaderMap, Method, StatusCode,
    header::{self, HeaderValue},
};
use hyper_util::rt::TokioIo;
use tokio::net::{TcpListener, UnixStream};

use crate::{
    api::{self, types::Problem},
    paths,
    secret::secret,
};

/// Why a request isn't forwarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Refusal {
    /// A name of another site was made to point to this machine.
    Host,
    /// Another site's page asks.
    Origin,
    Secret,
    /// What the page doesn't need, it can't do.
    Request,
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let (status, error) = match self {
            Self::Host => (
                StatusCode::MISDIRECTED_REQUEST,
                "use the address that `gpumux page` printed: this one has another name",
            ),
            Self::Origin => (StatusCode::FORBIDDEN, "another site may not ask here"),
            Self::Secret => (
                StatusCode::UNAUTHORIZED,
                "open the whole address that `gpumux page` printed, with what stands behind the #",
            ),
            Self::Request => (
                StatusCode::METHOD_NOT_ALLOWED,
                "the page does not do this: use the command line",
            ),
        };
        let error = error.to_owned();
        (status, Json(Problem { error })).into_response()
    }
}

/// Whether a request may go to the daemon, in the user's name.
fn check(secret: &str, method: &Method, path: &str, headers: &HeaderMap) -> Result<(), Refusal> {
    let text = |name| {
        headers
            .get(name)
            .map(|value: &HeaderValue| value.to_str().unwrap_or_default())
    };
    let host = text(header::HOST).unwrap_or_default();
    if !api::is_local_name(host) {
        return Err(Refusal::Host);
    }
    if text(header::ORIGIN).is_some_and(|origin| origin.strip_prefix("http://") != Some(host)) {
        return Err(Refusal::Origin);
    }
    if *method == Method::GET && path == "/" {
        return Ok(());
    }
    let given = text(header::AUTHORIZATION).and_then(|value| value.strip_prefix("Bearer "));
    if !given.is_some_and(|given| same(given.as_bytes(), secret.as_bytes())) {
        return Err(Refusal::Secret);
    }
    let tenant = path.strip_prefix("/v1/tenants/");
    let (name, action) = tenant.map_or(("", None), |it| match it.split_once('/') {
        Some((name, action)) => (name, Some(action)),
        None => (it, None),
    });
    match (method, action) {
        (&Method::GET, _) => Ok(()),
        (&Method::PATCH, None) if !name.is_empty() => Ok(()),
        (&Method::POST, Some("sleep" | "wake")) if !name.is_empty() => Ok(()),
        _ => Err(Refusal::Request),
    }
}

/// Compares in a time that doesn't depend on what is equal.
fn same(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |all, (a, b)| all | (a ^ b)) == 0
}

/// Forwards the web page's requests to one daemon.
#[derive(Debug)]
pub struct Forwarder {
    socket: PathBuf,
    secret: String,
}

impl Forwarder {
    /// To the daemon in this runtime directory, with a new secret.
    pub fn new(runtime_dir: impl Into<PathBuf>) -> Self {
        Self {
            socket: paths::api_socket(&runtime_dir.into()),
            secret: secret(),
        }
    }

    /// What to open in a browser when the forwarder listens on this address.
    pub fn url(&self, address: SocketAddr) -> String {
        format!("http://{address}/#token={}", self.secret)
    }

    /// Serves until the future is dropped.
    pub async fn serve(self, listener: TcpListener) {
        let router = Router::new().fallback(forward).with_state(Arc::new(self));
        api::serve_router(listener, router, std::future::pending()).await;
    }

    async fn pass(&self, mut request: Request) -> Result<Response, String> {
        let broken = |error: hyper::Error| error.to_string();
        let stream = UnixStream::connect(&self.socket).await;
        let stream =
            stream.map_err(|error| format!("no daemon at {}: {error}", self.socket.display()))?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .map_err(broken)?;
        tokio::spawn(connection);
        let headers = request.headers_mut();
        for own in [header::AUTHORIZATION, header::CONNECTION, header::ORIGIN] {
            headers.remove(own);
        }
        headers.insert(header::HOST, HeaderValue::from_static("gpumux"));
        let mut answer = sender
            .send_request(request)
            .await
            .map_err(broken)?
            .map(Body::new);
        answer.headers_mut().remove(header::CONNECTION);
        Ok(answer)
    }
}

async fn forward(State(forwarder): State<Arc<Forwarder>>, request: Request) -> Response {
    let (method, path) = (request.method(), request.uri().path());
    if let Err(refusal) = check(&forwarder.secret, method, path, request.headers()) {
        return refusal.into_response();
    }
    forwarder.pass(request).await.unwrap_or_else(|error| {
        let problem = Json(Problem { error });
        (StatusCode::BAD_GATEWAY, problem).into_response()
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn headers(host: &str, origin: Option<&str>, secret: Option<&str>) -> HeaderMap {
        let bearer = secret.map(|secret| format!("Bearer {secret}"));
        let all = [
            (header::HOST, Some(host)),
            (header::ORIGIN, origin),
            (header::AUTHORIZATION, bearer.as_deref()),
        ];
        let known = all
            .into_iter()
            .filter_map(|(name, value)| Some((name, value?.parse().ok()?)));
        known.collect()
    }

    fn verdict(method: Method, path: &str, headers: &HeaderMap) -> Result<(), Refusal> {
        check("5ec2e7", &method, path, headers)
    }

    #[test]
    fn requests_need_the_secret_and_their_own_host() {
        let own = headers(
            "127.0.0.1:4000",
            Some("http://127.0.0.1:4000"),
            Some("5ec2e7"),
        );
        for (method, path) in [
            (Method::GET, "/v1/live"),
            (Method::PATCH, "/v1/tenants/web"),
            (Method::POST, "/v1/tenants/web/sleep"),
            (Method::POST, "/v1/tenants/web/wake"),
        ] {
            assert_eq!(verdict(method.clone(), path, &own), Ok(()));
            for (refusal, foreign) in [
                (
                    Refusal::Host,
                    headers(
                        "evil.example:4000",
                        Some("http://evil.example:4000"),
                        Some("5ec2e7"),
                    ),
                ),
                (
                    Refusal::Origin,
                    headers(
                        "127.0.0.1:4000",
                        Some("http://evil.example"),
                        Some("5ec2e7"),
                    ),
                ),
                (
                    Refusal::Origin,
                    headers("127.0.0.1:4000", Some("null"), Some("5ec2e7")),
                ),
                (
                    Refusal::Origin,
                    headers(
                        "127.0.0.1:4000",
                        Some("http://127.0.0.1:4001"),
                        Some("5ec2e7"),
                    ),
                ),
                (Refusal::Secret, headers("localhost:4000", None, None)),
                (
                    Refusal::Secret,
                    headers("localhost:4000", None, Some("5ec2e8")),
                ),
                (Refusal::Secret, headers("localhost:4000", None, Some(""))),
            ] {
                assert_eq!(
                    verdict(method.clone(), path, &foreign),
                    Err(refusal),
                    "{path}"
                );
            }
        }
        // The page has no data, and is opened without the secret, which is behind the #.
        assert_eq!(
            verdict(Method::GET, "/", &headers("localhost:4000", None, None)),
            Ok(())
        );
    }

    proptest! {
        #[test]
        fn other_changes_are_refused(method in "(POST|PUT|DELETE|PATCH|OPTIONS|TRACE)", path in "/(v1/)?[a-z/.%]{0,20}") {
            let own = headers("127.0.0.1:4000", None, Some("5ec2e7"));
            let method: Method = method.parse().unwrap();
            let of_tenant = path.starts_with("/v1/tenants/");
            let allowed = verdict(method.clone(), &path, &own).is_ok();
            prop_assert!(!allowed || of_tenant && (method == Method::PATCH || method == Method::POST));
            for fixed in ["/v1/tenants", "/v1/tenants/", "/v1/settings/web", "/v1/programs/a", "/v1/tenants/web/hint", "/v1/tenants/web/sleep/x"] {
                prop_assert_eq!(verdict(method.clone(), fixed, &own), Err(Refusal::Request));
            }
        }

        #[test]
        fn equal_texts_are_the_same_and_no_others(a in "[0-9a-f]{0,3}", b in "[0-9a-f]{0,3}") {
            prop_assert_eq!(same(a.as_bytes(), b.as_bytes()), a == b);
        }
    }
}
