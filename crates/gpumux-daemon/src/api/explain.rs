//! Why a tenant gets what it gets: one paragraph, made of what the API shows anyway.

use std::collections::BTreeMap;

use gpumux_core::{Class, space::Way};

use super::types::{CurveFrom, Device, Domain, Fault, Placement, Spec, Tenant};
use crate::scheduler::AWAY;

/// What accounts and the driver's measure may differ by without a word: both are of about a second, but not of the same.
const DIFFERS: f64 = 0.1;

/// One paragraph about `tenant`; `all` are the tenants of the same moment, `faults` the last ones in groups.
pub fn explain(tenant: &Tenant, all: &[Tenant], devices: &[Device], faults: &[Fault]) -> String {
    let mut text = vec![promise(&tenant.name, &tenant.spec)];
    text.extend(place(&tenant.placement));
    text.extend(hindered(tenant, all));
    text.extend(fault(&tenant.name, faults));
    text.extend(memory(tenant));
    text.extend(unlisted(&tenant.unlisted_calls));
    if tenant.domains.is_empty() {
        text.push(match tenant.pids.len() {
            0 => "No process of it has connected yet: a program connects when it makes its first CUDA \
                  context."
                .into(),
            n => format!("{n} of its processes are connected, but none has a CUDA context yet."),
        });
    }
    for uuid in &tenant.devices {
        let device = devices.iter().find(|device| device.uuid == *uuid);
        let others: Vec<_> = all
            .iter()
            .filter(|other| other.name != tenant.name)
            .collect();
        text.push(on_device(tenant, uuid, device, &others));
    }
    if tenant.devices.len() > 1 {
        text.push("It runs on all its devices together or on none.".into());
    }
    text.extend(past(&tenant.domains));
    text.join(" ")
}

fn promise(name: &str, spec: &Spec) -> String {
    let Spec {
        guaranteed,
        limit,
        weight,
        ..
    } = *spec;
    let class = match spec.class {
        Class::Latency => "takes the device at once when it has work",
        Class::Standard => "gets a share by weight, after latency tenants",
        Class::Batch => "gets what the others leave",
    };
    let guarantee = match guaranteed {
        0.0 => "nothing guaranteed".into(),
        share => format!("{} guaranteed", percent(share)),
    };
    let limit = match limit {
        1.0 => String::new(),
        share => format!(", at most {} while others want it", percent(share)),
    };
    format!(
        "{name} is a {} tenant: it {class} (weight {weight}, {guarantee}{limit}).",
        spec.class
    )
}

/// Time or space, and why, where there was a choice.
fn place(placement: &Placement) -> Option<String> {
    if *placement == Placement::default() {
        return None;
    }
    let Placement {
        way,
        reason,
        trust,
        sm_percent,
        curve,
        fingerprint,
    } = placement;
    let trust = trust.as_deref().unwrap_or_default();
    let by = match (curve, fingerprint.as_deref()) {
        (Some(CurveFrom::Given), _) => ", by what was said that members make of SMs".into(),
        (Some(CurveFrom::Measured), Some(fingerprint)) => {
            format!(", by what was measured of {fingerprint}")
        }
        _ => String::new(),
    };
    let confined = match sm_percent {
        None => String::new(),
        Some(percent) => format!(
            " Each of its processes is confined to {percent}% of the SMs{by} until it ends: MPS cannot change that \
             while it runs."
        ),
    };
    Some(match way {
        Way::Time => format!("It takes turns with others in a context of its own ({reason})."),
        Way::Space => format!(
            "It shares the SMs with the others of the group {trust} ({reason}); they run and wait together, and \
             a fault of one ends all.{confined}"
        ),
    })
}

/// Why its guarantee does not hold inside its group, if so.
fn hindered(tenant: &Tenant, all: &[Tenant]) -> Option<String> {
    let by = tenant.hindered_by(all).into_iter().map(str::to_owned);
    let by: Vec<String> = by.collect();
    if by.is_empty() {
        return None;
    }
    Some(format!(
        "In the group its guarantee of {} holds only once {} start anew: until then they keep more SMs than it leaves.",
        percent(tenant.spec.guaranteed),
        list(by)
    ))
}

/// The last fault in a group that ended processes of a tenant.
fn fault(name: &str, faults: &[Fault]) -> Option<String> {
    let concerns = |fault: &&Fault| {
        fault.culprit.as_deref() == Some(name) || fault.others.iter().any(|other| other == name)
    };
    let fault = faults.iter().rev().find(concerns)?;
    let whose = match fault.culprit.as_deref() {
        Some(culprit) if culprit == name => "of its own".into(),
        Some(culprit) => format!("of {culprit}"),
        None => "whose cause is not known".into(),
    };
    let after = match fault.restarted_ms {
        Some(ms) => format!("the group was there again after {ms} ms"),
        None => "the group could not be started again".into(),
    };
    Some(format!(
        "A fault {whose} (error {}: {}) has ended its processes in the group {}; {after}, and programs that are \
         started again are in it.",
        fault.error, fault.evidence, fault.group
    ))
}

/// Where its memory is, if that is why it waits.
fn memory(tenant: &Tenant) -> Option<String> {
    let swapped: u64 = tenant.memory.iter().map(|share| share.swapped).sum();
    let gib = swapped as f64 / f64::from(1 << 30);
    Some(match (tenant.asleep, tenant.waits_for_memory) {
        (true, true) => format!(
            "It cannot run now: {gib:.1} GiB of its memory is on the host and comes back as soon as others have made \
             room."
        ),
        (true, false) => format!(
            "It sleeps: {gib:.1} GiB of its memory is on the host, since somebody put it to sleep, it had no work for \
             long, or others needed the room. It comes back when it has work, or with `gpumux wake {}`.",
            tenant.name
        ),
        (false, true) => format!(
            "One of its processes asked for memory that the device has no room for, and waits until others have \
             made some (memory policy {}).",
            tenant.spec.memory_policy.name()
        ),
        (false, false) => return None,
    })
}

/// What its processes called that nobody knows.
fn unlisted(calls: &[String]) -> Option<String> {
    (!calls.is_empty()).then(|| {
        format!(
            "Its program called {}, which this version of gpumux does not know: the program's memory stays on the device, and it \
             counts as busy. A newer gpumux may know it.",
            list(calls.to_vec())
        )
    })
}

fn on_device(tenant: &Tenant, uuid: &str, device: Option<&Device>, others: &[&Tenant]) -> String {
    let here = |tenant: &Tenant| -> Vec<Domain> {
        tenant
            .domains
            .iter()
            .filter(|domain| domain.device == uuid)
            .cloned()
            .collect()
    };
    let own = here(tenant);
    let received: f64 = own.iter().map(|domain| domain.received_share).sum();
    let promised = own
        .iter()
        .map(|domain| domain.promised_share)
        .fold(0.0, f64::max);
    let mut text = String::new();
    if let Some(device) = device.filter(|device| device.state != "ok") {
        text += &format!("{uuid} is in trouble ({}). ", device.state);
    }
    let rivals: Vec<_> = others
        .iter()
        .filter(|other| !here(other).is_empty())
        .collect();
    let policy = device.map_or("", |device| &device.policy);
    text += &match rivals.len() {
        0 => format!(
            "It has {uuid} for itself and received {} of it in the last second.",
            percent(received)
        ),
        _ => format!(
            "On {uuid} (policy {policy}) it gets {} if everybody wants the device; in the last second \
             it received {}, beside {}.",
            percent(promised),
            percent(received),
            list(rivals.iter().map(|other| {
                let share = here(other).iter().map(|domain| domain.received_share).sum();
                format!("{} ({}, {})", other.name, other.class, percent(share))
            }))
        ),
    };
    // In a group all members' kernels are the group's.
    let alone = own.iter().all(|domain| domain.group.is_none());
    let measured: Option<BTreeMap<u32, f64>> = own
        .iter()
        .map(|domain| Some((domain.pid, domain.measured_share?)))
        .collect();
    if let Some(measured) = measured.filter(|_| alone) {
        let measured = measured.values().sum::<f64>();
        if received - measured > DIFFERS {
            text += &format!(
                " By the driver's measure its kernels ran in {} of that second: the rest passed between them, or in switches.",
                percent(measured)
            );
        } else if measured - received > DIFFERS {
            text += &format!(
                " By the driver's measure it was {}: the account is too low.",
                percent(measured)
            );
        }
    }
    if promised + 0.005 < tenant.spec.guaranteed {
        text += " More is guaranteed to the tenants on it than it has: start this one on another device, or guarantee less.";
    }
    // Processes in the same situation are described once.
    let mut said = Vec::new();
    for domain in &own {
        let sentence = now(domain);
        if !said.contains(&sentence) {
            said.push(sentence);
        }
    }
    let frozen = own.iter().any(|domain| domain.frozen);
    let runs = |other: &&&Tenant| here(other).iter().any(|d| !d.frozen && d.demand.may_run());
    let runners: Vec<_> = rivals
        .iter()
        .copied()
        .filter(runs)
        .map(|t| t.name.clone())
        .collect();
    if frozen && !runners.is_empty() {
        said.push(format!("Now the device is with {}.", list(runners)));
    }
    [text, said.join(" ")].join(" ")
}

/// What a domain does at the moment, and why.
fn now(domain: &Domain) -> String {
    if let Some(error) = &domain.error {
        return format!("It is not managed now, because a lever does not move: {error}.");
    }
    match domain.reason.as_str() {
        "new" => "It has just come and is planned next.".into(),
        "has no work" => "It has no work for the device at the moment.".into(),
        "takes the device at once" => format!(
            "It may run, with a slice of {} µs, so that it keeps the device while it has work.",
            domain.timeslice_us
        ),
        "shares by slices" => format!(
            "It may run: the hardware goes round those that have work, and its slice of {} µs is in \
             proportion to its share.",
            domain.timeslice_us
        ),
        "has its turn" => "It has its turn among those that give way, until it has run for its share of \
                           a round or a tenant of a higher class has work."
            .into(),
        "waits for its turn" => "It waits, frozen: of those that give way only one may run at a time, and \
                                 it's another's turn."
            .into(),
        "pauses while others want the turn" => "It has no work at the moment and is frozen for up to 0.1 s, because others \
                                                take turns with it: it must not meet one of them if it is back soon."
            .into(),
        "over its budget while others wait" => "It waits, frozen: it ran ahead of its share while others \
                                                wanted the device, and goes on once they have caught up."
            .into(),
        "waits for its gang" => "It waits, frozen, until it can run on all its devices.".into(),
        AWAY => "It is frozen while its memory is away, or on its way.".into(),
        "runs with its gang" => "It may run, together with its domains on other devices.".into(),
        reason => format!("The policy's reason: {reason}."),
    }
}

fn past(domains: &[Domain]) -> Option<String> {
    let sum = |field: fn(&Domain) -> u64| domains.iter().map(field).sum::<u64>();
    let (runnable, waited) = (sum(|d| d.runnable_us), sum(|d| d.waited_us));
    let tampered = sum(|d| d.tampered);
    if runnable == 0 {
        return None;
    }
    let mut text = format!(
        "So far it had work for {:.1} s, waited {:.1} s of that ({}) and was preempted {} times.",
        runnable as f64 / 1e6,
        waited as f64 / 1e6,
        percent(waited as f64 / runnable as f64),
        sum(|d| d.preemptions)
    );
    if tampered > 0 {
        text += &format!(
            " Somebody else changed its slice {tampered} times; it was set again each time."
        );
    }
    Some(text)
}

fn percent(share: f64) -> String {
    format!("{:.0}%", share * 100.0)
}

fn list(items: impl IntoIterator<Item = String>) -> String {
    let items: Vec<_> = items.into_iter().collect();
    match items.split_last() {
        Some((last, [])) => last.clone(),
        Some((last, rest)) => format!("{} and {last}", rest.join(", ")),
        None => "nobody".into(),
    }
}

#[cfg(test)]
mod tests {
    use gpumux_core::Demand;

    use super::*;
    use crate::api::types::{MemoryShare, TenantState};

    fn domain(frozen: bool, reason: &str) -> Domain {
        Domain {
            id: 1,
            group: None,
            device: "GPU-0".into(),
            pid: 7,
            timeslice_us: 1,
            frozen,
            demand: Demand::Busy,
            promised_share: 0.5,
            received_share: 0.25,
            measured_share: None,
            received_us: 6_000_000,
            runnable_us: 10_000_000,
            waited_us: 4_000_000,
            preemptions: 12,
            freezes: 12,
            thaws: 11,
            slice_changes: 1,
            tampered: 0,
            reason: reason.into(),
            error: None,
        }
    }

    fn tenant(name: &str, class: Class, domains: Vec<Domain>) -> Tenant {
        Tenant {
            name: name.into(),
            class,
            spec: Spec {
                class,
                ..Spec::default()
            },
            uid: 0,
            pids: domains.iter().map(|domain| domain.pid).collect(),
            devices: domains.iter().map(|domain| domain.device.clone()).collect(),
            domains,
            since: 0,
            state: TenantState::Running,
            placement: Default::default(),
            work: 0,
            hints: Default::default(),
            requests: Default::default(),
            memory: Vec::new(),
            asleep: false,
            waits_for_memory: false,
            unlisted_calls: Vec::new(),
            moves: Default::default(),
        }
    }

    #[test]
    fn a_promise_that_the_device_cannot_keep_is_admitted() {
        let short = "More is guaranteed to the tenants on it than it has";
        let mut all = [1, 2].map(|n| tenant(&n.to_string(), Class::Batch, vec![domain(false, "")]));
        assert!(!explain(&all[0], &all, &[], &[]).contains(short));
        all[0].spec.guaranteed = 0.7;
        assert!(explain(&all[0], &all, &[], &[]).contains(short));
    }

    #[test]
    fn what_the_driver_measured_is_told_where_it_is_another() {
        let said = |measured: &[Option<f64>], group| {
            let with = |measured: &Option<f64>| Domain {
                measured_share: *measured,
                group,
                ..domain(false, "")
            };
            let domains = measured.iter().map(with).collect();
            let all = [tenant("web", Class::Latency, domains)];
            explain(&all[0], &all, &[], &[])
        };
        let low = said(&[Some(0.05)], None);
        assert!(
            low.contains("its kernels ran in 5% of that second"),
            "{low}"
        );
        let high = said(&[Some(0.5)], None);
        assert!(
            high.contains("it was 50%: the account is too low"),
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
            assert!(!text.contains("the driver's measure"), "{text}");
        }
    }

    #[test]
    fn who_waits_is_told_for_whom() {
        let all = [
            tenant(
                "night",
                Class::Batch,
                vec![domain(true, "waits for its turn")],
            ),
            tenant(
                "web",
                Class::Latency,
                vec![domain(false, "takes the device at once")],
            ),
            tenant("day", Class::Batch, vec![domain(false, "has its turn")]),
        ];
        assert_eq!(
            explain(&all[0], &all, &[], &[]),
            "night is a batch tenant: it gets what the others leave (weight 1, nothing guaranteed). \
             On GPU-0 (policy ) it gets 50% if everybody wants the device; in the last second it \
             received 25%, beside web (latency, 25%) and day (batch, 25%). It waits, frozen: of those \
             that give way only one may run at a time, and it's another's turn. Now the device is with web \
             and day. So far it had work for 10.0 s, waited 4.0 s of that (40%) and was preempted 12 times."
        );
        let alone = explain(&all[1], &all[1..2], &[], &[]);
        assert!(alone.contains("It has GPU-0 for itself"), "{alone}");
        assert!(!alone.contains("Now the device is with"), "{alone}");
    }

    #[test]
    fn a_guarantee_that_does_not_hold_in_a_group_is_named_with_whom_it_waits_for() {
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
            member("stranger", "other", None),
            tenant("turns", Class::Batch, vec![]),
            member("large", "team", Some(61)),
        ];
        let text = |all: &[Tenant]| explain(&all[0], all, &[], &[]);
        assert!(!text(&all).contains("start anew"), "nothing is guaranteed");
        all[0].spec.guaranteed = 0.4;
        let said = text(&all);
        assert!(
            said.contains("its guarantee of 40% holds only once free and large start anew"),
            "{said}"
        );
        all[0].placement.way = Way::Time;
        assert!(!text(&all).contains("start anew"), "it has turns");
    }

    #[test]
    fn what_is_wrong_is_said() {
        let mut broken = tenant("a", Class::Standard, vec![domain(false, "has its turn")]);
        broken.domains[0].error = Some("cannot freeze".into());
        broken.domains[0].tampered = 2;
        let text = explain(&broken, &[], &[], &[]);
        assert!(
            text.contains("a lever does not move: cannot freeze")
                && text.contains("changed its slice 2 times"),
            "{text}"
        );
        let new = explain(&tenant("b", Class::Batch, vec![]), &[], &[], &[]);
        assert!(new.contains("No process of it has connected yet"), "{new}");
    }

    #[test]
    fn memory_and_groups_are_named_where_they_are_the_reason() {
        let mut sleeper = tenant("big", Class::Batch, vec![domain(true, AWAY)]);
        sleeper.memory = vec![MemoryShare {
            device: "GPU-0".into(),
            tenant: "big".into(),
            guaranteed: 0,
            limit: None,
            in_use: 0,
            borrowed: 0,
            pinned: 0,
            swapped: 3 << 30,
        }];
        sleeper.asleep = true;
        let said = |tenant: &Tenant, faults: &[Fault]| explain(tenant, &[], &[], faults);
        let text = said(&sleeper, &[]);
        for part in [
            "It sleeps: 3.0 GiB of its memory is on the host",
            "or with `gpumux wake big`",
            "It is frozen while its memory is away",
        ] {
            assert!(text.contains(part), "{text}");
        }
        sleeper.waits_for_memory = true;
        let text = said(&sleeper, &[]);
        assert!(text.contains("comes back as soon as others"), "{text}");
        sleeper.asleep = false;
        let text = said(&sleeper, &[]);
        assert!(text.contains("(memory policy swap-others)"), "{text}");
        sleeper.unlisted_calls = vec!["cuMemcpyFutureAsync".into()];
        let text = said(&sleeper, &[]);
        assert!(text.contains("called cuMemcpyFutureAsync"), "{text}");

        let fault = |culprit: Option<&str>, others: &[&str]| Fault {
            number: 1,
            at: 0,
            group: "0/team".into(),
            error: 700,
            culprit: culprit.map(Into::into),
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
        let stranger = [fault(Some("bad"), &["other"])];
        assert!(!said(&web, &stranger).contains("A fault"));
    }

    /// The reasons are the policies' own words: each that is explained must still be one of them.
    #[test]
    fn every_reason_of_the_policies_has_a_sentence() {
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
            let text = now(&domain(false, reason));
            assert!(!text.starts_with("The policy's reason"), "{reason}");
        }
    }
}
