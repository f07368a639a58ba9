//! Crowds of connections, floods of packets, and too few open files.

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn thousands_of_connections_leave_room_for_the_rest() {
    crate::serve::raise_file_limit();
    let node = Node::start(500).await;
    let mut crowd = Vec::new();
    let mut refusals = 0;
    for _ in 0..2000 {
        crowd.push(node.connect());
    }
    // Those that got a place are let go when they say nothing; the others at once.
    for session in &crowd {
        match answer(session).await {
            Some(Daemon::Refused { reason }) => {
                refusals += usize::from(reason.contains("raise max_sessions"));
            }
            other => panic!("{other:?}"),
        }
    }
    // Some of the others may have come when the first places were free again.
    assert!(refusals >= 500, "{refusals}");
    drop(crowd);
    node.until("all places are free", |node| node.sessions.count() == 0)
        .await;
    node.session().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn users_who_fill_all_sessions_leave_some_to_root() {
    let node = Node::start(64).await;
    // Not a connection to it, which would have a place of its own.
    let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
    let socket = OwnedFd::from(socket);
    let most = |uid| {
        let place = || node.sessions.enter(&socket, uid).ok();
        std::iter::from_fn(place).collect::<Vec<_>>()
    };
    let of_users = [1000, 1001, 1002].map(most);
    assert_eq!(of_users.each_ref().map(Vec::len), [60, 0, 0]);
    assert_eq!(most(0).len(), 4);
    drop(of_users);
    assert_eq!(most(1001).len(), 60);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flood_of_packets_waits_its_turn() {
    let node = Node::start(16).await;
    let flood = node.session().await;
    let sent = (0..100_000)
        .take_while(|_| {
            socket::send(&flood, &Shim::Gone { key: 9 }, None, SendFlags::DONTWAIT).is_ok()
        })
        .count();
    assert!(sent < 100_000, "the socket is full");
    let other = node.session().await;
    let file = node.driver.open();
    send(&other, &fake::group(0, 1), Some(file.as_fd()));
    node.until_domains(1).await;
}

#[test]
fn packets_of_a_tenant_share_one_rate() {
    let start = Instant::now();
    let rate = Rate(Mutex::new((RATE.0, start)));
    let at_once = (0..10_000)
        .take_while(|_| rate.take(start).is_zero())
        .count();
    assert_eq!(at_once, 4096);
    // Each of those that follow waits for its own place.
    let waits: Vec<u128> = (0..3).map(|_| rate.take(start).as_micros()).collect();
    assert_eq!(waits, [500, 750, 1000]);
    let later = start + Duration::from_secs(2);
    assert!(rate.take(later).is_zero());
}

#[test]
fn few_open_files_are_reported() {
    assert_eq!(lack_of_files(None), None);
    assert_eq!(lack_of_files(Some(1024)), None);
    let why = lack_of_files(Some(100)).unwrap();
    assert!(why.contains("open files is 100"), "{why}");
}
