//! Why a tenant receives what it receives: five lines, made of what the API shows anyway.

use std::{collections::BTreeMap, time::Duration};

use gpumux_core::{
    Class, Micros, TenantSpec,
    admission::Most,
    broker,
    quantity::{Percent, Size, Time},
    runlist::OUTSTANDING,
    space::Way,
};

use super::types::{
    Copying, CurveFrom, Device, Domain, Explanation, Fault, MemoryShare, Neighbour, Placement,
    SwapReason, Tenant, TenantState,
};
use crate::scheduler::AWAY;

/// What accounts and the driver's measure may differ by without a word: both are of about a second, but not of the same.
const DIFFERS: f64 = 0.1;
/// Neighbours that are named; the others are counted.
const NAMED: usize = 3;
/// Shares below that are none.
const NOTHING: f64 = 0.005;
/// A tenant that receives so much less than it is entitled to lacks something.
const LACKS: f64 = 0.05;
/// The advice where no setting helps.
const LIMITED: &str = "nothing that its user may set: another guarantee must be lowered, or the administrator must allow more (gpumux.toml)";
/// A tenant that received so much has work all the time.
const ALL_THE_TIME: f64 = 0.5;
/// A guarantee of so much is advised, if it can be had.
const MUCH: f64 = 0.5;

/// Five lines about `tenant`; `all` are the tenants of the same moment, `faults` the last ones in groups, `most` is what it could have:
/// nothing more if that is not known.
pub fn explain(
    tenant: &Tenant,
    all: &[Tenant],
    devices: &[Device],
    faults: &[Fault],
    most: Option<&Most>,
) -> Explanation {
    let mut neighbours = neighbours(tenant, all, devices);
    neighbours.sort_by(|a, b| b.received.total_cmp(&a.received));
    let entitlement = entitlement(tenant, devices);
    let received = received(tenant, devices);
    let why = why(tenant, all, devices, faults, &neighbours);
    let foreign = foreign(tenant, devices);
    let alone = neighbours.is_empty() && foreign.is_empty();
    let advice = advice(tenant, &neighbours, alone, most);
    let others = others(tenant, &neighbours, &foreign);
    let text = [
        ("entitled", &entitlement),
        ("received", &received),
        ("why", &why),
        ("others", &others),
        ("to do", &advice),
    ]
    .map(|(head, line)| format!("{:9} {line}", head.to_owned() + ":"))
    .join("\n");
    Explanation {
        name: tenant.name.clone(),
        text,
        entitlement,
        received,
        why,
        advice,
        neighbours,
    }
}

/// A device as people number it.
fn gpu(uuid: &str, devices: &[Device]) -> String {
    let number = Device::number(uuid, devices);
    number.map_or_else(|| uuid.to_owned(), |it| format!("GPU {it}"))
}

/// What it is entitled to on a device when all tenants there have work.
fn entitled(tenant: &Tenant, uuid: &str) -> f64 {
    let here = tenant.domains.iter().filter(|it| it.device == uuid);
    here.map(|domain| domain.entitled_share).fold(0.0, f64::max)
}

/// The tenants on the same devices, once for each.
fn neighbours(tenant: &Tenant, all: &[Tenant], devices: &[Device]) -> Vec<Neighbour> {
    let is = |it: &Tenant| (it.uid, it.name.clone());
    let others = all.iter().filter(|other| is(other) != is(tenant));
    let shared = |other: &&Tenant| {
        let mut uuids = tenant.devices.iter();
        uuids.any(|uuid| other.devices.contains(uuid))
    };
    let neighbour = |other: &Tenant| {
        let common = || {
            tenant
                .devices
                .iter()
                .filter(|uuid| other.devices.contains(uuid))
        };
        let has_namesake = (all.iter()).any(|it| it.name == other.name && it.uid != other.uid);
        Neighbour {
            name: match has_namesake {
                true => format!("{}/{}", other.user, other.name),
                false => other.name.clone(),
            },
            user: other.user.clone(),
            class: other.class,
            state: other.state,
            guaranteed: other.guaranteed(),
            group: other.group(),
            gpus: common().map(|uuid| gpu(uuid, devices)).collect(),
            received: common()
                .map(|uuid| other.received(uuid))
                .fold(0.0, f64::max),
        }
    };
    others.filter(shared).map(neighbour).collect()
}

/// Its class and settings, and what follows from them beside the others of the moment.
fn entitlement(tenant: &Tenant, devices: &[Device]) -> String {
    let spec = &tenant.spec;
    let class = match spec.class {
        Class::Latency => "a latency tenant takes the GPU at once when it has work",
        Class::Standard => "a standard tenant has a share by weight",
        Class::Batch => "a batch tenant has what the others leave",
    };
    let mut parts = vec![format!("{class} (weight {})", spec.weight)];
    parts.push(match tenant.guaranteed() {
        share if share > 0.0 => format!("{} guaranteed", Percent(share)),
        _ => "nothing guaranteed".into(),
    });
    if spec.limit < 1.0 {
        parts.push(format!(
            "at most {} while others have work",
            Percent(spec.limit)
        ));
    }
    for uuid in &tenant.devices {
        let mut here = tenant.domains.iter().filter(|it| it.device == *uuid);
        let wait =
            here.find_map(|domain| (domain.wait_bound_us > 0).then_some(domain.wait_bound_us));
        let share = entitled(tenant, uuid);
        let wait = wait.map(|us| {
            let longest = Duration::from_micros(us);
            let (lag, longest) = (Time(longest.mul_f64(share.clamp(0.0, 1.0))), Time(longest));
            format!(
                ", waits at most {longest} of GPU time and lags behind its share by {lag} at most"
            )
        });
        parts.push(format!(
            "when all have work {} of {}{}",
            Percent(share),
            gpu(uuid, devices),
            wait.unwrap_or_default()
        ));
    }
    parts.join("; ")
}

/// What it received, by the accounts and by the driver.
fn received(tenant: &Tenant, devices: &[Device]) -> String {
    let mut parts: Vec<String> = (tenant.devices.iter())
        .map(|uuid| {
            let share = tenant.received(uuid);
            let own = || tenant.domains.iter().filter(|it| it.device == *uuid);
            let by = match own().any(|it| it.group.is_some()) {
                true => ", by all of its group together",
                false => "",
            };
            let text = format!(
                "{} of {} in the last second{by}",
                percent(share),
                gpu(uuid, devices)
            );
            text + &measured(tenant, uuid, share)
        })
        .collect();
    parts.extend((tenant.devices.iter()).filter_map(|uuid| copies(tenant, uuid, devices)));
    if parts.is_empty() {
        parts.push("nothing: it has used no GPU yet".into());
    }
    let sum = |field: fn(&Domain) -> u64| tenant.domains.iter().map(field).sum::<u64>();
    let (runnable, waited) = (sum(|d| d.runnable_us), sum(|d| d.waited_us));
    if runnable > 0 {
        parts.push(format!(
            "so far it waited {:.1} s of {:.1} s with work ({}), frozen {} times",
            waited as f64 / 1e6,
            runnable as f64 / 1e6,
            percent(waited as f64 / runnable as f64),
            sum(|d| d.preemptions)
        ));
    }
    parts.join("; ")
}

/// What it copies between the host and a device, if it does.
fn copies(tenant: &Tenant, uuid: &str, devices: &[Device]) -> Option<String> {
    let gb = |rate: u64| format!("{:.1} GB/s", rate as f64 / 1e9);
    let one = |(copying, to): (Copying, &str)| {
        let limit = copying.limit.map_or_else(String::new, |limit| {
            format!(
                " (limited to {}, as others have less than their shares)",
                gb(limit)
            )
        });
        (copying.rate > 0).then(|| format!("{} to {to}{limit}", gb(copying.rate)))
    };
    let gpu = gpu(uuid, devices);
    let ways = tenant.copies(uuid).into_iter().zip([&*gpu, "the host"]);
    let ways: Vec<String> = ways.filter_map(one).collect();
    (!ways.is_empty()).then(|| format!("it copies {}", ways.join(" and ")))
}

/// What the driver measured, where it differs.
fn measured(tenant: &Tenant, uuid: &str, share: f64) -> String {
    let own = || tenant.domains.iter().filter(|it| it.device == uuid);
    // In a group all members' kernels are the group's.
    if own().any(|domain| domain.group.is_some()) {
        return String::new();
    }
    let measured: Option<BTreeMap<u32, f64>> = own()
        .map(|domain| Some((domain.pid, domain.measured_share?)))
        .collect();
    let measured = measured.map(|all| all.values().sum::<f64>());
    match measured {
        Some(measured) if (share - measured).abs() > DIFFERS => {
            let less = match measured < share {
                true => ", without what passes between its kernels and in switches",
                false => "",
            };
            format!(
                " (computed from its timeslices and work; in another second the driver measured {}{less})",
                percent(measured)
            )
        }
        _ => String::new(),
    }
}

/// A process that the tenant's program started, that uses a device, and that is not connected.
fn unconnected(tenant: &Tenant, devices: &[Device]) -> Option<u32> {
    let mut all = devices.iter().flat_map(|it| &it.foreign);
    let own = all.find(|it| it.started_by.as_ref() == Some(&tenant.name))?;
    Some(own.pid)
}

/// Why it runs or waits now, and what else bears on that.
fn why(
    tenant: &Tenant,
    all: &[Tenant],
    devices: &[Device],
    faults: &[Fault],
    neighbours: &[Neighbour],
) -> String {
    let mut parts = Vec::new();
    for uuid in &tenant.devices {
        let device = devices.iter().find(|device| device.uuid == *uuid);
        if let Some(device) = device.filter(|device| device.state != "ok") {
            parts.push(format!(
                "{} is in trouble ({}).",
                gpu(uuid, devices),
                device.state
            ));
        }
        if entitled(tenant, uuid) + NOTHING < tenant.guaranteed() {
            parts.push(format!(
                "More is guaranteed to the tenants on {} than it has.",
                gpu(uuid, devices)
            ));
        }
    }
    if tenant.lapsed {
        parts.push(
            "Its guarantees have lapsed, because it had no work for longer than its user's policy allows; they hold again when it \
             has work, if they fit then."
                .into(),
        );
    }
    parts.extend(memory(tenant, all));
    if tenant.asleep {
        let stays = |it: &MemoryShare| Some(format!("{}.", it.stays(&gpu(&it.device, devices))?));
        parts.extend(tenant.memory.iter().filter_map(stays));
    }
    if let Some(lost) = &tenant.lost_output {
        parts.push(format!(
            "{lost}: its parent could not write it to {}.",
            tenant.log.as_deref().unwrap_or("its log")
        ));
    }
    for share in &tenant.memory {
        let excess = share.excess(&gpu(&share.device, devices));
        parts.extend(excess.map(|it| format!("{it}.")));
    }
    if let Some(why) = &tenant.uncontrolled {
        parts.push(format!("Processes of it run unmanaged: {why}."));
    } else if tenant.domains.is_empty() {
        parts.push(match tenant.pids.len() {
            0 => match unconnected(tenant, devices) {
                Some(pid) => format!(
                    "None of its processes is connected. Process {pid} uses a GPU: it lacks gpumux's library, or it is stopped and connects when it goes on."
                ),
                None => "No process of it has connected yet: a program connects when it makes its first CUDA context.".into(),
            },
            n => format!("{n} of its processes are connected, but none has a CUDA context yet."),
        });
    }
    // Processes in the same situation are described once.
    for domain in &tenant.domains {
        let sentence = now(domain, neighbours, tenant.guaranteed() > 0.0);
        if !parts.contains(&sentence) {
            parts.push(sentence);
        }
    }
    if let Some(why) = tenant.domains.iter().find_map(|it| it.refused.as_ref()) {
        parts.push(format!(
            "Its launches are scheduled, not its channel groups, since {why}: a running kernel is not interrupted, and a request waits \
             for at most {} of work that others have launched and one of their kernels.",
            Time(Duration::from_micros(OUTSTANDING.0))
        ));
    }
    if tenant.devices.len() > 1 {
        parts.push("It runs on all its GPUs together or on none.".into());
    }
    if let Some(tampering) = &tenant.tampering {
        const WHAT: &str = "undoing what gpumux sets (freezes, timeslices, the lease)";
        parts.push(match tampering.findings {
            0 => format!("Before the daemon started anew, its processes were found {WHAT}."),
            times => format!(
                "Its processes were found {times} times {WHAT}; it was set again each time."
            ),
        });
        if tampering.lowered {
            parts.push(
                "Therefore it is class batch without a compute guarantee, until root changes its settings.".into(),
            );
        }
    }
    parts.extend(collectives(tenant));
    parts.extend(place(tenant, all));
    parts.extend(hindered(tenant, all));
    parts.extend(fault(tenant, faults));
    parts.extend(unlisted(&tenant.unlisted_calls));
    parts.join(" ")
}

/// What a channel group does at the moment, and why.
fn now(domain: &Domain, neighbours: &[Neighbour], is_guaranteed: bool) -> String {
    if let Some(error) = &domain.error {
        return format!("It is not under control now, because a control failed: {error}.");
    }
    if domain.stopped {
        return format!(
            "Its process {} is stopped (SIGSTOP, Ctrl-Z, a debugger): what it has launched ends, and then it counts as without work until \
             it goes on.",
            domain.pid
        );
    }
    let first = neighbours.iter().find(|it| {
        it.class == Class::Latency
            && it.state == TenantState::Running
            && it.received >= ALL_THE_TIME
    });
    let runs = neighbours
        .iter()
        .find(|it| it.state == TenantState::Running && it.received >= NOTHING);
    match domain.reason.as_str() {
        "new" => "It has just started, and is scheduled next.".into(),
        "has no work" => "It has no work for the GPU.".into(),
        "takes the device at once" => format!(
            "It may run, with a timeslice of {}, so that it keeps the GPU while it has work.",
            Time(Duration::from_micros(domain.timeslice_us))
        ),
        "shares by timeslices" => format!(
            "It may run: the GPU serves those that have work in rounds, and its timeslice of {} is in proportion to its share.",
            Time(Duration::from_micros(domain.timeslice_us))
        ),
        "has its quantum" => {
            "It has the GPU for its quantum, unless a tenant of a higher class has work.".into()
        }
        "waits for its quantum" => match (first, runs) {
            (Some(first), _) => format!(
                "It is frozen: the latency tenant {} has work almost all the time and goes first{}.",
                first.name,
                match is_guaranteed {
                    true => ", except for what is guaranteed to this one",
                    false => "; the others share what it leaves",
                }
            ),
            (None, Some(runs)) => format!(
                "It is frozen: one tenant runs at a time, and {} has most of the quanta now.",
                runs.name
            ),
            (None, None) => "It is frozen: one tenant runs at a time, and it is another's quantum.".into(),
        },
        "idle contender" => {
            "It has no work, and is frozen for up to 0.1 s so that its next work does not interrupt another's quantum.".into()
        }
        "over its budget while others wait" => {
            "It is frozen: it ran ahead of its share while others had work, and continues once they have caught up.".into()
        }
        "over its limit while others wait" => {
            "It is frozen: it received more than its limit in the pauses of others, and continues once it is within it again.".into()
        }
        "waits for its gang" => "It is frozen until it can run on all its GPUs.".into(),
        AWAY => "It is frozen while its memory is on the host, or on its way.".into(),
        "runs with its gang" => "It may run, together with its processes on other GPUs.".into(),
        reason => format!("The policy's reason: {reason}."),
    }
}

/// Where its memory is, if that is why it waits.
fn memory(tenant: &Tenant, all: &[Tenant]) -> Option<String> {
    let swapped: u64 = tenant.memory.iter().map(|share| share.swapped).sum();
    let swapped = Size(swapped);
    Some(match (tenant.asleep, tenant.waits_for_memory) {
        (true, true) => format!(
            "It cannot run: {swapped} of its memory is on the host. {}",
            host_full(tenant).unwrap_or_else(|| rotation(tenant, all))
        ),
        (true, false) => {
            let why = match (tenant.swap_reason, tenant.spec.sleep_after_s) {
                (Some(SwapReason::Requested), _) => "by request (`gpumux sleep`)".into(),
                (Some(SwapReason::Idle), Some(after)) => {
                    format!(
                        "after {} without work (`--sleep-after`)",
                        Time(Duration::from_secs(after))
                    )
                }
                (Some(SwapReason::Idle), None) => "after a time without work".into(),
                (Some(SwapReason::Needed), _) => "because other tenants needed the room".into(),
                (None, _) => "where an earlier daemon moved it".into(),
            };
            format!("It is swapped out: {swapped} of its memory is on the host, {why}.")
        }
        (false, true) => format!(
            "One of its processes asked for memory that the GPU has no room for, and waits until others have made some (memory \
             policy {}). {}",
            tenant.spec.memory_policy.name(),
            host_full(tenant).unwrap_or_default()
        )
        .trim_end()
        .to_owned(),
        (false, false) => return None,
    })
}

/// That no others can be moved for it: the host has no room.
fn host_full(tenant: &Tenant) -> Option<String> {
    let lacks = Size(tenant.lacks_on_host?);
    Some(format!(
        "The host lacks {lacks} for what others would have to move there: they must free memory or end. `limit` of `[host_memory]` in the daemon's \
         configuration bounds it."
    ))
}

/// Which tenants have the memory that a waiting one lacks, and how long it waits for them at most.
fn rotation(tenant: &Tenant, all: &[Tenant]) -> String {
    let lacks =
        |uuid: &str| (tenant.memory.iter()).any(|share| share.swapped > 0 && share.device == uuid);
    let bytes = |it: &Tenant| -> u64 {
        let there = it.memory.iter().filter(|share| lacks(&share.device));
        there.map(|share| share.in_use).sum()
    };
    let holders = all.iter().filter(|it| {
        (it.uid, &it.name) != (tenant.uid, &tenant.name) && !it.asleep && bytes(it) > 0
    });
    let mut holders: Vec<&Tenant> = holders.collect();
    if holders.is_empty() {
        return "It comes back as soon as others have made room.".into();
    }
    holders.sort_by_key(|it| std::cmp::Reverse(bytes(it)));
    let wait = broker::longest_wait(
        tenant.class,
        holders.iter().map(|it| {
            let measured = it.moves.back_us.checked_div(it.moves.backs);
            (
                it.class,
                Micros(measured.unwrap_or(bytes(it) / broker::SPEED)),
            )
        }),
    );
    let names: Vec<&str> = holders.iter().map(|it| &*it.name).collect();
    format!(
        "Tenants that do not fit together have their memory on the GPU one after another, each for a memory quantum, and now it is that of {}. \
         It waits for at most about {} s while their processes answer.",
        first(&names),
        wait.0.div_ceil(1_000_000)
    )
}

/// What its ranks exchange, if they do.
fn collectives(tenant: &Tenant) -> Option<String> {
    let all = Some(tenant.collectives).filter(|it| it.calls > 0)?;
    let busy_us = tenant.domains.iter().map(|it| it.runnable_us).max();
    let rate = busy_us.filter(|us| *us > 0).map(|us| {
        let second = all.bytes as f64 / us as f64 * 1e6;
        format!(", {} in each second with work", Size(second as u64))
    });
    let now = match all.in_progress {
        true => "one is in progress",
        false => "none is in progress",
    };
    let most = tenant.placement.max_ctas.map(|blocks| {
        format!(" In the group each of its processes has at most {blocks} thread blocks for one, unless it sets another number itself.")
    });
    Some(format!(
        "Its ranks sent {} in {} collectives{}; {now}.{}",
        Size(all.bytes),
        all.calls,
        rate.unwrap_or_default(),
        most.unwrap_or_default()
    ))
}

/// Time or space, and why, where there was a choice.
fn place(tenant: &Tenant, all: &[Tenant]) -> Option<String> {
    let placement = &tenant.placement;
    if *placement == Placement::default() {
        return None;
    }
    let Placement {
        way,
        reason,
        trust,
        sm_percent: _,
        ranks_per_gpu,
        max_ctas: _,
        curve,
        fingerprint,
        prediction: _,
    } = placement;
    let trust = trust.as_deref().unwrap_or_default();
    let by = match (curve, fingerprint.as_deref()) {
        (Some(CurveFrom::Given), _) => ", by the scaling profiles that were given".into(),
        (Some(CurveFrom::Measured), Some(fingerprint)) => {
            format!(", by what was measured of {fingerprint}")
        }
        _ => String::new(),
    };
    let ranks = match ranks_per_gpu {
        0 => String::new(),
        ranks => format!(
            " {ranks} of its ranks share each GPU, and are each shown an equal part of its memory there."
        ),
    };
    let confined = match placement.percent_of_each() {
        100 => String::new(),
        percent => {
            format!(" Each of its processes has at most {percent}% of the SMs{by} until it ends.")
        }
    };
    Some(match way {
        Way::Time => {
            format!("It shares in time, in a context of its own (decided at its start: {reason}).")
        }
        Way::Space => {
            let members: Vec<&str> = tenant.members(all).map(|it| &*it.name).collect();
            let with = match members.is_empty() {
                true => "alone now".into(),
                false => format!("now with {}", first(&members)),
            };
            format!(
                "It shares the SMs of the group {trust}, {with} (decided at its start: {reason}); a fault of one ends all.{ranks}{confined}"
            )
        }
    })
}

/// Why its guarantee does not hold inside its group, if so.
fn hindered(tenant: &Tenant, all: &[Tenant]) -> Option<String> {
    let by: Vec<&str> = tenant.hindered_by(all);
    (!by.is_empty()).then(|| {
        format!(
            "Its guarantee of {} holds only once {} start anew: until then they keep more SMs than it leaves.",
            Percent(tenant.spec.guaranteed),
            list(&by)
        )
    })
}

/// The last fault in a group that ended processes of a tenant.
fn fault(tenant: &Tenant, faults: &[Fault]) -> Option<String> {
    let (name, user) = (&*tenant.name, format!("{}/", tenant.uid));
    let concerns = |fault: &&Fault| {
        fault.group.starts_with(&user)
            && (fault.faulting_client.as_deref() == Some(name)
                || fault.others.iter().any(|other| other == name))
    };
    let fault = faults.iter().rev().find(concerns)?;
    let whose = match fault.faulting_client.as_deref() {
        Some(faulting_client) if faulting_client == name => "of its own".to_owned(),
        Some(faulting_client) => format!("of {faulting_client}"),
        None => "whose cause is not known".into(),
    };
    let after = match fault.restarted_ms {
        Some(ms) => format!("the group was there again after {ms} ms"),
        None => "the group could not be started again".into(),
    };
    let processes = match fault.at < tenant.since {
        true => "the processes of an earlier tenant of its name",
        false => "its processes",
    };
    Some(format!(
        "A fault {whose} (error {}: {}) has ended {processes} in the group {}; {after}, and programs that are started again are in it.",
        fault.error, fault.evidence, fault.group
    ))
}

/// Driver calls of its processes that this version does not know.
fn unlisted(calls: &[String]) -> Option<String> {
    (!calls.is_empty()).then(|| {
        let calls: Vec<&str> = calls.iter().map(String::as_str).collect();
        format!(
            "Its program called {}, which this version of gpumux does not know: the program's memory stays on the GPU, and it counts as \
             busy. A newer gpumux may know it.",
            list(&calls)
        )
    })
}

/// The processes on its devices that gpumux does not control.
fn foreign(tenant: &Tenant, devices: &[Device]) -> Vec<String> {
    let used = |device: &&Device| tenant.devices.contains(&device.uuid);
    let all = devices.iter().filter(used).flat_map(|it| &it.foreign);
    all.map(ToString::to_string).collect()
}

/// What has the rest.
fn others(tenant: &Tenant, neighbours: &[Neighbour], foreign: &[String]) -> String {
    if tenant.devices.is_empty() {
        return "-".into();
    }
    // What a member received, all of its group received together.
    let mut groups: Vec<Vec<&Neighbour>> = Vec::new();
    for it in neighbours {
        let same = |all: &&mut Vec<&Neighbour>| it.group.is_some() && all[0].group == it.group;
        match groups.iter_mut().find(same) {
            Some(group) => group.push(it),
            None => groups.push(vec![it]),
        }
    }
    let entry = |all: &Vec<&Neighbour>| {
        let names: Vec<&str> = all.iter().map(|it| &*it.name).collect();
        let one = all[0];
        let own = one.group.is_some() && one.group == tenant.group();
        let mut text = first(&names);
        text += &match own {
            true => String::new(),
            false => format!(" {}", percent(one.received)),
        };
        text += &match (own, all.len()) {
            (true, _) => " in its own group".into(),
            (false, 1) => format!(" ({}, {})", one.class, one.state),
            (false, _) => " together in a group".to_owned(),
        };
        text
    };
    let mut named: Vec<String> = groups.iter().take(NAMED).map(entry).collect();
    let rest = &groups[named.len()..];
    if !rest.is_empty() {
        let sum: f64 = rest.iter().map(|it| it[0].received).sum();
        let count = rest.iter().map(Vec::len).sum::<usize>();
        named.push(format!("{count} more with {} together", percent(sum)));
    }
    let tenants = match (named.is_empty(), foreign.is_empty()) {
        (true, true) => "it has the GPU for itself".into(),
        (true, false) => "no other tenant".into(),
        (false, _) => named.join(", "),
    };
    if foreign.is_empty() {
        return tenants;
    }
    let foreign: Vec<&str> = foreign.iter().map(String::as_str).collect();
    let use_it = if foreign.len() == 1 { "uses" } else { "use" };
    format!(
        "{tenants}. Outside gpumux's control, {} {use_it} the GPU, too.",
        list(&foreign)
    )
}

/// Whether a tenant received less of a device than this although it had work.
fn lacks(tenant: &Tenant, uuid: &str, due: f64) -> bool {
    let mut here = tenant.domains.iter().filter(|it| it.device == uuid);
    tenant.received(uuid) + LACKS < due && here.any(|it| it.waited_share > LACKS)
}

/// The guarantee that a tenant is advised to ask for; none if it can be guaranteed no more than it is.
fn raised(tenant: &Tenant, most: Option<&Most>) -> Option<Percent> {
    let had = tenant.spec.guaranteed;
    // Whole percents, rounded down: more would be refused.
    let free = ((most?.guaranteed * 100.0 + NOTHING).floor() / 100.0).min(1.0);
    let much = if had < MUCH { free.min(MUCH) } else { free };
    (much > had + NOTHING).then_some(Percent(much))
}

/// What its user can do.
fn advice(tenant: &Tenant, neighbours: &[Neighbour], alone: bool, most: Option<&Most>) -> String {
    let name = &tenant.name;
    let any = |test: &dyn Fn(&String) -> bool| tenant.devices.iter().any(test);
    let lacks_guarantee = any(&|uuid| lacks(tenant, uuid, tenant.guaranteed()));
    let lacks = any(&|uuid| lacks(tenant, uuid, entitled(tenant, uuid)));
    let raise =
        raised(tenant, most).map(|share| format!("`gpumux set {name} --guaranteed {share}`"));
    let is_guaranteed = tenant.guaranteed() > 0.0;
    let receives = match is_guaranteed {
        true => "what is guaranteed to it",
        false => "what it is entitled to",
    };
    let hog = neighbours
        .iter()
        .find(|it| it.class < tenant.class && it.guaranteed == 0.0 && it.received >= ALL_THE_TIME);
    match tenant.state {
        TenantState::Faulty if tenant.uncontrolled.is_some() => {
            "run `gpumux doctor`: it lists the controls that this driver, GPU or sandbox lacks"
                .into()
        }
        TenantState::Faulty => "look at the daemon's log, and start the program again".into(),
        TenantState::Tampers => {
            "end the program that does it; root gives the tenant its class back with `gpumux set`"
                .into()
        }
        TenantState::Blocked => {
            let free = most.map_or(0, |most| most.memory_guaranteed);
            let guaranteed = tenant.spec.memory_guaranteed;
            let within = tenant
                .memory
                .iter()
                .all(|it| it.in_use + it.swapped < guaranteed);
            let way = match free > guaranteed {
                _ if within && guaranteed > 0 => {
                    "what it has is less than its guarantee, so it goes before others: they may be stopped, or the host may have no room for their memory; the daemon's log has what stands in the way".into()
                }
                true => format!(
                    "`gpumux set {name} --memory-guaranteed SIZE` guarantees room for this one, up to {}",
                    Size(free)
                ),
                false => "no more can be guaranteed to this one".into(),
            };
            format!("`gpumux memory` lists the memory of each tenant; {way}")
        }
        TenantState::Swapped => {
            format!(
                "nothing: its memory comes back with its next work, or with `gpumux wake {name}`"
            )
        }
        TenantState::Starting => {
            "nothing, unless it computes on a GPU already: a statically linked program is not seen"
                .into()
        }
        TenantState::Idle => "nothing: it has no work".into(),
        TenantState::Stopped => {
            format!("let it go on: `gpumux kill -s CONT {name}`, or `fg` in its terminal")
        }
        TenantState::Running | TenantState::Queued => match (hog, alone) {
            (_, true) => "nothing: it has the GPU for itself".into(),
            _ if lacks_guarantee => {
                "wait: it is behind its guarantee, and goes before others until it has caught up"
                    .into()
            }
            (Some(hog), _) => {
                let by = match hog.user == tenant.user {
                    true => String::new(),
                    false => format!(" (as {} or root)", hog.user),
                };
                let may = |class| most.is_none_or(|most| most.classes.contains(&class));
                let lower = format!("`gpumux set {} --class standard`{by}", hog.name);
                let own = format!("`gpumux set {name} --class standard`");
                let way = match (hog.class, tenant.class) {
                    (Class::Latency, Class::Standard) => {
                        Some(format!("{lower} lets {} share with others", hog.name))
                    }
                    // The lower class has only what the other leaves.
                    _ if !may(Class::Standard) => None,
                    (Class::Latency, _) => {
                        Some(format!("{lower} and {own} together let the two share"))
                    }
                    _ => Some(format!("{own} lets it share with {}", hog.name)),
                };
                let kept = is_guaranteed.then(|| format!("nothing: it receives {receives}"));
                let raise = raise.filter(|_| !is_guaranteed);
                let raise = raise.map(|raise| format!("{raise} gives this one a share of its own"));
                let ways: Vec<String> = kept.into_iter().chain(way).chain(raise).collect();
                match ways.is_empty() {
                    true => LIMITED.into(),
                    false => ways.join("; "),
                }
            }
            _ if lacks => {
                let may = most.is_some_and(|most| most.classes.contains(&Class::Latency));
                let class = (may && tenant.class != Class::Latency).then_some("`--class latency`");
                let class = class.map(|class| match raise {
                    Some(_) => class.to_owned(),
                    None => format!("`gpumux set {name} --class latency`"),
                });
                let ways: Vec<String> = raise.into_iter().chain(class).collect();
                match ways.is_empty() {
                    true => LIMITED.into(),
                    false => format!("if it lasts: {} puts it before others", ways.join(" or ")),
                }
            }
            _ if tenant.spec.limit < 1.0 => format!(
                "nothing: it receives what it is entitled to; `gpumux set {name} --limit 100%` lets it have more than {}",
                percent(tenant.spec.limit)
            ),
            _ => {
                // A weight divides what is guaranteed to none, among those of a user and a class.
                let same = |it: &Neighbour| (&it.user, it.class) == (&tenant.user, tenant.class);
                let divided = neighbours.iter().any(same)
                    && any(&|uuid| entitled(tenant, uuid) > tenant.guaranteed() + NOTHING);
                let weight = tenant.spec.weight * 2.0;
                let weight = (divided && TenantSpec::WEIGHTS.contains(&weight))
                    .then(|| format!("`gpumux set {name} --weight {weight}`"));
                let ways: Vec<String> = weight.into_iter().chain(raise).collect();
                match ways.is_empty() {
                    true => {
                        format!("nothing: it receives {receives}, and can be guaranteed no more")
                    }
                    false => format!(
                        "nothing: it receives {receives}; {} gives it more",
                        ways.join(" or ")
                    ),
                }
            }
        },
    }
}

/// The first of these names, and how many more there are.
fn first(names: &[&str]) -> String {
    let more = format!("{} more", names.len().saturating_sub(NAMED));
    let mut all: Vec<&str> = names.iter().take(NAMED).copied().collect();
    if names.len() > NAMED {
        all.push(&more);
    }
    list(&all)
}

fn percent(share: f64) -> String {
    format!("{:.0}%", share * 100.0)
}

fn list(items: &[&str]) -> String {
    match items.split_last() {
        Some((last, [])) => (*last).to_owned(),
        Some((last, rest)) => format!("{} and {last}", rest.join(", ")),
        None => "none".into(),
    }
}

#[cfg(test)]
mod tests {
    use gpumux_core::Demand;

    use super::*;
    use crate::api::types::{ForeignProcess, Hardware, TenantSpec};

    fn domain(frozen: bool, reason: &str) -> Domain {
        Domain {
            id: 1,
            device: "GPU-0".into(),
            pid: 7,
            timeslice_us: 1,
            frozen,
            demand: Demand::Busy,
            entitled_share: 0.5,
            received_share: 0.25,
            waited_share: 0.4,
            received_us: 6_000_000,
            runnable_us: 10_000_000,
            waited_us: 4_000_000,
            preemptions: 12,
            freezes: 12,
            thaws: 11,
            slice_changes: 1,
            reason: reason.into(),
            ..Domain::default()
        }
    }

    fn tenant(name: &str, class: Class, domains: Vec<Domain>) -> Tenant {
        Tenant {
            name: name.into(),
            class,
            spec: TenantSpec {
                class,
                ..TenantSpec::default()
            },
            pids: domains.iter().map(|domain| domain.pid).collect(),
            devices: domains.iter().map(|domain| domain.device.clone()).collect(),
            domains,
            state: TenantState::Running,
            ..Tenant::default()
        }
    }

    /// An explanation to a user who may have all.
    fn explain(
        tenant: &Tenant,
        all: &[Tenant],
        devices: &[Device],
        faults: &[Fault],
    ) -> Explanation {
        super::explain(tenant, all, devices, faults, Some(&could_have(1.0)))
    }

    fn could_have(guaranteed: f64) -> Most {
        Most {
            classes: Class::ALL.into(),
            guaranteed,
            memory_guaranteed: 2 << 30,
        }
    }

    /// The lines of an explanation, each without its head.
    fn lines(tenant: &Tenant, all: &[Tenant]) -> Vec<String> {
        lines_with(tenant, all, &[])
    }

    fn lines_with(tenant: &Tenant, all: &[Tenant], devices: &[Device]) -> Vec<String> {
        let text = explain(tenant, all, devices, &[]).text;
        let line = |line: &str| line.split_once(':').unwrap().1.trim().to_owned();
        text.lines().map(line).collect()
    }

    #[test]
    fn explanation_names_processes_without_control() {
        let mut night = tenant(
            "night",
            Class::Batch,
            vec![domain(false, "has its quantum")],
        );
        night.lapsed = true;
        // Another user's tenant of the same name is a neighbour.
        let mut other = tenant(
            "night",
            Class::Batch,
            vec![domain(true, "waits for its quantum")],
        );
        (other.uid, other.user) = (1000, "alice".into());
        let foreign = ForeignProcess {
            pid: 77,
            name: "python".into(),
            ..ForeignProcess::default()
        };
        let device = Device {
            uuid: "GPU-0".into(),
            state: "ok".into(),
            foreign: vec![foreign],
            ..Device::default()
        };
        let all = [night, other];
        let others = |all: &[Tenant]| lines_with(&all[0], all, std::slice::from_ref(&device));
        let beside = others(&all);
        assert!(beside[2].contains("have lapsed"), "{beside:?}");
        assert!(beside[3].starts_with("alice/night 25%"), "{beside:?}");
        assert!(
            beside[3].contains("python (pid 77, use unknown)"),
            "{beside:?}"
        );
        let alone = others(&all[..1]);
        assert!(alone[3].starts_with("no other tenant. "), "{alone:?}");
        assert!(!alone[4].contains("for itself"), "{alone:?}");
    }

    #[test]
    fn explanation_of_namesakes_names_their_users() {
        let of = |name: &str, user: &str, uid| Tenant {
            uid,
            user: user.into(),
            ..tenant(name, Class::Batch, vec![domain(false, "has its quantum")])
        };
        let all = [
            of("web", "alice", 1),
            of("web", "bob", 2),
            of("night", "bob", 2),
        ];
        let others = |at: usize| lines(&all[at], &all).remove(3);
        assert_eq!(
            others(0),
            "bob/web 25% (batch, running), night 25% (batch, running)"
        );
        assert!(
            others(2).starts_with("alice/web 25% (batch, running), bob/web"),
            "{}",
            others(2)
        );
    }

    #[test]
    fn explanation_has_five_lines() {
        let mut night = tenant(
            "night",
            Class::Batch,
            vec![domain(true, "waits for its quantum")],
        );
        night.state = TenantState::Queued;
        let day = tenant("day", Class::Batch, vec![domain(false, "has its quantum")]);
        let all = [night, day];
        let lines = lines(&all[0], &all);
        assert_eq!(
            lines,
            [
                "a batch tenant has what the others leave (weight 1); nothing guaranteed; when all have work 50% of GPU-0",
                "25% of GPU-0 in the last second; so far it waited 4.0 s of 10.0 s with work (40%), frozen 12 times",
                "It is frozen: one tenant runs at a time, and day has most of the quanta now.",
                "day 25% (batch, running)",
                "if it lasts: `gpumux set night --guaranteed 50%` or `--class latency` puts it before others",
            ]
        );
        // Advice is never what the tenant has already.
        let web = tenant(
            "web",
            Class::Latency,
            vec![domain(false, "has its quantum")],
        );
        let with_web = [web, all[1].clone()];
        assert_eq!(
            self::lines(&with_web[0], &with_web)[4],
            "if it lasts: `gpumux set web --guaranteed 50%` puts it before others"
        );
        let mut seldom = with_web.clone();
        seldom[0].domains[0].waited_share = 0.03;
        let advice = self::lines(&seldom[0], &seldom).remove(4);
        assert!(advice.starts_with("nothing: "), "{advice}");
        let text = explain(&all[0], &all, &[], &[]).text;
        assert!(text.starts_with("entitled: a batch tenant"), "{text}");
        let alone = explain(&all[0], &all[..1], &[], &[]).text;
        assert!(alone.contains("it has the GPU for itself"), "{alone}");
    }

    #[test]
    fn explanation_names_busy_latency_tenant_and_way_out() {
        let mut night = tenant(
            "night",
            Class::Standard,
            vec![domain(true, "waits for its quantum")],
        );
        night.state = TenantState::Queued;
        let mut hog = tenant(
            "hog",
            Class::Latency,
            vec![domain(false, "takes the device at once")],
        );
        hog.domains[0].received_share = 0.97;
        let mut bat = tenant(
            "bat",
            Class::Batch,
            vec![domain(true, "waits for its quantum")],
        );
        bat.domains[0].received_share = 0.0;
        let all = [night, bat, hog];
        let lines = lines(&all[0], &all);
        assert!(
            lines[2].contains("the latency tenant hog has work almost all the time"),
            "{lines:?}"
        );
        assert!(
            lines[3].starts_with("hog 97% (latency, running), bat 0%"),
            "{lines:?}"
        );
        assert!(
            lines[4].starts_with("`gpumux set hog --class standard` lets hog share"),
            "{lines:?}"
        );
    }

    /// A class above it has the device before it, whatever it weighs.
    #[test]
    fn advice_for_a_tenant_below_a_busy_one_raises_its_class() {
        let mut all = [(Class::Batch, "night", 0.05), (Class::Latency, "web", 0.95)].map(
            |(class, name, received)| {
                let mut it = tenant(name, class, vec![domain(false, "has its quantum")]);
                (it.domains[0].received_share, it.domains[0].entitled_share) = (received, received);
                it
            },
        );
        let advice =
            |all: &[Tenant]| super::explain(&all[0], all, &[], &[], Some(&could_have(0.95))).advice;
        assert_eq!(
            advice(&all),
            "`gpumux set web --class standard` and `gpumux set night --class standard` together let the two share; \
             `gpumux set night --guaranteed 50%` gives this one a share of its own"
        );
        all[1].class = Class::Standard;
        assert!(
            advice(&all)
                .starts_with("`gpumux set night --class standard` lets it share with web; "),
            "{}",
            advice(&all)
        );
        all[1].domains[0].received_share = 0.2;
        assert!(!advice(&all).contains("--weight"), "{}", advice(&all));
        all[1].class = Class::Batch;
        assert!(advice(&all).contains("--weight 2"), "{}", advice(&all));
    }

    #[test]
    fn advice_is_never_what_the_tenant_has_already() {
        let mut train = tenant(
            "train",
            Class::Batch,
            vec![domain(true, "waits for its quantum")],
        );
        (train.user, train.spec.guaranteed) = ("bob".into(), 0.3);
        let mut hog = tenant(
            "hog",
            Class::Latency,
            vec![domain(false, "takes the device at once")],
        );
        (hog.uid, hog.user) = (1, "alice".into());
        hog.domains[0].received_share = 0.7;
        let advice = |entitled: f64, received: f64, most: &Most| {
            let mut all = [train.clone(), hog.clone()];
            let domain = &mut all[0].domains[0];
            (domain.entitled_share, domain.received_share) = (entitled, received);
            super::explain(&all[0], &all, &[], &[], Some(most))
        };
        // It receives its guarantee, so nothing is advised for itself.
        let kept = advice(0.3, 0.29, &could_have(0.8));
        assert!(
            kept.why
                .contains("goes first, except for what is guaranteed to this one."),
            "{}",
            kept.why
        );
        assert_eq!(
            kept.advice,
            "nothing: it receives what is guaranteed to it; `gpumux set hog --class standard` (as alice or root) and \
             `gpumux set train --class standard` together let the two share"
        );
        let behind = advice(0.3, 0.1, &could_have(0.8)).advice;
        assert!(behind.starts_with("wait: it is behind"), "{behind}");
    }

    #[test]
    fn advice_is_only_what_the_users_policy_allows() {
        let night = tenant(
            "night",
            Class::Batch,
            vec![domain(true, "waits for its quantum")],
        );
        let day = tenant("day", Class::Batch, vec![domain(false, "has its quantum")]);
        let all = [night, day];
        let advice = |guaranteed: f64, classes: &[Class]| {
            let most = Most {
                classes: classes.iter().copied().collect(),
                ..could_have(guaranteed)
            };
            super::explain(&all[0], &all, &[], &[], Some(&most)).advice
        };
        let batch = [Class::Batch];
        assert_eq!(
            advice(0.2, &batch),
            "if it lasts: `gpumux set night --guaranteed 20%` puts it before others"
        );
        assert_eq!(
            advice(0.0, &Class::ALL),
            "if it lasts: `gpumux set night --class latency` puts it before others"
        );
        let nothing = advice(0.004, &batch);
        assert!(
            nothing.starts_with("nothing that its user may set"),
            "{nothing}"
        );
    }

    #[test]
    fn explanation_names_at_most_three_neighbours() {
        let of = |n: usize| tenant(&format!("n{n}"), Class::Batch, vec![domain(false, "")]);
        let all: Vec<Tenant> = (0..9).map(of).collect();
        let explained = explain(&all[0], &all, &[], &[]);
        assert_eq!(explained.neighbours.len(), 8, "JSON keeps all");
        assert!(
            explained.text.contains("5 more with 125% together"),
            "{}",
            explained.text
        );
    }

    #[test]
    fn explanation_has_wait_bound_and_gpu_index() {
        let mut web = tenant(
            "web",
            Class::Latency,
            vec![domain(false, "takes the device at once")],
        );
        web.domains[0].wait_bound_us = 12_300;
        let all = [web];
        let device = Device {
            uuid: "GPU-0".into(),
            state: "ok".into(),
            index: Some(3),
            hardware: Hardware {
                minor: Some(5),
                ..Hardware::default()
            },
            ..Device::default()
        };
        let text = explain(&all[0], &all, &[device], &[]).text;
        assert!(
            text.contains(
                "50% of GPU 3, waits at most 12.3 ms of GPU time and lags behind its share by 6.2 ms at most"
            ),
            "{text}"
        );
        assert!(!text.contains("GPU-0"), "{text}");
    }

    #[test]
    fn explanation_names_guarantee_that_does_not_fit() {
        let short = "More is guaranteed to the tenants on GPU-0 than it has";
        let mut all = [1, 2].map(|n| tenant(&n.to_string(), Class::Batch, vec![domain(false, "")]));
        assert!(!explain(&all[0], &all, &[], &[]).text.contains(short));
        all[0].spec.guaranteed = 0.7;
        assert!(explain(&all[0], &all, &[], &[]).text.contains(short));
    }

    #[test]
    fn received_share_has_the_drivers_measure_if_it_differs() {
        let said = |measured: &[Option<f64>], group| {
            let with = |measured: &Option<f64>| Domain {
                measured_share: *measured,
                group,
                ..domain(false, "")
            };
            let domains = measured.iter().map(with).collect();
            let all = [tenant("web", Class::Latency, domains)];
            explain(&all[0], &all, &[], &[]).text
        };
        let low = said(&[Some(0.05)], None);
        assert!(
            low.contains("in another second the driver measured 5%, without what passes"),
            "{low}"
        );
        let high = said(&[Some(0.5)], None);
        assert!(
            high.contains("in another second the driver measured 50%)"),
            "{high}"
        );
        // 25% of each, of one process.
        let contexts = said(&[Some(0.45), Some(0.45)], None);
        for text in [
            said(&[Some(0.3)], None),
            said(&[None], None),
            said(&[Some(0.9)], Some(1)),
            contexts,
        ] {
            assert!(!text.contains("driver"), "{text}");
        }
    }

    #[test]
    fn members_of_a_group_are_those_of_now_and_receive_together() {
        let member = |name: &str, trust: Option<&str>| {
            let group = trust.map(|_| 1);
            let own = Domain {
                group,
                ..domain(false, "")
            };
            let mut member = tenant(name, Class::Batch, vec![own]);
            member.placement = Placement {
                way: if trust.is_some() {
                    Way::Space
                } else {
                    Way::Time
                },
                reason: "first of team: others may join it".into(),
                trust: trust.map(Into::into),
                ..Placement::default()
            };
            member
        };
        let all = [
            member("a", Some("team")),
            member("b", Some("team")),
            member("c", None),
        ];
        let of_a = lines(&all[0], &all);
        let now = "the group team, now with b (decided at its start: first of team";
        assert!(of_a[1].contains("by all of its group together"), "{of_a:?}");
        assert!(of_a[2].contains(now), "{of_a:?}");
        assert_eq!(of_a[3], "b in its own group, c 25% (batch, running)");
        let of_c = lines(&all[2], &all);
        assert_eq!(of_c[3], "a and b 25% together in a group");
        assert!(!of_c[1].contains("group"), "{of_c:?}");
        let alone = lines(&all[0], &all[..1]);
        assert!(
            alone[2].contains("the group team, alone now (decided"),
            "{alone:?}"
        );
    }

    #[test]
    fn guarantee_hindered_in_a_group_names_the_members() {
        let member = |name: &str, trust: &str, sm_percent| {
            let mut member = tenant(name, Class::Batch, vec![]);
            member.placement = Placement {
                way: Way::Space,
                trust: Some(trust.into()),
                sm_percent,
                ..Placement::default()
            };
            member
        };
        let mut all = [
            member("sure", "team", Some(60)),
            member("free", "team", None),
            member("small", "team", Some(60)),
            member("outside", "other", None),
            tenant("in-time", Class::Batch, vec![]),
            member("large", "team", Some(61)),
        ];
        let text = |all: &[Tenant]| explain(&all[0], all, &[], &[]).text;
        assert!(!text(&all).contains("start anew"), "nothing is guaranteed");
        all[0].spec.guaranteed = 0.4;
        let said = text(&all);
        assert!(
            said.contains("Its guarantee of 40% holds only once free and large start anew"),
            "{said}"
        );
        all[0].placement.way = Way::Time;
        assert!(!text(&all).contains("start anew"), "it shares in time");
    }

    #[test]
    fn explanation_names_errors_and_tampering() {
        let mut broken = tenant("a", Class::Standard, vec![domain(false, "has its quantum")]);
        broken.domains[0].error = Some("cannot freeze".into());
        broken.tampering = Some(crate::api::types::Tampering {
            findings: 2,
            lowered: true,
        });
        let text = explain(&broken, &[], &[], &[]).text;
        assert!(
            text.contains("a control failed: cannot freeze")
                && text.contains("found 2 times undoing what gpumux sets")
                && text.contains("class batch without a compute guarantee"),
            "{text}"
        );
        let new = explain(&tenant("b", Class::Batch, vec![]), &[], &[], &[]).text;
        assert!(new.contains("No process of it has connected yet"), "{new}");
    }

    #[test]
    fn explanation_names_memory_and_faults_that_hinder() {
        let mut sleeper = tenant("big", Class::Batch, vec![domain(true, AWAY)]);
        sleeper.memory = vec![MemoryShare {
            device: "GPU-0".into(),
            tenant: "big".into(),
            guaranteed: 0,
            limit: None,
            in_use: 0,
            above_guarantee: 0,
            pinned: 0,
            swapped: 3 << 30,
            above_limit: 0,
        }];
        (sleeper.asleep, sleeper.state) = (true, TenantState::Swapped);
        let said = |tenant: &Tenant, faults: &[Fault]| explain(tenant, &[], &[], faults).text;
        let mut limited = sleeper.clone();
        (limited.memory[0].limit, limited.memory[0].above_limit) = (Some(1 << 30), 2 << 30);
        let part = "big has 3.0 GiB of the memory of GPU-0, 2.0 GiB above its limit of 1.0 GiB:";
        let text = said(&limited, &[]);
        assert!(text.contains(part), "{text}");
        let text = said(&sleeper, &[]);
        assert!(!text.contains("above its limit"), "{text}");
        for part in [
            "It is swapped out: 3.0 GiB of its memory is on the host, where an earlier daemon moved it.",
            "or with `gpumux wake big`",
            "It is frozen while its memory is on the host",
        ] {
            assert!(text.contains(part), "{text}");
        }
        sleeper.spec.sleep_after_s = Some(90);
        for (reason, why) in [
            (SwapReason::Requested, "by request (`gpumux sleep`)."),
            (
                SwapReason::Idle,
                "after 1m30s without work (`--sleep-after`).",
            ),
            (SwapReason::Needed, "because other tenants needed the room."),
        ] {
            sleeper.swap_reason = Some(reason);
            let text = said(&sleeper, &[]);
            assert!(text.contains(&format!("is on the host, {why}")), "{text}");
        }
        let stays = "512 MiB of its memory stays on GPU-0: managed or stream-ordered memory";
        assert!(!text.contains("stays on"), "{text}");
        sleeper.memory[0].pinned = 512 << 20;
        let text = said(&sleeper, &[]);
        assert!(text.contains(stays), "{text}");
        sleeper.waits_for_memory = true;
        let text = said(&sleeper, &[]);
        assert!(text.contains("comes back as soon as others"), "{text}");
        // Of two that do not fit together, the other has the memory. Its last move took half a second.
        let mut other = tenant("other", Class::Batch, vec![]);
        (other.memory, other.moves.backs, other.moves.back_us) =
            (sleeper.memory.clone(), 1, 500_000);
        (other.memory[0].in_use, other.memory[0].swapped) = (2 << 30, 0);
        let mut stays_away = sleeper.clone();
        stays_away.lacks_on_host = Some(5 << 29);
        let text = explain(&stays_away, std::slice::from_ref(&other), &[], &[]).text;
        assert!(text.contains("The host lacks 2.5 GiB"), "{text}");
        assert!(!text.contains("at most about"), "{text}");
        let text = explain(&sleeper, &[other], &[], &[]).text;
        let quantum = "a memory quantum, and now it is that of other. It waits for at most about";
        assert!(text.contains(quantum), "{text}");
        sleeper.asleep = false;
        let text = said(&sleeper, &[]);
        assert!(!text.contains("stays on"), "{text}");
        assert!(text.contains("(memory policy swap-others)"), "{text}");
        sleeper.unlisted_calls = vec!["cuMemcpyFutureAsync".into()];
        let text = said(&sleeper, &[]);
        assert!(text.contains("called cuMemcpyFutureAsync"), "{text}");

        let fault = |faulting_client: Option<&str>, others: &[&str]| Fault {
            number: 1,
            at: 0,
            group: "0/team".into(),
            error: 700,
            faulting_client: faulting_client.map(Into::into),
            evidence: "its server says so".into(),
            others: others.iter().map(|it| (*it).into()).collect(),
            noticed_after_ms: Some(3),
            restarted_ms: Some(40),
        };
        let web = tenant("web", Class::Latency, vec![]);
        let faults = [fault(Some("web"), &["bad"]), fault(Some("bad"), &["web"])];
        let text = said(&web, &faults);
        assert!(
            text.contains("A fault of bad (error 700: its server says so)"),
            "{text}"
        );
        assert!(
            text.contains("there again after 40 ms") && !text.contains("of its own"),
            "{text}"
        );
        assert!(said(&web, &faults[..1]).contains("A fault of its own"));
        let again = Tenant {
            since: 1,
            ..web.clone()
        };
        let text = said(&again, &faults);
        assert!(text.contains("an earlier tenant of its name"), "{text}");
        let namesake = Tenant {
            uid: 1000,
            ..web.clone()
        };
        assert!(
            !said(&namesake, &faults).contains("A fault"),
            "another user's"
        );
        let foreign = [fault(Some("bad"), &["other"])];
        assert!(!said(&web, &foreign).contains("A fault"));
    }

    /// The reasons are the policies' own words: each that is explained must still be one of them.
    #[test]
    fn every_policy_reason_has_a_sentence() {
        let source = include_str!("../../../gpumux-core/src/policy/schedule.rs");
        let body = source
            .split_once("fn run_state")
            .unwrap()
            .1
            .split_once("\n    }\n")
            .unwrap()
            .0;
        let reasons: Vec<&str> = body.split('"').skip(1).step_by(2).collect();
        assert!(reasons.len() >= 8, "{reasons:?}");
        for reason in reasons {
            let text = now(&domain(false, reason), &[], false);
            assert!(!text.starts_with("The policy's reason"), "{reason}");
        }
    }
}
