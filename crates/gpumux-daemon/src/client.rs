//! Asking the daemon.

mod stream;

use std::{
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use gpumux_core::TenantSpec;
use http_body_util::{BodyExt, Full, Limited};
use hyper::{Method, Request, StatusCode, body::Bytes};
use hyper_util::rt::TokioIo;
use serde::{Serialize, de::DeserializeOwned};
use tokio::net::UnixStream;

use self::stream::WriteFirst;
use crate::{
    api::types::{
        Created, Device, DeviceMemory, Ended, Event, Exit, Explanation, Hinted, History,
        LostOutput, MigGpu, MigInstance, NewCurve, NewHint, NewMigInstance, NewPlace, NewSignal,
        NewTenant, Problem, Program, Relocated, Reported, Setting, Signalled, SpecChange, Status,
        Tenant,
    },
    paths,
};

/// How long a request may take.
const TIMEOUT: Duration = Duration::from_secs(5);
/// How long MIG instances may take to be listed, made or removed: longer than the daemon waits for NVML.
const MIG: Duration = Duration::from_secs(38);
/// How long moving a tenant's memory may take.
const MOVE: Duration = Duration::from_secs(330);
type Sender = hyper::client::conn::http1::SendRequest<Full<Bytes>>;
type Connection =
    hyper::client::conn::http1::Connection<TokioIo<WriteFirst<UnixStream>>, Full<Bytes>>;

/// Largest answer in bytes.
const MAX_ANSWER: usize = 64 << 20;

/// A daemon's users' side.
#[derive(Clone, Debug)]
pub struct Client {
    socket: PathBuf,
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No daemon listens.
    #[error("{}", no_daemon(socket, why))]
    NoDaemon {
        /// The API's socket.
        socket: PathBuf,
        /// What connecting said.
        why: io::Error,
    },
    /// This process cannot ask: it has no files left.
    #[error("the daemon cannot be asked: {0}")]
    Unable(io::Error),
    /// The daemon refuses.
    #[error("{message}")]
    Refused {
        /// HTTP status.
        status: u16,
        /// Why, in the daemon's words.
        message: String,
    },
    /// The daemon cannot do it, because the driver does not answer.
    #[error("{0}")]
    Stalled(String),
    /// No answer within five seconds.
    #[error("the daemon at {0} does not answer: look at its log, or restart it")]
    Timeout(PathBuf),
    /// It took the request and was gone.
    #[error("the daemon at {0} ended before it answered: try again")]
    Gone(PathBuf),
    /// Something else answered, or half a daemon.
    #[error(
        "the answer from {socket} cannot be understood ({why}): is the daemon of the same version?"
    )]
    Protocol {
        /// The API's socket.
        socket: PathBuf,
        /// What is wrong.
        why: String,
    },
}

fn no_daemon(socket: &Path, why: &io::Error) -> String {
    let socket = socket.display();
    match why.kind() {
        io::ErrorKind::NotFound => {
            format!("no daemon at {socket}, so no tenant is managed: `gpumux run` starts one")
        }
        io::ErrorKind::PermissionDenied => format!(
            "{socket} is in a directory of another user: set GPUMUX_RUNTIME_DIR to one of your own"
        ),
        _ => format!(
            "no daemon at {socket} ({why}), so no tenant is managed: `gpumux run` starts one"
        ),
    }
}

impl ClientError {
    /// Whether the daemon is about to end, or ended when it was asked.
    pub fn is_leaving(&self) -> bool {
        match self {
            Self::Refused { status, .. } => *status == StatusCode::SERVICE_UNAVAILABLE.as_u16(),
            Self::Gone(_) => true,
            _ => false,
        }
    }
}

/// All requests fail as [`ClientError`] has it.
impl Client {
    /// For the daemon in this runtime directory.
    pub fn new(runtime_dir: impl Into<PathBuf>) -> Self {
        Self {
            socket: paths::api_socket(&runtime_dir.into()),
        }
    }

    /// What the daemon is and does.
    pub async fn status(&self) -> Result<Status, ClientError> {
        self.get("/v1/status").await
    }

    /// The devices.
    pub async fn devices(&self) -> Result<Vec<Device>, ClientError> {
        self.get("/v1/devices").await
    }

    /// All tenants.
    pub async fn tenants(&self) -> Result<Vec<Tenant>, ClientError> {
        self.get("/v1/tenants").await
    }

    /// One tenant.
    pub async fn tenant(&self, name: &str) -> Result<Tenant, ClientError> {
        self.get(&of(name)).await
    }

    /// Why a tenant gets what it gets.
    pub async fn explanation(&self, name: &str) -> Result<Explanation, ClientError> {
        self.get(&(of(name) + "/explanation")).await
    }

    /// The last seconds as a Chrome trace.
    pub async fn trace(&self, seconds: f64) -> Result<String, ClientError> {
        let path = format!("/v1/trace?seconds={seconds}");
        self.text(&path).await
    }

    /// What Prometheus reads.
    pub async fn metrics(&self) -> Result<String, ClientError> {
        self.text("/metrics").await
    }

    async fn text(&self, path: &str) -> Result<String, ClientError> {
        let bytes = self.answer(TIMEOUT, Method::GET, path, None::<&()>).await?;
        String::from_utf8(bytes.into()).map_err(|error| self.protocol(error))
    }

    /// Makes a tenant that lives as long as this process, or the one it execs.
    pub async fn create(&self, new: &NewTenant) -> Result<Created, ClientError> {
        self.post("/v1/tenants", new).await
    }

    /// Changes a tenant.
    pub async fn change(&self, name: &str, change: &SpecChange) -> Result<Tenant, ClientError> {
        // JSON has no NaN: it would arrive as "no change".
        let checked = change.apply(&TenantSpec::default()).validate();
        checked.map_err(|error| ClientError::Refused {
            status: 422,
            message: error.to_string(),
        })?;
        self.ask(TIMEOUT, Method::PATCH, &of(name), Some(change))
            .await
    }

    /// Says that a tenant's work is coming.
    pub async fn hint(&self, name: &str, hint: &NewHint) -> Result<Hinted, ClientError> {
        self.post(&(of(name) + "/hint"), hint).await
    }

    /// The memory of each device by tenant.
    pub async fn memory(&self) -> Result<Vec<DeviceMemory>, ClientError> {
        self.get("/v1/memory").await
    }

    /// The last five minutes of devices and tenants.
    pub async fn history(&self) -> Result<History, ClientError> {
        self.get("/v1/history?span=5m").await
    }

    /// Moves a tenant to another GPU, and returns when it is there.
    pub async fn relocate(&self, name: &str, gpu: &str) -> Result<Relocated, ClientError> {
        let place = NewPlace { gpu: gpu.into() };
        let path = of(name) + "/move";
        self.ask(MOVE, Method::POST, &path, Some(&place)).await
    }

    /// Moves a tenant's memory to the host, and returns when that is done.
    pub async fn sleep(&self, name: &str) -> Result<(), ClientError> {
        let path = of(name) + "/sleep";
        self.ask(MOVE, Method::POST, &path, None::<&()>).await
    }

    /// Brings a tenant's memory back, and returns when that is done.
    pub async fn wake(&self, name: &str) -> Result<(), ClientError> {
        let path = of(name) + "/wake";
        self.ask(MOVE, Method::POST, &path, None::<&()>).await
    }

    /// Ends a tenant that has no connected process.
    pub async fn delete(&self, name: &str) -> Result<(), ClientError> {
        self.remove(&of(name)).await
    }

    /// Forgets what was set for tenants of this name.
    pub async fn forget(&self, name: &str) -> Result<(), ClientError> {
        let path = format!("/v1/settings/{}", escaped(name));
        self.remove(&path).await
    }

    /// What this user (root: any user) set for names.
    pub async fn settings(&self) -> Result<Vec<Setting>, ClientError> {
        self.get("/v1/settings").await
    }

    /// The last tenants that ended, the latest last.
    pub async fn ended(&self) -> Result<Vec<Ended>, ClientError> {
        self.get("/v1/ended").await
    }

    /// Sends a signal to a tenant's program.
    pub async fn signal(&self, name: &str, signal: i32) -> Result<Signalled, ClientError> {
        let path = of(name) + "/signal";
        self.post(&path, &NewSignal { signal }).await
    }

    /// Reports how a tenant's program ended.
    pub async fn report_exit(&self, name: &str, exit: Exit) -> Result<Reported, ClientError> {
        self.post(&(of(name) + "/exit"), &exit).await
    }

    /// Reports that output of a tenant's program could not be written.
    pub async fn report_lost_output(
        &self,
        name: &str,
        lost: &LostOutput,
    ) -> Result<(), ClientError> {
        self.post(&(of(name) + "/lost-output"), lost).await
    }

    /// The last events, the latest last.
    pub async fn past_events(&self) -> Result<Vec<Event>, ClientError> {
        self.get("/v1/events/past").await
    }

    /// Hands over events until one is answered with `false`, or the daemon ends: those after the event of this number, as far as
    /// they are kept, or without one the next ones.
    pub async fn events(
        &self,
        after: Option<u64>,
        mut take: impl FnMut(Event) -> bool,
    ) -> Result<(), ClientError> {
        let path = match after {
            Some(number) => format!("/v1/events?after={number}"),
            None => "/v1/events".to_owned(),
        };
        let request = Request::get(path).header("host", "gpumux");
        let request = request.body(Full::<Bytes>::default());
        let request = request.map_err(|error| self.protocol(error))?;
        let (mut sender, connection) = self.connect().await?;
        let connection = tokio::spawn(connection);
        let answer = sender.send_request(request).await;
        let answer = answer.map_err(|error| self.broken(&error))?;
        let status = answer.status();
        let mut body = answer.into_body();
        if !status.is_success() {
            let whole = Limited::new(body, MAX_ANSWER).collect().await;
            let whole = whole.map_err(|error| self.protocol(error))?.to_bytes();
            return Err(self.refusal(status, &whole));
        }
        let mut text = Vec::new();
        let mut goes_on = true;
        while goes_on && let Some(Ok(frame)) = body.frame().await {
            text.extend_from_slice(frame.data_ref().map_or(&[][..], |data| data));
            while let Some(end) = text.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = text.drain(..=end).collect();
                let Some(event) = line.strip_prefix(b"data: ").filter(|_| goes_on) else {
                    continue;
                };
                let event = serde_json::from_slice(event);
                goes_on = take(event.map_err(|error| self.protocol(error))?);
            }
        }
        connection.abort();
        Ok(())
    }

    /// What is known of programs.
    pub async fn programs(&self) -> Result<Vec<Program>, ClientError> {
        self.get("/v1/programs").await
    }

    /// Sets a program's scaling profile.
    pub async fn teach(&self, fingerprint: &str, curve: &NewCurve) -> Result<(), ClientError> {
        let path = format!("/v1/programs/{}", escaped(fingerprint));
        self.ask(TIMEOUT, Method::PUT, &path, Some(curve)).await
    }

    /// Forgets what is known of a program.
    pub async fn unlearn(&self, fingerprint: &str) -> Result<(), ClientError> {
        let path = format!("/v1/programs/{}", escaped(fingerprint));
        self.remove(&path).await
    }

    /// The GPUs in MIG mode, with the instances that they have and can have. For root.
    pub async fn mig_gpus(&self) -> Result<Vec<MigGpu>, ClientError> {
        self.ask(MIG, Method::GET, "/v1/mig", None::<&()>).await
    }

    /// Makes a GPU instance with one compute instance, and returns when it can be used. For root.
    pub async fn make_mig(&self, new: &NewMigInstance) -> Result<MigInstance, ClientError> {
        self.ask(MIG, Method::POST, "/v1/mig", Some(new)).await
    }

    /// Removes a GPU instance that has this compute instance and no other; none: that has no compute instance. For root.
    pub async fn remove_mig(
        &self,
        gpu: &str,
        gpu_instance: u32,
        device: Option<&str>,
    ) -> Result<(), ClientError> {
        let query = device.map_or_else(String::new, |it| format!("?device={}", escaped(it)));
        let path = format!("/v1/mig/{}/{gpu_instance}{query}", escaped(gpu));
        self.ask(MIG, Method::DELETE, &path, None::<&()>).await
    }

    async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        self.ask(TIMEOUT, Method::GET, path, None::<&()>).await
    }

    async fn post<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &impl Serialize,
    ) -> Result<T, ClientError> {
        self.ask(TIMEOUT, Method::POST, path, Some(body)).await
    }

    async fn remove(&self, path: &str) -> Result<(), ClientError> {
        self.ask(TIMEOUT, Method::DELETE, path, None::<&()>).await
    }

    async fn ask<T: DeserializeOwned>(
        &self,
        time: Duration,
        method: Method,
        path: &str,
        body: Option<&impl Serialize>,
    ) -> Result<T, ClientError> {
        let bytes = self.answer(time, method, path, body).await?;
        // An answer without contents is `()`.
        let json: &[u8] = if bytes.is_empty() { b"null" } else { &bytes };
        serde_json::from_slice(json).map_err(|error| self.protocol(error))
    }

    async fn answer(
        &self,
        time: Duration,
        method: Method,
        path: &str,
        body: Option<&impl Serialize>,
    ) -> Result<Bytes, ClientError> {
        tokio::time::timeout(time, self.exchange(method, path, body))
            .await
            .unwrap_or_else(|_| Err(ClientError::Timeout(self.socket.clone())))
    }

    async fn exchange(
        &self,
        method: Method,
        path: &str,
        body: Option<&impl Serialize>,
    ) -> Result<Bytes, ClientError> {
        let body = match body {
            Some(body) => serde_json::to_vec(body).map_err(|error| self.protocol(error))?,
            None => Vec::new(),
        };
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("host", "gpumux")
            .header("content-type", "application/json")
            .body(Full::new(Bytes::from(body)))
            .map_err(|error| self.protocol(error))?;
        let (mut sender, connection) = self.connect().await?;
        // The connection must be driven while its answer is awaited.
        let answer = async {
            let answer = sender
                .send_request(request)
                .await
                .map_err(|error| self.broken(&error))?;
            let status = answer.status();
            let body = Limited::new(answer.into_body(), MAX_ANSWER).collect().await;
            Ok((
                status,
                body.map_err(|error| self.protocol(error))?.to_bytes(),
            ))
        };
        tokio::pin!(answer);
        let (status, bytes) = tokio::select! {
            answer = &mut answer => answer?,
            ended = connection => {
                ended.map_err(|error| self.broken(&error))?;
                answer.await?
            }
        };
        if status.is_success() {
            return Ok(bytes);
        }
        Err(self.refusal(status, &bytes))
    }

    async fn connect(&self) -> Result<(Sender, Connection), ClientError> {
        let none = |why| ClientError::NoDaemon {
            socket: self.socket.clone(),
            why,
        };
        let stream = UnixStream::connect(&self.socket).await.map_err(none)?;
        let connected =
            hyper::client::conn::http1::handshake(TokioIo::new(WriteFirst::new(stream))).await;
        connected.map_err(|error| self.broken(&error))
    }

    fn refusal(&self, status: StatusCode, bytes: &[u8]) -> ClientError {
        match serde_json::from_slice::<Problem>(bytes) {
            Ok(problem) if status == StatusCode::GATEWAY_TIMEOUT => {
                ClientError::Stalled(problem.error)
            }
            Ok(problem) => ClientError::Refused {
                status: status.as_u16(),
                message: problem.error,
            },
            Err(_) => self.protocol(status),
        }
    }

    fn broken(&self, error: &hyper::Error) -> ClientError {
        match error.is_parse() || error.is_user() {
            true => self.protocol(error),
            false => ClientError::Gone(self.socket.clone()),
        }
    }

    fn protocol(&self, why: impl ToString) -> ClientError {
        ClientError::Protocol {
            socket: self.socket.clone(),
            why: why.to_string(),
        }
    }
}

/// A tenant's path.
fn of(name: &str) -> String {
    format!("/v1/tenants/{}", escaped(name))
}

/// What cannot be in a name is escaped, so that any text makes a valid request.
fn escaped(name: &str) -> String {
    let escape = |byte: u8| match byte {
        b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'.' | b'_' | b'-' => {
            char::from(byte).to_string()
        }
        _ => format!("%{byte:02X}"),
    };
    name.bytes().map(escape).collect()
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read, Write},
        os::unix::net::UnixListener,
    };

    use super::*;

    #[tokio::test]
    async fn daemon_that_ends_differs_from_one_that_sends_nonsense() {
        let dir = tempfile::tempdir().unwrap();
        let client = Client::new(dir.path());
        let listener = UnixListener::bind(paths::api_socket(dir.path())).unwrap();
        let answers = ["", "HTTP/1.1 200 OK\r\ncontent-le", "what?\r\n\r\n"];
        let daemon = std::thread::spawn(move || {
            for answer in answers {
                let mut stream = listener.accept().unwrap().0;
                // What is left unread would break the connection before the answer is read.
                if !answer.is_empty() {
                    let _ = stream.read(&mut [0; 4096]).unwrap();
                }
                let _ = stream.write_all(answer.as_bytes());
            }
        });
        for gone in [true, true, false] {
            let error = client.status().await.unwrap_err();
            assert_eq!(error.is_leaving(), gone, "{error}");
        }
        daemon.join().unwrap();
        let error = client.status().await.unwrap_err();
        assert!(matches!(error, ClientError::NoDaemon { .. }), "{error}");
    }

    #[test]
    fn missing_daemon_is_reported_with_the_way_to_one() {
        for (why, expected) in [
            (
                io::ErrorKind::NotFound,
                "/x/api.sock, so no tenant is managed",
            ),
            (io::ErrorKind::ConnectionRefused, "`gpumux run` starts one"),
            (io::ErrorKind::PermissionDenied, "set GPUMUX_RUNTIME_DIR"),
        ] {
            let text = no_daemon(Path::new("/x/api.sock"), &why.into());
            assert!(text.contains(expected), "{text}");
        }
    }

    #[tokio::test]
    async fn reason_sent_before_the_request_is_reported() {
        let dir = tempfile::tempdir().unwrap();
        let client = Client::new(dir.path());
        let listener = UnixListener::bind(paths::api_socket(dir.path())).unwrap();
        let daemon = std::thread::spawn(move || {
            for closes in [true, false].repeat(20) {
                let mut stream = listener.accept().unwrap().0;
                let answer = crate::receiver::no_place("no \"place\"");
                stream.write_all(answer.as_bytes()).unwrap();
                if !closes {
                    stream.shutdown(std::net::Shutdown::Write).unwrap();
                    let _ = stream.read(&mut [0; 4096]).unwrap();
                }
            }
        });
        for _ in 0..40 {
            let error = client.status().await.unwrap_err();
            assert_eq!(error.to_string(), "no \"place\"");
            assert!(!error.is_leaving(), "{error:?}");
        }
        daemon.join().unwrap();
    }
}
