//! A tenant's program from start to end: its command, how it ended, and why.

use std::path::PathBuf;

use gpumux_core::quantity::Size;
use serde::{Deserialize, Serialize};

use crate::{
    api::types::{Exit, LostOutput, Reported},
    peer::{ProcessId, cgroups},
    quota::cut,
};

/// Longest command that is kept, in bytes.
const MAX_COMMAND: usize = 1000;
/// Longest path of a log that is kept, in bytes.
const MAX_PATH: usize = 4096;
/// Longest reason why output was lost that is kept, in bytes.
const MAX_WHY: usize = 200;

/// What is known of a tenant's program.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Life {
    /// Its command line, for people.
    pub(crate) command: String,
    /// The file of its output, if it runs detached.
    pub(crate) log: Option<String>,
    /// What could not be written of its output.
    pub(crate) lost_output: Option<LostOutput>,
    /// The program that `gpumux run` turned into, or its parent if it runs detached.
    pub(super) main: Option<ProcessId>,
    /// How it ended.
    #[serde(skip)]
    pub(super) exit: Option<Exit>,
    /// Its program turned into that of another tenant.
    #[serde(skip)]
    pub(super) replaced: bool,
    /// The signals that a user had sent to it, the last one last.
    #[serde(skip)]
    pub(super) sent: Vec<i32>,
    /// The memory limit that it reached, in bytes.
    #[serde(skip)]
    pub(super) limited: Option<u64>,
    /// The kernel's counts of processes killed for memory, when it began.
    #[serde(skip)]
    pub(super) kills: Kills,
}

impl Life {
    pub(super) fn new(
        command: Option<String>,
        log: Option<String>,
        main: Option<ProcessId>,
    ) -> Self {
        Self {
            command: cut(command.unwrap_or_default(), MAX_COMMAND),
            log: log.filter(|path| path.len() <= MAX_PATH),
            main,
            kills: main.map(|main| Kills::of(main.pid)).unwrap_or_default(),
            ..Self::default()
        }
    }

    /// That of a program that goes on after its end was recorded.
    pub(super) fn again(self) -> Self {
        Self {
            exit: None,
            replaced: false,
            ..self
        }
    }

    /// Notes what could not be written of its output.
    pub(super) fn lost(&mut self, lost: LostOutput) {
        let why = cut(lost.why, MAX_WHY);
        self.lost_output = Some(LostOutput { why, ..lost });
    }

    /// Notes a signal that a user has sent to it, if it may end it. A stop sends two: SIGTERM, and SIGKILL to processes that are there after the grace time.
    pub(super) fn signalled(&mut self, signal: i32) {
        const STOP_OR_GO_ON: [i32; 5] = [18, 19, 20, 21, 22];
        if STOP_OR_GO_ON.contains(&signal) {
            return;
        }
        self.sent.retain(|sent| *sent != signal);
        self.sent.push(signal);
    }

    /// How it ended, as far as that is known: no process survives SIGKILL.
    pub(super) fn exit(&self) -> Exit {
        const KILLED: Exit = Exit {
            code: None,
            signal: Some(9),
        };
        let killed = || self.sent.contains(&9).then_some(KILLED);
        self.exit.or_else(killed).unwrap_or_default()
    }

    /// Its end, as far as it is known.
    pub(super) fn report(&self) -> Reported {
        let killed = self.kills.since();
        Reported {
            reason: self.reason(killed),
            noteworthy: self.limited.is_some()
                || self.lost_output.is_some()
                || self.is_for_memory(killed),
        }
    }

    /// Whether the kernel killed it for memory, as far as that is known.
    fn is_for_memory(&self, killed: Killed) -> bool {
        let exit = self.exit();
        match killed {
            Killed::None => false,
            Killed::InItsGroup => exit.signal == Some(9) || exit == Exit::default(),
            Killed::OnTheMachine => exit.signal == Some(9),
        }
    }

    /// Its end in words, as far as it is known.
    pub(super) fn reason(&self, killed: Killed) -> String {
        let exit = self.exit();
        let mut reason = match (exit.signal, exit.code, killed) {
            (Some(9), _, Killed::InItsGroup) => "killed by the kernel's OOM killer".to_owned(),
            (Some(9), _, Killed::OnTheMachine) => {
                "killed by SIGKILL; the kernel's OOM killer killed a process of this machine meanwhile".to_owned()
            }
            (Some(signal), _, _) if self.sent.contains(&signal) => {
                format!("ended by {} on request", signal_name(signal))
            }
            (Some(signal), _, _) => format!("killed by {}", signal_name(signal)),
            (None, Some(code), _) => {
                // A program that exits by itself was not ended by SIGKILL: that came to its other processes, or too late.
                let sent = self.sent.iter().rfind(|it| **it != 9);
                let sent = sent.map(|it| signal_name(*it));
                match (code, sent) {
                    (0, None) => "completed".to_owned(),
                    (0, Some(sent)) => format!("completed after {sent} on request"),
                    (_, Some(sent)) => format!("exit code {code} after {sent} on request"),
                    (_, None) => format!("failed with exit code {code}"),
                }
            }
            (None, None, Killed::InItsGroup) => {
                "ended; the kernel's OOM killer killed a process of its control group".to_owned()
            }
            (None, None, _) if self.replaced => "its process became another tenant".to_owned(),
            (None, None, _) => "ended; its exit code is not known".to_owned(),
        };
        if let Some(limit) = self.limited {
            reason += &format!("; reached its memory limit of {}", Size(limit));
        }
        if let Some(lost) = &self.lost_output {
            reason += &format!("; {lost}");
        }
        reason
    }
}

/// Whom the kernel killed for memory while a program ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Killed {
    /// As far as is known, no process.
    None,
    /// A process of its control group.
    InItsGroup,
    /// A process of this machine.
    OnTheMachine,
}

/// The kernel's counts of processes killed for memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Kills {
    /// Of a control group: the file, and what it said.
    group: Option<(PathBuf, u64)>,
    /// Of the machine.
    machine: Option<u64>,
}

impl Kills {
    /// As they are now, for the control group of a process.
    fn of(pid: u32) -> Self {
        let groups = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
        let file = events_file(&groups);
        Self {
            group: file.and_then(|file| Some((file.clone(), read_count(&file)?))),
            machine: read_count("/proc/vmstat".as_ref()),
        }
    }

    /// What they have counted since then.
    pub(super) fn since(&self) -> Killed {
        let now = |file: &PathBuf| read_count(file);
        let grew = |before: u64, now: Option<u64>| now.is_some_and(|now| now > before);
        if let Some((file, before)) = &self.group
            && grew(*before, now(file))
        {
            return Killed::InItsGroup;
        }
        match self.machine {
            Some(before) if grew(before, read_count("/proc/vmstat".as_ref())) => {
                Killed::OnTheMachine
            }
            _ => Killed::None,
        }
    }
}

/// The file in which a control group counts, by `/proc/PID/cgroup`.
fn events_file(groups: &str) -> Option<PathBuf> {
    cgroups(groups).find_map(|(controllers, path)| match controllers {
        "memory" => Some(format!("/sys/fs/cgroup/memory{path}/memory.oom_control").into()),
        "" if path != "/" => Some(format!("/sys/fs/cgroup{path}/memory.events").into()),
        _ => None,
    })
}

fn read_count(file: &std::path::Path) -> Option<u64> {
    count(&std::fs::read_to_string(file).ok()?)
}

/// What a file of counters says of `oom_kill`.
fn count(text: &str) -> Option<u64> {
    let mut lines = text.lines();
    lines.find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
}

/// A signal as people write it.
fn signal_name(signal: i32) -> String {
    const NAMES: [(i32, &str); 15] = [
        (1, "SIGHUP"),
        (2, "SIGINT"),
        (3, "SIGQUIT"),
        (4, "SIGILL"),
        (6, "SIGABRT"),
        (7, "SIGBUS"),
        (8, "SIGFPE"),
        (9, "SIGKILL"),
        (10, "SIGUSR1"),
        (11, "SIGSEGV"),
        (12, "SIGUSR2"),
        (13, "SIGPIPE"),
        (14, "SIGALRM"),
        (15, "SIGTERM"),
        (24, "SIGXCPU"),
    ];
    let known = NAMES.iter().find(|(number, _)| *number == signal);
    known.map_or_else(
        || format!("signal {signal}"),
        |(_, name)| (*name).to_owned(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reason_names_only_what_is_known() {
        let exit = |status| Some(Exit::of_status(status));
        let mut life = Life::default();
        let unknown = "ended; its exit code is not known";
        assert_eq!(life.reason(Killed::None), unknown);
        assert_eq!(life.reason(Killed::OnTheMachine), unknown);
        assert!(
            life.reason(Killed::InItsGroup)
                .contains("of its control group")
        );
        for (status, killed, reason) in [
            (0, Killed::None, "completed"),
            (3 << 8, Killed::None, "failed with exit code 3"),
            (15, Killed::None, "killed by SIGTERM"),
            (9, Killed::None, "killed by SIGKILL"),
            (9, Killed::InItsGroup, "killed by the kernel's OOM killer"),
            (64, Killed::None, "killed by signal 64"),
            (0, Killed::InItsGroup, "completed"),
        ] {
            life.exit = exit(status);
            assert_eq!(life.reason(killed), reason);
            let for_memory = status == 9 && killed != Killed::None;
            assert_eq!(life.is_for_memory(killed), for_memory, "{reason}");
        }
        (life.exit, life.sent) = (None, vec![9]);
        let reason = life.reason(Killed::None);
        assert_eq!(reason, "ended by SIGKILL on request");
        (life.exit, life.sent) = (exit(15), vec![15]);
        assert_eq!(life.reason(Killed::None), "ended by SIGTERM on request");
        // Its children outlived it, and were killed after the grace time.
        life.signalled(9);
        assert_eq!(life.reason(Killed::None), "ended by SIGTERM on request");
        life.exit = exit(0);
        assert_eq!(
            life.reason(Killed::None),
            "completed after SIGTERM on request"
        );
        life.sent = Vec::new();
        for signal in [19, 18, 9] {
            life.signalled(signal);
            assert_eq!(life.reason(Killed::None), "completed", "{signal}");
        }
        life.sent = vec![15];
        assert_eq!(
            life.reason(Killed::None),
            "completed after SIGTERM on request"
        );
        life.exit = exit(143 << 8);
        assert_eq!(
            life.reason(Killed::None),
            "exit code 143 after SIGTERM on request"
        );
        (life.exit, life.sent, life.limited) = (exit(1 << 8), Vec::new(), Some(1 << 30));
        let reason = life.reason(Killed::None);
        assert_eq!(
            reason,
            "failed with exit code 1; reached its memory limit of 1.0 GiB"
        );
        assert!(life.report().noteworthy);
        (life.exit, life.limited) = (exit(0), None);
        assert!(!life.report().noteworthy);
        life.lost_output = Some(LostOutput {
            bytes: 2048,
            why: "No space left on device".into(),
        });
        let reason = life.reason(Killed::None);
        assert_eq!(
            reason,
            "completed; 2 KiB of its output lost (No space left on device)"
        );
        assert!(life.report().noteworthy);
    }

    #[test]
    fn status_has_code_or_signal() {
        let exit = Exit::of_status(7 << 8);
        assert_eq!(
            (exit.code, exit.signal, exit.shell_code()),
            (Some(7), None, Some(7))
        );
        let exit = Exit::of_status(9);
        assert_eq!(
            (exit.code, exit.signal, exit.shell_code()),
            (None, Some(9), Some(137))
        );
        // With a core file.
        assert_eq!(Exit::of_status(11 | 0x80).signal, Some(11));
        assert_eq!(Exit::default().shell_code(), None);
    }

    #[test]
    fn kernel_counts_are_found_in_both_hierarchies() {
        let file = |text| events_file(text).map(|file| file.display().to_string());
        let unified = "0::/user.slice/a.scope\n";
        let expected = "/sys/fs/cgroup/user.slice/a.scope/memory.events";
        assert_eq!(file(unified).as_deref(), Some(expected));
        let split = "9:name=systemd:/\n4:memory:/jobs/7\n0::/\n";
        let expected = "/sys/fs/cgroup/memory/jobs/7/memory.oom_control";
        assert_eq!(file(split).as_deref(), Some(expected));
        assert_eq!(file("0::/\n"), None);
        assert_eq!(
            count("low 0\noom 3\noom_kill 2\noom_group_kill 0\n"),
            Some(2)
        );
        assert_eq!(count("oom 3\n"), None);
    }

    #[test]
    fn commands_are_bounded() {
        let life = Life::new(Some("é".repeat(2000)), Some("x".repeat(5000)), None);
        assert!(life.command.len() <= MAX_COMMAND && life.log.is_none());
    }
}
