use super::*;
use crate::receiver::Place;

/// Plays the control program: what it is asked it finds in files beside it, and waits without end where there is a `.hang`. Where there is
/// `stopped`, it has a server that was stopped, and writes its pid there.
const CONTROL: &str = r#"#!/bin/sh
here=$(dirname "$0")
if [ "$1" = -f ]; then
    [ -e "$here/silent" ] || : > "$CUDA_MPS_PIPE_DIRECTORY/control"
    if [ -e "$here/stopped" ]; then
        sleep 600 &
        kill -STOP $!
        echo $! > "$here/stopped"
    fi
    exec sleep 600
fi
read -r question server
[ -e "$here/$question.hang" ] && exec sleep 600
cat "$here/$question"
"#;

struct Node {
    dir: tempfile::TempDir,
    config: Config,
}

impl Node {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("control");
        gpumux_tests::program(&program, CONTROL);
        let config = Config {
            mps_control: Some(program),
            ..Config::default()
        };
        let node = Self { dir, config };
        node.write("get_server_list", "7\n");
        node.write("get_client_list", "");
        node
    }

    fn write(&self, file: &str, text: &str) {
        fs::write(self.dir.path().join(file), text).unwrap();
    }

    fn load(&self) -> Arc<Groups> {
        Groups::load(&self.config, self.dir.path(), Examiner::new(Place::Threads))
    }

    fn folders(&self) -> usize {
        fs::read_dir(self.dir.path().join("groups")).map_or(0, Iterator::count)
    }
}

fn key() -> Key {
    Key {
        uid: rustix::process::geteuid().as_raw(),
        trust: "team".into(),
    }
}

fn only(groups: &Groups) -> Arc<Group> {
    groups.table().values().next().cloned().unwrap()
}

async fn ended(process: ProcessId) {
    if let Some(process) = process.watch() {
        let ended = tokio::time::timeout(Duration::from_secs(10), process.ended());
        ended.await.unwrap().unwrap();
    }
}

/// A control daemon that says nothing, and is being started.
async fn starting(groups: &Arc<Groups>) -> ProcessId {
    let key = key();
    let started = async {
        loop {
            tokio::time::sleep(Duration::from_millis(5)).await;
            let group = groups.table().values().next().cloned();
            if let Some(process) = group.and_then(|it| it.process()) {
                break process;
            }
        }
    };
    tokio::select! {
        _ = groups.enter(&key, std::process::id()) => panic!("it says nothing"),
        process = started => process,
    }
}

#[tokio::test]
async fn user_has_a_bounded_number_of_groups() {
    let node = Node::new();
    let groups = node.load();
    let make = |uid, n: usize| {
        let key = Key {
            uid,
            trust: format!("team{n}"),
        };
        groups.find_or_make(&key, std::process::id())
    };
    for n in 0..MAX_GROUPS_PER_USER {
        make(4797, n).unwrap();
    }
    let refused = make(4797, MAX_GROUPS_PER_USER).err();
    assert!(
        matches!(refused, Some(GroupError::TooMany(16))),
        "{refused:?}"
    );
    make(4797, 0).unwrap();
    make(4798, 0).unwrap();
    assert_eq!(node.folders(), MAX_GROUPS_PER_USER + 1);
}

#[tokio::test]
async fn only_a_control_daemon_that_was_asked_can_be_late() {
    let node = Node::new();
    let groups = node.load();
    let membership = groups.enter(&key(), std::process::id()).await.unwrap();
    let group = only(&groups);
    let pid = std::process::id();
    node.write("get_client_list", &format!("{pid}\n1\n"));
    assert_eq!(groups.clients(&group).await, Ok([1, pid].into()));
    let intruded = async |own| groups.intruded(key().uid, own, pid).await;
    let name = membership.name();
    assert_eq!(
        intruded(None).await,
        Some(UnauthorizedClient::Seen(name.to_string()))
    );
    assert_eq!(intruded(Some(&*name)).await, None, "it is its own");
    assert_eq!(groups.intruded(key().uid, None, pid + 1).await, None);

    // No answer is no permission, whatever the reason.
    let answer = node.dir.path().join("get_client_list");
    fs::remove_file(&answer).unwrap();
    assert_eq!(groups.clients(&group).await, Err(Unanswered::Failed));
    let feared = Some(UnauthorizedClient::Feared(name.to_string()));
    assert_eq!(intruded(None).await, feared);
    node.write("get_client_list.hang", "");
    assert_eq!(groups.clients(&group).await, Err(Unanswered::Late));
    assert_eq!(intruded(None).await, feared);
    // No client is in a group that is only just beginning.
    group.state().ready = false;
    assert_eq!(intruded(None).await, None);
    group.state().ready = true;
    let program = node.dir.path().join("control");
    fs::rename(&program, node.dir.path().join("old")).unwrap();
    assert_eq!(groups.clients(&group).await, Err(Unanswered::Failed));
    drop(membership);
    groups.close().await;
    assert_eq!(node.folders(), 0);
}

#[tokio::test]
async fn client_of_a_failed_group_waits_for_the_next_server() {
    let node = Node::new();
    let groups = node.load();
    let membership = groups.enter(&key(), std::process::id()).await.unwrap();
    let failed = only(&groups).process().unwrap();
    let (tell, told) = tokio::sync::oneshot::channel();
    let restart = {
        let (groups, name) = (Arc::clone(&groups), membership.name());
        tokio::spawn(async move { groups.restart(&name, false, told).await })
    };
    let enter = {
        let groups = Arc::clone(&groups);
        tokio::spawn(async move { groups.enter(&key(), std::process::id()).await })
    };
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(!enter.is_finished());
    tell.send(()).unwrap();
    restart.await.unwrap().unwrap().unwrap();
    let second = enter.await.unwrap().unwrap();
    assert_ne!(only(&groups).process(), Some(failed));
    drop((membership, second));
    groups.close().await;
}

#[test]
fn server_that_answered_before_hangs_after_several_misses() {
    let now = Instant::now();
    let late = |pulse: &mut Pulse, server| pulse.missed(server, Unanswered::Late, now);
    let mut pulse = Pulse::default();
    // As while a package is replaced.
    for _ in 0..100 {
        assert!(!pulse.missed(None, Unanswered::Failed, now));
    }
    // In between it was well.
    pulse.answered(7);
    pulse.well(&[7]);
    for _ in 0..100 {
        for _ in 1..MISSES {
            assert!(!late(&mut pulse, Some(7)));
        }
        pulse.well(&[7]);
    }
    for _ in 1..MISSES {
        assert!(!late(&mut pulse, Some(7)));
    }
    assert!(late(&mut pulse, None), "it hangs");

    // Another server begins, and keeps the control daemon from answering.
    let mut pulse = Pulse::default();
    for _ in 0..100 {
        assert!(!late(&mut pulse, Some(8)));
        assert!(!late(&mut pulse, None));
    }
    let much_later = now + STARTING + Duration::from_secs(1);
    assert!(pulse.missed(None, Unanswered::Late, much_later));
    pulse.answered(8);
    pulse.well(&[8]);
    for _ in 1..MISSES {
        assert!(!late(&mut pulse, Some(8)));
    }
    assert!(late(&mut pulse, Some(8)));
}

#[test]
fn server_is_asked_again_sooner_after_a_miss() {
    let start = Instant::now();
    let mut pulse = Pulse::default();
    assert!(pulse.is_due(start));
    assert!(!pulse.is_due(start + PING_AGAIN));
    assert!(pulse.is_due(start + PING));
    pulse.answered(7);
    assert!(!pulse.missed(Some(7), Unanswered::Late, start + PING));
    assert!(pulse.is_due(start + PING + PING_AGAIN));
    pulse.well(&[7]);
    assert!(!pulse.is_due(start + PING + 2 * PING_AGAIN));
}

#[tokio::test]
async fn stopped_server_is_reported_without_being_asked() {
    let node = Node::new();
    node.write("stopped", "");
    let groups = node.load();
    let (tell, mut told) = tokio::sync::mpsc::unbounded_channel();
    groups.report_to(tell, tokio::sync::mpsc::unbounded_channel().0);
    let _membership = groups.enter(&key(), std::process::id()).await.unwrap();
    let group = only(&groups);
    let first = group.process().unwrap();
    let pid = || {
        fs::read_to_string(node.dir.path().join("stopped"))
            .ok()?
            .trim()
            .parse()
            .ok()
    };
    let pid = gpumux_tests::wait_for("a server", Duration::from_secs(10), pid);
    group.state().serving.insert(pid);
    let failure = tokio::time::timeout(PING, told.recv()).await;
    assert!(
        matches!(failure, Ok(Some(Failure::Server(_)))),
        "{failure:?}"
    );
    ended(first).await;
    groups.end(&only(&groups)).await;
}

#[tokio::test]
async fn server_started_since_the_lost_one_stays() {
    let node = Node::new();
    let groups = node.load();
    let membership = groups.enter(&key(), std::process::id()).await.unwrap();
    let name = membership.name();
    groups.lose(&name).await;
    let second = groups.enter(&key(), std::process::id()).await.unwrap();
    let fresh = only(&groups).process().unwrap();
    let told = async { Ok::<_, ()>(()) };
    groups.restart(&name, true, told).await.unwrap().unwrap();
    assert_eq!(only(&groups).process(), Some(fresh));
    drop((membership, second));
    groups.close().await;
}

/// Members that lose their server may all have ended before their control daemon does.
#[tokio::test]
async fn server_that_ends_just_after_its_last_member_has_failed() {
    let node = Node::new();
    let groups = node.load();
    let (tell, mut told) = tokio::sync::mpsc::unbounded_channel();
    groups.report_to(tell, tokio::sync::mpsc::unbounded_channel().0);
    let membership = groups.enter(&key(), std::process::id()).await.unwrap();
    let (name, process) = (membership.name(), only(&groups).process().unwrap());
    drop(membership);
    let watch = process.watch().unwrap();
    watch.kill();
    // Nothing else runs on this thread meanwhile: the group looks once, soon.
    gpumux_tests::wait_for("the server's end", Duration::from_secs(20), || {
        watch.has_ended().then_some(())
    });
    let failure = tokio::time::timeout(Duration::from_secs(20), told.recv());
    assert!(matches!(failure.await.unwrap(), Some(Failure::Server(of)) if of == name));
    groups.end(&only(&groups)).await;
}

#[tokio::test]
async fn hung_server_is_reported_and_ended() {
    let node = Node::new();
    let groups = node.load();
    let (tell, mut told) = tokio::sync::mpsc::unbounded_channel();
    groups.report_to(tell, tokio::sync::mpsc::unbounded_channel().0);
    let _membership = groups.enter(&key(), std::process::id()).await.unwrap();
    let first = only(&groups).process().unwrap();
    only(&groups).state().serving.insert(7);
    node.write("get_client_list.hang", "");
    let failure = tokio::time::timeout(Duration::from_secs(60), told.recv()).await;
    assert!(
        matches!(failure, Ok(Some(Failure::Server(_)))),
        "{failure:?}"
    );
    ended(first).await;
    groups.end(&only(&groups)).await;
}

#[tokio::test]
async fn what_a_killed_daemon_was_starting_is_ended_by_the_next() {
    let node = Node::new();
    node.write("silent", "");
    let groups = node.load();
    let process = starting(&groups).await;
    assert_eq!(node.folders(), 1);

    let next = node.load();
    ended(process).await;
    assert!(next.table().is_empty());
    assert_eq!(node.folders(), 0);
}

#[tokio::test]
async fn group_that_was_being_started_again_keeps_its_members() {
    let node = Node::new();
    let groups = node.load();
    let membership = groups.enter(&key(), std::process::id()).await.unwrap();
    let folder = only(&groups).folder.path().to_owned();
    groups.lose(&membership.name()).await;
    node.write("silent", "");
    let starting = starting(&groups).await;
    // A killed daemon starts nothing again.
    groups.table().clear();
    fs::remove_file(node.dir.path().join("silent")).unwrap();

    let next = node.load();
    let membership = next.enter(&key(), std::process::id()).await.unwrap();
    assert_eq!(only(&next).folder.path(), folder);
    ended(starting).await;
    // It could not be started, and the daemon was killed then.
    next.lose(&membership.name()).await;
    next.save();
    assert_eq!(only(&node.load()).folder.path(), folder);
    drop(membership);
    next.close().await;
}

#[test]
fn group_in_the_file_of_an_older_daemon_is_read() {
    let saved = r#"{"key":{"uid":7,"trust":"a"},"folder":"/f","gid":8,"process":{"pid":1,"start":2},"ready":true}"#;
    let saved: Saved = serde_json::from_str(saved).unwrap();
    let process = Some(ProcessId { pid: 1, start: 2 });
    assert_eq!((saved.process, saved.answered), (process, true));
}

#[tokio::test]
async fn groups_of_a_damaged_file_are_ended_and_others_kept() {
    let node = Node::new();
    let groups = node.load();
    let _membership = groups.enter(&key(), std::process::id()).await.unwrap();
    let process = only(&groups).process().unwrap();
    let next = node.load();
    assert_eq!(only(&next).process(), Some(process));
    assert_eq!(node.folders(), 1);

    node.write("groups.json", "gpumux 1 00000000\n[]");
    let last = node.load();
    ended(process).await;
    assert!(last.table().is_empty());
    assert_eq!(node.folders(), 0);
}
