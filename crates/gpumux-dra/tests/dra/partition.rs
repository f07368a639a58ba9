//! A network that is cut between the driver and the API server: packets are lost in both directions, and no connection ends.

use gpumux_dra::start;
use serde_json::json;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::watch,
};

use crate::support::{api, kubelet::Kubelet, node::Node};

/// A way to a server which can be cut.
struct Network {
    uri: String,
    open: watch::Sender<bool>,
}

impl Network {
    async fn to(server: &str) -> Self {
        let server = server.strip_prefix("http://").unwrap().to_owned();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let uri = format!("http://{}", listener.local_addr().unwrap());
        let (open, opened) = watch::channel(true);
        tokio::spawn(async move {
            while let Ok((near, _)) = listener.accept().await {
                let far = TcpStream::connect(&server).await.unwrap();
                let ((near_in, near_out), (far_in, far_out)) =
                    (near.into_split(), far.into_split());
                tokio::spawn(pass(near_in, far_out, opened.clone()));
                tokio::spawn(pass(far_in, near_out, opened.clone()));
            }
        });
        Self { uri, open }
    }

    fn cut(&self) {
        self.open.send_replace(false);
    }

    fn mend(&self) {
        self.open.send_replace(true);
    }
}

/// One direction of a connection. What is sent while it is cut arrives later, as TCP does it.
async fn pass(
    mut from: impl AsyncReadExt + Unpin,
    mut to: impl AsyncWriteExt + Unpin,
    mut open: watch::Receiver<bool>,
) {
    let mut bytes = vec![0; 16 << 10];
    while let Ok(length @ 1..) = from.read(&mut bytes).await {
        if open.wait_for(|open| *open).await.is_err()
            || to.write_all(&bytes[..length]).await.is_err()
        {
            return;
        }
    }
    let _ = to.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn cut_network_stops_no_claim_that_is_known_and_heals() {
    let mut node = Node::new().await;
    let network = Network::to(&node.api.uri).await;
    let driver = start(node.config(), api::client(&network.uri))
        .await
        .unwrap();
    let kubelet = Kubelet::register(&node.config().places.registry).await;
    node.api.until_published().await;
    let mut claim = |name: &str| {
        let half = json!({"compute": "400"});
        node.claim(name, "gpumux-guaranteed", half, None)
    };
    let [kept, gone] = ["kept", "gone"].map(&mut claim);
    for claim in [&kept, &gone] {
        kubelet.prepare_one(claim).await.unwrap();
    }
    network.cut();
    // The kubelet starts pods again, and ends them.
    kubelet.prepare_one(&kept).await.unwrap();
    kubelet.unprepare_one(&gone).await.unwrap();
    assert!(node.tenant(&gone).await.is_none());
    assert!(node.tenant(&kept).await.is_some());
    // What it does not know is refused, and the kubelet asks again.
    let error = kubelet.prepare_one(&gone).await.unwrap_err();
    assert!(error.contains("API server"), "{error}");
    assert_eq!(node.records(), 1);
    network.mend();
    kubelet.prepare_one(&gone).await.unwrap();
    assert!(node.tenant(&gone).await.is_some());
    // What changed while the network was cut is found.
    network.cut();
    node.api.wipe_slices();
    network.mend();
    node.api.until_published().await;
    driver.stop().await;
}
