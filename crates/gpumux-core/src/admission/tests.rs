use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::quantity::GIB;

const DEVICES: usize = 3;

fn spec(guaranteed: f64, memory: u64) -> TenantSpec {
    TenantSpec {
        guaranteed,
        memory_guaranteed: memory,
        ..TenantSpec::default()
    }
}

fn policy(user: &str, rules: &UserRules) -> UserPolicy {
    UserPolicy::new(user.into(), user == "root", rules)
}

fn booking(name: &str, user: u32, guaranteed: f64, memory: u64) -> Booking {
    Booking {
        tenant: TenantId(u64::from(user) * 100 + name.len() as u64),
        name: name.into(),
        user: UserId(user),
        privileged: user == 0,
        guaranteed,
        memory,
    }
}

fn room(booked: Vec<Booking>) -> Room {
    Room {
        device: "GPU 0".into(),
        memory: Some(100 * GIB),
        booked,
        foreign: Vec::new(),
    }
}

fn ask(user: u32, spec: &TenantSpec, rooms: &[Room]) -> Result<(), String> {
    let request = Request {
        tenant: TenantId(7),
        user: UserId(user),
        spec,
        before: None,
    };
    let name = if user == 0 { "root" } else { "alice" };
    let policy = policy(name, &UserRules::default());
    admit(&request, &policy, &Reserve::default(), rooms).map_err(|error| error.to_string())
}

#[test]
fn whole_machine_is_root_s_only() {
    for (share, memory) in [(1.0, 0), (0.81, 0), (0.0, 81 * GIB)] {
        let error = ask(1000, &spec(share, memory), &[room(Vec::new())]).unwrap_err();
        assert!(
            error.contains("alice may be guaranteed at most 80"),
            "{error}"
        );
    }
    let all = spec(1.0, 100 * GIB);
    assert_eq!(ask(0, &all, &[room(Vec::new())]), Ok(()));
    // Two users together leave root its part.
    let others = vec![booking("train", 1001, 0.8, 80 * GIB)];
    let rooms = [room(others)];
    assert_eq!(ask(1000, &spec(0.1, 10 * GIB), &rooms), Ok(()));
    let error = ask(1000, &spec(0.11, 0), &rooms).unwrap_err();
    assert!(error.contains("10% is reserved for root"), "{error}");
    assert_eq!(ask(0, &spec(0.2, 20 * GIB), &rooms), Ok(()));
}

#[test]
fn refusal_names_value_device_holders_and_way_out() {
    let rooms = [room(vec![
        booking("web", 1000, 0.1, 0),
        booking("train", 1001, 0.5, 70 * GIB),
        booking("night", 1002, 0.2, 0),
        booking("tiny", 1003, 0.01, 0),
    ])];
    assert_eq!(
        ask(1000, &spec(0.3, 0), &rooms).unwrap_err(),
        "cannot guarantee 30% of GPU 0: guaranteed to train (50%), night (20%), web (10%) and 1 more, 10% is reserved for root: \
         guarantee at most 9%, lower a guarantee with `gpumux set`, or name another device with --gpu"
    );
    assert_eq!(
        ask(1000, &spec(0.0, 64_424_509_440), &rooms).unwrap_err(),
        "cannot guarantee 60.0 GiB of GPU 0: guaranteed to train (70.0 GiB), 10.0 GiB is reserved for root: guarantee at most \
         20.0 GiB, lower a guarantee with `gpumux set`, or name another device with --gpu"
    );
    assert_eq!(
        ask(1000, &spec(0.75, 0), &rooms[..]).unwrap_err(),
        "cannot guarantee 75% of GPU 0: user alice may be guaranteed at most 80% of it; guaranteed to web (10%): guarantee at most 70%, \
         lower another guarantee, or ask the administrator (`max_guaranteed` in gpumux.toml)"
    );
}

#[test]
fn refusal_advises_to_lower_only_what_is_held() {
    let empty = [room(Vec::new())];
    assert_eq!(
        ask(0, &spec(0.0, 150 * GIB), &empty).unwrap_err(),
        "cannot guarantee 150.0 GiB of GPU 0: only 100.0 GiB of it can be guaranteed: guarantee at most 100.0 GiB, or name another \
         device with --gpu"
    );
    assert_eq!(
        ask(1000, &spec(0.9, 0), &empty).unwrap_err(),
        "cannot guarantee 90% of GPU 0: user alice may be guaranteed at most 80% of it: guarantee at most 80%, or ask the administrator \
         (`max_guaranteed` in gpumux.toml)"
    );
}

#[test]
fn most_that_can_be_had_is_admitted_and_more_is_refused() {
    let rooms = [
        room(vec![
            booking("web", 1000, 0.1, 0),
            booking("train", 1001, 0.5, 70 * GIB),
        ]),
        room(vec![booking("night", 1002, 0.2, 0)]),
    ];
    let own = spec(0.0, 0);
    let request = Request {
        tenant: TenantId(7),
        user: UserId(1000),
        spec: &own,
        before: None,
    };
    let policy = policy("alice", &UserRules::default());
    let most = most(&request, &policy, &Reserve::default(), &rooms);
    assert_eq!(most.memory_guaranteed, 20 * GIB);
    assert_eq!(most.classes, Class::ALL.into());
    let ask = |share, memory| ask(1000, &spec(share, memory), &rooms);
    assert_eq!(ask(most.guaranteed, most.memory_guaranteed), Ok(()));
    assert!(ask(most.guaranteed + 0.01, 0).is_err());
    assert!(ask(0.0, most.memory_guaranteed + GIB).is_err());
}

#[test]
fn class_that_is_not_allowed_is_refused_but_kept() {
    let rules = UserRules {
        classes: Some([Class::Standard, Class::Batch].into()),
        ..UserRules::default()
    };
    let latency = TenantSpec {
        class: Class::Latency,
        ..TenantSpec::default()
    };
    let request = Request {
        tenant: TenantId(1),
        user: UserId(1000),
        spec: &latency,
        before: None,
    };
    let decide = |request: &Request<'_>| {
        let policy = policy("alice", &rules);
        admit(request, &policy, &Reserve::default(), &[])
    };
    let error = decide(&request).unwrap_err().to_string();
    assert!(
        error.contains("class latency: use standard or batch"),
        "{error}"
    );
    let before = Some(&latency);
    assert_eq!(decide(&Request { before, ..request }), Ok(()));
}

#[test]
fn foreign_use_counts_unless_it_is_small() {
    let with = |used| Room {
        foreign: vec![Foreign {
            name: "python (pid 7)".into(),
            used,
            memory: 0,
        }],
        ..room(Vec::new())
    };
    assert_eq!(ask(0, &spec(1.0, 0), &[with(0.02)]), Ok(()));
    let error = ask(0, &spec(0.7, 0), &[with(0.4)]).unwrap_err();
    assert!(
        error.contains("used without gpumux by python (pid 7) (40%)"),
        "{error}"
    );
    assert!(error.contains("at most 60%"), "{error}");
}

/// It is not in what can be guaranteed.
#[test]
fn foreign_memory_is_named_and_not_subtracted_again() {
    let with = Room {
        memory: Some(60 << 30),
        foreign: vec![Foreign {
            name: "python (pid 7)".into(),
            used: 0.0,
            memory: 20 << 30,
        }],
        ..room(Vec::new())
    };
    assert_eq!(
        ask(0, &spec(0.0, 60 << 30), std::slice::from_ref(&with)),
        Ok(())
    );
    let error = ask(0, &spec(0.0, 70 << 30), &[with]).unwrap_err();
    assert!(
        error.contains("only 60.0 GiB of it can be guaranteed; used without gpumux by python (pid 7) (20.0 GiB)"),
        "{error}"
    );
}

#[test]
fn guarantee_is_checked_on_every_device() {
    let full = |name: &str| room(vec![booking(name, 1001, 0.7, 0)]);
    let rooms = [room(Vec::new()), full("web")];
    assert!(ask(1000, &spec(0.7, 0), &rooms).is_err());
    assert_eq!(ask(1000, &spec(0.7, 0), &rooms[..1]), Ok(()));
    let thirds = vec![
        booking("a", 0, 1.0 / 3.0, 0),
        booking("bc", 0, 1.0 / 3.0, 0),
    ];
    assert_eq!(ask(0, &spec(1.0 / 3.0, 0), &[room(thirds)]), Ok(()));
}

#[test]
fn rules_of_the_user_come_before_groups_before_defaults() {
    let rules = |share: Option<f64>, tenants: Option<usize>| UserRules {
        max_guaranteed: share,
        max_tenants: tenants,
        ..UserRules::default()
    };
    let (defaults, ml, web) = (
        rules(Some(0.1), Some(1)),
        rules(Some(0.3), None),
        rules(Some(0.2), Some(5)),
    );
    let resolve = |user: Option<&UserRules>, groups: &[&UserRules]| {
        let found = UserRules::resolve(user, groups.iter().copied(), &defaults);
        (found.max_guaranteed, found.max_tenants)
    };
    assert_eq!(resolve(None, &[]), (Some(0.1), Some(1)));
    assert_eq!(resolve(None, &[&ml, &web]), (Some(0.3), Some(5)));
    assert_eq!(resolve(None, &[&ml]), (Some(0.3), Some(1)));
    // Its own section comes first although it allows less.
    let own = rules(Some(0.05), None);
    assert_eq!(resolve(Some(&own), &[&ml, &web]), (Some(0.05), Some(5)));
}

#[test]
fn amounts_are_read_as_people_write_them() {
    for (text, amount) in [
        ("80%", Amount::Share(0.8)),
        ("64GiB", Amount::Bytes(64 * GIB)),
        ("0%", Amount::Share(0.0)),
    ] {
        assert_eq!(Amount::try_from(text.to_owned()), Ok(amount), "{text}");
    }
    for text in ["", "80", "-5%", "101%", "NaN%", "much"] {
        assert!(Amount::try_from(text.to_owned()).is_err(), "{text}");
    }
}

/// What one of some tenants asks for.
#[derive(Clone, Debug)]
struct Step {
    tenant: usize,
    guaranteed: f64,
    memory: u64,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = (0..8usize, 0..=20u32, 0..=20u64).prop_map(|(tenant, share, part)| Step {
        tenant,
        guaranteed: f64::from(share) / 20.0,
        memory: part * 5 * GIB,
    });
    proptest::collection::vec(step, 1..60)
}

/// Which devices a tenant may use, as bits.
fn devices() -> impl Strategy<Value = Vec<usize>> {
    proptest::collection::vec(1..(1usize << DEVICES), 8)
}

/// Tenants 0 and 1 are root's, the others two users'.
fn user(tenant: usize) -> u32 {
    (tenant / 2).min(2) as u32
}

struct World {
    specs: BTreeMap<usize, TenantSpec>,
    devices: Vec<usize>,
    policies: [UserPolicy; 3],
    reserve: Reserve,
}

impl World {
    fn rooms(&self, of: usize) -> Vec<Room> {
        (0..DEVICES)
            .filter(|device| self.devices[of] & 1 << device != 0)
            .map(|device| {
                let here = self
                    .specs
                    .iter()
                    .filter(|(id, _)| self.devices[**id] & 1 << device != 0);
                room(
                    here.map(|(id, spec)| Booking {
                        tenant: TenantId(*id as u64),
                        ..booking("x", user(*id), spec.guaranteed, spec.memory_guaranteed)
                    })
                    .collect(),
                )
            })
            .collect()
    }

    fn admit(&self, tenant: usize, spec: &TenantSpec) -> Result<(), Refusal> {
        let request = Request {
            tenant: TenantId(tenant as u64),
            user: UserId(user(tenant)),
            spec,
            before: self.specs.get(&tenant),
        };
        let policy = &self.policies[user(tenant) as usize];
        admit(&request, policy, &self.reserve, &self.rooms(tenant))
    }
}

proptest! {
    #[test]
    fn admitted_guarantees_hold_together(
        steps in steps(),
        devices in devices(),
        most in (0.0..=1.0f64, 0.0..=1.0f64),
        reserved in 0.0..=0.5f64,
    ) {
        let rules = |most| UserRules {
            max_guaranteed: Some(most),
            max_memory_guaranteed: Some(Amount::Share(most)),
            ..UserRules::default()
        };
        let mut world = World {
            specs: BTreeMap::new(),
            devices,
            policies: [
                policy("root", &UserRules::default()),
                policy("alice", &rules(most.0)),
                policy("bob", &rules(most.1)),
            ],
            reserve: Reserve { guaranteed: reserved, memory_guaranteed: Amount::Share(reserved) },
        };
        for step in steps {
            let wish = spec(step.guaranteed, step.memory);
            let before = world.specs.get(&step.tenant).cloned().unwrap_or_default();
            match world.admit(step.tenant, &wish) {
                Ok(()) => {
                    // Less is admitted, too.
                    let less = spec(step.guaranteed / 2.0, step.memory / 2);
                    prop_assert_eq!(world.admit(step.tenant, &less), Ok(()));
                    world.specs.insert(step.tenant, wish);
                }
                Err(refusal) => {
                    let rises = wish.guaranteed > before.guaranteed
                        || wish.memory_guaranteed > before.memory_guaranteed;
                    prop_assert!(rises, "what does not rise is refused: {}", refusal);
                    // More is refused, too.
                    let more = spec(step.guaranteed.max(before.guaranteed), step.memory.max(before.memory_guaranteed));
                    prop_assert!(world.admit(step.tenant, &more).is_err());
                    // As much of it as is said to be free is not refused for the same device and reason.
                    let (Refusal::User { free, .. } | Refusal::Full { free, .. }) = refusal else {
                        return Err(TestCaseError::fail(refusal.to_string()));
                    };
                    let (smaller, held) = match free {
                        Quantity::Compute(share) => (share < step.guaranteed, share),
                        Quantity::Memory(bytes) => (bytes < step.memory, 0.0),
                    };
                    prop_assert!(smaller && held >= 0.0);
                }
            }
            for device in 0..DEVICES {
                let sum = |users: &[u32]| {
                    let here = world.specs.iter().filter(|(id, _)| {
                        world.devices[**id] & 1 << device != 0 && users.contains(&user(**id))
                    });
                    here.fold((0.0, 0), |(share, bytes), (_, spec)| {
                        (share + spec.guaranteed, bytes + spec.memory_guaranteed)
                    })
                };
                let all = sum(&[0, 1, 2]);
                prop_assert!(all.0 <= 1.0 + 1e-6 && all.1 <= 100 * GIB, "{:?}", all);
                let ordinary = sum(&[1, 2]);
                prop_assert!(ordinary.0 <= 1.0 - reserved + 1e-6, "{:?} of {}", ordinary, reserved);
                for (one, most) in [(1, most.0), (2, most.1)] {
                    let own = sum(&[one]);
                    prop_assert!(own.0 <= most + 1e-6, "{:?} of {}", own, most);
                    prop_assert!(own.1 <= (100.0 * GIB as f64 * most) as u64 + 1, "{:?} of {}", own, most);
                }
            }
        }
    }
}

#[test]
fn trust_domain_of_batch_tenants_is_a_name_or_none() {
    let rules = |name: &str| UserRules {
        batch_trust: Some(name.into()),
        ..UserRules::default()
    };
    for name in ["night", "team-1", ""] {
        assert_eq!(rules(name).mistake(), None, "{name}");
    }
    for name in ["a b", "-a", "../a", "é"] {
        let (key, ..) = rules(name).mistake().expect(name);
        assert_eq!(key, "batch_trust");
    }
    let batch = TenantSpec {
        class: Class::Batch,
        ..TenantSpec::default()
    };
    let domain = |rules: &UserRules| {
        let policy = policy("alice", rules);
        policy.trust_of(&batch).map(str::to_owned)
    };
    let (night, none) = (rules("night"), rules(""));
    assert_eq!(domain(&night).as_deref(), Some("night"));
    assert_eq!(domain(&none.clone().or(&night)), None, "the user's own");
    assert_eq!(domain(&night.joined(&none)), None, "of two Unix groups");
}
