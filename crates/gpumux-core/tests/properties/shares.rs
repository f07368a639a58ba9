//! What a tenant gains from its own spec, and a user from its number of tenants: random mixes are played twice, with one difference.

use std::cell::Cell;

use gpumux_core::policy::Bound;
use proptest::test_runner::{TestCaseResult, TestError, TestRng, TestRunner};

use super::*;

/// How long each mix is played, in ms.
const TIME: u64 = 5_000;

/// One tenant.
#[derive(Clone, Debug)]
struct Kind {
    user: u32,
    spec: TenantSpec,
    /// How long it has work, and then none, in ms.
    pauses: Option<(u64, u64)>,
}

fn kind() -> impl Strategy<Value = Kind> {
    let class = prop::sample::select(Class::ALL.to_vec());
    let guaranteed = prop_oneof![Just(0.0), 0.02..1.0f64];
    let limit = prop_oneof![3 => Just(1.0), 1 => 0.05..1.0f64];
    let pauses = prop_oneof![2 => Just(None), 1 => (5..300u64, 1..300u64).prop_map(Some)];
    let weight = prop_oneof![2 => Just(1.0), 1 => 0.25..4.0f64, 1 => 0.01..100.0f64];
    (0..3u32, class, guaranteed, limit, weight, pauses).prop_map(
        |(user, class, guaranteed, limit, weight, pauses)| {
            let spec = TenantSpec {
                class,
                guaranteed,
                limit,
                weight,
                ..TenantSpec::default()
            };
            Kind { user, spec, pauses }
        },
    )
}

/// Some whose guarantees can be admitted. The first always has work.
fn kinds() -> impl Strategy<Value = Vec<Kind>> {
    prop::collection::vec(kind(), 2..=8).prop_map(|mut kinds| {
        let sum: f64 = kinds.iter().map(|it| it.spec.guaranteed).sum();
        for Kind { spec, .. } in &mut kinds {
            spec.guaranteed *= 0.7 / sum.max(1.0);
            spec.limit = spec.limit.max(spec.guaranteed);
        }
        kinds[0].pauses = None;
        kinds
    })
}

#[derive(Clone, Debug)]
enum Raise {
    /// By so much, up to its limit.
    Guarantee(f64),
    /// So many times.
    Weight(f64),
    Class(Class),
}

impl Raise {
    fn apply(&self, spec: &mut TenantSpec) {
        match self {
            Self::Guarantee(more) => spec.guaranteed = (spec.guaranteed + more).min(spec.limit),
            Self::Weight(times) => spec.weight *= times,
            Self::Class(class) => spec.class = spec.class.min(*class),
        }
    }
}

fn guarantee() -> impl Strategy<Value = Raise> {
    (-7.0..-1.2f64).prop_map(|log| Raise::Guarantee(log.exp()))
}

fn weight() -> impl Strategy<Value = Raise> {
    (1.1..10.0f64).prop_map(Raise::Weight)
}

fn class() -> impl Strategy<Value = Raise> {
    prop::sample::select(vec![Class::Latency, Class::Standard]).prop_map(Raise::Class)
}

/// What came of a mix.
struct Played {
    /// Of the time that the device worked, each one's part.
    received: Vec<f64>,
    /// The lag of each one's bound, as a part of the same time.
    lags: Vec<f64>,
}

/// The bounds that these tenants can rely on.
fn bounds(policy: &dyn Policy, kinds: &[Kind]) -> Vec<Bound> {
    let tenant = |(id, it): (u64, &Kind)| TenantState {
        id: TenantId(id),
        user: UserId(it.user),
        spec: it.spec.clone(),
    };
    let tenants = (1..).zip(kinds).map(tenant).collect();
    policy.bounds(&Snapshot::of_tenants(tenants))
}

fn play(policy: Box<dyn Policy>, kinds: &[Kind]) -> Played {
    let bounds = bounds(&*policy, kinds);
    let mut world = World::new(policy);
    for it in kinds {
        world.arrive(UserId(it.user), it.spec.clone(), Demand::Busy);
    }
    world.plan();
    let pausing = kinds.iter().map(|it| it.pauses).enumerate();
    let pausing = pausing.filter_map(|(at, pauses)| Some((at, pauses?)));
    let pausing: Vec<(usize, (u64, u64))> = pausing.collect();
    for ms in 0..TIME {
        for (at, (works, pause)) in &pausing {
            let demand = match (ms + 7 * *at as u64) % (works + pause) < *works {
                true => Demand::Busy,
                false => Demand::Idle,
            };
            if world.now.domains[*at].demand != demand {
                world.apply(Event::Demand(*at, demand));
            }
        }
        world.run_for(1_000);
    }
    let domains = world.now.domains.iter();
    let received = domains.map(|it| world.accounts.get(it.id).received_us);
    let received: Vec<f64> = received.collect();
    let sum: f64 = received.iter().sum();
    Played {
        received: received.iter().map(|it| it / sum).collect(),
        lags: bounds.iter().map(|it| it.lag.0 as f64 / sum).collect(),
    }
}

/// Makes the policy of a name, or one with a fault.
type Make = fn(&str) -> Box<dyn Policy>;

/// What a tenant can rely on is no less when its spec asks for more.
fn bounds_rise(make: Make, (name, kinds, raise): &(&str, Vec<Kind>, Raise)) -> TestCaseResult {
    let mut raised = kinds.clone();
    raise.apply(&mut raised[0].spec);
    let policy = make(name);
    let (before, after) = (bounds(&*policy, kinds)[0], bounds(&*policy, &raised)[0]);
    prop_assert!(
        after.share >= before.share - 1e-9,
        "{before:?} became {after:?}"
    );
    Ok(())
}

/// Service is no less, but for the larger of the two documented lags.
fn service_rises(make: Make, (name, kinds, raise): &(&str, Vec<Kind>, Raise)) -> TestCaseResult {
    let mut kinds = kinds.clone();
    // What a pause leaves is divided in proportion to the shares by timeslices, and in turns as it meets them: not the same.
    let turns = kinds.iter().any(|it| it.spec.class == Class::Latency);
    if turns || matches!(raise, Raise::Class(_)) {
        kinds.iter_mut().for_each(|it| it.pauses = None);
    }
    let mut raised = kinds.clone();
    raise.apply(&mut raised[0].spec);
    let (before, after) = (play(make(name), &kinds), play(make(name), &raised));
    let lag = before.lags[0].max(after.lags[0]);
    let (before, after) = (before.received[0], after.received[0]);
    prop_assert!(
        after >= before - lag,
        "{before} became {after}, which is less, also with {lag}"
    );
    Ok(())
}

/// One piece of what a tenant was: its parts of guarantee and limit, its class and weight.
type Piece = (f64, Class, f64);

fn pieces() -> impl Strategy<Value = Vec<Piece>> {
    let class = prop::sample::select(Class::ALL.to_vec());
    prop::collection::vec((0.1..1.0f64, class, 0.25..4.0f64), 1..=5)
}

/// The first tenant as these pieces, which come last, and all always have work.
fn split(kinds: &[Kind], pieces: &[Piece]) -> Vec<Kind> {
    let sum: f64 = pieces.iter().map(|it| it.0).sum();
    let whole = &kinds[0];
    let piece = |(part, class, weight): &Piece| {
        let mut piece = whole.clone();
        piece.spec.class = *class;
        piece.spec.weight = *weight;
        piece.spec.guaranteed *= part / sum;
        if piece.spec.limit < 1.0 {
            piece.spec.limit *= part / sum;
        }
        piece
    };
    kinds[1..]
        .iter()
        .cloned()
        .chain(pieces.iter().map(piece))
        .collect()
}

/// A user's total is the same, however one of its tenants is split.
fn total_stays(
    make: Make,
    (name, kinds, pieces): &(&str, Vec<Kind>, Vec<Piece>),
) -> TestCaseResult {
    let mut kinds = kinds.clone();
    kinds.iter_mut().for_each(|it| it.pauses = None);
    let user = kinds[0].user;
    let parts = split(&kinds, pieces);
    let total = |kinds: &[Kind], of: &[f64]| -> f64 {
        let own = kinds.iter().zip(of).filter(|(it, _)| it.user == user);
        own.map(|(_, of)| of).sum()
    };
    let policy = make(name);
    let share = |kinds: &[Kind]| {
        let shares: Vec<f64> = bounds(&*policy, kinds).iter().map(|it| it.share).collect();
        total(kinds, &shares)
    };
    let (before, after) = (share(&kinds), share(&parts));
    prop_assert!(
        (before - after).abs() < 1e-9,
        "a share of {before} became {after}"
    );
    let (one, many) = (play(make(name), &kinds), play(make(name), &parts));
    // Each tenant's service may lag by that much, or be ahead.
    let lag = total(&kinds, &one.lags).max(total(&parts, &many.lags));
    let (before, after) = (total(&kinds, &one.received), total(&parts, &many.received));
    prop_assert!(
        (before - after).abs() <= lag,
        "{before} became {after}, more than {lag} apart"
    );
    Ok(())
}

fn raised() -> impl Strategy<Value = (&'static str, Vec<Kind>, Raise)> {
    (
        policies(),
        kinds(),
        prop_oneof![guarantee(), weight(), class()],
    )
}

fn splits() -> impl Strategy<Value = (&'static str, Vec<Kind>, Vec<Piece>)> {
    (policies(), kinds(), pieces())
}

/// Runs a check with so many cases, in parts of the usual number: PROPTEST_CASES runs more of them. Returns how many.
fn all<S: Strategy>(
    (times, of): (u32, u32),
    cases: S,
    check: impl Fn(&S::Value) -> TestCaseResult,
) -> u32 {
    let config = ProptestConfig {
        cases: ProptestConfig::default().cases * times / of,
        max_shrink_iters: 60,
        failure_persistence: None,
        ..Default::default()
    };
    let count = config.cases;
    let result = TestRunner::new(config).run(&cases, |case| check(&case));
    result.unwrap_or_else(|error| panic!("{error}"));
    count
}

#[test]
fn bounds_never_fall_with_guarantee_weight_or_class() {
    let count = all((8, 1), raised(), |mix| bounds_rise(policy, mix));
    println!("covered: bounds of {count} tenants that ask for more");
}

#[test]
fn service_never_falls_with_guarantee_weight_or_class() {
    let tenants = Cell::new(0);
    let count = all((1, 4), raised(), |mix| {
        tenants.set(tenants.get() + mix.1.len());
        service_rises(policy, mix)
    });
    let tenants = tenants.get();
    println!("covered: service in {count} mixes of {tenants} tenants, of which one asks for more");
}

#[test]
fn users_total_does_not_change_by_splitting() {
    let pieces = Cell::new(0);
    let count = all((1, 4), splits(), |mix| {
        pieces.set(pieces.get() + mix.2.len());
        total_stays(policy, mix)
    });
    let pieces = pieces.get();
    println!("covered: {count} mixes in which a tenant is split, into {pieces} in all");
}

/// Timeslices keep the shares of two latency tenants, roughly. What that leaves owed was cut in each plan, and leveled in the next one of
/// the same moment, which gave the quantum to another.
#[test]
fn what_timeslices_leave_owed_is_cut_once() {
    let tenant = |class, guaranteed, weight, pauses| Kind {
        user: 0,
        spec: TenantSpec {
            class,
            guaranteed,
            weight,
            ..TenantSpec::default()
        },
        pauses,
    };
    for weight in [1.0, 7.067366259291718] {
        // `World::plan` checks every plan on the way.
        let kinds = [
            tenant(Class::Standard, 0.0, weight, None),
            tenant(Class::Standard, 0.3759499578489575, 1.0, None),
            tenant(Class::Standard, 0.1783307236584573, 1.0, None),
            tenant(Class::Latency, 0.0, 1.0, None),
            tenant(Class::Latency, 0.0, 1.0, Some((149, 77))),
        ];
        play(policy("priority"), &kinds);
    }
}

/// A policy that takes tenants for what they are not.
struct Faulty {
    policy: Box<dyn Policy>,
    fault: fn(&mut TenantState),
}

impl Faulty {
    fn seen(&self, snapshot: &Snapshot) -> Snapshot {
        let mut seen = snapshot.clone();
        seen.tenants.iter_mut().for_each(self.fault);
        seen
    }
}

impl Policy for Faulty {
    fn name(&self) -> &'static str {
        self.policy.name()
    }

    fn plan(&self, snapshot: &Snapshot, memory: &mut Memory) -> Plan {
        self.policy.plan(&self.seen(snapshot), memory)
    }

    fn bounds(&self, snapshot: &Snapshot) -> Vec<Bound> {
        self.policy.bounds(&self.seen(snapshot))
    }
}

fn faulty(name: &str, fault: fn(&mut TenantState)) -> Box<dyn Policy> {
    let policy = policy(name);
    Box::new(Faulty { policy, fault })
}

/// The first version's: beyond its guarantee, a latency tenant was one of the others.
fn guarantee_lowers_class(name: &str) -> Box<dyn Policy> {
    faulty(name, |it| {
        if it.spec.guaranteed > 0.0 {
            it.spec.class = it.spec.class.max(Class::Standard);
        }
    })
}

fn weights_inverted(name: &str) -> Box<dyn Policy> {
    faulty(name, |it| it.spec.weight = it.spec.weight.recip())
}

fn classes_inverted(name: &str) -> Box<dyn Policy> {
    faulty(name, |it| {
        it.spec.class = match it.spec.class {
            Class::Latency => Class::Batch,
            Class::Standard => Class::Standard,
            Class::Batch => Class::Latency,
        };
    })
}

/// The first version's: five tenants got five shares.
fn users_do_not_count(name: &str) -> Box<dyn Policy> {
    faulty(name, |it| it.user = UserId(it.id.0 as u32))
}

/// Whether a check fails for one of these cases, which are always the same.
fn finds<S: Strategy>(cases: S, check: impl Fn(&S::Value) -> TestCaseResult) -> bool {
    let config = ProptestConfig {
        cases: 256,
        max_shrink_iters: 0,
        failure_persistence: None,
        ..Default::default()
    };
    let rng = TestRng::deterministic_rng(config.rng_algorithm);
    let mut runner = TestRunner::new_with_rng(config, rng);
    let result = runner.run(&cases, |case| check(&case));
    matches!(result, Err(TestError::Fail(..)))
}

#[test]
fn each_fault_of_shares_is_found() {
    let raises: [(Make, BoxedStrategy<Raise>); 3] = [
        (guarantee_lowers_class, guarantee().boxed()),
        (weights_inverted, weight().boxed()),
        (classes_inverted, class().boxed()),
    ];
    for (at, (fault, raise)) in raises.into_iter().enumerate() {
        let mixes = || (policies(), kinds(), raise.clone());
        assert!(
            finds(mixes(), |mix| bounds_rise(fault, mix)),
            "{at}: bounds"
        );
        let service = finds(mixes(), |mix| service_rises(fault, mix));
        assert!(service, "{at}: service");
    }
    assert!(finds(splits(), |it| total_stays(users_do_not_count, it)));
}
