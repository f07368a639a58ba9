//! What can be watched: on the socket, and on TCP.

use super::*;

/// A daemon that is also watched over TCP, with a latency and two batch tenants that run.
async fn watched(dir: &Path, driver: &Driver) -> (Running, String, Vec<[rustix::fd::OwnedFd; 2]>) {
    let config = Config {
        listen: Some("127.0.0.1:0".parse().unwrap()),
        ..config(dir, driver)
    };
    let daemon = Running::with(dir, config).await;
    let mut processes = Vec::new();
    for (n, (name, class)) in [
        ("web", Class::Latency),
        ("day", Class::Batch),
        ("night", Class::Batch),
    ]
    .into_iter()
    .enumerate()
    {
        let created = daemon.create(name, class).await.unwrap();
        processes.push(join(&created, driver, n as u32 + 1));
    }
    daemon
        .until("night", |night| {
            night.domains.iter().any(|d| d.timeslice_us == 1)
        })
        .await;
    daemon.until("day", |day| !day.domains.is_empty()).await;
    let listen = daemon.client.status().await.unwrap().listen.unwrap();
    (daemon, listen, processes)
}

/// The answer to a plain request, up to where `enough` says so.
async fn http(address: &str, request: &str, enough: impl Fn(&str) -> bool) -> String {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    let read = async {
        while stream.read_buf(&mut answer).await.unwrap() > 0 {
            if enough(&String::from_utf8_lossy(&answer)) {
                break;
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(20), read)
        .await
        .unwrap();
    String::from_utf8(answer).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_happens_is_measured_explained_and_traced() {
    let dir = TempDir::new().unwrap();
    let driver = Driver::start(dir.path(), "driver.sock");
    let (daemon, _, processes) = watched(dir.path(), &driver).await;
    let metrics = daemon.client.metrics().await.unwrap();
    let names = crate::api::lint_metrics(&metrics);
    assert!(names.contains("gpumux_tenant_received_seconds_total"));
    assert!(
        metrics.contains(r#"gpumux_tenant_domains{tenant="web",device="GPU-0"} 1"#),
        "{metrics}"
    );
    assert!(
        metrics.contains(r#"gpumux_control_seconds_count{device="GPU-0",control="set_timeslice"}"#),
        "{metrics}"
    );

    let text = daemon.client.explanation("day").await.unwrap().text;
    assert!(
        text.starts_with("entitled: a batch tenant") && text.contains(" (latency, "),
        "{text}"
    );
    assert_eq!(refusal(daemon.client.explanation("nobody").await).0, 404);

    // What a tenant had is not forgotten when its process ends, as long as it lives itself.
    let freezes = |text: &str| -> Vec<String> {
        let lines = text
            .lines()
            .filter(|line| line.starts_with("gpumux_tenant_slice_changes_total"));
        lines.map(str::to_owned).collect()
    };
    let before = freezes(&metrics);
    drop(processes);
    daemon.until("web", |web| web.domains.is_empty()).await;
    daemon
        .until("night", |night| night.domains.is_empty())
        .await;
    daemon.until("day", |day| day.domains.is_empty()).await;
    let after = freezes(&daemon.client.metrics().await.unwrap());
    assert_eq!(after.len(), 3, "{before:?} {after:?}");

    let trace = daemon.client.trace(60.0).await.unwrap();
    let trace: serde_json::Value = serde_json::from_str(&trace).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let has = |key: &str, value: &str| {
        events
            .iter()
            .any(|e| e[key] == value || e["args"]["name"] == value)
    };
    assert!(
        has("name", "came") && has("name", "left") && has("name", "slice 1000000 µs"),
        "{trace:#}"
    );
    assert!(
        has("", &format!("web (process {})", std::process::id())),
        "{trace:#}"
    );
    assert_eq!(refusal(daemon.client.trace(0.0).await).0, 422);
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn over_tcp_everything_can_be_watched_and_nothing_changed() {
    let dir = TempDir::new().unwrap();
    let driver = Driver::start(dir.path(), "driver.sock");
    let (daemon, address, _processes) = watched(dir.path(), &driver).await;
    let ask = async |method: &str, path: &str, host: &str| {
        let request =
            format!("{method} {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n");
        http(&address, &request, |_| false).await
    };
    let metrics = ask("GET", "/metrics", &address).await;
    assert!(
        metrics.contains("application/openmetrics-text") && metrics.ends_with("# EOF\n"),
        "{metrics}"
    );
    let page = ask("GET", "/", "localhost:9440").await;
    assert!(
        page.contains("<title>gpumux</title>") && page.contains("content-security-policy"),
        "{page}"
    );
    for (method, path) in [
        ("DELETE", "/v1/tenants/web"),
        ("PATCH", "/v1/tenants/web"),
        ("POST", "/v1/tenants"),
    ] {
        let answer = ask(method, path, &address).await;
        assert!(answer.starts_with("HTTP/1.1 405"), "{answer}");
    }
    let foreign = ask("GET", "/v1/tenants", "attacker.example").await;
    assert!(foreign.starts_with("HTTP/1.1 421"), "{foreign}");
    // Two moments of what is live.
    let request = format!("GET /v1/live HTTP/1.1\r\nhost: {address}\r\n\r\n");
    let live = http(&address, &request, |text| {
        text.matches("data: ").count() >= 2
    })
    .await;
    let first = live
        .lines()
        .find_map(|line| line.strip_prefix("data: "))
        .unwrap();
    let first: crate::api::types::Live = serde_json::from_str(first).unwrap();
    assert_eq!(first.tenants.len(), 3);
    daemon.stop().await;
}
