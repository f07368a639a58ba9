//! Groups that the driver does not let be controlled, and handles of others.

use super::*;

/// A process whose group the driver refuses to control, in one of these ways.
async fn uncontrolled(node: &Node, client: u32, status: RmStatus, shared: bool) -> OwnedFd {
    let session = node.session().await;
    let file = node.driver.open_refusing(client, status);
    let mut group = fake::group(0, client);
    if let Shim::Group { shared: is, .. } = &mut group {
        *is = shared;
    }
    send(&session, &group, Some(file.as_fd()));
    session
}

#[tokio::test(flavor = "multi_thread")]
async fn groups_that_cannot_be_controlled_are_scheduled_at_launch() {
    let node = Node::start(64).await;
    let denied = RmStatus::INSUFFICIENT_PERMISSIONS;
    let session = uncontrolled(&node, 1, denied, false).await;
    assert_eq!(answer(&session).await, Some(Daemon::Permits { key: 0 }));
}

#[tokio::test(flavor = "multi_thread")]
async fn groups_that_cannot_be_controlled_end_their_session() {
    let node = Node::with(64, Mechanism::Controls).await;
    let why = "the driver does not let gpumux control this process";
    let denied = RmStatus::INSUFFICIENT_PERMISSIONS;
    let session = uncontrolled(&node, 1, denied, false).await;
    refused(&session, why).await;
    // It might be that the program has freed the group, but it has not.
    let absent = uncontrolled(&node, 2, RmStatus::OBJECT_NOT_FOUND, false).await;
    let busy = uncontrolled(&node, 3, RmStatus::BUSY_RETRY, false).await;
    // It has.
    let freed = uncontrolled(&node, 20, RmStatus::OBJECT_NOT_FOUND, false).await;
    send(&freed, &Shim::Gone { key: 0 }, None);
    // Whatever the driver answers for a lost MPS server, its member stays, and is ended if it waits.
    let member = uncontrolled(&node, 21, denied, true).await;
    refused(&absent, why).await;
    refused(&busy, why).await;
    for (session, client) in [(&freed, 22), (&member, 23)] {
        let file = node.driver.open();
        send(session, &fake::group(1, client), Some(file.as_fd()));
    }
    node.until_domains(2).await;
}

#[test]
fn group_with_refused_controls_is_due_unless_it_was_freed() {
    let start = std::time::Instant::now();
    let failure = || ControlFailure::new("freeze", gpumux_rm::Cause::Refused, "gone");
    let mut groups = Refused::default();
    assert_eq!(groups.next(), None);
    groups.add(1, failure(), start);
    groups.add(2, failure(), start + FREED / 2);
    groups.remove(1);
    assert_eq!(groups.next(), Some(start + FREED / 2 + FREED));
    assert!(groups.due(start + FREED).is_none());
    assert!(groups.due(start + FREED * 2).is_some());
    assert!(groups.due(start + FREED * 2).is_none(), "once");
}

#[tokio::test(flavor = "multi_thread")]
async fn group_on_a_device_of_another_daemon_is_refused() {
    let node = Node::start(64).await;
    let first = node.session().await;
    let own = node.driver.open();
    send(&first, &fake::group(0, 1), Some(own.as_fd()));
    let which = "GPU 0 has a daemon already (pid 7, uid 0): use root's";
    let device = crate::devices::Known {
        uuid: node.until_domains(1).await.remove(0).device,
        other: Some(which.into()),
        ..Default::default()
    };
    let known = |answer| scheduler::Command::KnowDevices(vec![device], answer);
    node.scheduler.ask(known).await.unwrap();
    let second = node.session().await;
    let file = node.driver.open();
    send(&second, &fake::group(0, 2), Some(file.as_fd()));
    refused(&second, which).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn handles_that_the_file_does_not_own_are_refused() {
    let node = Node::start(64).await;
    let victim = node.session().await;
    let own = node.driver.open();
    send(&victim, &fake::group(0, 7), Some(own.as_fd()));
    node.until_domains(1).await;

    let thief = node.session().await;
    let file = node.driver.open();
    send(&thief, &fake::group(0, 7), Some(file.as_fd()));
    refused(&thief, "does not own RM client 0x7").await;

    let thief = node.session().await;
    let Shim::Group {
        subdevice,
        group,
        channels,
        ..
    } = fake::group(0, 8)
    else {
        unreachable!()
    };
    let wrong = |subdevice, group, channels| Shim::Group {
        key: 0,
        engine: 1,
        client: 8,
        subdevice,
        group,
        channels,
        timeslice_us: 2048,
        shared: false,
    };
    for message in [
        wrong(subdevice, group + 1, channels.clone()),
        wrong(subdevice + 1, group, channels.clone()),
        wrong(subdevice, group, vec![1, 2, 3]),
    ] {
        send(&thief, &message, Some(file.as_fd()));
    }
    // The session goes on: such a group may just have been freed.
    send(&thief, &fake::group(5, 8), Some(file.as_fd()));
    assert_eq!(node.until_domains(2).await.len(), 2);
    send(
        &thief,
        &wrong(subdevice, group, Vec::new()),
        Some(file.as_fd()),
    );
    refused(&thief, "without channels").await;
    let (page, hello) = (fake::hello(None).2, node.session().await);
    send(
        &hello,
        &wrong(subdevice, group, vec![0x5c00_0020; 600]),
        Some(page.as_fd()),
    );
    refused(&hello, "channels in a group").await;
    assert_eq!(node.until_domains(1).await[0].error, None);
}
