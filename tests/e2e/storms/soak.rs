//! Tenants of all kinds come, change, move and go, and what serves them is killed: nothing is lost, nothing is left behind.

use super::*;
use crate::memory::python;

/// Takes pages of an elastic pool and gives them back, of which every byte is verified.
const PAGES: &str = r#"
import sys
sys.path.insert(0, sys.argv[1])
import gpumux.kv
MIB = 1 << 20
use_device()
pool = gpumux.kv.Pool(32 * MIB, MIB, granule_bytes=2 * MIB, fallback=False)
found, held, step = ctypes.create_string_buffer(MIB), {}, 0
while True:
    step += 1
    for page in pool.alloc(1 + step % 7) or []:
        call("cuMemsetD32_v2", ctypes.c_uint64(pool.address + page * MIB), step, ctypes.c_size_t(MIB // 4))
        held[page] = step
    for page, value in held.items():
        call("cuMemcpyDtoH_v2", found, ctypes.c_uint64(pool.address + page * MIB), ctypes.c_size_t(MIB))
        assert found.raw == value.to_bytes(4, "little") * (MIB // 4), f"page {page} is wrong"
    if len(held) > 16:
        pool.free(list(held))
        held = {}
    print(step, flush=True)
"#;

/// Two processes that write and read the same memory in turn, which one has from the other by CUDA IPC, beside memory of their own.
const PAIR: &str = r#"
import subprocess, sys
class Handle(ctypes.Structure):
    _fields_ = [("words", ctypes.c_uint64 * 8)]
def read(at):
    word = ctypes.c_uint32()
    call("cuMemcpyDtoH_v2", ctypes.byref(word), at, ctypes.c_size_t(4))
    return word.value
use_device()
own, at = ctypes.c_uint64(), ctypes.c_uint64()
call("cuMemAlloc_v2", ctypes.byref(own), ctypes.c_size_t(4 << 20))
call("cuMemsetD32_v2", own, 77, ctypes.c_size_t(1 << 20))
if len(sys.argv) > 1:
    call("cuIpcOpenMemHandle_v2", ctypes.byref(at), Handle.from_buffer_copy(bytes.fromhex(sys.argv[1])), 1)
    for line in sys.stdin:
        assert read(at) == int(line) and read(own) == 77
        call("cuMemsetD32_v2", at, int(line) + 1, ctypes.c_size_t(1))
        call("cuCtxSynchronize")
        print(flush=True)
    sys.exit()
call("cuMemAlloc_v2", ctypes.byref(at), ctypes.c_size_t(2 << 20))
handle, pipe = Handle(), subprocess.PIPE
call("cuIpcGetMemHandle", ctypes.byref(handle), at)
child = subprocess.Popen([sys.executable, __file__, bytes(handle).hex()], stdin=pipe, stdout=pipe, text=True)
step = 0
while True:
    step += 2
    call("cuMemsetD32_v2", at, step, ctypes.c_size_t(1))
    call("cuCtxSynchronize")
    print(step, file=child.stdin, flush=True)
    assert child.stdout.readline(), "the child has ended"
    assert read(at) == step + 1 and read(own) == 77
    print(step, flush=True)
"#;

/// A tenant that is there, and whether its program must not end by itself.
struct Living {
    name: String,
    process: Process,
    lasts: bool,
}

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

/// What has been done so far.
#[derive(Default)]
struct Done {
    started: usize,
    ended: u64,
    changes: u64,
    moves: u64,
    kills: u64,
    elements: u64,
}

struct Soak {
    /// Options, program, and whether it lasts.
    programs: Vec<(&'static str, String, bool)>,
    random: Random,
    done: Done,
}

impl Soak {
    fn new(node: &Node, seed: u64) -> Self {
        let mut programs: Vec<_> = [
            ("--class latency", REQUESTS, true),
            ("--class batch", TICKS, true),
            ("--class standard --guaranteed 10%", TICKS, true),
            (
                "--class batch",
                "gpumux workload batch --kernel-us 3000 --seconds 86400",
                true,
            ),
            ("--class batch", BYTES, true),
            // Members share each other's faults, and their server's end.
            ("--class batch --trust team", TICKS, false),
            (
                "--class standard",
                "gpumux workload fault --seconds 0.2",
                false,
            ),
            (
                "--class batch",
                "gpumux workload sweep --memory 16MiB --churn 4MiB --passes 100000000",
                true,
            ),
        ]
        .map(|(options, program, lasts)| (options, program.to_owned(), lasts))
        .into();
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../python");
        for (name, program, argument) in [("pages", PAGES, folder), ("pair", PAIR, "")] {
            let Some(command) = python(node, program) else {
                break;
            };
            // Each has a file of its own.
            let script = format!("{name}.py");
            fs::rename(node.dir().join("program.py"), node.dir().join(&script)).unwrap();
            let command = command.replace("program.py", &script);
            programs.push(("--class batch", format!("{command} {argument}"), true));
        }
        Self {
            programs,
            random: Random(seed | 1),
            done: Done::default(),
        }
    }

    fn start(&mut self, node: &Node) -> Living {
        let number = self.done.started;
        let (options, program, lasts) = &self.programs[number % self.programs.len()];
        let name = format!("t{number}");
        self.done.started += 1;
        // It sees all devices, and may be moved between them.
        let options = format!("--gpu all {options}");
        Living {
            process: start(node, &name, &options, program),
            name,
            lasts: *lasts,
        }
    }

    /// Changes one tenant, or kills what serves them.
    fn change(&mut self, node: &mut Node, name: &str, kills: bool) {
        let number = self.random.below(2).to_string();
        let changes: &[&[&str]] = match self.random.below(if kills { 8 } else { 6 }) {
            0 => &[&["sleep", name], &["wake", name]],
            1 => &[&["set", name, "--weight", "2"]],
            2 => &[&["set", name, "--limit", "50%"]],
            3 => &[&["kill", "-s", "STOP", name], &["kill", "-s", "CONT", name]],
            4 | 5 => &[&["move", name, "--gpu", &number]],
            6 => {
                self.done.kills += 1;
                node.kill_daemon();
                return node.start_daemon();
            }
            _ => {
                let all = servers(node);
                self.done.kills += all.len() as u64;
                return all.into_iter().for_each(|server| {
                    let _ = kill_process(server, Signal::KILL);
                });
            }
        };
        for words in changes {
            // It may have ended, or not have begun; what is refused then is tested elsewhere.
            let changed = node.gpumux(*words).run();
            self.done.changes += 1;
            self.done.moves += u64::from(words[0] == "move" && changed.status.success());
        }
    }

    /// All kinds of tenants, for so long: each at least once. None is there before or after.
    fn mix(&mut self, node: &mut Node, time: Duration, kills: bool) {
        let begin = Instant::now();
        let witness = start(node, "witness", "--gpu all --class batch", BYTES);
        let mut living: Vec<Living> = Vec::new();
        let all = self.done.started + self.programs.len();
        while begin.elapsed() < time || self.done.started < all {
            if living.len() < 6 {
                living.push(self.start(node));
            }
            thread::sleep(Duration::from_millis(50 + self.random.below(200)));
            let one = self.random.below(living.len() as u64 + 1) as usize;
            let name = living.get(one).map_or("witness", |it| &it.name).to_owned();
            self.change(node, &name, kills);
            if living.len() >= 4 {
                let one = living.swap_remove(self.random.below(living.len() as u64) as usize);
                let signal = [Signal::KILL, Signal::TERM][self.random.below(2) as usize];
                self.end(one, signal);
            }
        }
        for one in living {
            self.end(one, Signal::KILL);
        }
        witness.signal(Signal::TERM);
        let report = witness.finish().ok().json();
        assert_eq!(report["mismatches"], 0, "{report:#}");
        self.done.elements += report["elements"].as_u64().unwrap();
        wait_for("the end of all tenants", PATIENCE, || {
            let ps = node.ps();
            ps["tenants"].as_array()?.is_empty().then_some(())
        });
    }

    fn end(&mut self, mut one: Living, signal: Signal) {
        let ended = one.process.poll();
        if ended.is_none() {
            one.process.signal(signal);
        }
        self.done.ended += 1;
        let (name, end) = (one.name, one.process.finish());
        assert!(
            ended.is_none() || !one.lasts,
            "{name} ended before it was to: {end:#?}"
        );
    }
}

#[test]
fn tenants_that_come_and_go_leave_nothing_behind() {
    let seconds = number("GPUMUX_TEST_SECONDS").unwrap_or(4);
    let time = |part: u64| Duration::from_secs(seconds / part);
    // Two of those that verify bytes do not fit, but each does, beside the contexts of all.
    let mut node = Node::with(Options {
        devices: 2,
        memory: if real() { 0 } else { 176 << 20 },
        ..Options::default()
    });
    let free = free_memory(&node);
    let seed = number("GPUMUX_TEST_SEED").unwrap_or(0x9e37_79b9_7f4a_7c15);
    let mut soak = Soak::new(&node, seed);
    let settle = |node: &Node| {
        wait_for("the end of unused groups", PATIENCE, || {
            servers(node).is_empty().then_some(())
        });
        let a_while = Duration::from_millis(500);
        wait_settled("no files come or go", PATIENCE, a_while, || {
            let mut all = BTreeSet::new();
            files(node.dir(), &mut all);
            (node.daemon_files().len(), all)
        })
    };
    // What the first needed is enough for all others.
    soak.mix(&mut node, time(3), true);
    let before = settle(&node);
    soak.mix(&mut node, time(2), true);
    settle(&node);
    let daemon = node.daemon().pid();
    let resident_before = resident(daemon);
    soak.mix(&mut node, time(2), false);
    let after = settle(&node);
    let grown = resident(daemon).saturating_sub(resident_before);
    let done = soak.done;
    print(&format!(
        "soak: {} tenants in {seconds} s, {} ended by a signal, {} changes, {} moves to another device, {} kills of daemons and MPS \
         servers (seed {seed}); 0 lost, 0 wrong of {} elements; daemon: {} descriptors before, {} after, {} KiB more memory; files {} \
         before, {} after",
        done.started,
        done.ended,
        done.changes,
        done.moves,
        done.kills,
        done.elements,
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
    assert_ne!(done.elements, 0);
    let left = free_memory(&node);
    // Another's use of a real device is not ours.
    let slack = if real() { 64 << 20 } else { 0 };
    assert!(left + slack >= free, "{left} of {free} bytes are free");
}
