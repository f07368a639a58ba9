//! Memory that is kept over a fault of another member: `gpumux.kept`.

use super::*;
use crate::memory::python;

/// Has a buffer, and carries out lines of Python. While the file `hold` is there, the next start waits.
const PROGRAM: &str = r#"
import os, sys, time
sys.path.insert(0, sys.argv[1])
while os.path.exists(sys.argv[2]):
    time.sleep(0.01)
import gpumux.kept
SIZE = (64 << 20) - 8
context = use_device()
def buffer_of(size):
    global buffer
    buffer = gpumux.kept.Buffer("state", size, fallback=False)
    print("buffer", buffer.found, buffer.step, flush=True)
def fill(value, first=0, size=SIZE):
    call("cuMemsetD32_v2", ctypes.c_uint64(buffer.address + first), value, ctypes.c_size_t(size // 4))
def is_all(value):
    found = (ctypes.c_uint32 * (buffer.nbytes // 4))()
    call("cuMemcpyDtoH_v2", found, ctypes.c_uint64(buffer.address), ctypes.c_size_t(buffer.nbytes))
    assert bytes(found) == value.to_bytes(4, "little") * (buffer.nbytes // 4), found[0]
def work():
    number = first = buffer.step
    while True:
        number += 1
        fill(number)
        buffer.commit(number)
        if number % 4 == 0:
            call("cuCtxSynchronize")
        if number == first + 4:
            print("works", flush=True)
buffer_of(SIZE)
for line in sys.stdin:
    exec(line)
    print("done", flush=True)
"#;

/// What the tests' buffer takes: twice its bytes and some words, in granules of 2 MiB.
const TAKEN: u64 = 130 << 20;

struct Keeping {
    process: Process,
    hold: PathBuf,
}

impl Keeping {
    fn start(node: &Node, options: &str) -> Option<Self> {
        let program = python(node, PROGRAM)?;
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../python");
        let hold = node.dir().join("hold");
        let program = format!("{program} {folder} {}", hold.display());
        let process = member(node, "keeping", options, &program);
        Some(Self { process, hold })
    }

    fn line(&mut self) -> String {
        self.process.next_line()
    }

    #[track_caller]
    fn runs(&mut self, line: &str) {
        self.process.write(&format!("{line}\n"));
        assert_eq!(self.line(), "done");
    }

    /// A neighbour faults, and the program notices that.
    fn is_ended_by_a_fault(&mut self, node: &Node, number: usize) {
        fault(node, number);
        self.process.write("call('cuCtxSynchronize')\n");
    }
}

/// A member faults, the first of them with number 0.
fn fault(node: &Node, number: usize) {
    let name = format!("faulty{number}");
    member(node, &name, "", "gpumux workload fault --seconds 0.1").finish();
    wait_ps(node, "the fault", |ps| ps["faults"].get(number).map(|_| ()));
}

const AGAIN: &str = "--restart on-collateral --keep-memory";

/// Pinned memory of the tenant.
fn pinned(node: &Node) -> u64 {
    let tenant = node.find_tenant("keeping").expect("it is there");
    let all = tenant["memory"].as_array().expect("a list").iter();
    all.map(|it| it["pinned"].as_u64().expect("a number")).sum()
}

fn free_memory(node: &Node) -> u64 {
    let mut probe = node.shimmed("gpumux scratch --memory", "/dev/null".as_ref());
    let probe = probe.env_remove("LD_PRELOAD").run().ok();
    probe.out.trim().parse().unwrap()
}

#[test]
fn kept_buffer_has_its_committed_contents_after_each_fault() {
    let node = Node::start();
    let free = free_memory(&node);
    let Some(mut keeping) = Keeping::start(&node, AGAIN) else {
        return;
    };
    assert_eq!(keeping.line(), "buffer False 0");
    keeping.runs("is_all(0); fill(1); buffer.commit(7)");
    // A step that is not committed, in its middle.
    keeping.runs("call('cuCtxSynchronize'); fill(2, first=SIZE // 2, size=SIZE // 4)");
    node.wait_tenant("keeping", |_| pinned(&node) == TAKEN);
    fs::write(&keeping.hold, "").unwrap();
    keeping.is_ended_by_a_fault(&node, 0);
    // No process has the memory now.
    let ended = |it: &Value| it["domains"].as_array().is_some_and(Vec::is_empty);
    node.wait_tenant("keeping", ended);
    assert_eq!(pinned(&node), TAKEN);
    if !real() {
        wait_for("the memory of the processes", PATIENCE, || {
            (free_memory(&node) + TAKEN == free).then_some(())
        });
    }
    fs::remove_file(&keeping.hold).unwrap();
    assert_eq!(keeping.line(), "buffer True 7");
    keeping.runs("is_all(1)");
    assert_eq!(pinned(&node), TAKEN);
    // Steps beyond 32 bits; one that was committed whole right before the fault.
    keeping.runs("fill(3); buffer.commit(1 << 40); fill(4); buffer.commit((1 << 40) + 1)");
    keeping.runs("call('cuCtxSynchronize'); fill(5)");
    keeping.is_ended_by_a_fault(&node, 1);
    assert_eq!(keeping.line(), "buffer True 1099511627777");
    keeping.runs("is_all(4)");
    assert_eq!(pinned(&node), TAKEN);
    if real() {
        // The faulting client is unknown there: a program runs again twice.
        return;
    }
    // A buffer that has ended is found no more, nor is one of another size.
    keeping.runs("buffer.end()");
    node.wait_tenant("keeping", |_| pinned(&node) < TAKEN);
    keeping.process.write("buffer_of(SIZE // 2)\n");
    assert_eq!(keeping.line(), "buffer False 0");
    assert_eq!(keeping.line(), "done");
    keeping.runs("fill(6, size=SIZE // 2); buffer.commit(9); call('cuCtxSynchronize')");
    // Its contents look like the words by which a buffer's halves are known.
    keeping.runs("small = gpumux.kept.Buffer('small', 200_000, fallback=False)");
    keeping.runs("call('cuMemsetD32_v2', ctypes.c_uint64(small.address), 0x7470656b, ctypes.c_size_t(50_000))");
    keeping.runs("small.commit(9); call('cuCtxSynchronize')");
    keeping.is_ended_by_a_fault(&node, 2);
    assert_eq!(keeping.line(), "buffer False 0");
    keeping.runs("is_all(0)");
    keeping.runs("small = gpumux.kept.Buffer('small', 100_000, fallback=False); assert not small.found; small.end()");
    node.wait_tenant("keeping", |_| pinned(&node) == TAKEN);
    // A good end leaves nothing.
    keeping.process.write("sys.exit()\n");
    let end = keeping.process.finish();
    assert_eq!(end.code(), 0, "{end:#?}");
    wait_for("all memory", PATIENCE, || {
        (free_memory(&node) == free).then_some(())
    });
}

/// It works and commits without a pause.
#[test]
fn kept_buffer_is_whole_wherever_a_fault_strikes() {
    let node = Node::start();
    let Some(mut keeping) = Keeping::start(&node, AGAIN) else {
        return;
    };
    assert_eq!(keeping.line(), "buffer False 0");
    // Twice at most where the faulting client is unknown, as on a GPU.
    for number in 0..2 {
        keeping.process.write("work()\n");
        assert_eq!(keeping.line(), "works");
        fault(&node, number);
        let found = keeping.line();
        assert!(found.starts_with("buffer True "), "{found}");
        keeping.runs("assert buffer.step >= 4; is_all(buffer.step)");
    }
}

/// A daemon that begins again while the program has the memory, and while no process has it.
#[test]
fn kept_buffer_is_counted_once_and_limited_over_daemons() {
    let mut node = Node::start();
    let Some(mut keeping) = Keeping::start(&node, &format!("{AGAIN} --memory-limit 256MiB")) else {
        return;
    };
    assert_eq!(keeping.line(), "buffer False 0");
    keeping.runs("fill(1); buffer.commit(1); call('cuCtxSynchronize')");
    node.kill_daemon();
    node.start_daemon();
    node.wait_tenant("keeping", |_| pinned(&node) == TAKEN);
    fs::write(&keeping.hold, "").unwrap();
    keeping.is_ended_by_a_fault(&node, 0);
    let ended = |it: &Value| it["domains"].as_array().is_some_and(Vec::is_empty);
    node.wait_tenant("keeping", ended);
    assert_eq!(pinned(&node), TAKEN);
    wait_for("the next start", PATIENCE, || {
        keeping
            .process
            .err()
            .contains("it runs again")
            .then_some(())
    });
    node.kill_daemon();
    node.start_daemon();
    fs::remove_file(&keeping.hold).unwrap();
    assert_eq!(keeping.line(), "buffer True 1");
    keeping.runs("is_all(1)");
    node.wait_tenant("keeping", |_| pinned(&node) == TAKEN);
    keeping.runs(
        "at = ctypes.c_uint64(); assert cuda.cuMemAlloc_v2(ctypes.byref(at), ctypes.c_size_t(140 << 20)) == 2",
    );
    keeping.runs("call('cuMemAlloc_v2', ctypes.byref(at), ctypes.c_size_t(120 << 20))");
}

#[test]
fn kept_buffer_is_refused_to_other_tenants_and_users() {
    const OTHER: &str = r#"
import os, sys
sys.path.insert(0, sys.argv[1])
os.environ["GPUMUX_KEEPER"] = sys.argv[2]
import gpumux.kept
context = use_device()
try:
    gpumux.kept.Buffer("state", 1, fallback=False)
except gpumux.kept.KeptError as error:
    print(error)
"#;
    // A process of user 65534, and one of this user, introduce themselves with the tenant's secret.
    const USERS: &str = r#"
import os, socket, sys
name, secret = sys.argv[1].encode(), sys.argv[2].encode()
for user in (65534, None):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
        if user is not None: os.seteuid(user)
        link.connect(b"\0" + name)
        if user is not None: os.seteuid(0)
        try:
            link.send(bytes([0, len(secret)]) + secret)
            print(link.recv(100))
        except (ConnectionResetError, BrokenPipeError):
            print("refused")
"#;
    let node = Node::start();
    let Some(mut keeping) = Keeping::start(&node, AGAIN) else {
        return;
    };
    assert_eq!(keeping.line(), "buffer False 0");
    keeping
        .process
        .write("print(os.environ['GPUMUX_KEEPER'], os.environ['GPUMUX_TENANT'])\n");
    let names = keeping.line();
    let (socket, secret) = names.split_once(' ').unwrap();
    assert_eq!(keeping.line(), "done");
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../python");
    let program = python(&node, OTHER).unwrap();
    let other = member(&node, "other", "", &format!("{program} {folder} {socket}")).finish();
    assert!(other.out.contains("no supervisor keeps it"), "{other:#?}");
    if rustix::process::geteuid().is_root() {
        let mut users = Command::new("python3");
        let users = users.args(["-c", USERS, socket, secret]).run().ok();
        let lines: Vec<&str> = users.out.lines().collect();
        assert!(
            matches!(lines[..], ["refused" | "b''", r"b'\x00'"]),
            "{lines:?}"
        );
    }
    keeping.runs("is_all(0)");
}
