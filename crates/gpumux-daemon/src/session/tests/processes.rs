//! Processes that are not what they say, or end.

use super::*;

/// What the processes of the next tests do: hand a group over, and wait.
#[test]
#[ignore = "runs as a process of its own"]
fn a_process_with_a_group() {
    let dir = std::env::var("GPUMUX_TEST_DIR").unwrap();
    let dir = std::path::Path::new(&dir);
    let session = socket::connect(&dir.join("session.sock"), SocketFlags::empty()).unwrap();
    let (hello, _page, file) = fake::hello(None);
    send(&session, &hello, Some(file.as_fd()));
    let pretended =
        std::env::var_os("GPUMUX_TEST_PRETEND").map(|_| Driver::start(dir, "mine.sock"));
    let control = match &pretended {
        Some(driver) => driver.open(),
        None => socket::connect(&dir.join("driver.sock"), SocketFlags::empty()).unwrap(),
    };
    send(&session, &fake::group(0, 3), Some(control.as_fd()));
    println!("\nready");
    while let Ok(Some((message, _))) = socket::recv::<Daemon>(&session, RecvFlags::empty()) {
        println!("{message:?}");
    }
    std::thread::park();
}

/// Starts it; its output after `ready`.
fn process(node: &Node, pretend: bool) -> (std::process::Child, impl Iterator<Item = String>) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args([
            "--ignored",
            "--nocapture",
            "--exact",
            "session::tests::processes::a_process_with_a_group",
        ])
        .env("GPUMUX_TEST_DIR", node.dir.path())
        .stdout(Stdio::piped());
    if pretend {
        command.env("GPUMUX_TEST_PRETEND", "1");
    }
    let mut child = command.spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap())
        .lines()
        .map_while(Result::ok);
    assert!(lines.any(|line| line == "ready"));
    (child, lines)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_plays_driver_is_refused() {
    let node = Node::start(16).await;
    let (mut child, mut said) = process(&node, true);
    assert!(said.any(|line| line.contains("without a control file")));
    child.kill().unwrap();
    child.wait().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn files_of_a_killed_process_are_closed_with_its_socket_open() {
    let node = Node::start(16).await;
    let (mut child, _output) = process(&node, false);
    let domains = node.until_domains(1).await;
    assert_eq!(domains[0].pid, child.id());
    let names: Vec<String> = node
        .tenants
        .list()
        .await
        .into_iter()
        .map(|t| t.name)
        .collect();
    assert!(names[0].ends_with(&format!("-{}", child.id())), "{names:?}");
    child.kill().unwrap();
    node.until_domains(0).await;
    node.until("its memory is free", |node| {
        node.driver.clients().is_empty()
    })
    .await;
    child.wait().unwrap();
    node.until("its place is free", |node| node.sessions.count() == 0)
        .await;
    assert!(node.tenants.list().await.is_empty());
}
