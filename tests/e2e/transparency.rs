//! Programs must not notice the shim: those without CUDA not at all, those with CUDA not in what they do.

use std::path::Path;

use gpumux_tests::{Finished, Node, Options, PATIENCE, Process, Run, wait_for};

/// No process listens there. A program without CUDA must not even look.
const NOWHERE: &str = "/nonexistent/session.sock";

fn plain() -> Node {
    Node::with(Options {
        without_daemon: true,
        ..Options::default()
    })
}

#[track_caller]
fn shell(node: &Node, program: &str, script: &str) -> Finished {
    let mut command = node.shimmed(program, Path::new(NOWHERE));
    command.arg("-c").arg(script).run()
}

#[test]
fn programs_without_cuda_do_as_ever_and_say_nothing() {
    let node = plain();
    for (program, script, out) in [
        ("sh", "echo a | cat", "a\n"),
        (
            "bash",
            "for i in 1 2 3; do (echo $i) & wait; done; exit 0",
            "1\n2\n3\n",
        ),
        ("sh", "cat /proc/self/comm", "cat\n"),
    ] {
        let finished = shell(&node, program, script).ok();
        assert_eq!(
            (finished.out.as_str(), finished.err.as_str()),
            (out, ""),
            "{script}"
        );
    }
    assert_eq!(shell(&node, "sh", "exit 42").code(), 42);
    assert_eq!(shell(&node, "sh", "kill -SEGV $$").code(), 139);
}

#[test]
fn python_forks_threads_and_runs_children_as_ever() {
    let node = plain();
    let script = "\
import os, subprocess, sys, threading, fcntl, array, termios
threads = [threading.Thread(target=os.listdir, args=('/',)) for _ in range(8)]
[t.start() for t in threads]; [t.join() for t in threads]
r, w = os.pipe()
os.write(w, b'xy')
n = array.array('i', [0]); fcntl.ioctl(r, termios.FIONREAD, n)
pid = os.fork()
if pid == 0:
    os.close(r); os.close(w); os._exit(5)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), n[0], subprocess.check_output(['echo', 'child']).decode().strip())
";
    if !has("python3") {
        return;
    }
    let finished = shell(&node, "python3", script).ok();
    assert_eq!(
        (finished.out.as_str(), finished.err.as_str()),
        ("5 2 child\n", "")
    );
}

/// Whether this machine has a program that a test is about; without it there is nothing to test.
fn has(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|dir| dir.join(program).is_file())
}

#[test]
fn a_program_without_cuda_makes_no_session() {
    let node = Node::start();
    let mut tenant = node.tenant("--name plain", "sh -c");
    let mut tenant = Process::start(tenant.arg("echo ready; read line"));
    tenant.wait_lines(1);
    let found = node.find_tenant("plain").unwrap();
    assert_eq!(found["state"], "starting");
    assert_eq!(found["pids"].as_array().map(Vec::len), Some(0), "{found:#}");
}

/// Nothing, or that the daemon's answer or lease came late, once each: so it is on a slow machine, and the daemon finds it later.
fn says_nothing(err: &str) -> bool {
    let late = ["timed out", "stands still"];
    let is_late = |line: &str| late.iter().any(|it| line.contains(it));
    err.lines().count() <= late.len() && err.lines().all(is_late)
}

#[test]
fn results_are_the_same_with_and_without_gpumux() {
    let node = Node::start();
    let check = "gpumux workload check --json --seconds 0.3";
    for class in ["latency", "standard", "batch"] {
        wait_for("a managed run", PATIENCE, || {
            let report = node.tenant(&format!("--class {class}"), check).run().ok();
            assert!(says_nothing(&report.err), "{report:#?}");
            assert_eq!(report.json()["mismatches"], 0, "{class}: {report:#?}");
            report.err.is_empty().then_some(())
        });
    }
}

/// A process forks before it uses CUDA, and so does its child: both are seen, each with its own context.
#[test]
fn children_forked_before_cuda_are_seen_for_themselves() {
    let node = Node::start();
    let gpumux = gpumux_tests::binary();
    let mut tenant = node.tenant("--name forks --class batch", "sh -c");
    let script = format!("({0} scratch | cat) & {0} scratch", gpumux.display());
    let _tenant = Process::start(tenant.arg(script));
    let found = node.wait_tenant("forks", |tenant| {
        tenant["domains"]
            .as_array()
            .is_some_and(|domains| domains.len() >= 2)
    });
    assert_eq!(found["pids"].as_array().map(Vec::len), Some(2), "{found:#}");
}

/// A child forked after CUDA came to life (here through a shell in Python) has no part in its parent's session.
#[test]
fn children_forked_after_cuda_do_no_harm() {
    if !has("python3") {
        return;
    }
    let node = Node::start();
    let script = "\
import ctypes, os, subprocess, sys
cuda = ctypes.CDLL('libcuda.so.1')
context = ctypes.c_void_p()
assert cuda.cuInit(0) == 0
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
print(subprocess.check_output(['echo', 'child']).decode().strip(), flush=True)
pid = os.fork()
if pid == 0:
    os._exit(3)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
free, total = ctypes.c_size_t(), ctypes.c_size_t()
assert cuda.cuCtxSetCurrent(context) == 0
assert cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
print('alive', flush=True)
sys.stdin.readline()
";
    let mut tenant = node.tenant("--name parent", "python3 -c");
    let mut tenant = Process::start(tenant.arg(script));
    tenant.wait_lines(3);
    assert_eq!(tenant.out(), "child\n3\nalive\n", "{}", tenant.err());
    // The child's end must not have ended the parent's session.
    let found = node.wait_tenant("parent", |tenant| !tenant["domains"][0].is_null());
    assert_eq!(found["pids"].as_array().map(Vec::len), Some(1), "{found:#}");
    tenant.close_input();
    tenant.finish().ok();
}

#[test]
fn a_program_that_ends_leaves_its_exit_code_and_no_tenant() {
    let node = Node::start();
    let mut tenant = node.tenant("--name ends --class batch", "sh -c");
    let script = format!(
        "{} workload check --seconds 0.1 >&2; exit 9",
        gpumux_tests::binary().display()
    );
    assert_eq!(tenant.arg(script).run().code(), 9);
    wait_for("the tenant's end", PATIENCE, || {
        node.find_tenant("ends").is_none().then_some(())
    });
}

#[test]
fn many_processes_at_once_do_not_lock_up() {
    let node = Node::start();
    let (count, at_a_time) = (64_usize, 8);
    let script = format!(
        "echo ready; read line; exec {} scratch",
        gpumux_tests::binary().display()
    );
    let mut tenants: Vec<Process> = Vec::new();
    // A request is given up after 5 s, which a slow machine may need for more of them.
    for n in 0..count {
        let mut tenant = node.tenant("--class batch", "sh -c");
        tenants.push(Process::start(tenant.arg(&script)));
        if let Some(earlier) = n.checked_sub(at_a_time) {
            tenants[earlier].wait_lines(1);
        }
    }
    for tenant in &mut tenants {
        tenant.wait_lines(1);
    }
    for tenant in &mut tenants {
        tenant.write("go\n");
    }
    for tenant in &mut tenants {
        tenant.wait_lines(2);
        assert!(says_nothing(&tenant.err()), "{}", tenant.err());
    }
    wait_for("all tenants", PATIENCE, || {
        let ps = node.ps();
        let tenants = ps["tenants"].as_array()?;
        let seen = tenants
            .iter()
            .filter(|tenant| !tenant["domains"][0].is_null())
            .count();
        (seen == count).then_some(())
    });
}
