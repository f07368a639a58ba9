//! Programs that their memory limit, or the kernel for want of memory, has ended.

use super::*;
use std::time::{SystemTime, UNIX_EPOCH};

#[test]
fn memory_limit_that_was_reached_is_named_at_the_end() {
    let node = Node::start();
    let gpumux_binary = gpumux_tests::binary();
    let script = format!(
        "{} workload idle --memory 600MiB --seconds 0.1 || exit 4",
        gpumux_binary.display()
    );
    let mut command = node.tenant("-d --name greedy --memory-limit 512MiB", "sh -c");
    at_home(&node, command.arg(script));
    command.run().ok();
    assert_eq!(gpumux(&node, "wait greedy").run().code(), 4);
    let end = ended(&node, "greedy").unwrap();
    let reason = end["reason"].as_str().unwrap();
    assert!(
        reason.ends_with("reached its memory limit of 512 MiB"),
        "{end:#}"
    );
    let logs = gpumux(&node, "logs greedy").run().ok();
    let line = "gpumux: greedy: failed with exit code 4; reached";
    assert!(logs.out.contains(line) && logs.err.is_empty(), "{logs:?}");
    let events = gpumux(&node, "events --past greedy").run().ok().out;
    assert!(events.contains("limit"), "{events}");
}

/// A control group with little memory, in which the kernel kills the largest process. Removed in the end.
struct SmallGroup(PathBuf);

impl SmallGroup {
    /// None, with the reason, where it cannot be made.
    fn make(name: &str) -> Option<Self> {
        let root = Path::new("/sys/fs/cgroup");
        let (folder, limit) = match root.join("memory/cgroup.procs").exists() {
            true => (root.join("memory"), "memory.limit_in_bytes"),
            false => (root.to_owned(), "memory.max"),
        };
        let group = Self(folder.join(format!("gpumux-test-{name}-{}", std::process::id())));
        let made = fs::create_dir(&group.0)
            .and_then(|()| fs::write(group.0.join(limit), (128 << 20).to_string()));
        if let Err(error) = made {
            eprintln!("SKIPPED: no memory control group can be made here: {error}");
            return None;
        }
        // Where the machine has swap space.
        let _ = fs::write(group.0.join("memory.swap.max"), "0");
        Some(group)
    }

    /// The same command in this group.
    fn holds(&self, command: &Command) -> Command {
        let procs = self.0.join("cgroup.procs");
        let mut inside = Command::new("sh");
        inside
            .args(["-c", "echo $$ > \"$0\" && exec \"$@\""])
            .arg(procs);
        inside.arg(command.get_program()).args(command.get_args());
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => inside.env(name, value),
                None => inside.env_remove(name),
            };
        }
        inside
    }
}

impl Drop for SmallGroup {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

/// A program that needs more memory with each byte it reads.
const HUNGRY: &str = "tail /dev/zero";

#[test]
fn oom_kill_of_a_detached_program_is_in_log_and_listing() {
    let Some(group) = SmallGroup::make("detached") else {
        return;
    };
    let node = Node::start();
    let mut command = node.tenant("-d --name hungry", HUNGRY);
    at_home(&node, &mut command);
    group.holds(&command).run().ok();
    assert_eq!(gpumux(&node, "wait hungry").run().code(), 137);
    let end = ended(&node, "hungry").unwrap();
    assert_eq!(end["reason"], "killed by the kernel's OOM killer");
    let logs = gpumux(&node, "logs hungry").run().ok().out;
    let line = "gpumux: hungry: killed by the kernel's OOM killer";
    assert!(logs.contains(line), "{logs}");
}

#[test]
fn oom_kill_of_a_foreground_program_is_printed_at_a_terminal() {
    let Some(group) = SmallGroup::make("terminal") else {
        return;
    };
    let node = Node::start();
    let (status, printed) = at_terminal(group.holds(&node.tenant("--name hungry", HUNGRY)));
    assert!(!status.success(), "{status}");
    assert!(printed.starts_with("gpumux: hungry: "), "{printed}");
    assert!(printed.contains("the kernel's OOM killer"), "{printed}");
}

#[test]
fn foreground_programs_memory_limit_is_printed_at_a_terminal() {
    let node = Node::start();
    let program = "gpumux workload idle --memory 600MiB --seconds 0.1";
    let (status, printed) =
        at_terminal(node.tenant("--name greedy --memory-limit 512MiB", program));
    assert!(!status.success(), "{status}");
    let last = printed.lines().last().unwrap_or_default();
    assert!(last.starts_with("gpumux: greedy: "), "{printed}");
    assert!(
        last.ends_with("reached its memory limit of 512 MiB"),
        "{printed}"
    );
    let (_, printed) = at_terminal(node.tenant("--name modest", "sh -c exit"));
    assert_eq!(printed, "");
}

#[test]
fn notice_that_starts_after_the_programs_end_is_printed() {
    let node = Node::start();
    let program = "gpumux workload idle --memory 600MiB --seconds 0.1";
    let run = node
        .tenant("--name greedy --memory-limit 512MiB", program)
        .run();
    assert!(!run.status.success(), "{run:?}");
    let end = wait_for("its end", PATIENCE, || ended(&node, "greedy"));
    let at = end["at"].as_u64().unwrap();
    wait_for("the next second", PATIENCE, || {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        (now.as_secs() > at).then_some(())
    });
    // No process has this number.
    let line = format!("notice --pid 0 --since {at} greedy");
    let printed = gpumux(&node, &line).run().ok().err;
    assert!(
        printed.contains("reached its memory limit of 512 MiB"),
        "{printed}"
    );
}
