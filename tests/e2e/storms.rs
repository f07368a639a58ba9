//! Kills and stops in turn, for as many rounds or as long as asked: nothing is lost, nothing is wrong, nothing is left behind.
//!
//! `GPUMUX_TEST_ROUNDS=1000` sets the rounds, `GPUMUX_TEST_SECONDS=150` when each storm ends at the latest, and how long the soak is;
//! `--nocapture` shows their figures. Without these they are as short as the other tests.

mod soak;

use std::{
    collections::BTreeSet,
    env, fs,
    io::{self, Write},
    iter,
    path::Path,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use gpumux_tests::{
    Node, Options, PATIENCE, Patience, Process, Random, Run, devices, real, wait_for, wait_settled,
};
use rustix::process::{Pid, Signal, kill_process};

use crate::TICKS;

/// A program that verifies every byte, until SIGTERM ends it.
const BYTES: &str = "gpumux workload memory --json --seed 7 --memory 48MiB --seconds 86400";
/// Requests for as long as a storm lasts.
const SERVE: &str =
    "gpumux workload latency --kernels 1 --iterations 1000000 --period-us 20000 --seconds 20000";
/// How long the daemon is stopped.
const STOP: Duration = Duration::from_secs(5);
/// The longest that a program that has nothing to do with what is killed may stand still on a real device: what a group's last member
/// left may run for two seconds, and a daemon's restart and turns take as long. The emulated device's machine itself may stand still.
const STALL: u64 = 15_000;

fn number(variable: &str) -> Option<u64> {
    env::var(variable).ok()?.parse().ok()
}

/// When to stop: after these rounds, or this time.
struct Storm {
    rounds: u64,
    end: Option<Instant>,
}

impl Storm {
    fn new(rounds: u64) -> Self {
        let seconds = number("GPUMUX_TEST_SECONDS").map(Duration::from_secs);
        Self {
            rounds: number("GPUMUX_TEST_ROUNDS").unwrap_or(rounds),
            end: seconds.map(|it| Instant::now() + it),
        }
    }

    fn goes_on(&self, done: u64) -> bool {
        done < self.rounds && self.end.is_none_or(|end| Instant::now() < end)
    }
}

/// Figures, also of a test that passes.
fn print(what: &str) {
    let _ = io::stderr().write_all(format!("STORM {what}\n").as_bytes());
}

/// How a stop of the daemon looked to programs, in ms, each the longest of all rounds and programs.
#[derive(Default)]
struct Stops {
    /// From the stop to the first kernel after it: what is guaranteed, but for the machine's lateness.
    until_run: u64,
    /// Without a kernel after that, while the daemon was stopped.
    while_stopped: u64,
    /// Without a kernel while the daemon took control again, and none that began before.
    while_returning: u64,
}

impl Stops {
    /// `lines`: when each program wrote lines, of which the first is the last before the stop.
    fn add(&mut self, lines: &[Vec<Instant>], [stopped, goes_on, controlled]: [Instant; 3]) {
        let ms = |from: Instant, to: Instant| to.saturating_duration_since(from).as_millis() as u64;
        for lines in lines {
            let first = lines.iter().find(|at| **at > stopped).copied();
            let first = first.unwrap_or(controlled);
            self.until_run = self.until_run.max(ms(stopped, first));
            let longest = |begin: Instant, end: Instant| {
                let inner = lines.iter().copied().filter(|at| begin < *at && *at < end);
                let marks: Vec<Instant> = iter::once(begin).chain(inner).chain([end]).collect();
                marks
                    .windows(2)
                    .map(|it| ms(it[0], it[1]))
                    .max()
                    .unwrap_or(0)
            };
            self.while_stopped = self.while_stopped.max(longest(first, goes_on));
            self.while_returning = self.while_returning.max(longest(goes_on, controlled));
        }
    }
}

/// When programs wrote lines, and by how much this machine's threads were late, while something is done.
fn record<T>(processes: &[Process], work: impl FnOnce() -> T) -> (T, Vec<Vec<Instant>>, Duration) {
    const LOOK: Duration = Duration::from_millis(2);
    let over = AtomicBool::new(false);
    let watch = |process: &Process| {
        let (mut lines, mut written) = (process.lines(), Vec::new());
        while !over.load(Ordering::Relaxed) {
            thread::sleep(LOOK);
            let now = process.lines();
            if now != lines {
                lines = now;
                written.push(Instant::now());
            }
        }
        written
    };
    // What these programs and the daemon need the machine for, another thread gets as late.
    let look_for_lateness = || {
        let mut latest = Duration::ZERO;
        while !over.load(Ordering::Relaxed) {
            let before = Instant::now();
            thread::sleep(LOOK);
            latest = latest.max(before.elapsed().saturating_sub(LOOK));
        }
        latest
    };
    thread::scope(|scope| {
        let ends = Over(&over);
        let watchers: Vec<_> = (processes.iter())
            .map(|process| scope.spawn(|| watch(process)))
            .collect();
        let late = scope.spawn(look_for_lateness);
        let done = work();
        drop(ends);
        let lines = watchers.into_iter().map(|it| it.join().unwrap());
        (done, lines.collect(), late.join().unwrap())
    })
}

/// The longest time in which each of some programs wrote no line, in ms.
struct Longest<const N: usize>([AtomicU64; N]);

impl<const N: usize> Longest<N> {
    fn watch(longest: &AtomicU64, process: &Process, over: &AtomicBool) {
        let (mut lines, mut since) = (process.lines(), Instant::now());
        while !over.load(Ordering::Relaxed) {
            thread::sleep(Duration::from_millis(2));
            let now = process.lines();
            let stood = since.elapsed().as_millis() as u64;
            longest.fetch_max(stood, Ordering::Relaxed);
            if now != lines {
                (lines, since) = (now, Instant::now());
            }
        }
    }

    /// That of these while something is done.
    fn of(processes: &[Process; N], work: impl FnOnce(&Self)) -> [u64; N] {
        let (longest, over) = (
            Self([const { AtomicU64::new(0) }; N]),
            AtomicBool::new(false),
        );
        thread::scope(|scope| {
            let _over = Over(&over);
            for (longest, process) in longest.0.iter().zip(processes) {
                scope.spawn(|| Self::watch(longest, process, &over));
            }
            work(&longest);
        });
        longest.0.map(AtomicU64::into_inner)
    }
}

/// Ends the watching also when a test fails.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Waits until each of these has made progress.
#[track_caller]
fn all_progress(what: &str, processes: &[&Process]) {
    let before: Vec<usize> = processes.iter().map(|it| it.lines()).collect();
    for (process, before) in processes.iter().zip(before) {
        wait_for(what, PATIENCE, || {
            (process.lines() > before + 3).then_some(())
        });
    }
}

/// The MPS servers of a node's groups.
fn servers(node: &Node) -> Vec<Pid> {
    let groups = node.dir().join("groups").display().to_string();
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let servers = processes.filter_map(|process| {
        let read = |name: &str| {
            let bytes = fs::read(process.path().join(name)).unwrap_or_default();
            String::from_utf8_lossy(&bytes).into_owned()
        };
        let words: Vec<String> = read("cmdline").split('\0').map(str::to_owned).collect();
        let emulated = words.get(1..3) == Some(&["emu".to_owned(), "mps".to_owned()]);
        let is_server = emulated || words[0].ends_with("nvidia-cuda-mps-server");
        let pid = process.file_name().to_string_lossy().parse().ok();
        (is_server && read("environ").contains(&groups)).then_some(Pid::from_raw(pid?)?)
    });
    servers.collect()
}

fn start(node: &Node, name: &str, options: &str, program: &str) -> Process {
    Process::start(&mut node.tenant(&format!("--name {name} {options}"), program))
}

fn wait_controlled(node: &Node, name: &str) {
    node.wait_tenant(name, |it| !it["domains"][0].is_null());
}

#[test]
fn kills_of_daemon_tenant_and_server_lose_nothing() {
    let storm = Storm::new(4);
    let mut node = Node::start();
    // Requests now and then: one that always has work would leave the others their floor, whatever is killed.
    let _serve = start(&node, "serve", "--class latency", SERVE);
    let survivors = [
        start(&node, "shared", "--class standard", TICKS),
        start(&node, "train", "--class batch", TICKS),
    ];
    let bytes = start(&node, "bytes", "--class batch", BYTES);
    let member = |node: &Node| start(node, "member", "--class batch --trust team", TICKS);
    let mut grouped = member(&node);
    let mut victim = start(&node, "victim", "--class batch", TICKS);
    for name in ["serve", "shared", "train", "bytes", "member", "victim"] {
        wait_controlled(&node, name);
    }
    let turns = Longest::of(&survivors, |_| thread::sleep(Duration::from_secs(3)));
    let (mut done, mut kills, mut stalls) = (0, [0; 4], [[0; 2]; 4]);
    Longest::of(&survivors, |longest| {
        while storm.goes_on(done) {
            let kind = (done % 4) as usize;
            match kind {
                0 => {
                    node.kill_daemon();
                    node.start_daemon();
                }
                1 => {
                    victim.signal(Signal::KILL);
                    victim.finish();
                    victim = start(&node, &format!("victim{done}"), "--class batch", TICKS);
                    victim.wait_lines(1);
                }
                2 => {
                    // The last of its group, which another enters while what was left behind is still there.
                    grouped.signal(Signal::KILL);
                    grouped.finish();
                    wait_for("the end of its tenant", PATIENCE, || {
                        node.find_tenant("member").is_none().then_some(())
                    });
                    grouped = member(&node);
                    grouped.wait_lines(1);
                }
                _ => {
                    let all = servers(&node);
                    assert!(!all.is_empty(), "no MPS server runs");
                    for server in all {
                        let _ = kill_process(server, Signal::KILL);
                    }
                    // Its clients share its fate: the driver ends them.
                    grouped.finish();
                    wait_for("the end of its tenant", PATIENCE, || {
                        node.find_tenant("member").is_none().then_some(())
                    });
                    grouped = member(&node);
                    grouped.wait_lines(1);
                }
            }
            kills[kind] += 1;
            done += 1;
            all_progress("progress after a kill", &[&survivors[0], &survivors[1]]);
            for name in ["serve", "shared", "train", "bytes"] {
                wait_controlled(&node, name);
            }
            for (longest, stalls) in longest.0.iter().zip(&mut stalls[kind]) {
                let stall = longest.swap(0, Ordering::Relaxed);
                assert!(
                    stall <= STALL || !real(),
                    "a survivor of kill {done} stood still for {stall} ms"
                );
                *stalls = stall.max(*stalls);
            }
        }
    });
    bytes.signal(Signal::TERM);
    let report = bytes.finish().ok().json();
    assert_eq!(report["mismatches"], 0, "{report:#}");
    assert_ne!(report["elements"], 0, "{report:#}");
    let [standard, batch] = turns;
    print(&format!(
        "kills: {done} rounds; 0 tenants lost, 0 wrong of {} elements; longest stall of the standard and the batch tenant {standard} and \
         {batch} ms with quanta only",
        report["elements"],
    ));
    let what = ["daemon", "tenant", "last member of a group", "MPS server"];
    for ((what, kills), [standard, batch]) in what.iter().zip(kills).zip(stalls) {
        print(&format!(
            "kills: {kills} of a {what}: {standard} and {batch} ms"
        ));
    }
}

#[test]
fn stops_of_the_daemon_stop_no_tenant() {
    let storm = Storm::new(1);
    let node = Node::start();
    let _serve = start(&node, "serve", "--class latency", SERVE);
    let names = ["b0", "b1", "b2"];
    let batch = names.map(|name| start(&node, name, "--class batch", TICKS));
    let mut done = 0;
    let controlled = || {
        for name in names {
            node.wait_tenant(name, |it| it["domains"][0]["freezes"].as_u64() > Some(1));
        }
    };
    controlled();
    let all: Vec<&Process> = batch.iter().collect();
    let turns = Longest::of(&batch, |_| thread::sleep(Duration::from_secs(3)));
    let (mut stops, mut late) = (Stops::default(), Duration::ZERO);
    while storm.goes_on(done) {
        let (marks, lines, lateness) = record(&batch, || {
            node.daemon().signal(Signal::STOP);
            let stopped = Instant::now();
            all_progress("progress while the daemon is stopped", &all);
            thread::sleep(STOP.saturating_sub(stopped.elapsed()));
            let goes_on = Instant::now();
            node.daemon().signal(Signal::CONT);
            controlled();
            [stopped, goes_on, Instant::now()]
        });
        stops.add(&lines, marks);
        late = late.max(lateness);
        done += 1;
        // Where nothing else loads the machine, its lateness is none.
        if real() {
            let longest = stops.until_run.max(stops.while_stopped);
            assert!(
                longest <= 1000,
                "a tenant of a stopped daemon stood for {longest} ms"
            );
        }
    }
    print(&format!(
        "stops: {done} rounds of 5 s; a batch tenant ran at most {} ms after the stop, then stood at most {} ms while the daemon was \
         stopped, and {} ms while it took control again ({} ms with turns only); a thread of this machine was up to {} ms late",
        stops.until_run,
        stops.while_stopped,
        stops.while_returning,
        turns.into_iter().max().unwrap_or(0),
        late.as_millis()
    ));
}
