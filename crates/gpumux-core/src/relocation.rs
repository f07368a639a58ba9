//! Whether a tenant can go to another device, and how.
//!
//! # Problem
//! The driver can take a process off its devices and put it on others of the same kind, if the process sees both, and nothing of it is shared with other processes. A move
//! that fails half-way must be undone, so what is known to fail is refused before anything is done.
//!
//! # Approach
//! [`plan`] goes through what is known of the tenant, its processes and the devices, and names the first thing that stands in the way.
//! [`visible`] and [`pairs`] make of what a process sees the list that the driver takes: every visible device once, the two exchanged.

mod sequence;

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::quantity::Quantity;

pub use sequence::{Checkpoints, Outcome, carry_out};

/// A device of the node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gpu {
    /// UUID, as NVML writes it.
    pub uuid: String,
    /// NVML's number of it, or of the GPU that it is a part of.
    pub number: u32,
    /// Product name.
    pub name: String,
    /// Bytes of memory.
    pub memory: u64,
    /// It is a MIG instance.
    pub instance: bool,
    /// What is wrong with it; none: nothing.
    pub trouble: Option<String>,
}

/// A process of the tenant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    /// Its pid; 0 where the daemon does not see it.
    pub pid: u32,
    /// The devices on which it has contexts or memory, by UUID.
    pub devices: BTreeSet<String>,
    /// It has groups that gpumux does not control with the driver's controls.
    pub unmanaged: bool,
}

/// What is known when a tenant is to go to another device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    /// Its processes that are connected.
    pub processes: Vec<Process>,
    /// It shares an MPS group.
    pub in_group: bool,
    /// Processes of it share device memory.
    pub shares: bool,
    /// It is on its way already.
    pub under_way: bool,
    /// The devices that it may use, by UUID; none: all.
    pub confined: Option<BTreeSet<String>>,
    /// The devices of the node.
    pub gpus: Vec<Gpu>,
    /// UUID of the device where it shall be.
    pub target: String,
    /// Bytes that it has, those on the host and in contexts included.
    pub needs: u64,
    /// Bytes that are free on the target.
    pub free: u64,
    /// Why the target cannot keep its guarantees.
    pub unkept: Option<String>,
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Where it is, by UUID.
    pub from: String,
    /// Where it shall be.
    pub to: String,
    /// Its processes.
    pub pids: Vec<u32>,
    /// Bytes that are kept for it on the target.
    pub bytes: u64,
}

/// Why a tenant stays where it is.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// No process.
    #[error("the tenant has no connected process that uses CUDA: start it on the other GPU")]
    NoProcess,
    /// A second request.
    #[error("the tenant is being moved already")]
    UnderWay,
    /// It is there.
    #[error("the tenant is on GPU {0} already")]
    There(u32),
    /// No such device.
    #[error("{0} is no device of this node that NVML lists")]
    NoDevice(String),
    /// A broken device.
    #[error("GPU {0} cannot take the tenant: {1}")]
    Trouble(u32, String),
    /// Another kind of device.
    #[error(
        "GPU {from} is {from_name} and GPU {to} is {to_name}: the driver moves programs between GPUs of one kind only"
    )]
    Kind {
        /// The device's number where the tenant is.
        from: u32,
        /// Its product name.
        from_name: String,
        /// The other one's number.
        to: u32,
        /// Its product name.
        to_name: String,
    },
    /// MIG.
    #[error(
        "a MIG instance is a program's only device: the driver moves no program from one or to one"
    )]
    Instance,
    /// A group.
    #[error(
        "the tenant is in an MPS group, whose members have one server: start it without `--trust`"
    )]
    Group,
    /// Shared memory.
    #[error("processes of the tenant share device memory (cuIpc), which the driver does not move")]
    Shares,
    /// Several devices.
    #[error("process {pid} works on {count} GPUs: only programs on one GPU are moved")]
    Several {
        /// Which process.
        pid: u32,
        /// How many devices.
        count: usize,
    },
    /// Processes on several devices.
    #[error("processes of the tenant are on different GPUs: only tenants on one GPU are moved")]
    Spread,
    /// Not controlled.
    #[error("process {0} has channel groups that the driver does not let gpumux control")]
    Unmanaged(u32),
    /// No pid.
    #[error("a process of the tenant has no pid that the daemon sees")]
    Unseen,
    /// The device is not visible.
    #[error(
        "the tenant does not see GPU {target}: start it with `--gpu {seen},{target}` or `--gpu all`"
    )]
    Invisible {
        /// The device's number.
        target: u32,
        /// Numbers of those that it sees.
        seen: String,
    },
    /// No guarantee.
    #[error("GPU {0} cannot keep its guarantees: {1}")]
    Unkept(u32, String),
    /// No room.
    #[error(
        "GPU {target} has {} free, and the tenant needs {}: `gpumux memory` shows whose the rest is",
        Quantity::Memory(*free),
        Quantity::Memory(*needs)
    )]
    Full {
        /// The device's number.
        target: u32,
        /// What is free.
        free: u64,
        /// What is needed.
        needs: u64,
    },
}

/// Decides whether the tenant can go there.
///
/// # Errors
/// The first thing that stands in the way.
pub fn plan(facts: &Facts) -> Result<Plan, Refusal> {
    let find = |uuid: &str| facts.gpus.iter().find(|gpu| gpu.uuid == uuid);
    let to = find(&facts.target).ok_or_else(|| Refusal::NoDevice(facts.target.clone()))?;
    if facts.under_way {
        return Err(Refusal::UnderWay);
    }
    let used: BTreeSet<&String> = (facts.processes.iter())
        .flat_map(|it| &it.devices)
        .collect();
    let Some(first) = used.first() else {
        return Err(Refusal::NoProcess);
    };
    if facts.in_group {
        return Err(Refusal::Group);
    }
    if let Some(it) = facts.processes.iter().find(|it| it.devices.len() > 1) {
        return Err(Refusal::Several {
            pid: it.pid,
            count: it.devices.len(),
        });
    }
    if used.len() > 1 {
        return Err(Refusal::Spread);
    }
    let from = find(first).ok_or_else(|| Refusal::NoDevice((*first).clone()))?;
    if from.uuid == to.uuid {
        return Err(Refusal::There(to.number));
    }
    if from.instance || to.instance {
        return Err(Refusal::Instance);
    }
    if let Some(trouble) = &to.trouble {
        return Err(Refusal::Trouble(to.number, trouble.clone()));
    }
    if (&from.name, from.memory) != (&to.name, to.memory) {
        return Err(Refusal::Kind {
            from: from.number,
            from_name: from.name.clone(),
            to: to.number,
            to_name: to.name.clone(),
        });
    }
    if let Some(confined) = &facts.confined
        && !confined.contains(&to.uuid)
    {
        let seen = facts.gpus.iter().filter(|it| confined.contains(&it.uuid));
        let seen: Vec<String> = seen.map(|it| it.number.to_string()).collect();
        return Err(Refusal::Invisible {
            target: to.number,
            seen: seen.join(","),
        });
    }
    if facts.processes.iter().any(|it| it.pid == 0) {
        return Err(Refusal::Unseen);
    }
    if let Some(it) = facts.processes.iter().find(|it| it.unmanaged) {
        return Err(Refusal::Unmanaged(it.pid));
    }
    if facts.shares {
        return Err(Refusal::Shares);
    }
    if let Some(why) = &facts.unkept {
        return Err(Refusal::Unkept(to.number, why.clone()));
    }
    if facts.needs > facts.free {
        return Err(Refusal::Full {
            target: to.number,
            free: facts.free,
            needs: facts.needs,
        });
    }
    let mut pids: Vec<u32> = facts.processes.iter().map(|it| it.pid).collect();
    pids.sort_unstable();
    pids.dedup();
    Ok(Plan {
        from: from.uuid.clone(),
        to: to.uuid.clone(),
        pids,
        bytes: facts.needs,
    })
}

/// The devices that a process sees which was started with this `CUDA_VISIBLE_DEVICES`, as the driver reads it: up to the first name that
/// is none; without the variable all that are no MIG instances.
pub fn visible(list: Option<&str>, gpus: &[Gpu]) -> Vec<String> {
    let whole: Vec<&Gpu> = gpus.iter().filter(|it| !it.instance).collect();
    let Some(list) = list else {
        return whole.iter().map(|it| it.uuid.clone()).collect();
    };
    let find = |name: &str| match name.parse::<u32>() {
        Ok(number) => whole.iter().find(|it| it.number == number),
        Err(_) if name.starts_with("GPU-") => whole.iter().find(|it| it.uuid.starts_with(name)),
        Err(_) => None,
    };
    let mut seen = Vec::new();
    for name in list.split(',').map(str::trim) {
        let Some(gpu) = find(name) else { break };
        if !seen.contains(&gpu.uuid) {
            seen.push(gpu.uuid.clone());
        }
    }
    seen
}

/// For each visible device the one that takes its place; none where one of the two is not visible.
pub fn pairs(visible: &[String], from: &str, to: &str) -> Option<Vec<(String, String)>> {
    let sees = |uuid: &str| visible.iter().any(|it| it == uuid);
    let takes_place = |uuid: &String| match uuid.as_str() {
        it if it == from => to.to_owned(),
        it if it == to => from.to_owned(),
        _ => uuid.clone(),
    };
    (sees(from) && sees(to)).then(|| {
        let pairs = visible.iter().map(|it| (it.clone(), takes_place(it)));
        pairs.collect()
    })
}

#[cfg(test)]
mod tests;
