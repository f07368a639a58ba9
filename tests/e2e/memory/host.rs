//! What moved memory takes of the host.

use super::*;

/// A node whose daemon has this configuration.
fn configured(memory: u64, text: &str) -> (Node, tempfile::NamedTempFile) {
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), text).expect("room");
    let path = file.path().display().to_string();
    let node = Node::with(Options {
        memory,
        daemon: vec!["--config".into(), path],
        ..Options::default()
    });
    (node, file)
}

/// What moved memory takes on the host.
fn on_host(node: &Node) -> u64 {
    let memory = node.gpumux(["memory", "--json"]).run().ok().json();
    memory["host"]["used"].as_u64().expect("a number")
}

#[test]
fn moved_memory_never_takes_more_of_the_host_than_it_may() {
    const LIMIT: u64 = 200 << 20;
    let (mut node, _file) = configured(0, "[host_memory]\nlimit = '200MiB'");
    let idle = |node: &Node, name: &str| {
        let program = "gpumux workload idle --seconds 600 --memory 128MiB";
        let tenant = Process::start(&mut node.tenant(&format!("--name {name}"), program));
        node.wait_tenant(name, |it| bytes(it, "in_use") >= 128 << 20);
        tenant
    };
    let (first, second) = (idle(&node, "first"), idle(&node, "second"));
    assert_eq!(on_host(&node), 0);
    node.gpumux(["sleep", "first"]).run().ok();
    assert!((128 << 20..=LIMIT).contains(&on_host(&node)));
    let refused = node.gpumux(["sleep", "second"]).run();
    assert!(!refused.status.success(), "{}", refused.out);
    for word in ["200 MiB on the host", "`limit` of `[host_memory]`"] {
        assert!(refused.err.contains(word), "{}", refused.err);
    }
    let awake = node.wait_tenant("second", |it| it["asleep"] == false);
    assert_eq!(bytes(&awake, "swapped"), 0, "nothing of it was moved");
    // Awake, the first needs it no more, and lets go of it for the other.
    node.gpumux(["wake", "first"]).run().ok();
    node.gpumux(["sleep", "second"]).run().ok();
    assert!((128 << 20..=LIMIT).contains(&on_host(&node)));
    // What the next daemon did not allow is not kept.
    node.kill_daemon();
    node.start_daemon();
    for name in ["first", "second"] {
        node.wait_tenant(name, |it| bytes(it, "in_use") >= 128 << 20);
    }
    wait_for("host memory of before", PATIENCE, || {
        (on_host(&node) == 0).then_some(())
    });
    // What ends keeps nothing.
    node.gpumux(["sleep", "first"]).run().ok();
    assert!((128 << 20..=LIMIT).contains(&on_host(&node)));
    drop(second);
    first.kill();
    wait_for("the host memory of the dead", PATIENCE, || {
        (on_host(&node) == 0).then_some(())
    });
}

/// What a process has mapped of files in a folder, where it may be looked at.
fn mapped(pid: u64, folder: &Path) -> Option<Vec<u8>> {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).ok()?;
    let memory = File::open(format!("/proc/{pid}/mem")).ok()?;
    let mut all = Vec::new();
    for line in maps.lines() {
        let mut words = line.split_whitespace();
        let (range, path) = (words.next()?, words.nth(4));
        if path.is_none_or(|path| !Path::new(path).starts_with(folder)) {
            continue;
        }
        let (from, to) = range.split_once('-')?;
        let [from, to] = [from, to].map(|text| u64::from_str_radix(text, 16).expect("hex"));
        let mut contents = vec![1; (to - from) as usize];
        memory.read_exact_at(&mut contents, from).ok()?;
        all.append(&mut contents);
    }
    Some(all)
}

#[test]
fn moved_memory_is_at_its_location_and_zero_after_use() {
    let Ok(folder) = tempfile::Builder::new().tempdir_in("/dev/shm") else {
        eprintln!("SKIPPED: there is no /dev/shm");
        return;
    };
    // The tests' user may run their tenants as another user.
    let all = std::os::unix::fs::PermissionsExt::from_mode(0o1777);
    std::fs::set_permissions(folder.path(), all).expect("it is ours");
    let text = format!(
        "[host_memory]\nlimit = '32MiB'\nscrub = true\nlocation = '{}'",
        folder.path().display()
    );
    let (node, _file) = configured(0, &text);
    let worker = checks(&node, 24, 3);
    let pid = u64::from(worker.pid());
    node.gpumux(["sleep", "worker"]).run().ok();
    assert_eq!(on_host(&node), 32 << 20);
    if let Some(contents) = mapped(pid, folder.path()) {
        assert_eq!(contents.len(), 32 << 20);
        let used = contents.iter().filter(|it| **it != 0).count();
        assert!(used > 1 << 20, "{used} bytes are not zero");
    }
    // It wakes by itself, or so.
    node.gpumux(["wake", "worker"]).run().ok();
    wait_for("zeros", PATIENCE, || {
        let contents = mapped(pid, folder.path()).unwrap_or_default();
        contents.iter().all(|it| *it == 0).then_some(())
    });
    verified(&worker.finish_within(PATIENCE * 3));
    // Its files had no names.
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

/// Two programs with work, of which the host has room for one's excess but not for both's.
#[test]
fn explain_shows_what_the_host_lacks_for_a_tenant() {
    if real() {
        eprintln!("SKIPPED: it fills the device");
        return;
    }
    let (node, _file) = configured(256 << 20, "[host_memory]\nlimit = '150MiB'");
    let sweep = |name: &str| {
        let program = "gpumux workload sweep --json --memory 150MiB --seconds 600";
        let tenant = Process::start(&mut node.tenant(&format!("--name {name}"), program));
        node.wait_tenant(name, |it| {
            bytes(it, "in_use") + bytes(it, "swapped") >= 150 << 20
        });
        tenant
    };
    let (_first, second) = (sweep("first"), sweep("second"));
    let lacks = |it: &Value| it["lacks_on_host"].as_u64();
    let waiting = node.wait_tenant("first", |it| lacks(it).is_some());
    assert!(bytes(&waiting, "swapped") > 0);
    let explained = node.gpumux(["explain", "first"]).run().ok().out;
    for part in ["The host lacks", "`limit` of `[host_memory]`"] {
        assert!(explained.contains(part), "{explained}");
    }
    second.kill();
    node.wait_tenant("first", |it| {
        bytes(it, "swapped") == 0 && lacks(it).is_none()
    });
}
