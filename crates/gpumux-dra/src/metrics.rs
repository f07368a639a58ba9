//! What pods get of the devices, as Prometheus text: gpumux's own series, and the one that routers read from NVIDIA's
//! exporter, so that they turn away from replicas that have no headroom.

use std::{
    collections::BTreeMap,
    fmt::Write,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use axum::{
    Router,
    extract::State,
    http::{HeaderMap, StatusCode, header::AUTHORIZATION},
    routing::get,
};
use gpumux_daemon::api::types::{Domain, Tenant};
use k8s_openapi::api::{
    authentication::v1::{TokenReview, TokenReviewSpec},
    authorization::v1::{NonResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec},
};
use kube::{Api, Client, api::PostParams};
use tokio::sync::watch;
use tonic::transport::Endpoint;

use crate::{
    checkpoint::Record,
    claim::Share,
    device::Device,
    model::{Resource, Use},
    prepare::Engine,
    proto::pod_resources::{
        ListPodResourcesRequest, pod_resources_lister_client::PodResourcesListerClient,
    },
    publish::Published,
};

/// How long the kubelet or the daemon may take before a scrape goes on without it.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long an answer of the API server about a token holds, and how many are kept.
const ANSWER_HOLDS: Duration = Duration::from_secs(60);
const ANSWERS: usize = 64;

/// A container that uses a claim.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct User {
    /// The pod.
    pub pod: String,
    /// The container; empty where the kubelet does not say.
    pub container: String,
}

/// The pods that use a claim, by namespace and name.
pub type Users = BTreeMap<(String, String), Vec<User>>;

/// Asks the kubelet which containers use which claims.
///
/// # Errors
/// No kubelet there, or one that does not know.
pub async fn users(socket: &Path) -> Result<Users, String> {
    let endpoint =
        Endpoint::from_shared(format!("unix://{}", socket.display())).map_err(|e| e.to_string())?;
    let channel = endpoint
        .connect_timeout(PATIENCE)
        .timeout(PATIENCE)
        .connect()
        .await
        .map_err(|e| e.to_string())?;
    // A node has at most some hundred pods.
    let mut client = PodResourcesListerClient::new(channel).max_decoding_message_size(64 << 20);
    let answer = client
        .list(ListPodResourcesRequest {})
        .await
        .map_err(|e| e.to_string())?;
    let mut users = Users::new();
    for pod in answer.into_inner().pod_resources {
        for container in pod.containers {
            for resource in container.dynamic_resources {
                let user = User {
                    pod: pod.name.clone(),
                    container: container.name.clone(),
                };
                users
                    .entry((resource.claim_namespace, resource.claim_name))
                    .or_default()
                    .push(user);
            }
        }
    }
    Ok(users)
}

/// What is said at a scrape.
#[derive(Debug, Default)]
pub struct Facts {
    /// The node.
    pub node: String,
    /// Its devices.
    pub devices: Vec<Device>,
    /// The claims that are prepared.
    pub records: Vec<Arc<Record>>,
    /// The daemon's tenants.
    pub tenants: Vec<Tenant>,
    /// The pods that use the claims.
    pub users: Users,
    /// What is published.
    pub published: Published,
}

/// The series of tenants: name, type, help, and the value of one domain on the tenant's device.
type Series = (
    &'static str,
    &'static str,
    &'static str,
    fn(&Tenant, Option<&Domain>) -> Option<f64>,
);

const SERIES: [Series; 11] = [
    (
        "DCGM_FI_DEV_GPU_UTIL",
        "gauge",
        "Percent of what the pod is entitled to that it uses: at 100 it has no headroom.",
        // Also of a pod that has used nothing yet: a router gives one without a sample no requests.
        |_, domain| Some(domain.map_or(0.0, utilization)),
    ),
    (
        "gpumux_pod_guaranteed_share",
        "gauge",
        "Share of the device that is always there when the pod wants it.",
        |tenant, _| Some(tenant.spec.guaranteed),
    ),
    (
        "gpumux_pod_limit_share",
        "gauge",
        "Share of the device that the pod never exceeds while others want it.",
        |tenant, _| Some(tenant.spec.limit),
    ),
    (
        "gpumux_pod_entitled_share",
        "gauge",
        "Share that the pod gets if all on the device want it.",
        |_, domain| domain.map(|domain| domain.entitled_share),
    ),
    (
        "gpumux_pod_received_share",
        "gauge",
        "Share that the pod received in the last second or two.",
        |_, domain| domain.map(|domain| domain.received_share),
    ),
    (
        "gpumux_pod_received_seconds_total",
        "counter",
        "Device time received.",
        |_, domain| domain.map(|domain| seconds(domain.received_us)),
    ),
    (
        "gpumux_pod_runnable_seconds_total",
        "counter",
        "Time in which the pod had work.",
        |_, domain| domain.map(|domain| seconds(domain.runnable_us)),
    ),
    (
        "gpumux_pod_waited_seconds_total",
        "counter",
        "Time in which the pod had work and did not run; a wait for memory does not count.",
        |_, domain| domain.map(|domain| seconds(domain.waited_us)),
    ),
    (
        "gpumux_pod_preemptions_total",
        "counter",
        "Times that the pod was frozen while it had work; switches between timeslices do not count.",
        |_, domain| domain.map(|domain| domain.preemptions as f64),
    ),
    (
        "gpumux_pod_frozen",
        "gauge",
        "Whether the pod is off the device now.",
        |_, domain| domain.map(|domain| f64::from(u8::from(domain.frozen))),
    ),
    (
        "gpumux_pod_processes",
        "gauge",
        "Processes of the pod that use the device.",
        |tenant, _| Some(tenant.pids.len() as f64),
    ),
];

/// Percent of its entitlement that a domain uses. What it may borrow is no headroom that a router should count on.
fn utilization(domain: &Domain) -> f64 {
    if domain.entitled_share <= 0.0 {
        // Entitled to nothing: it has headroom as long as it does not wait.
        return if domain.frozen {
            100.0
        } else {
            (domain.received_share * 100.0).clamp(0.0, 100.0)
        };
    }
    (domain.received_share / domain.entitled_share * 100.0).clamp(0.0, 100.0)
}

fn seconds(us: u64) -> f64 {
    us as f64 / 1e6
}

/// The text of a scrape.
pub fn render(facts: &Facts) -> String {
    let mut out = String::new();
    for (name, kind, help, value) in SERIES {
        head(&mut out, name, kind, help);
        for record in &facts.records {
            let one = (record.claim.namespace.clone(), record.claim.name.clone());
            // Without the kubelet's word, the claim says which pods, but not which containers.
            let reserved: Vec<_> = record
                .pods
                .iter()
                .map(|(pod, _)| User {
                    pod: pod.clone(),
                    container: String::new(),
                })
                .collect();
            let users = facts.users.get(&one).unwrap_or(&reserved);
            for (share, &tenant) in record.shares.iter().zip(&record.tenant_of) {
                let found = tenant
                    .and_then(|tenant| record.tenants.get(tenant))
                    .map(|tenant| &tenant.name);
                let Some(tenant) = facts
                    .tenants
                    .iter()
                    .find(|tenant| Some(&tenant.name) == found)
                else {
                    continue;
                };
                let domain = busiest(tenant, &share.of.uuid);
                let Some(value) = value(tenant, domain.as_ref()) else {
                    continue;
                };
                for user in users {
                    let labels = labels(&facts.node, record, share, tenant, user);
                    let _ = writeln!(out, "{name}{{{labels}}} {value}");
                }
            }
        }
    }
    let free = "gpumux_device_free";
    head(
        &mut out,
        free,
        "gauge",
        "What of a device is not guaranteed to any claim: milli-GPU, bytes, tenants.",
    );
    // What of an instance that is made for one claim is free says nothing: the slices of its GPU do.
    for device in facts.devices.iter().filter(|it| it.offer.is_none()) {
        let mut left = device.capacity();
        for share in facts.records.iter().flat_map(|record| &record.shares) {
            if share.of.uuid == device.uuid {
                let used = match share.usage {
                    Use::Shared(amounts) => amounts,
                    Use::Whole => left,
                    Use::Admin => continue,
                };
                left.compute = left.compute.saturating_sub(used.compute);
                left.memory = left.memory.saturating_sub(used.memory);
                left.clients = left.clients.saturating_sub(used.clients);
            }
        }
        for resource in Resource::ALL {
            let labels = pairs(&[
                ("Hostname", &facts.node),
                ("UUID", &device.uuid),
                ("resource", resource.name()),
            ]);
            let _ = writeln!(out, "{free}{{{labels}}} {}", left.get(resource));
        }
    }
    head(
        &mut out,
        "gpumux_device_healthy",
        "gauge",
        "Whether a device works.",
    );
    for device in &facts.devices {
        let labels = pairs(&[("Hostname", &facts.node), ("UUID", &device.uuid)]);
        let _ = writeln!(
            out,
            "gpumux_device_healthy{{{labels}}} {}",
            u8::from(device.fault.is_none())
        );
    }
    head(
        &mut out,
        "gpumux_dra_prepared_claims",
        "gauge",
        "Claims that are prepared on the node.",
    );
    let _ = writeln!(out, "gpumux_dra_prepared_claims {}", facts.records.len());
    head(
        &mut out,
        "gpumux_dra_pool_generation",
        "gauge",
        "Generation of the published pool.",
    );
    let _ = writeln!(
        out,
        "gpumux_dra_pool_generation {}",
        facts.published.generation
    );
    out
}

fn head(out: &mut String, name: &str, kind: &str, help: &str) {
    let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}");
}

/// A tenant's domains on one device as one: what they received together, and what the first of them is entitled to.
fn busiest(tenant: &Tenant, uuid: &str) -> Option<Domain> {
    let mut own = tenant.domains.iter().filter(|domain| domain.device == uuid);
    let mut sum = own.next()?.clone();
    for domain in own {
        sum.received_share += domain.received_share;
        sum.received_us += domain.received_us;
        sum.runnable_us += domain.runnable_us;
        sum.waited_us += domain.waited_us;
        sum.preemptions += domain.preemptions;
        sum.frozen &= domain.frozen;
    }
    Some(sum)
}

/// Labels as NVIDIA's exporter has them, and gpumux's own.
fn labels(node: &str, record: &Record, share: &Share, tenant: &Tenant, user: &User) -> String {
    let index = share
        .of
        .minor
        .map(|minor| minor.to_string())
        .unwrap_or_default();
    let device = share
        .of
        .minor
        .map(|minor| format!("nvidia{minor}"))
        .unwrap_or_default();
    pairs(&[
        ("gpu", &index),
        ("UUID", &share.of.uuid),
        ("device", &device),
        ("modelName", &share.of.product),
        ("Hostname", node),
        ("namespace", &record.claim.namespace),
        ("pod", &user.pod),
        ("container", &user.container),
        ("claim", &record.claim.name),
        ("request", &share.request),
        ("class", tenant.class.name()),
    ])
}

fn pairs(labels: &[(&str, &str)]) -> String {
    let escape = |value: &str| {
        value
            .replace('\\', "\\\\")
            .replace('"', "\\\"")
            .replace('\n', "\\n")
    };
    labels
        .iter()
        .map(|(name, value)| format!("{name}=\"{}\"", escape(value)))
        .collect::<Vec<_>>()
        .join(",")
}

/// What the HTTP endpoint needs.
#[derive(Clone)]
pub struct Endpoints {
    /// For records, devices and the daemon.
    pub engine: Engine,
    /// The kubelet's socket that lists the devices of each pod.
    pub pod_resources: PathBuf,
    /// Follows the publisher.
    pub published: watch::Receiver<Published>,
    /// Only clients that, by the API server, may `get` the path `/metrics`.
    pub authenticate: bool,
}

/// Answers of the API server about tokens, and when they were given.
type Known = Mutex<BTreeMap<String, (Instant, bool)>>;

/// Whether this token's owner may read metrics.
async fn may_read(client: &Client, known: &Known, token: &str) -> Result<bool, kube::Error> {
    let lock = || known.lock().unwrap_or_else(PoisonError::into_inner);
    let before = lock().get(token).copied();
    if let Some((_, allowed)) = before.filter(|(at, _)| at.elapsed() < ANSWER_HOLDS) {
        return Ok(allowed);
    }
    let review = TokenReview {
        spec: TokenReviewSpec {
            token: token.to_owned(),
            ..TokenReviewSpec::default()
        },
        ..TokenReview::default()
    };
    let status = Api::all(client.clone())
        .create(&PostParams::default(), &review)
        .await?
        .status
        .unwrap_or_default();
    let user = status.user.unwrap_or_default();
    let review = SubjectAccessReview {
        spec: SubjectAccessReviewSpec {
            user: user.username,
            uid: user.uid,
            groups: user.groups,
            extra: user.extra,
            non_resource_attributes: Some(NonResourceAttributes {
                path: Some("/metrics".to_owned()),
                verb: Some("get".to_owned()),
            }),
            ..SubjectAccessReviewSpec::default()
        },
        ..SubjectAccessReview::default()
    };
    let allowed = status.authenticated == Some(true)
        && Api::all(client.clone())
            .create(&PostParams::default(), &review)
            .await?
            .status
            .is_some_and(|status| status.allowed);
    let mut all = lock();
    all.retain(|_, (at, _)| at.elapsed() < ANSWER_HOLDS);
    if all.len() < ANSWERS {
        all.insert(token.to_owned(), (Instant::now(), allowed));
    }
    Ok(allowed)
}

/// `/metrics`.
pub fn router(endpoints: Endpoints) -> Router {
    Router::new()
        .route("/metrics", get(metrics))
        .with_state((endpoints, Arc::new(Known::default())))
}

async fn metrics(
    State((endpoints, known)): State<(Endpoints, Arc<Known>)>,
    headers: HeaderMap,
) -> (StatusCode, String) {
    if endpoints.authenticate {
        let header = headers.get(AUTHORIZATION).and_then(|it| it.to_str().ok());
        let Some(token) = header.and_then(|it| it.strip_prefix("Bearer ")) else {
            let why = "name a token of the cluster: Authorization: Bearer TOKEN\n";
            return (StatusCode::UNAUTHORIZED, why.to_owned());
        };
        let asked = may_read(&endpoints.engine.kube, &known, token);
        match tokio::time::timeout(PATIENCE, asked).await {
            Ok(Ok(true)) => {}
            Ok(Ok(false)) => {
                let why = "the token's owner may not `get` the path /metrics: bind the chart's role metrics-reader to it\n";
                return (StatusCode::FORBIDDEN, why.to_owned());
            }
            Ok(Err(error)) => return (StatusCode::SERVICE_UNAVAILABLE, format!("{error}\n")),
            Err(_) => {
                let why = "the API server does not answer\n";
                return (StatusCode::SERVICE_UNAVAILABLE, why.to_owned());
            }
        }
    }
    let engine = &endpoints.engine;
    let (tenants, users) = tokio::join!(
        tokio::time::timeout(PATIENCE, engine.daemon.tenants()),
        tokio::time::timeout(PATIENCE, users(&endpoints.pod_resources)),
    );
    let records = match engine.store.all() {
        Ok(records) => records,
        Err(error) => return (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")),
    };
    let tenants = match tenants {
        Ok(Ok(tenants)) => tenants,
        _ => Vec::new(),
    };
    let text = render(&Facts {
        node: engine.node.clone(),
        devices: engine.devices.borrow().to_vec(),
        records,
        tenants,
        users: users.ok().and_then(Result::ok).unwrap_or_default(),
        published: endpoints.published.borrow().clone(),
    });
    (StatusCode::OK, text)
}

#[cfg(test)]
mod tests {
    use gpumux_core::{Class, Demand};
    use gpumux_daemon::api::types::{TenantSpec, TenantState};

    use super::*;
    use crate::{checkpoint::tests::record, slices::tests::device};

    fn tenant(received: f64) -> Tenant {
        let spec = TenantSpec {
            guaranteed: 0.5,
            class: Class::Latency,
            ..TenantSpec::default()
        };
        Tenant {
            name: "k8s-a-0".into(),
            class: spec.class,
            spec,
            pids: vec![1],
            devices: vec![device(0).uuid],
            state: TenantState::Running,
            domains: vec![Domain {
                id: 1,
                device: device(0).uuid,
                pid: 1,
                timeslice_us: 2000,
                demand: Demand::Busy,
                entitled_share: 0.5,
                received_share: received,
                received_us: 1_500_000,
                runnable_us: 2_000_000,
                waited_us: 500_000,
                preemptions: 3,
                ..Domain::default()
            }],
            ..Tenant::default()
        }
    }

    fn facts(received: f64) -> Facts {
        Facts {
            node: "node1".into(),
            devices: vec![device(0)],
            records: vec![Arc::new(record("a", 500))],
            tenants: vec![tenant(received)],
            users: Users::from([(
                ("ns".into(), "claim-a".into()),
                vec![User {
                    pod: "serve-0".into(),
                    container: "engine".into(),
                }],
            )]),
            published: Published::default(),
        }
    }

    #[test]
    fn a_router_finds_its_pod_and_how_little_headroom_it_has() {
        let line = |received| {
            let text = render(&facts(received));
            let line = text
                .lines()
                .find(|line| line.starts_with("DCGM_FI_DEV_GPU_UTIL{"))
                .unwrap();
            line.to_owned()
        };
        for label in [
            r#"pod="serve-0""#,
            r#"namespace="ns""#,
            r#"container="engine""#,
            r#"claim="claim-a""#,
        ] {
            assert!(line(0.25).contains(label), "{}", line(0.25));
        }
        assert!(line(0.25).ends_with("} 50"), "{}", line(0.25));
        assert!(line(0.9).ends_with("} 100"), "{}", line(0.9));
    }

    #[test]
    fn the_text_is_what_prometheus_reads() {
        let text = render(&facts(0.5));
        let mut typed = std::collections::BTreeSet::new();
        for line in text.lines() {
            if let Some(rest) = line.strip_prefix("# TYPE ") {
                let (name, kind) = rest.split_once(' ').unwrap();
                assert!(matches!(kind, "gauge" | "counter"));
                assert!(typed.insert(name.to_owned()), "{name} twice");
                assert_eq!(kind == "counter", name.ends_with("_total"), "{name}");
            } else if !line.starts_with('#') {
                let (series, value) = line.rsplit_once(' ').unwrap();
                assert!(typed.contains(series.split('{').next().unwrap()), "{line}");
                assert!(value.parse::<f64>().is_ok(), "{line}");
            }
        }
        assert!(text.contains(r#"resource="compute"} 500"#), "{text}");
        assert_eq!(pairs(&[("a", "x\"y\\\n")]), r#"a="x\"y\\\n""#);
    }

    #[test]
    fn without_the_kubelet_pods_come_from_the_claim() {
        let text = render(&Facts {
            users: Users::new(),
            ..facts(0.5)
        });
        assert!(text.contains(r#"pod="pod",container="""#), "{text}");
    }
}
