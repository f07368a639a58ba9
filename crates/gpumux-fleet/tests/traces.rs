//! Tenants that come and go, models that serve, and recorded use.

use gpumux_fleet::{
    lifetimes,
    model::{Class, Demand, Models, NodeSpec, Pod, WHOLE},
    rules::Rule,
    serving::{self, Error, Mesh, Profile, Service, Terms},
    sizing::Sharing,
    trace,
    usage::{self, Recording, Request, Sample, Setting, Way},
};
use proptest::prelude::*;

fn nodes(count: usize, gpus: u8, gpu_memory_mib: u32) -> Vec<NodeSpec> {
    let node = |nth| NodeSpec {
        name: format!("node-{nth}"),
        cpu_milli: 0,
        memory_mib: 0,
        gpus,
        model: 0,
        gpu_memory_mib,
        domain: 0,
    };
    (0..count).map(node).collect()
}

fn pod(milli: u32, from: u64, to: u64) -> Pod {
    Pod {
        name: String::new(),
        demand: Demand {
            gpus: 1,
            milli,
            class: Class::Guaranteed,
            ..Demand::default()
        },
        created_s: from,
        deleted_s: to,
        latency_sensitive: true,
    }
}

#[test]
fn tenant_without_room_waits_until_one_goes() {
    let pods = [pod(WHOLE, 0, 100), pod(WHOLE, 30, 50), pod(WHOLE, 120, 130)];
    let lived = lifetimes::live(&nodes(1, 1, 0), &pods, Sharing::Exclusive, &[]);
    // The second comes in at 100, lives its 20 seconds, and is gone when the third comes.
    assert_eq!(lived.longest_wait_s, Some(70));
    assert!(
        (lived.waited - 100.0 / 3.0).abs() < 1e-9,
        "{}",
        lived.waited
    );
    let two = lifetimes::live(&nodes(2, 1, 0), &pods, Sharing::Exclusive, &[]);
    assert_eq!((two.waited, two.longest_wait_s), (0.0, Some(0)));
}

#[test]
fn tenant_that_never_finds_room_has_no_longest_wait() {
    let pods = [pod(WHOLE, 0, u64::MAX), pod(WHOLE, 5, 6)];
    let lived = lifetimes::live(&nodes(1, 1, 0), &pods, Sharing::Exclusive, &[]);
    assert_eq!(lived.longest_wait_s, None);
    let all = lifetimes::needed(&nodes(1, 1, 0), &pods, Sharing::Exclusive, 1, 1, &[]);
    assert_eq!(all.map(|lived| lived.gpus), Some(2));
}

#[test]
fn time_slices_attain_less_while_more_are_there() {
    let pods = [pod(500, 0, 100), pod(500, 0, 100), pod(400, 0, 100)];
    let sliced = lifetimes::live(&nodes(1, 1, 0), &pods, Sharing::TimeSliced(4), &[]);
    // At the three moments of arrival: all, all, and none of three.
    assert!(
        (sliced.attained.unwrap() - 200.0 / 3.0).abs() < 1e-9,
        "{sliced:?}"
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whole GPUs on nodes of one: as many as tenants are there at a time, but for the hundredth part that may wait.
    #[test]
    fn whole_gpus_over_time_are_the_largest_overlap(lives in prop::collection::vec((0u64..50, 1u64..20), 1..30)) {
        let pods: Vec<Pod> = lives.iter().map(|(at, life)| pod(WHOLE, *at, at + life)).collect();
        let overlap = |at: u64| pods.iter().filter(|pod| pod.created_s <= at && at < pod.deleted_s).count();
        let most = (0..70).map(overlap).max().unwrap();
        for sharing in [Sharing::Exclusive, Sharing::Fractions(Rule::Fgd), Sharing::Guaranteed] {
            let lived = lifetimes::needed(&nodes(30, 1, 0), &pods, sharing, 7, 1, &[]).unwrap();
            prop_assert_eq!(lived.gpus, most);
            prop_assert_eq!(lived.waited, 0.0);
        }
    }
}

fn sample() -> (Vec<Service>, Profile, Terms) {
    let services = trace::table(include_str!("../../../scenarios/fleet/models.csv")).unwrap();
    let profile = include_str!("../../../scenarios/fleet/profile.json");
    let terms = Terms {
        card_mib: 81_920,
        working_mib: 6_144,
        slower: 8.0,
    };
    (services, serde_json::from_str(profile).unwrap(), terms)
}

#[test]
fn slot_grows_with_the_rate_and_keeps_the_card() {
    let (services, profile, terms) = sample();
    let mut before = 0;
    for rate in [0.1, 1.0, 5.0, 20.0, 80.0] {
        let service = Service {
            rate,
            ..services[4].clone()
        };
        let slot = profile.smallest(&service, &terms, false).unwrap();
        let asked = slot.copies * slot.gpus * slot.percent;
        assert!(
            slot.memory_mib <= terms.card_mib && slot.memory_mib > 6_144,
            "{slot:?}"
        );
        assert!(asked >= before, "{rate} requests per second: {slot:?}");
        before = asked;
        let whole = profile.smallest(&service, &terms, true).unwrap();
        assert_eq!(whole.percent, 100);
    }
    assert!(before > 100, "80 requests per second need more than a GPU");
}

#[test]
fn model_without_measurements_or_room_is_named() {
    let (services, profile, terms) = sample();
    let unknown = Service {
        model: "none".into(),
        ..services[0].clone()
    };
    assert_eq!(
        profile.smallest(&unknown, &terms, false),
        Err(Error::Model("none".into()))
    );
    let small = Terms {
        card_mib: 8_000,
        ..terms
    };
    let error = profile
        .smallest(&services[4], &small, false)
        .unwrap_err()
        .to_string();
    assert!(
        error.starts_with("chat-4: no GPUs of the profile hold `large` in 8000 MiB"),
        "{error}"
    );
}

#[test]
fn more_nodes_serve_more_requests() {
    let (mut services, profile, terms) = sample();
    services.iter_mut().for_each(|service| service.rate *= 8.0);
    let slots: Vec<_> = services
        .iter()
        .map(|it| profile.smallest(it, &terms, false).unwrap())
        .collect();
    let on = |gpus| {
        let specs = nodes(gpus, 2, terms.card_mib);
        serving::served(
            &specs,
            &services,
            &slots,
            Sharing::Guaranteed,
            (&profile, &terms),
        )
        .unwrap()
    };
    let served = [1, 2, 4, 64].map(on);
    assert!(served.is_sorted(), "{served:?}");
    assert!(served[0] > 0.0 && served[0] < 60.0, "{served:?}");
    assert!((served[3] - 100.0).abs() < 1e-9, "{served:?}");
}

#[test]
fn neighbour_in_a_mesh_costs_rate() {
    let (services, profile, terms) = sample();
    let busy = Service {
        rate: 1e3,
        ..services[4].clone()
    };
    let rates = |services: Vec<(&Service, u32)>| {
        serving::together(&profile, &Mesh { gpus: 1, services }, &terms)
    };
    let alone = rates(vec![(&busy, 100)])[0].unwrap();
    let other = Service {
        rate: 500.0,
        ..services[0].clone()
    };
    let beside = rates(vec![(&busy, 100), (&other, 50)])[0].unwrap();
    assert!(
        beside < alone && beside > 0.0,
        "alone {alone}, beside another {beside}"
    );
    assert_eq!(
        rates(vec![(&busy, 33)])[0],
        None,
        "the profile has no 33 percent"
    );
}

/// Tenants of constant use: milli and MiB, in windows 0 to 3.
fn constant(tenants: &[(u32, u32)]) -> Recording {
    let windows = |(milli, memory_mib): &(u32, u32)| {
        let (milli, memory_mib) = (*milli, *memory_mib);
        (0..4)
            .map(|at| (at, Sample { milli, memory_mib }))
            .collect()
    };
    let named = tenants.iter().enumerate();
    named
        .map(|(nth, it)| (format!("{nth:02}"), windows(it)))
        .collect()
}

const SETTING: Setting = Setting {
    card_mib: 1_000,
    covers_percent: 100,
    window_s: 60.0,
    moved_mib_s: 1_000.0,
};

#[test]
fn time_slices_run_out_of_memory_and_caps_do_not() {
    let recording = constant(&[(100, 600), (100, 600)]);
    let sliced = usage::play(&recording, Way::TimeSliced(2), &SETTING).unwrap();
    assert_eq!(
        (sliced.gpus, sliced.attained, sliced.out_of_memory),
        (1, 50.0, 50.0)
    );
    let mps = usage::play(&recording, Way::Mps(2), &SETTING).unwrap();
    assert_eq!((mps.gpus, mps.attained), (1, 0.0));
    for way in [Way::Caps(Rule::BestFit), Way::Gpumux, Way::Dedicated] {
        let kept = usage::play(&recording, way, &SETTING).unwrap();
        assert_eq!((kept.gpus, kept.attained), (2, 100.0), "{way:?}");
    }
}

#[test]
fn idle_share_is_used_above_guarantees_but_not_caps() {
    let mut recording = constant(&[(300, 100), (300, 100)]);
    // More than its guarantee in the last window, while the other is idle.
    recording.get_mut("00").unwrap().get_mut(&3).unwrap().milli = 900;
    recording.get_mut("01").unwrap().get_mut(&3).unwrap().milli = 0;
    let caps = usage::play(&recording, Way::Caps(Rule::Fgd), &SETTING).unwrap();
    assert!((caps.attained - 200.0 / 3.0).abs() < 1e-9, "{caps:?}");
    let shared = usage::play(&recording, Way::Gpumux, &SETTING).unwrap();
    assert_eq!((shared.gpus, shared.attained), (1, 100.0));
}

#[test]
fn memory_of_idle_tenants_makes_room_for_others() {
    let mut recording = constant(&[(0, 800), (0, 800)]);
    // They take turns.
    for (name, windows) in [("00", [0, 2]), ("01", [1, 3])] {
        for at in windows {
            recording.get_mut(name).unwrap().get_mut(&at).unwrap().milli = 400;
        }
    }
    let swapped = usage::play(&recording, Way::GpumuxSwapped, &SETTING).unwrap();
    assert_eq!((swapped.gpus, swapped.attained), (1, 100.0));
    let guaranteed = usage::play(&recording, Way::Gpumux, &SETTING).unwrap();
    assert_eq!(guaranteed.gpus, 2);
}

#[test]
fn requests_become_use_in_the_windows_they_came_in() {
    let (services, profile, terms) = sample();
    let request = |at_s| Request {
        name: "chat-0".into(),
        at_s,
        prompt_tokens: 100,
        output_tokens: 100,
    };
    let requests = [request(1.0), request(2.0), request(25.0)];
    let found = usage::of_requests(&requests, &services[..1], &profile, &terms, 10.0).unwrap();
    let milli: Vec<u32> = found["chat-0"]
        .values()
        .map(|sample| sample.milli)
        .collect();
    assert!(
        milli[0] > milli[2] && milli[1] == 0 && milli[2] > 0,
        "{milli:?}"
    );
    assert_eq!(found["chat-0"][&1].memory_mib, 4_096 + 6_144);
    assert!(found["chat-0"][&0].memory_mib > found["chat-0"][&2].memory_mib);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// A guarantee that covers every window of a constant use is kept, on as many GPUs as hard caps need or fewer.
    #[test]
    fn guarantee_of_constant_use_is_kept(tenants in prop::collection::vec((1u32..=1000, 1u32..=1000), 1..12)) {
        let recording = constant(&tenants);
        for way in [Way::Caps(Rule::BestFit), Way::Caps(Rule::Fgd), Way::Gpumux, Way::Dedicated] {
            let outcome = usage::play(&recording, way, &SETTING).unwrap();
            prop_assert_eq!(outcome.attained, 100.0, "{:?}", way);
            prop_assert_eq!(outcome.out_of_memory, 0.0);
            prop_assert!(outcome.gpus <= tenants.len());
        }
    }
}

#[test]
fn list_may_tell_of_gpu_memory() {
    let mut models = Models::default();
    let hosts = trace::nodes(
        include_str!("../../../scenarios/fleet/hosts.csv"),
        &mut models,
    );
    assert_eq!(hosts.unwrap()[0].gpu_memory_mib, 81_920);
    let head = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_memory_mib\n";
    let pods = trace::pods(&format!("{head}a,0,0,1,500,4096\n"), &mut models).unwrap();
    assert_eq!(pods[0].demand.gpu_memory_mib, 4_096);
}
