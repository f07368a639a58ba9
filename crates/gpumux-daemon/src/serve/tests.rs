//! The whole daemon, asked through its own client.

mod watching;

use std::{os::fd::AsFd, path::Path};

use gpumux_core::Class;
use gpumux_wire::{Daemon, socket};
use rustix::net::{RecvFlags, SendFlags, SocketFlags};
use tempfile::TempDir;
use tokio::{sync::oneshot, task::JoinHandle};

use super::*;
use crate::{
    api::types::{Created, NewTenant, SpecChange, Tenant, TenantState},
    client::{Client, ClientError},
    fake::{self, Driver},
};

struct Running {
    client: Client,
    stop: oneshot::Sender<()>,
    task: JoinHandle<Result<(), Error>>,
}

impl Running {
    /// Starts a daemon and waits until it is ready.
    async fn start(dir: &Path, driver: &Driver) -> Self {
        Self::with(dir, config(dir, driver)).await
    }

    async fn with(dir: &Path, config: Config) -> Self {
        let (stop, stopped) = oneshot::channel();
        let task = tokio::spawn(serve(config, Place::Threads, async { drop(stopped.await) }));
        let client = Client::new(dir);
        while client.status().await.is_err() {
            assert!(!task.is_finished(), "{:?}", task.await);
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        Self { client, stop, task }
    }

    async fn stop(self) {
        self.stop.send(()).unwrap();
        self.task.await.unwrap().unwrap();
    }

    async fn create(&self, name: &str, class: Class) -> Result<Created, ClientError> {
        let spec = SpecChange {
            class: Some(class),
            ..SpecChange::default()
        };
        self.client
            .create(&NewTenant {
                name: Some(name.into()),
                spec,
                ..NewTenant::default()
            })
            .await
    }

    /// Waits until a tenant is so.
    async fn until(&self, name: &str, so: impl Fn(&Tenant) -> bool) -> Tenant {
        let wait = async {
            loop {
                let tenant = self.client.tenant(name).await.unwrap();
                if so(&tenant) {
                    return tenant;
                }
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), wait)
            .await
            .expect(name)
    }
}

fn config(dir: &Path, driver: &Driver) -> Config {
    Config {
        runtime_dir: Some(dir.into()),
        emulated: Some(driver.socket.clone()),
        nvml: Some("/nonexistent/libnvidia-ml.so".into()),
        ..Config::default()
    }
}

/// A process of a tenant with one group; returns its session and control file.
fn join(created: &Created, driver: &Driver, client: u32) -> [rustix::fd::OwnedFd; 2] {
    let session = socket::connect(Path::new(&created.socket), SocketFlags::empty()).unwrap();
    let (hello, _, page) = fake::hello(Some(&created.token));
    socket::send(&session, &hello, Some(page.as_fd()), SendFlags::empty()).unwrap();
    let answer = socket::recv::<Daemon>(&session, RecvFlags::empty())
        .unwrap()
        .unwrap()
        .0;
    assert!(matches!(answer, Daemon::Welcome { tenant, .. } if tenant == created.name));
    let control = driver.open();
    let group = fake::group(0, client);
    socket::send(&session, &group, Some(control.as_fd()), SendFlags::empty()).unwrap();
    [session, control]
}

fn refusal<T: std::fmt::Debug>(result: Result<T, ClientError>) -> (u16, String) {
    match result {
        Err(ClientError::Refused { status, message }) => (status, message),
        other => panic!("{other:?} instead of a refusal"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tenant_from_its_making_to_its_end() {
    let dir = TempDir::new().unwrap();
    let driver = Driver::start(dir.path(), "driver.sock");
    let daemon = Running::start(dir.path(), &driver).await;
    let created = daemon.create("train", Class::Batch).await.unwrap();
    let waiting = daemon.client.tenant("train").await.unwrap();
    assert_eq!(
        (waiting.state, waiting.class),
        (TenantState::Starting, Class::Batch)
    );
    assert_eq!(waiting.uid, rustix::process::getuid().as_raw());
    let server = daemon.create("server", Class::Latency).await.unwrap();
    let _train = join(&created, &driver, 1);
    let _server = join(&server, &driver, 2);
    let sliced = |us| move |tenant: &Tenant| tenant.domains.iter().any(|d| d.timeslice_us == us);
    let running = daemon.until("train", sliced(1)).await;
    assert_eq!(running.state, TenantState::Running);
    assert_eq!(running.pids, [std::process::id()]);
    assert_eq!(running.devices, ["GPU-0"]);
    daemon.until("server", sliced(1_000_000)).await;
    let (status, message) = refusal(daemon.client.delete("train").await);
    assert_eq!(status, 409, "{message}");

    let change = SpecChange {
        class: Some(Class::Latency),
        ..SpecChange::default()
    };
    let changed = daemon.client.change("train", &change).await.unwrap();
    assert_eq!(changed.class, Class::Latency);
    // Two of which nothing tells that they have short requests share by timeslices.
    for name in ["train", "server"] {
        let tenant = daemon.until(name, sliced(2_048)).await;
        assert!(!tenant.domains[0].frozen, "{tenant:?}");
    }

    let status = daemon.client.status().await.unwrap();
    assert_eq!(
        (status.tenants, status.sessions, status.devices.len()),
        (2, 2, 1)
    );
    drop(_train);
    daemon.until("train", |tenant| tenant.pids.is_empty()).await;
    daemon.client.delete("train").await.unwrap();
    assert_eq!(refusal(daemon.client.tenant("train").await).0, 404);
    daemon.stop().await;
    assert!(!driver.clients().is_empty());
    assert!(
        driver
            .clients()
            .values()
            .all(|client| !client.frozen && client.slice == 2048)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn guarantee_that_does_not_fit_is_refused() {
    let dir = TempDir::new().unwrap();
    let driver = Driver::start(dir.path(), "driver.sock");
    let daemon = Running::start(dir.path(), &driver).await;
    daemon.create("a", Class::Standard).await.unwrap();
    let before = daemon.client.tenant("a").await.unwrap();
    let change = |guaranteed, weight| SpecChange {
        guaranteed,
        weight,
        ..SpecChange::default()
    };
    for (change, message) in [
        (change(Some(1.5), None), "guaranteed 1.5 is not a share"),
        (change(None, Some(-1.0)), "weight -1 is out of range"),
        (change(Some(f64::NAN), None), "guaranteed NaN"),
    ] {
        let (status, said) = refusal(daemon.client.change("a", &change).await);
        assert!(status == 422 && said.contains(message), "{status} {said}");
    }
    assert_eq!(daemon.client.tenant("a").await.unwrap(), before);
    let (status, said) = refusal(daemon.client.change("b", &change(None, None)).await);
    assert_eq!(
        (status, said.contains("no tenant is called `b`")),
        (404, true),
        "{said}"
    );
    let (status, said) = refusal(daemon.create("a", Class::Batch).await);
    assert_eq!(
        (status, said.contains("`a` lives already")),
        (409, true),
        "{said}"
    );
    let (status, said) = refusal(daemon.create("../a b", Class::Batch).await);
    assert_eq!((status, said.contains("no name")), (422, true), "{said}");
    let new = |guaranteed| NewTenant {
        program: Some("/usr/bin/python3".into()),
        spec: SpecChange {
            guaranteed: Some(guaranteed),
            ..SpecChange::default()
        },
        ..NewTenant::default()
    };
    assert_eq!(
        daemon.client.create(&new(0.6)).await.unwrap().name,
        "python3"
    );
    assert_eq!(
        daemon.client.create(&new(0.3)).await.unwrap().name,
        "python3-2"
    );
    let (status, said) = refusal(daemon.client.create(&new(0.2)).await);
    assert_eq!(
        (status, said.contains("guarantee at most 10%")),
        (422, true),
        "{said}"
    );
    assert_eq!(daemon.client.tenants().await.unwrap().len(), 3);
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restarted_daemon_knows_its_tenants() {
    let dir = TempDir::new().unwrap();
    let driver = Driver::start(dir.path(), "driver.sock");
    let daemon = Running::start(dir.path(), &driver).await;
    let created = daemon.create("train", Class::Batch).await.unwrap();
    let change = SpecChange {
        weight: Some(3.0),
        ..SpecChange::default()
    };
    daemon.client.change("train", &change).await.unwrap();
    let before = daemon.client.tenant("train").await.unwrap();
    let session = join(&created, &driver, 1);
    daemon
        .until("train", |tenant| !tenant.domains.is_empty())
        .await;
    daemon.stop().await;
    let bye = socket::recv::<Daemon>(&session[0], RecvFlags::empty())
        .unwrap()
        .unwrap()
        .0;
    assert_eq!(bye, Daemon::Bye);

    let daemon = Running::start(dir.path(), &driver).await;
    assert_eq!(daemon.client.tenant("train").await.unwrap(), before);
    let _session = join(&created, &driver, 2);
    daemon
        .until("train", |tenant| !tenant.domains.is_empty())
        .await;
    daemon.stop().await;

    // One whose files make no sense starts too.
    for file in ["tenants.json", "settings.json"] {
        std::fs::write(dir.path().join(file), "{").unwrap();
    }
    let daemon = Running::start(dir.path(), &driver).await;
    assert_eq!(daemon.client.tenants().await.unwrap(), []);
    for file in ["tenants.json.bad", "settings.json.bad"] {
        assert!(dir.path().join(file).exists(), "{file}");
    }
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_daemons_do_not_meet() {
    let dir = TempDir::new().unwrap();
    let driver = Driver::start(dir.path(), "driver.sock");
    let daemon = Running::start(dir.path(), &driver).await;
    let second = serve(
        config(dir.path(), &driver),
        Place::Threads,
        std::future::pending(),
    )
    .await;
    assert!(
        matches!(second, Err(Error::Dir(DirError::AlreadyRunning { .. }))),
        "{second:?}"
    );
    daemon.client.status().await.unwrap();
    let client = daemon.client.clone();
    daemon.stop().await;
    let error = client.status().await.unwrap_err();
    assert!(
        error.to_string().contains("`gpumux run` starts one"),
        "{error}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn daemon_whose_folder_is_removed_ends_in_good_order() {
    let parent = TempDir::new().unwrap();
    let driver = Driver::start(parent.path(), "driver.sock");
    let dir = parent.path().join("runtime");
    let daemon = Running::start(&dir, &driver).await;
    let created = daemon.create("train", Class::Batch).await.unwrap();
    let [session, _control] = join(&created, &driver, 1);
    let server = daemon.create("server", Class::Latency).await.unwrap();
    let _server = join(&server, &driver, 2);
    let controlled = |tenant: &Tenant| tenant.domains.iter().any(|d| d.timeslice_us == 1);
    daemon.until("train", controlled).await;
    // The daemon may write a file there meanwhile.
    gpumux_tests::wait_for("the folder's end", Duration::from_secs(20), || {
        std::fs::remove_dir_all(&dir).ok()
    });
    // What another daemon has there stays.
    std::fs::create_dir(&dir).unwrap();
    for file in ["lock", "api.sock", "groups.json"] {
        std::fs::write(dir.join(file), "another's").unwrap();
    }
    let ended = tokio::time::timeout(Duration::from_secs(20), daemon.task).await;
    let ended = ended.unwrap().unwrap();
    assert!(
        matches!(ended, Err(Error::Dir(DirError::Lost(_)))),
        "{ended:?}"
    );
    for file in ["lock", "api.sock", "groups.json"] {
        assert_eq!(std::fs::read(dir.join(file)).unwrap(), b"another's");
    }
    let clients = driver.clients().clone();
    assert!(clients.values().all(|it| !it.frozen && it.slice == 2048));
    let bye = socket::recv::<Daemon>(&session, RecvFlags::empty());
    assert_eq!(bye.unwrap().unwrap().0, Daemon::Bye);
}

#[tokio::test(flavor = "multi_thread")]
async fn daemon_without_tenants_ends() {
    let dir = TempDir::new().unwrap();
    let driver = Driver::start(dir.path(), "driver.sock");
    let config = Config {
        idle_exit_s: Some(0),
        ..config(dir.path(), &driver)
    };
    serve(config, Place::Threads, std::future::pending())
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_that_make_no_sense_are_answered() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let dir = TempDir::new().unwrap();
    let driver = Driver::start(dir.path(), "driver.sock");
    let daemon = Running::start(dir.path(), &driver).await;
    let body = |text: &str| {
        format!(
            "POST /v1/tenants HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n\
             content-length: {}\r\n\r\n{text}",
            text.len()
        )
    };
    for (request, status, said) in [
        (
            "GET /nowhere HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".into(),
            "404",
            "openapi.json",
        ),
        (body("{"), "400", "error"),
        (
            body(r#"{"spec": {"class": "urgent"}}"#),
            "422",
            "expected one of `latency`",
        ),
        (
            body(r#"{"spec": {"clas": "batch"}}"#),
            "422",
            "unknown field `clas`",
        ),
        (body(&" ".repeat(100_000)), "413", "error"),
        ("\u{1}\u{2}\r\n\r\n".into(), "400", ""),
    ] {
        let mut stream = tokio::net::UnixStream::connect(dir.path().join("api.sock"))
            .await
            .unwrap();
        // A connection that is closed before all was sent may end with an error.
        let _ = stream.write_all(request.as_bytes()).await;
        let mut answer = String::new();
        let _ = stream.read_to_string(&mut answer).await;
        assert!(answer.contains(status) && answer.contains(said), "{answer}");
    }
    assert_eq!(daemon.client.tenants().await.unwrap(), []);
    daemon.stop().await;
}
