//! Processes on devices that gpumux does not control: programs without its library, and a tenant's process on a device that
//! its tenant may not use.

use std::collections::{BTreeMap, BTreeSet};

use gpumux_core::{TenantId, admission};

use super::state::State;
use crate::{api::types, devices::Process};

/// How NVIDIA's MPS control program and server are called, as far as the kernel keeps it.
const MPS: &str = "nvidia-cuda-mps";

/// The processes on one device that gpumux does not control.
#[derive(Debug, Default)]
pub(super) struct Foreigners {
    /// Found at the last look. A tenant's process has a context shortly before it is known.
    new: BTreeSet<u32>,
    known: BTreeMap<u32, Foreigner>,
}

#[derive(Clone, Debug, Default)]
struct Foreigner {
    process: Process,
    /// Part of the last seconds in which its kernels ran, if the driver tells.
    used: Option<f64>,
    /// Of the last second alone.
    lately: Option<f64>,
    /// The tenant that it is of, which may not use the device.
    tenant: Option<TenantId>,
}

impl Foreigners {
    /// NVML has found these processes on this device.
    pub(super) fn see(
        &mut self,
        state: &State,
        uuid: &str,
        processes: Vec<Process>,
        used_by: Option<&BTreeMap<u32, f64>>,
    ) {
        let own = std::process::id();
        let groups = !state.placed.is_empty();
        let found = processes.into_iter().filter_map(|process| {
            if process.pid == own || (groups && process.name.starts_with(MPS)) {
                return None;
            }
            let mut tenants = state.sessions.values().filter(|met| met.pid == process.pid);
            let tenant = tenants.next().map(|met| met.tenant);
            if tenant.is_some_and(|tenant| state.may_use(tenant, uuid)) {
                return None;
            }
            let used = used_by.map(|parts| parts.get(&process.pid).copied().unwrap_or(0.0));
            Some((process, used, tenant))
        });
        self.look(found.collect());
    }

    /// NVML has found these, each with the part of the last second in which its kernels ran.
    fn look(&mut self, found: Vec<(Process, Option<f64>, Option<TenantId>)>) {
        let before = std::mem::take(&mut self.known);
        let new = std::mem::take(&mut self.new);
        for (process, used, tenant) in found {
            let pid = process.pid;
            let old = before
                .get(&pid)
                .filter(|it| it.process.name == process.name);
            if old.is_none() && !new.contains(&pid) {
                self.new.insert(pid);
                continue;
            }
            let smoothed = match (old.and_then(|it| it.used), used) {
                (Some(old), Some(now)) => Some(old * 0.75 + now * 0.25),
                (_, now) => now,
            };
            let known = Foreigner {
                process,
                used: smoothed,
                lately: used,
                tenant,
            };
            self.known.insert(pid, known);
        }
    }

    /// For people.
    pub(super) fn list(
        &self,
        name: impl Fn(TenantId) -> Option<String>,
    ) -> Vec<types::ForeignProcess> {
        let shown = |it: &Foreigner| types::ForeignProcess {
            pid: it.process.pid,
            name: it.process.name.clone(),
            uid: it.process.uid,
            memory_bytes: it.process.memory_bytes,
            used_share: it.used,
            tenant: it.tenant.and_then(&name),
            started_by: None,
        };
        self.known.values().map(shown).collect()
    }

    /// Part of the last second in which their kernels ran, of those of which the driver tells: one that has a context may do nothing.
    pub(super) fn used(&self) -> f64 {
        self.known.values().filter_map(|it| it.lately).sum()
    }

    /// For admission.
    pub(super) fn room(&self) -> Vec<admission::Foreign> {
        let takes = |it: &Foreigner| admission::Foreign {
            name: format!("{} (pid {})", it.process.name, it.process.pid),
            used: it.used.unwrap_or_default(),
            memory: it.process.memory_bytes.unwrap_or_default(),
        };
        self.known.values().map(takes).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(pid: u32) -> Process {
        Process {
            pid,
            name: "python".into(),
            ..Process::default()
        }
    }

    #[test]
    fn process_is_foreign_from_the_second_look_on() {
        let mut foreign = Foreigners::default();
        let look = |foreign: &mut Foreigners, pids: &[u32]| {
            let found = pids.iter().map(|pid| (process(*pid), Some(0.5), None));
            foreign.look(found.collect());
            let list = foreign.list(|_| None);
            list.into_iter().map(|it| it.pid).collect::<Vec<_>>()
        };
        assert_eq!(look(&mut foreign, &[7]), [0; 0]);
        assert_eq!(look(&mut foreign, &[7, 8]), [7]);
        assert_eq!(look(&mut foreign, &[7]), [7]);
        assert_eq!(look(&mut foreign, &[8]), [0; 0], "it was gone between");
    }

    #[test]
    fn use_of_a_foreign_process_is_smoothed() {
        let mut foreign = Foreigners::default();
        for used in [0.4, 0.4, 0.0] {
            foreign.look(vec![(process(7), Some(used), None)]);
        }
        let room = foreign.room();
        assert!((room[0].used - 0.3).abs() < 1e-9, "{room:?}");
        assert_eq!(room[0].name, "python (pid 7)");
    }

    #[test]
    fn use_of_foreign_processes_is_of_the_last_second() {
        let mut foreign = Foreigners::default();
        let mut look = |used: &[Option<f64>]| {
            let all = (1..).zip(used);
            foreign.look(all.map(|(pid, used)| (process(pid), *used, None)).collect());
            foreign.used()
        };
        assert_eq!(look(&[Some(0.25), Some(0.5)]), 0.0, "not foreign yet");
        assert_eq!(look(&[Some(0.25), Some(0.5)]), 0.75);
        assert_eq!(look(&[Some(0.0), Some(0.25)]), 0.25);
        assert_eq!(look(&[Some(0.5), None]), 0.5, "the driver does not tell");
    }
}
