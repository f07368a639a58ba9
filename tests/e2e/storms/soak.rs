//! Tenants of all kinds come, change, move and go, and what serves them is killed: nothing is lost, nothing is left behind.

use super::*;
use crate::memory::python;

/// Takes pages of elastic pools and gives them back, of which every byte is verified.
const PAGES: &str = r#"
import sys
sys.path.insert(0, sys.argv[1])
import gpumux.kv
MIB = 1 << 20
use_device()
count = int(sys.argv[2])
pools = [gpumux.kv.Pool((32 // count) * MIB, MIB, granule_bytes=2 * MIB, fallback=False) for _ in range(count)]
found, held, step = ctypes.create_string_buffer(MIB), {}, 0
while True:
    step += 1
    pool = pools[step % count]
    for page in pool.alloc(1 + step % 7) or []:
        at = pool.address + page * MIB
        call("cuMemsetD32_v2", ctypes.c_uint64(at), step, ctypes.c_size_t(MIB // 4))
        held[at] = step
    for at, value in held.items():
        call("cuMemcpyDtoH_v2", found, ctypes.c_uint64(at), ctypes.c_size_t(MIB))
        assert found.raw == value.to_bytes(4, "little") * (MIB // 4), f"page at {at:x} is wrong"
    if len(held) > 16 or step % 50 == 0:
        for pool in pools:
            pool.free([(at - pool.address) // MIB for at in held if 0 <= at - pool.address < 32 // count * MIB])
        held = {}
    print(step, flush=True)
"#;

/// The same as [`BYTES`], with memory that it maps itself.
const MAPPED: &str =
    "gpumux workload memory --json --seed 9 --memory 32MiB --mapped --seconds 86400";
/// Requests that are graphs.
const GRAPHS: &str =
    "gpumux workload latency --json --graph --kernels 5 --period-us 20000 --seconds 86400";
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

/// Threads that allocate, write, verify and free at the same time.
const THREADS: &str = r#"
import os, threading
context = use_device()
def work(step):
    call("cuCtxSetCurrent", context)
    while True:
        step += 8
        at, size = ctypes.c_uint64(), (1 + step * 7 % 5) << 18
        call("cuMemAlloc_v2", ctypes.byref(at), ctypes.c_size_t(size))
        call("cuMemsetD32_v2", at, step, ctypes.c_size_t(size // 4))
        found = ctypes.create_string_buffer(size)
        call("cuMemcpyDtoH_v2", found, at, ctypes.c_size_t(size))
        assert found.raw == step.to_bytes(4, "little") * (size // 4), step
        call("cuMemFree_v2", at)
        os.write(1, b"there\n")
def fails(what):
    threading.__excepthook__(what)
    os._exit(1)
threading.excepthook = fails
for n in range(8):
    threading.Thread(target=work, args=[n]).start()
"#;

/// Stream-ordered memory, of which every byte is verified.
const ORDERED: &str = r#"
use_device()
pool, step, held = ctypes.c_void_p(), 0, []
call("cuDeviceGetDefaultMemPool", ctypes.byref(pool), 0)
call("cuMemPoolSetAttribute", pool, 4, ctypes.byref(ctypes.c_uint64(16 << 20)))
while True:
    step += 1
    at, size = ctypes.c_uint64(), (1 + step % 6) << 19
    call("cuMemAllocAsync", ctypes.byref(at), ctypes.c_size_t(size), None)
    call("cuMemsetD32Async", at, step, ctypes.c_size_t(size // 4), None)
    held.append((at, size, step))
    if len(held) > 4:
        at, size, value = held.pop(0)
        found = ctypes.create_string_buffer(size)
        call("cuMemcpyDtoH_v2", found, at, ctypes.c_size_t(size))
        assert found.raw == value.to_bytes(4, "little") * (size // 4), value
        call("cuMemFreeAsync", at, None)
    print(step, flush=True)
"#;

/// Starts programs like itself and kills them, and forks children that use no device.
const CHILDREN: &str = r#"
import os, signal, subprocess, sys, time
use_device()
at, step, word = ctypes.c_uint64(), 0, ctypes.c_uint32()
call("cuMemAlloc_v2", ctypes.byref(at), ctypes.c_size_t(3 << 20))
def works():
    global step
    step += 1
    call("cuMemsetD32_v2", at, step, ctypes.c_size_t(3 << 18))
    call("cuMemcpyDtoH_v2", ctypes.byref(word), ctypes.c_uint64(at.value + (step % (3 << 18)) * 4), ctypes.c_size_t(4))
    assert word.value == step, (word.value, step)
    print(step, flush=True)
while len(sys.argv) > 1:
    works()
while True:
    child = subprocess.Popen([sys.executable, __file__, "child"], stdout=subprocess.DEVNULL)
    forked = os.fork()
    if forked == 0:
        time.sleep(0.1)
        os._exit(0)
    for _ in range(20 + step % 30):
        works()
    child.send_signal([signal.SIGKILL, signal.SIGTERM][step % 2])
    child.wait()
    os.waitpid(forked, 0)
"#;

/// Two ranks, which begin with one device each.
const RANKS: &str = r#"
import os, subprocess, sys
if len(sys.argv) == 1:
    ranks = [dict(os.environ, RANK=str(n), LOCAL_RANK=str(n)) for n in (0, 1)]
    ranks = [subprocess.Popen([sys.executable, __file__, "rank"], env=it) for it in ranks]
    sys.exit(max(it.wait() for it in ranks))
use_device()
at, step, word = ctypes.c_uint64(), 0, ctypes.c_uint32()
call("cuMemAlloc_v2", ctypes.byref(at), ctypes.c_size_t(2 << 20))
while True:
    step += 1
    call("cuMemsetD32_v2", at, step, ctypes.c_size_t(1 << 19))
    call("cuMemcpyDtoH_v2", ctypes.byref(word), at, ctypes.c_size_t(4))
    assert word.value == step, (word.value, step)
    os.write(1, b"there\n")
"#;

/// What shows that a program goes on.
#[derive(Clone, Copy, PartialEq)]
enum Sign {
    /// Lines that it writes again and again.
    Lines,
    /// Its report at its end, which tells of wrong bytes.
    Report,
    /// It need not go on: members of a group share each other's faults.
    None,
}

/// A kind of tenant.
struct Program {
    options: &'static str,
    command: String,
    sign: Sign,
    /// It goes on where it gets no memory.
    spares: bool,
}

/// A tenant that is there.
struct Living {
    name: String,
    process: Process,
    sign: Sign,
    spares: bool,
}

/// By how much the daemon's memory may grow while tenants come and go: what its rings keep of them.
const GROWTH: u64 = 24 << 20;
/// Longer than between two looks at what a device has.
const COUNTED: Duration = Duration::from_millis(1200);
/// How long a tenant may stand still among others with work: a turn of each, and what its class waits.
const WAITS: Duration = Duration::from_secs(120);

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
        if !path.ends_with("programs.json") {
            into.insert(path.display().to_string());
        }
    }
}

/// Whether a process is still `gpumux run`, which becomes its program.
fn is_run(pid: u32) -> bool {
    let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    words.split(|it| *it == 0).any(|word| word == b"--name")
}

/// Free bytes of each device, as a program sees them that is no tenant.
fn free_memory(node: &Node) -> Vec<u64> {
    let free = |device: u64| {
        let gpumux = gpumux_tests::binary().into_os_string();
        let mut scratch = node.on_device([gpumux, "scratch".into(), "--memory".into()]);
        scratch.env("CUDA_VISIBLE_DEVICES", device.to_string());
        scratch.run().ok().out.trim().parse().unwrap()
    };
    (0..devices().min(2) as u64).map(free).collect()
}

/// Free bytes of each device as the daemon counts them.
fn counted(node: &Node) -> Vec<u64> {
    let memory = node.get("/v1/memory");
    let devices = memory.as_array().unwrap().iter();
    devices.map(|it| it["free"].as_u64().unwrap()).collect()
}

/// Why a tenant stands still.
fn stands(node: &Node, one: &Living) -> String {
    let said = |words: &[&str]| node.gpumux(words).run().out;
    let why = said(&["explain", &one.name]) + &said(&["memory"]);
    let (name, err) = (&one.name, one.process.err());
    format!("{name} stands still: {why}{:#}{err}", node.ps())
}

/// What the daemon wrote is no sign of a fault of its own.
fn assert_sound(log: &str) {
    assert!(!log.contains("panicked"), "{log}");
}

/// What has been done so far.
#[derive(Default)]
struct Done {
    started: usize,
    ended: u64,
    changes: u64,
    refused: u64,
    moves: u64,
    kills: u64,
    elements: u64,
    /// The longest time until all went on when nothing changed any more.
    stood: Duration,
}

struct Soak {
    programs: Vec<Program>,
    random: Random,
    done: Done,
    /// Commands that are under way.
    commands: Vec<(Vec<String>, Process)>,
    /// Tenants that are stopped or asleep.
    resting: Vec<(String, &'static [&'static str])>,
    /// Moved memory may take little of the host.
    tight: bool,
}

impl Soak {
    fn new(node: &Node, seed: u64) -> Self {
        const LATENCY: &str = "--class latency";
        const BATCH: &str = "--class batch";
        let serve = &*format!("{SERVE} --json");
        const SWEEP: &str =
            "gpumux workload sweep --json --memory 16MiB --churn 4MiB --passes 100000000";
        let mut programs: Vec<_> = [
            (LATENCY, serve, Sign::Report, false),
            (BATCH, TICKS, Sign::Lines, false),
            (
                "--class standard --guaranteed 10%",
                TICKS,
                Sign::Lines,
                false,
            ),
            (
                BATCH,
                "gpumux workload batch --json --kernel-us 3000 --seconds 86400",
                Sign::Report,
                false,
            ),
            (BATCH, BYTES, Sign::Report, true),
            ("--class batch --trust team", TICKS, Sign::None, false),
            (
                "--class standard",
                "gpumux workload fault --seconds 0.2",
                Sign::None,
                false,
            ),
            (BATCH, SWEEP, Sign::Report, false),
            (
                "--class standard --memory-guaranteed 24MiB",
                MAPPED,
                Sign::Report,
                true,
            ),
            (LATENCY, GRAPHS, Sign::Report, false),
        ]
        .map(|(options, command, sign, spares)| Program {
            options,
            command: command.to_owned(),
            sign,
            spares,
        })
        .into();
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../python");
        let pages = format!("{folder} 1");
        let two_pools = format!("{folder} 2");
        for (name, options, program, argument) in [
            ("pages", BATCH, PAGES, &*pages),
            (
                "owner",
                "--class standard --memory-guaranteed 24MiB",
                PAGES,
                &*pages,
            ),
            ("pools", BATCH, PAGES, &*two_pools),
            ("pair", BATCH, PAIR, ""),
            ("threads", BATCH, THREADS, ""),
            ("ordered", BATCH, ORDERED, ""),
            ("children", BATCH, CHILDREN, ""),
            (
                "ranks",
                "--class batch --trust team --ranks-per-gpu 2",
                RANKS,
                "",
            ),
        ] {
            let Some(command) = python(node, program) else {
                break;
            };
            // Each has a file of its own.
            let script = format!("{name}.py");
            fs::rename(node.dir().join("program.py"), node.dir().join(&script)).unwrap();
            let command = command.replace("program.py", &script);
            programs.push(Program {
                options,
                command: format!("{command} {argument}"),
                sign: if program == RANKS {
                    Sign::None
                } else {
                    Sign::Lines
                },
                spares: program == PAGES,
            });
        }
        Self {
            programs,
            random: Random(seed | 1),
            done: Done::default(),
            commands: Vec::new(),
            resting: Vec::new(),
            tight: false,
        }
    }

    fn one_of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.random.below(all.len() as u64) as usize]
    }

    fn start(&mut self, node: &Node) -> Living {
        let number = self.done.started;
        let program = &self.programs[number % self.programs.len()];
        let name = format!("t{number}");
        self.done.started += 1;
        // It sees all devices, and may be moved between them.
        let options = format!("--gpu all {}", program.options);
        Living {
            process: start(node, &name, &options, &program.command),
            name,
            sign: program.sign,
            spares: program.spares,
        }
    }

    /// Has a command carried out while other things happen.
    fn command(&mut self, node: &Node, name: &str, words: &[&str]) {
        let mut words: Vec<String> = words.iter().map(|it| (*it).to_owned()).collect();
        words.insert(1, name.to_owned());
        self.done.changes += 1;
        let process = Process::start(&mut node.gpumux(&words));
        self.commands.push((words, process));
    }

    /// Waits for commands. What is changed may have ended, or not have begun; what is refused then is tested elsewhere.
    fn settle(&mut self) {
        for (words, process) in self.commands.drain(..) {
            let end = process.finish();
            self.done.moves += u64::from(words[0] == "move" && end.status.success());
            self.done.refused += u64::from(end.code() == 1);
            let known = matches!(end.code(), 0 | 1) && !end.err.contains("panicked");
            assert!(known, "gpumux {words:?}: {end:#?}");
        }
    }

    /// Those that were stopped or put to sleep go on.
    fn resume(&mut self, node: &Node) {
        for (name, words) in std::mem::take(&mut self.resting) {
            self.command(node, &name, words);
        }
        self.settle();
    }

    /// Changes one tenant, or kills or stops what serves them. Whether it is to be killed in the middle of that.
    fn change(&mut self, node: &mut Node, living: &[Living], one: usize, kills: bool) -> bool {
        let named = living.get(one).map(|it| (&*it.name, it.spares));
        let (name, spares) = named.unwrap_or(("witness", true));
        let set: &[&str] = match self.random.below(if kills { 16 } else { 13 }) {
            0 | 1 => {
                self.command(node, name, &["sleep"]);
                self.resting.push((name.to_owned(), &["wake"]));
                return self.random.below(4) == 0;
            }
            2 => {
                // One after the other, so that it does not stay stopped.
                self.settle();
                self.command(node, name, &["kill", "-s", "STOP"]);
                self.settle();
                self.resting
                    .push((name.to_owned(), &["kill", "-s", "CONT"]));
                return false;
            }
            3 | 4 => {
                let number = self.one_of(&["0", "1"]);
                self.command(node, name, &["move", "--gpu", number]);
                return self.random.below(4) == 0;
            }
            5 => &["set", "--weight", "2"],
            6 => &["set", "--limit", self.one_of(&["50%", "100%"])],
            7 => &[
                "set",
                "--class",
                self.one_of(&["latency", "standard", "batch"]),
            ],
            8 => &["set", "--guaranteed", self.one_of(&["10%", "0"])],
            9 => {
                let limit = if spares { "12MiB" } else { "96MiB" };
                &["set", "--memory-limit", self.one_of(&[limit, "none"])]
            }
            10 => &["set", "--memory-guaranteed", self.one_of(&["16MiB", "0"])],
            11 => &["set", "--sleep-after", self.one_of(&["0", "1", "never"])],
            12 => &["set", "--latency-objective", self.one_of(&["20ms", "none"])],
            13 => {
                // One that finds no daemon starts one.
                wait_for("programs to begin", PATIENCE, || {
                    let begun = |it: &Living| !is_run(it.process.pid());
                    living.iter().all(begun).then_some(())
                });
                self.restart(node);
                return false;
            }
            14 => {
                let all = servers(node);
                self.done.kills += all.len() as u64;
                for server in all {
                    let _ = kill_process(server, Signal::KILL);
                }
                return false;
            }
            _ => {
                self.stand_still(node);
                node.daemon().signal(Signal::CONT);
                return false;
            }
        };
        self.command(node, name, set);
        false
    }

    /// The daemon stands still until its lease has expired.
    fn stand_still(&mut self, node: &Node) {
        node.daemon().signal(Signal::STOP);
        thread::sleep(Duration::from_millis(900 + self.random.below(300)));
    }

    /// The daemon ends in one of several ways, and another begins, which may have another configuration.
    fn restart(&mut self, node: &mut Node) {
        self.done.kills += 1;
        assert_sound(&node.daemon().err());
        match self.random.below(3) {
            0 => drop(node.stop_daemon().ok()),
            1 => {
                self.stand_still(node);
                node.kill_daemon();
            }
            _ => node.kill_daemon(),
        }
        let tight = self.random.below(3) == 0;
        self.begin(node, tight);
    }

    /// Starts a daemon. `tight`: the host has no room for a move now and then, so that a tenant may wait without end.
    fn begin(&mut self, node: &mut Node, tight: bool) {
        self.tight = tight && !real();
        let policy = self.one_of(&["priority", "weighted", "max-min"]);
        let limit = if self.tight { "limit = '96MiB'" } else { "" };
        let text = format!("policy = '{policy}'\n[host_memory]\n{limit}\n");
        fs::write(node.dir().join("gpumux.toml"), text).unwrap();
        node.start_daemon();
    }

    /// Tenants for so long, and at least so many kinds of them. None is there before or after.
    fn mix(&mut self, node: &mut Node, (time, least): (Duration, usize), kills: bool) {
        let begin = Instant::now();
        let witness = start(node, "witness", "--gpu all --class batch", BYTES);
        let mut living: Vec<Living> = Vec::new();
        let all = self.done.started + least;
        while begin.elapsed() < time || self.done.started < all {
            while living.len() < 6 {
                living.push(self.start(node));
            }
            thread::sleep(Duration::from_millis(self.random.below(100)));
            let one = self.random.below(living.len() as u64 + 1) as usize;
            let dies = self.change(node, &living, one, kills) && one < living.len();
            if dies {
                thread::sleep(Duration::from_millis(self.random.below(30)));
                let one = living.swap_remove(one);
                self.end(node, one, Signal::KILL);
            } else if self.done.started < all || self.random.below(6) == 0 {
                let one = living.swap_remove(self.random.below(living.len() as u64) as usize);
                let signal = self.one_of(&[Signal::KILL, Signal::TERM]);
                self.end(node, one, signal);
            }
            if self.commands.len() > 5 || self.random.below(4) == 0 {
                self.resume(node);
            }
        }
        self.resume(node);
        if self.tight {
            node.kill_daemon();
            self.begin(node, false);
        }
        self.go_on(node, &mut living);
        for one in living {
            self.end(node, one, Signal::TERM);
        }
        witness.signal(Signal::TERM);
        let report = witness.finish_within(WAITS).ok().json();
        assert_eq!(report["mismatches"], 0, "{report:#}");
        self.done.elements += report["elements"].as_u64().unwrap();
        wait_for("the end of all tenants", PATIENCE, || {
            let ps = node.ps();
            ps["tenants"].as_array()?.is_empty().then_some(())
        });
        assert_sound(&node.daemon().err());
    }

    /// No tenant stays frozen or asleep, and none waits without end.
    fn go_on(&mut self, node: &Node, living: &mut [Living]) {
        let begin = Instant::now();
        let writes = living.iter_mut().filter(|it| it.sign == Sign::Lines);
        for (before, one) in writes
            .map(|it| (it.process.lines(), it))
            .collect::<Vec<_>>()
        {
            let mut left = Patience::new(WAITS);
            // One that has ended is found below.
            while one.process.lines() < before + 3 && one.process.poll().is_none() {
                assert!(left.lasts(), "{}", stands(node, one));
                thread::sleep(Duration::from_millis(5));
            }
        }
        self.done.stood = self.done.stood.max(begin.elapsed());
    }

    fn end(&mut self, node: &Node, mut one: Living, signal: Signal) {
        let ended = one.process.poll();
        if ended.is_none() {
            let ends = if self.tight { Signal::KILL } else { signal };
            // One that sleeps at its user's request ends by SIGTERM only once it is woken.
            if ends == Signal::TERM {
                self.resume(node);
            }
            one.process.signal(ends);
            // If it is stopped.
            one.process.signal(Signal::CONT);
        }
        let mut left = Patience::new(WAITS);
        while one.process.poll().is_none() {
            assert!(left.lasts(), "{}", stands(node, &one));
            thread::sleep(Duration::from_millis(5));
        }
        self.resting.retain(|(name, _)| *name != one.name);
        self.done.ended += 1;
        let (name, end) = (one.name, one.process.finish());
        assert!(
            ended.is_none() || one.sign == Sign::None,
            "{name} ended before it was to: {end:#?}"
        );
        if one.sign == Sign::Report && end.status.success() {
            let wrong = end.json()["mismatches"].as_u64();
            assert_eq!(wrong.unwrap_or(0), 0, "{name}: {end:#?}");
        }
    }
}

#[test]
fn tenants_that_come_and_go_leave_nothing_behind() {
    let seconds = number("GPUMUX_TEST_SECONDS").unwrap_or(4);
    let time = |part: u64| Duration::from_secs(seconds / part);
    // Not all fit, but each does, beside the contexts of all and what does not move.
    let mut node = Node::with(Options {
        devices: 2,
        memory: if real() { 0 } else { 320 << 20 },
        without_daemon: true,
        ..Options::default()
    });
    let free = free_memory(&node);
    let file = node.dir().join("gpumux.toml").display().to_string();
    node.configure(["--config".into(), file]);
    let seed = number("GPUMUX_TEST_SEED").unwrap_or(0x9e37_79b9_7f4a_7c15);
    let mut soak = Soak::new(&node, seed);
    soak.begin(&mut node, false);
    let counted_before = wait_settled("counts of memory", PATIENCE, COUNTED, || counted(&node));
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
    let all = soak.programs.len();
    soak.mix(&mut node, (time(3), all), true);
    let before = settle(&node);
    soak.mix(&mut node, (time(2), all / 3), true);
    settle(&node);
    let daemon = node.daemon().pid();
    let resident_before = resident(daemon);
    soak.mix(&mut node, (time(2), all / 3), false);
    let after = settle(&node);
    let grown = resident(daemon).saturating_sub(resident_before);
    let done = soak.done;
    print(&format!(
        "soak: {} tenants in {seconds} s, {} ended by a signal, {} changes, {} of them refused, {} moves to another device, {} ends of \
         daemons and MPS servers (seed {seed}); 0 lost, 0 wrong of {} elements; all went on within {} ms; daemon: {} descriptors before, \
         {} after, {} KiB more memory; files {} before, {} after",
        done.started,
        done.ended,
        done.changes,
        done.refused,
        done.moves,
        done.kills,
        done.elements,
        done.stood.as_millis(),
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
    // Another's use of a real device is not ours.
    let slack = if real() { 64 << 20 } else { 0 };
    let is_free = |left: &[u64], before: &[u64]| {
        let mut all = left.iter().zip(before);
        all.all(|(left, before)| left + slack >= *before)
    };
    let left = free_memory(&node);
    assert!(is_free(&left, &free), "{left:?} of {free:?} bytes are free");
    wait_for("what is counted to be free", PATIENCE, || {
        is_free(&counted(&node), &counted_before).then_some(())
    });
    assert_eq!(node.get("/v1/status")["host_memory"]["used"], 0);
}
