use proptest::prelude::*;

use super::*;

/// What the model's link carries, in bytes a second.
const CARRIES: f64 = 54e9;

/// A tenant of the model: its part of the shares, and what it would copy in bytes a second if it could.
#[derive(Clone, Copy, Debug)]
struct Copies {
    part: f64,
    wants: f64,
}

/// A link as a GPU's: what it carries is divided evenly among those that want more, each up to its limit.
struct Model {
    link: Link,
    now: Micros,
    limits: Rates,
    /// By how much counts differ from what was copied, and what decides by how much.
    uneven: (f64, u64),
    /// For how long each tenant's copies occupy the link that it has submitted and that are not done.
    ahead: f64,
    /// Their bytes.
    queued: Vec<f64>,
}

fn even(wants: &[f64]) -> Vec<f64> {
    let mut got = vec![0.0; wants.len()];
    for _ in wants {
        let open = |at: &usize| got[*at] < wants[*at];
        let open: Vec<usize> = (0..wants.len()).filter(open).collect();
        let part = (CARRIES - got.iter().sum::<f64>()) / open.len().max(1) as f64;
        for at in open {
            got[at] = (got[at] + part).min(wants[at]);
        }
    }
    got
}

impl Model {
    fn new() -> Self {
        let mut link = Link::default();
        link.look(Micros::ZERO, &BTreeMap::new(), |_| Vec::new());
        Self {
            link,
            now: Micros::ZERO,
            limits: Rates::new(),
            uneven: (0.0, 1),
            ahead: 0.0,
            queued: Vec::new(),
        }
    }

    /// The part of what was copied that is counted.
    fn counted(&mut self) -> f64 {
        let (by, seed) = &mut self.uneven;
        *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        1.0 + *by * ((*seed >> 33) as f64 / f64::from(1u32 << 30) - 1.0)
    }

    /// What each tenant submits a second until the next look, and what is copied of it.
    fn rates(&mut self, tenants: &[Copies]) -> (Vec<f64>, Vec<f64>) {
        const PARTS: u32 = 100;
        let limit = |at: usize| self.limits.get(&TenantId(at as u64)).copied();
        let wants = tenants.iter().enumerate();
        let wants: Vec<f64> = wants
            .map(|(at, it)| it.wants.min(limit(at).unwrap_or(f64::MAX)))
            .collect();
        if self.ahead == 0.0 {
            let got = even(&wants);
            return (got.clone(), got);
        }
        self.queued.resize(tenants.len(), 0.0);
        let part = LOOK.as_secs_f64() / f64::from(PARTS);
        let (mut submitted, mut copied) = (vec![0.0; tenants.len()], vec![0.0; tenants.len()]);
        for _ in 0..PARTS {
            for at in 0..tenants.len() {
                let room = (self.ahead * CARRIES - self.queued[at]).max(0.0);
                let more = room.min(wants[at] * part);
                self.queued[at] += more;
                submitted[at] += more / LOOK.as_secs_f64();
            }
            let queued: Vec<f64> = self.queued.iter().map(|it| it / part).collect();
            for (at, got) in even(&queued).into_iter().enumerate() {
                self.queued[at] -= got * part;
                copied[at] += got / f64::from(PARTS);
            }
        }
        (submitted, copied)
    }

    /// What each tenant has in the next look.
    fn step(&mut self, tenants: &[Copies]) -> Vec<f64> {
        let id = |at: usize| TenantId(at as u64);
        let (submitted, got) = self.rates(tenants);
        self.now += LOOK;
        assert!(self.link.is_due(self.now));
        let mut bytes = Vec::new();
        for rate in &submitted {
            bytes.push((rate * self.counted() * LOOK.as_secs_f64()) as u64);
        }
        let copied = bytes
            .into_iter()
            .enumerate()
            .map(|(at, bytes)| (id(at), bytes));
        let shares = |ids: &[TenantId]| {
            let parts = ids.iter().map(|id| tenants[id.0 as usize].part);
            let sum: f64 = parts.clone().sum();
            parts.map(|part| part / sum).collect()
        };
        let limits = self.link.look(self.now, &copied.collect(), shares);
        self.limits.clone_from(limits);
        got
    }

    /// What each has on average in so many looks.
    fn run(&mut self, looks: u32, tenants: &[Copies]) -> Vec<f64> {
        let mut sums = vec![0.0; tenants.len()];
        for _ in 0..looks {
            let got = self.step(tenants);
            let pairs = sums.iter_mut().zip(got);
            pairs.for_each(|(sum, got)| *sum += got / f64::from(looks));
        }
        sums
    }
}

fn copies(part: f64, wants: f64) -> Copies {
    let wants = wants * CARRIES;
    Copies { part, wants }
}

const ALL: f64 = 2.0;
/// Until limits hold.
const SETTLES: u32 = 4;
const LONG: u32 = 150;

#[track_caller]
fn near(got: &[f64], expected: &[f64], by: f64) {
    for (got, expected) in got.iter().zip(expected) {
        let got = got / CARRIES;
        assert!(
            (got - expected).abs() < by,
            "{got} instead of {expected} of the link"
        );
    }
}

#[test]
fn shares_hold_within_a_second() {
    let mut model = Model::new();
    let both = [copies(0.7, ALL), copies(0.3, ALL)];
    model.run(SETTLES, &both);
    near(&model.run(5, &both), &[0.7, 0.3], 0.001);
    near(&model.run(LONG, &both), &[0.7, 0.3], 0.01);
    let three = [copies(0.5, ALL), copies(0.35, ALL), copies(0.15, ALL)];
    let mut model = Model::new();
    model.run(SETTLES + 1, &three);
    near(&model.run(LONG, &three), &[0.5, 0.35, 0.15], 0.01);
}

#[test]
fn tenants_with_their_shares_are_not_limited() {
    for tenants in [
        vec![copies(0.2, ALL)],
        vec![copies(0.5, ALL), copies(0.5, ALL)],
        vec![copies(0.8, ALL), copies(0.2, 0.0)],
        vec![copies(0.8, 0.005), copies(0.2, ALL)],
        vec![copies(0.4, 0.38), copies(0.6, 0.57)],
    ] {
        let mut model = Model::new();
        for _ in 0..LONG {
            model.step(&tenants);
            assert_eq!(model.limits, Rates::new(), "{tenants:?}");
        }
    }
}

#[test]
fn link_that_is_not_full_is_not_limited() {
    let mut model = Model::new();
    let few = [copies(0.9, 0.05), copies(0.1, 0.05)];
    model.run(2, &[copies(0.9, ALL), copies(0.1, 0.0)]);
    for _ in 0..LONG {
        model.step(&few);
        assert_eq!(model.limits, Rates::new());
    }
}

#[test]
fn shares_hold_although_counts_are_uneven() {
    for seed in 1..20 {
        let mut model = Model::new();
        model.uneven = (0.08, seed);
        let both = [copies(0.7, ALL), copies(0.3, ALL)];
        model.run(SETTLES, &both);
        near(&model.run(LONG, &both), &[0.7, 0.3], 0.04);
    }
}

/// A program may count in one look what it copies in several.
#[test]
fn copies_that_are_queued_far_ahead_do_not_hide_a_full_link() {
    let mut model = Model::new();
    model.now += LOOK;
    let queued = 10.0 * CARRIES * LOOK.as_secs_f64();
    let copied = BTreeMap::from([(TenantId(0), queued as u64)]);
    model.link.look(model.now, &copied, |_| Vec::new());
    let both = [copies(0.7, ALL), copies(0.3, ALL)];
    model.run(SETTLES + 1, &both);
    near(&model.run(LONG, &both), &[0.7, 0.3], 0.01);
}

/// While what a limited tenant queued before is copied, the others cannot have more.
#[test]
fn shares_hold_although_copies_are_queued_ahead() {
    for ahead in [0.05, 0.1, 0.15] {
        let mut model = Model::new();
        model.ahead = ahead;
        let both = [copies(0.7, ALL), copies(0.3, ALL)];
        model.run(SETTLES + 2, &both);
        near(&model.run(5, &both), &[0.7, 0.3], 0.02);
        near(&model.run(LONG, &both), &[0.7, 0.3], 0.03);
    }
}

#[test]
fn new_share_holds_within_a_second() {
    let mut model = Model::new();
    model.run(30, &[copies(0.7, ALL), copies(0.3, ALL)]);
    let turned = [copies(0.2, ALL), copies(0.8, ALL)];
    model.run(5, &turned);
    near(&model.run(LONG, &turned), &[0.2, 0.8], 0.02);
}

#[test]
fn tenant_that_begins_to_copy_more_has_its_share_soon() {
    let mut model = Model::new();
    model.run(LONG, &[copies(0.7, 0.2), copies(0.3, ALL)]);
    let both = [copies(0.7, ALL), copies(0.3, ALL)];
    model.run(SETTLES, &both);
    near(&model.run(LONG, &both), &[0.7, 0.3], 0.02);
}

fn tenants() -> impl Strategy<Value = Vec<Copies>> {
    let wants = prop_oneof![Just(ALL), 0.0..1.0];
    let one = (0.05f64..1.0, wants).prop_map(|(part, wants)| copies(part, wants));
    proptest::collection::vec(one, 1..5)
}

proptest! {
    #[test]
    fn limits_sum_to_no_more_than_the_link(tenants in tenants()) {
        let mut model = Model::new();
        for _ in 0..LONG {
            model.step(&tenants);
            let sum: f64 = model.limits.values().sum();
            prop_assert!(sum <= CARRIES * 1.001, "{:?}", model.limits);
            prop_assert!(model.limits.values().all(|limit| *limit > 0.0));
        }
    }

    /// Nearly all that is wanted is copied, whatever the shares.
    #[test]
    fn link_does_not_idle_while_a_tenant_copies(tenants in tenants()) {
        let mut model = Model::new();
        let carried: f64 = model.run(LONG, &tenants).iter().sum();
        let wanted: f64 = tenants.iter().map(|it| it.wants).sum();
        prop_assert!(carried >= 0.9 * wanted.min(CARRIES), "{}", carried / CARRIES);
    }

    #[test]
    fn tenant_has_its_share_as_far_as_it_wants_it(tenants in tenants()) {
        let mut model = Model::new();
        model.run(10, &tenants);
        let got = model.run(LONG, &tenants);
        let copying = tenants.iter().filter(|it| it.wants > 0.02 * CARRIES);
        let parts: f64 = copying.map(|it| it.part).sum();
        for (tenant, got) in tenants.iter().zip(got) {
            let share = CARRIES * tenant.part / parts;
            let due = tenant.wants.min(share);
            prop_assert!(got >= due - 0.1 * CARRIES, "{} of {}", got / CARRIES, due / CARRIES);
        }
    }

    #[test]
    fn shares_hold_among_all_that_want_the_link(parts in proptest::collection::vec(0.1f64..1.0, 2..5)) {
        let tenants: Vec<Copies> = parts.iter().map(|part| copies(*part, ALL)).collect();
        let mut model = Model::new();
        model.run(10, &tenants);
        let sum: f64 = parts.iter().sum();
        for (part, got) in parts.iter().zip(model.run(LONG, &tenants)) {
            let (share, got) = (part / sum, got / CARRIES);
            prop_assert!((got - share).abs() < 0.05, "{} instead of {}", got, share);
        }
    }
}

/// Five programs whose requests bring an image each, on an H200: copies of one percent of what its link carries were limited, and requests waited for them.
#[test]
fn tenants_that_copy_little_in_all_are_never_limited() {
    let mut model = Model::new();
    model.link.set_capacity(CARRIES as u64);
    let tenants = [copies(0.5, 0.002), copies(0.3, 0.02), copies(0.2, 0.1)];
    for _ in 0..200 {
        model.step(&tenants);
        assert!(model.limits.is_empty());
    }
}

/// A program can write its counts: the others have their shares all the same, once it stops.
#[test]
fn counts_of_more_than_a_link_can_carry_leave_the_others_their_shares() {
    let mut model = Model::new();
    model.link.set_capacity(CARRIES as u64);
    let forged = BTreeMap::from([(TenantId(7), 22 << 40)]);
    for _ in 0..3 {
        model.now += LOOK;
        model.link.look(model.now, &forged, |_| vec![1.0]);
    }
    let tenants = [copies(0.7, 2.0), copies(0.3, 2.0)];
    model.run(20, &tenants);
    let got = model.run(50, &tenants);
    let part = got[0] / (got[0] + got[1]);
    assert!((0.65..0.75).contains(&part), "{part}");
}
