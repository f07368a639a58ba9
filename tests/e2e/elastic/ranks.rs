//! Ranks of an engine on two devices, each with an elastic range: what one has not, none has.

use gpumux_tests::{Node, Options, Process, real};

use crate::memory::python;

/// An engine's process, which carries out lines of Python, and its two ranks, which it starts. `ranks[n]` has what rank n carries out.
const ENGINE: &str = r#"
import subprocess, sys, threading, time
sys.path.insert(0, sys.argv[1])
import gpumux.kv, gpumux._ranks
MIB, GRANULE = 1 << 20, 16 << 20
def lines():
    for line in sys.stdin:
        exec(line, globals())
        print("done", flush=True)
def rank(device):
    global memory, given
    context = ctypes.c_void_p()
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)
    memory, given = gpumux.kv._Elastic(device, 15 * GRANULE, GRANULE), 0
    def at(first):
        return ctypes.c_uint64(memory.address + first * GRANULE)
    def clear(first, count):
        call("cuCtxSetCurrent", context)
        call("cuMemsetD32_v2", at(first), 0, ctypes.c_size_t(count * GRANULE // 4))
        call("cuCtxSynchronize")
    class Rank(gpumux._ranks.Rank):
        def commit(self, *arguments):
            global given
            answer = super().commit(*arguments)
            given += answer == 0
            return answer
    print(Rank(memory, clear).listen(b"key"), flush=True)
    lines()
if len(sys.argv) > 2:
    rank(int(sys.argv[2]))
    sys.exit()
ranks = [subprocess.Popen([sys.executable, *sys.argv[:2], str(n)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for n in (0, 1)]
together = gpumux._ranks.Ranks([it.stdout.readline().strip() for it in ranks], b"key", GRANULE)
def runs(n, line):
    ranks[n].stdin.write(line + "\n")
    ranks[n].stdin.flush()
    assert ranks[n].stdout.readline() == "done\n", line
def both(line):
    together.there([])
    for n in (0, 1):
        runs(n, line)
print("there", flush=True)
lines()
"#;

/// Two devices of 320 MiB. An engine takes 240 MiB of each at most.
fn node() -> Option<Node> {
    if real() {
        eprintln!("SKIPPED: the devices are too large to fill in a test");
        return None;
    }
    Some(Node::with(Options {
        devices: 2,
        memory: 320 << 20,
        ..Options::default()
    }))
}

fn engine(node: &Node, name: &str) -> Option<Process> {
    let program = python(node, ENGINE)?;
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../python");
    let options = format!("--name {name} --memory-policy wait");
    let mut engine = Process::start(&mut node.tenant(&options, &format!("{program} {folder}")));
    engine.next_line();
    Some(engine)
}

fn runs(engine: &mut Process, line: &str) {
    engine.write(&format!("{line}\n"));
    engine.next_line();
}

#[test]
fn rank_has_no_memory_that_the_other_lacks() {
    let Some(node) = node() else { return };
    let Some(mut other) = engine(&node, "other") else {
        return;
    };
    let mut own = engine(&node, "own").expect("there is Python");
    // The other engine's second rank has most of the second device to itself.
    runs(
        &mut other,
        "runs(1, 'assert memory.commit(0, 12, 30.0) == 0')",
    );
    runs(&mut own, "assert together.commit(0, 10, 2.0) == 1");
    runs(&mut own, "both('assert given == 0')");
    runs(&mut other, "runs(1, 'memory.decommit(0, 12)')");
    runs(&mut own, "assert together.commit(0, 10, 30.0) == 0");
    runs(&mut own, "both('assert memory.committed() == 160 * MIB')");
}

/// Each wants most of both devices, again and again. If one had a half, and the other the other, both would wait until the time is over.
#[test]
fn two_engines_do_not_wait_for_each_other() {
    let Some(node) = node() else { return };
    let Some(first) = engine(&node, "first") else {
        return;
    };
    let mut engines = [first, engine(&node, "second").expect("there is Python")];
    for _ in 0..5 {
        for it in &mut engines {
            it.write("assert together.commit(0, 10, 60.0) == 0; together._tell('give', 0, 10)\n");
        }
        engines.iter_mut().for_each(|it| drop(it.next_line()));
    }
    for it in &mut engines {
        runs(it, "both('assert memory.committed() == 0')");
    }
}

/// A rank that is killed while both wait: the other's wait ends, too.
#[test]
fn request_of_a_rank_that_was_killed_ends() {
    let Some(node) = node() else { return };
    let Some(mut other) = engine(&node, "other") else {
        return;
    };
    let mut own = engine(&node, "own").expect("there is Python");
    runs(&mut other, "assert together.commit(0, 12, 30.0) == 0");
    runs(
        &mut own,
        "threading.Timer(0.5, ranks[1].kill).start(); assert together.commit(0, 10, 3600.0) == 1",
    );
    runs(&mut own, "runs(0, 'assert given == 0')");
    // Where the other engine leaves room, the one that is left has it by itself, as any program.
    runs(&mut other, "together._tell('give', 0, 12); both('')");
    runs(
        &mut own,
        "runs(0, 'assert memory.commit(0, 10, 30.0) == 0')",
    );
}
