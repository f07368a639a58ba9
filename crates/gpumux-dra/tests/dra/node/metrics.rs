//! Metrics with the names of pods.

use super::*;

/// A kubelet that says which containers use which claims.
struct Lister;

#[tonic::async_trait]
impl pod_resources::pod_resources_lister_server::PodResourcesLister for Lister {
    async fn list(
        &self,
        _: tonic::Request<pod_resources::ListPodResourcesRequest>,
    ) -> Result<tonic::Response<pod_resources::ListPodResourcesResponse>, tonic::Status> {
        let claim = pod_resources::DynamicResource {
            claim_name: "first".into(),
            claim_namespace: "team".into(),
        };
        let container = pod_resources::ContainerResources {
            name: "engine".into(),
            dynamic_resources: vec![claim],
        };
        let pod = pod_resources::PodResources {
            name: "serve-0".into(),
            namespace: "team".into(),
            containers: vec![container],
        };
        Ok(tonic::Response::new(
            pod_resources::ListPodResourcesResponse {
                pod_resources: vec![pod],
            },
        ))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_scrape_names_pods_and_containers() {
    let mut node = Node::new().await;
    let (driver, kubelet) = node.start().await;
    let claim = node.half("first");
    kubelet.prepare_one(&claim).await.unwrap();
    let pod_resources = node.path("pod-resources.sock");
    let listener = tokio::net::UnixListener::bind(&pod_resources).unwrap();
    let lister = pod_resources::pod_resources_lister_server::PodResourcesListerServer::new(Lister);
    let incoming = tokio_stream::wrappers::UnixListenerStream::new(listener);
    tokio::spawn(
        tonic::transport::Server::builder()
            .add_service(lister)
            .serve_with_incoming(incoming),
    );
    let router = gpumux_dra::metrics::router(gpumux_dra::metrics::Endpoints {
        engine: driver.engine.clone(),
        pod_resources,
        published: driver.published.clone(),
        authenticate: true,
    });
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, router).await });
    let get = async |token: &str| {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
        let request = format!("GET /metrics HTTP/1.0\r\nAuthorization: Bearer {token}\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    };
    for (token, code) in [("", "401"), ("forged", "403"), ("other", "403")] {
        let answer = get(token).await;
        assert!(answer.starts_with(&format!("HTTP/1.0 {code}")), "{answer}");
        assert!(!answer.contains("serve-0"), "{answer}");
    }
    let text = get("reader").await;
    // All of its share is there for a pod that has used nothing yet.
    let idle = text
        .lines()
        .find(|line| line.starts_with("DCGM_FI_DEV_GPU_UTIL{"))
        .expect("a sample");
    assert!(
        idle.contains(r#"pod="serve-0""#) && idle.ends_with("} 0"),
        "{idle}"
    );
    let guaranteed = text
        .lines()
        .find(|line| line.starts_with("gpumux_pod_guaranteed_share{"))
        .expect("a series");
    for part in [
        r#"namespace="team""#,
        r#"pod="serve-0""#,
        r#"container="engine""#,
        r#"claim="first""#,
        "} 0.5",
    ] {
        assert!(guaranteed.contains(part), "{guaranteed}");
    }
    assert!(text.contains("gpumux_dra_prepared_claims 1\n"), "{text}");
    driver.stop().await;
}
