//! Tenants of all kinds come, change, move and go: nothing is left behind.

use super::*;

/// By how much the daemon's memory may grow while tenants come and go: what its rings keep of them.
const GROWTH: u64 = 24 << 20;

/// Bytes that a process has in memory.
fn resident(pid: u32) -> u64 {
    let statm = fs::read_to_string(format!("/proc/{pid}/statm")).unwrap_or_default();
    let pages: Option<u64> = statm.split(' ').nth(1).and_then(|it| it.parse().ok());
    4096 * pages.unwrap_or(0)
}

/// All files below a folder, but for those that grow with what was ever known.
fn files(dir: &Path, into: &mut BTreeSet<String>) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            files(&path, into);
        }
        into.insert(path.display().to_string());
    }
}

fn free_memory(node: &Node) -> u64 {
    let gpumux = gpumux_tests::binary().into_os_string();
    let scratch = [gpumux, "scratch".into(), "--memory".into()];
    let free = node.on_device(scratch).run().ok().out;
    free.trim().parse().unwrap()
}

#[test]
fn tenants_that_come_and_go_leave_nothing_behind() {
    let seconds = number("GPUMUX_TEST_SECONDS").unwrap_or(4);
    // Two of those that verify bytes do not fit, but each does, beside the contexts of all.
    let node = Node::with(Options {
        memory: if real() { 0 } else { 176 << 20 },
        ..Options::default()
    });
    let free = free_memory(&node);
    let seed = number("GPUMUX_TEST_SEED").unwrap_or(0x9e37_79b9_7f4a_7c15) | 1;
    let mut random = seed;
    let mut next = |below: u64| {
        // xorshift64
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random % below
    };
    let programs = [
        ("--class latency", REQUESTS),
        ("--class batch", TICKS),
        ("--class standard --guaranteed 10%", TICKS),
        (
            "--class batch",
            "gpumux workload batch --kernel-us 3000 --seconds 600",
        ),
        ("--class batch", BYTES),
        ("--class batch --trust team", TICKS),
        ("--class standard", "gpumux workload fault --seconds 0.2"),
    ];
    let (mut started, mut killed) = (0, 0);
    let (mut elements, mut changes) = (0, 0);
    let mut mix = |node: &Node, time: Duration, started: &mut u64, killed: &mut u64| {
        let begin = Instant::now();
        let witness = start(node, "witness", "--class batch", BYTES);
        let mut living: Vec<(String, Process)> = Vec::new();
        // Each program at least once.
        while begin.elapsed() < time || *started < programs.len() as u64 {
            if living.len() < 6 {
                let (options, program) = programs[*started as usize % programs.len()];
                let name = format!("t{started}");
                let process = start(node, &name, options, program);
                living.push((name, process));
                *started += 1;
            }
            thread::sleep(Duration::from_millis(50 + next(200)));
            let one = next(living.len() as u64 + 1) as usize;
            let name = living.get(one).map_or("witness", |(name, _)| name);
            let change: &[&[&str]] = match next(3) {
                0 => &[&["sleep", name], &["wake", name]],
                1 => &[&["set", name, "--weight", "2"]],
                _ => &[&["set", name, "--limit", "50%"]],
            };
            // It may have ended, or not have begun; what is refused then is tested elsewhere.
            for words in change {
                node.gpumux(*words).run();
                changes += 1;
            }
            if living.len() >= 4 {
                let (_, one) = living.swap_remove(next(living.len() as u64) as usize);
                let signal = [Signal::KILL, Signal::TERM][next(2) as usize];
                one.signal(signal);
                *killed += 1;
                one.finish();
            }
        }
        for (_, one) in living {
            one.kill();
        }
        witness.signal(Signal::TERM);
        let report = witness.finish().ok().json();
        assert_eq!(report["mismatches"], 0, "{report:#}");
        elements += report["elements"].as_u64().unwrap();
        wait_for("the end of all tenants", PATIENCE, || {
            let ps = node.ps();
            ps["tenants"].as_array()?.is_empty().then_some(())
        });
    };
    let look = || {
        let a_while = Duration::from_millis(500);
        wait_settled("no files come or go", PATIENCE, a_while, || {
            let mut all = BTreeSet::new();
            files(node.dir(), &mut all);
            (node.daemon_files().len(), all)
        })
    };
    let daemon = node.daemon().pid();
    // What the first needed is enough for all others.
    mix(
        &node,
        Duration::from_secs(seconds / 3),
        &mut started,
        &mut killed,
    );
    let settle = || {
        wait_for("the end of unused groups", PATIENCE, || {
            servers(&node).is_empty().then_some(())
        });
        look()
    };
    let (before, resident_before) = (settle(), resident(daemon));
    mix(
        &node,
        Duration::from_secs(seconds),
        &mut started,
        &mut killed,
    );
    let (after, resident_after) = (settle(), resident(daemon));
    let grown = resident_after.saturating_sub(resident_before);
    print(&format!(
        "soak: {started} tenants in {seconds} s, {killed} ended by a signal, {changes} changes (seed {seed}); 0 wrong of {elements} \
         elements; daemon: {} descriptors before, {} after, {} KiB more memory; files {} before, {} after",
        before.0,
        after.0,
        grown >> 10,
        before.1.len(),
        after.1.len()
    ));
    assert!(
        after.0 <= before.0,
        "descriptors: {} after {}",
        after.0,
        before.0
    );
    let new: Vec<_> = after.1.difference(&before.1).collect();
    assert!(new.is_empty(), "left behind: {new:?}");
    assert!(grown < GROWTH, "the daemon has grown by {grown} bytes");
    assert_ne!(elements, 0);
    let left = free_memory(&node);
    // Another's use of a real device is not ours.
    let slack = if real() { 64 << 20 } else { 0 };
    assert!(left + slack >= free, "{left} of {free} bytes are free");
}
