//! The kubelet's side for tests. It speaks HTTP/2 by itself, because it must send what no Rust library would: the
//! escaped path as `:authority`, as the kubelet's gRPC library does when it dials a bare path.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use fluke_hpack::{Decoder, Encoder};
use gpumux_dra::proto::{health, registration, v1};
use prost::Message;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixStream,
};

/// A connection.
pub struct Connection {
    stream: UnixStream,
    encoder: Encoder<'static>,
    decoder: Decoder<'static>,
    next: u32,
    authority: String,
}

/// How a call failed: a reset of the stream with an HTTP/2 error code, or a gRPC status.
#[derive(Debug, PartialEq)]
pub enum Failure {
    Reset(u32),
    Status(String, String),
    Closed,
}

impl Connection {
    /// Dials the bare path, as the kubelet's plugin watcher does.
    pub async fn bare(path: &Path) -> std::io::Result<Self> {
        let escaped = path.display().to_string().replace('/', "%2F");
        Self::dial(path, escaped).await
    }

    /// Dials `unix:path`, as the kubelet does for the services.
    pub async fn unix(path: &Path) -> std::io::Result<Self> {
        Self::dial(path, "localhost".into()).await
    }

    async fn dial(path: &Path, authority: String) -> std::io::Result<Self> {
        let mut stream = UnixStream::connect(path).await?;
        stream
            .write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            .await?;
        stream.write_all(&frame(4, 0, 0, &[])).await?;
        // Answers may be large.
        stream
            .write_all(&frame(8, 0, 0, &(1u32 << 24).to_be_bytes()))
            .await?;
        Ok(Self {
            stream,
            encoder: Encoder::new(),
            decoder: Decoder::new(),
            next: 1,
            authority,
        })
    }

    /// Sends a request; the answer's messages come from [`Self::message`].
    pub async fn send(&mut self, method: &str, message: &impl Message) -> u32 {
        let id = self.next;
        self.next += 2;
        let block = self.encoder.encode([
            (&b":method"[..], &b"POST"[..]),
            (b":scheme", b"http"),
            (b":path", method.as_bytes()),
            (b":authority", self.authority.as_bytes()),
            (b"content-type", b"application/grpc"),
            (b"user-agent", b"grpc-go/1.72.2"),
            (b"te", b"trailers"),
        ]);
        let body = message.encode_to_vec();
        let mut data = vec![0];
        data.extend_from_slice(&(body.len() as u32).to_be_bytes());
        data.extend_from_slice(&body);
        let mut out = frame(1, 4, id, &block);
        let chunks: Vec<_> = data.chunks(16_384).collect();
        for (index, chunk) in chunks.iter().enumerate() {
            out.extend(frame(0, u8::from(index + 1 == chunks.len()), id, chunk));
        }
        let _ = self.stream.write_all(&out).await;
        id
    }

    /// One call with one answer.
    pub async fn call<T: Message + Default>(
        &mut self,
        method: &str,
        message: &impl Message,
    ) -> Result<T, Failure> {
        let id = self.send(method, message).await;
        self.message(id).await
    }

    /// The next message of an answer.
    pub async fn message<T: Message + Default>(&mut self, id: u32) -> Result<T, Failure> {
        let mut data = Vec::new();
        loop {
            let mut head = [0; 9];
            if self.stream.read_exact(&mut head).await.is_err() {
                return Err(Failure::Closed);
            }
            let length = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
            let mut payload = vec![0; length];
            self.stream
                .read_exact(&mut payload)
                .await
                .map_err(|_| Failure::Closed)?;
            let stream = u32::from_be_bytes([head[5], head[6], head[7], head[8]]);
            match (head[3], stream == id) {
                (0, true) => {
                    data.extend_from_slice(&payload);
                    let more = (1u32 << 16).to_be_bytes();
                    let _ = self.stream.write_all(&frame(8, 0, id, &more)).await;
                    if let Some((prefix, rest)) = data.split_first_chunk::<5>() {
                        let length =
                            u32::from_be_bytes([prefix[1], prefix[2], prefix[3], prefix[4]])
                                as usize;
                        if rest.len() >= length {
                            return Ok(T::decode(&rest[..length]).unwrap());
                        }
                    }
                }
                (1, _) => {
                    let headers: BTreeMap<_, _> = self
                        .decoder
                        .decode(&payload)
                        .unwrap()
                        .into_iter()
                        .map(|(name, value)| {
                            (
                                String::from_utf8(name).unwrap(),
                                String::from_utf8(value).unwrap(),
                            )
                        })
                        .collect();
                    let text = |name: &str| headers.get(name).cloned().unwrap_or_default();
                    match headers.get("grpc-status") {
                        Some(status) if stream == id && status != "0" => {
                            return Err(Failure::Status(status.clone(), text("grpc-message")));
                        }
                        Some(_) if stream == id => return Err(Failure::Closed),
                        _ => {}
                    }
                }
                (3, true) => {
                    return Err(Failure::Reset(u32::from_be_bytes(
                        payload.try_into().unwrap(),
                    )));
                }
                (4, _) if head[4] & 1 == 0 => {
                    let _ = self.stream.write_all(&frame(4, 1, 0, &[])).await;
                }
                (6, _) if head[4] & 1 == 0 => {
                    let _ = self.stream.write_all(&frame(6, 1, 0, &payload)).await;
                }
                (7, _) => return Err(Failure::Closed),
                _ => {}
            }
        }
    }
}

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let mut frame = (payload.len() as u32).to_be_bytes()[1..].to_vec();
    frame.extend_from_slice(&[kind, flags]);
    frame.extend_from_slice(&stream.to_be_bytes());
    frame.extend_from_slice(payload);
    frame
}

/// The CDI devices that the kubelet gives to a container which names this request of a claim, or none: all of them. It compares the
/// names as they are (pkg/kubelet/cm/dra/claiminfo.go of 1.36.2), and finds nothing wrong with none.
pub fn given(devices: &[v1::Device], request: Option<&str>) -> Vec<String> {
    let wanted = |device: &&v1::Device| {
        let mut names = device.request_names.iter();
        names.len() == 0 || request.is_none_or(|request| names.any(|name| name == request))
    };
    let given = devices.iter().filter(wanted);
    given
        .flat_map(|device| device.cdi_device_ids.clone())
        .collect()
}

/// A kubelet that has registered a plugin.
pub struct Kubelet {
    pub endpoint: PathBuf,
    pub services: Vec<String>,
}

impl Kubelet {
    /// Finds the plugin in the registry's directory and registers it.
    pub async fn register(registry: &Path) -> Self {
        let mut sockets: Vec<_> = std::fs::read_dir(registry)
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .collect();
        sockets.sort();
        Self::register_socket(sockets.last().expect("a plugin")).await
    }

    pub async fn register_socket(socket: &Path) -> Self {
        let mut connection = Connection::bare(socket).await.unwrap();
        let info: registration::PluginInfo = connection
            .call(
                "/pluginregistration.Registration/GetInfo",
                &registration::InfoRequest {},
            )
            .await
            .expect("GetInfo");
        assert_eq!(
            (info.r#type.as_str(), info.name.as_str()),
            ("DRAPlugin", gpumux_dra::DRIVER)
        );
        let done = registration::RegistrationStatus {
            plugin_registered: true,
            error: String::new(),
        };
        let _: registration::RegistrationStatusResponse = connection
            .call(
                "/pluginregistration.Registration/NotifyRegistrationStatus",
                &done,
            )
            .await
            .unwrap();
        Self {
            endpoint: info.endpoint.into(),
            services: info.supported_versions,
        }
    }

    /// Prepares claims: for each uid its CDI ids by request, or the error.
    pub async fn prepare(
        &self,
        claims: &[v1::Claim],
    ) -> Result<BTreeMap<String, Result<Vec<v1::Device>, String>>, Failure> {
        let mut connection = Connection::unix(&self.endpoint)
            .await
            .map_err(|_| Failure::Closed)?;
        let request = v1::NodePrepareResourcesRequest {
            claims: claims.to_vec(),
        };
        let method = "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodePrepareResources";
        let response: v1::NodePrepareResourcesResponse = connection.call(method, &request).await?;
        let result = |answer: v1::NodePrepareResourceResponse| match answer.error.is_empty() {
            true => Ok(answer.devices),
            false => Err(answer.error),
        };
        Ok(response
            .claims
            .into_iter()
            .map(|(uid, answer)| (uid, result(answer)))
            .collect())
    }

    /// Prepares one claim.
    pub async fn prepare_one(&self, claim: &v1::Claim) -> Result<Vec<v1::Device>, String> {
        let mut all = self
            .prepare(std::slice::from_ref(claim))
            .await
            .map_err(|failure| format!("{failure:?}"))?;
        all.remove(&claim.uid).expect("an entry for each claim")
    }

    /// Unprepares one claim.
    pub async fn unprepare_one(&self, claim: &v1::Claim) -> Result<(), String> {
        let mut connection = Connection::unix(&self.endpoint)
            .await
            .map_err(|error| error.to_string())?;
        let request = v1::NodeUnprepareResourcesRequest {
            claims: vec![claim.clone()],
        };
        let method = "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodeUnprepareResources";
        let mut response: v1::NodeUnprepareResourcesResponse = connection
            .call(method, &request)
            .await
            .map_err(|failure| format!("{failure:?}"))?;
        let answer = response
            .claims
            .remove(&claim.uid)
            .expect("an entry for each claim");
        if answer.error.is_empty() {
            Ok(())
        } else {
            Err(answer.error)
        }
    }

    /// The same in the version for older kubelets.
    pub async fn prepare_old(&self, claim: &v1::Claim) -> Result<Vec<v1::Device>, String> {
        let mut connection = Connection::unix(&self.endpoint).await.unwrap();
        let claims = vec![claim.clone()];
        let method = "/k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin/NodePrepareResources";
        let mut response: v1::NodePrepareResourcesResponse = connection
            .call(method, &v1::NodePrepareResourcesRequest { claims })
            .await
            .unwrap();
        let answer = response
            .claims
            .remove(&claim.uid)
            .expect("an entry for each claim");
        if answer.error.is_empty() {
            Ok(answer.devices)
        } else {
            Err(answer.error)
        }
    }

    /// The first message of the health stream of a version of the service.
    pub async fn health(&self, version: &str) -> health::NodeWatchResourcesResponse {
        let mut connection = Connection::unix(&self.endpoint).await.unwrap();
        let method = format!("/{version}.DRAResourceHealth/NodeWatchResources");
        connection
            .call(&method, &health::NodeWatchResourcesRequest {})
            .await
            .unwrap()
    }
}
