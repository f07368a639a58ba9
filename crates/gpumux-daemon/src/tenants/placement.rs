//! Where a new tenant goes: in time with others, or into the group of its trust domain, and to how many SMs.

use gpumux_core::{
    TenantSpec,
    admission::UserPolicy,
    space::{self, Applicant, Curve, Decision, Member, Program, Way},
};

use super::{faults::CrashCount, model::Tenant};
use crate::{
    api::types::{CurveFrom, NewTenant, Placement},
    groups::{self, Key, Membership},
    programs::Programs,
};

/// A tenant to be made, and what is known of it.
pub(super) struct Wish<'a> {
    pub(super) new: &'a NewTenant,
    /// Its group, if it may be in one.
    pub(super) key: Option<Key>,
    pub(super) programs: &'a Programs,
    pub(super) utility: &'a (Vec<(u32, f64)>, Option<CurveFrom>),
    /// The fewest SMs of a device that it may use, if known.
    pub(super) sms: Option<u32>,
}

impl Wish<'_> {
    /// Under what its like would be known for faults.
    pub(super) fn crash_count(&self) -> Option<CrashCount> {
        let (name, fingerprint) = (self.new.name.as_deref(), self.new.fingerprint.as_deref());
        CrashCount::of(self.key.as_ref(), name, fingerprint)
    }
}

/// The trust domain of a new tenant: the one that it names, or the one that its user's policy has for such. A kept one's containers
/// have what they were made for.
pub(super) fn trust(new: &NewTenant, policy: &UserPolicy, spec: &TenantSpec) -> Option<String> {
    let of_user = || policy.trust_of(spec).filter(|_| !new.kept);
    let named = new.trust.as_deref();
    named.or_else(of_user).map(str::to_owned)
}

/// What is known of the group that a new tenant may enter.
pub(super) struct Room<'a> {
    /// The tenants in it.
    pub(super) members: Vec<&'a Tenant>,
    /// Why there can be no group, if so.
    pub(super) unavailable: Option<&'a str>,
    /// How often its like took a group down.
    pub(super) faults: u32,
}

/// Time or space, as things are now.
pub(super) fn decide(wish: &Wish<'_>, spec: &TenantSpec, room: &Room<'_>) -> Decision {
    let members = &room.members;
    let known = known(wish, spec, room);
    let hinders = |it: &&Tenant| space::hinders(it.placement.sm_percent, spec.guaranteed);
    space::decide(&Applicant {
        sharing: wish.new.sharing,
        trust: wish.key.as_ref().map(|key| key.trust.as_str()),
        class: spec.class,
        members: members.len(),
        room: groups::ROOM,
        unavailable: room.unavailable,
        faults: room.faults,
        prediction: space::predict(&self::members(&known)),
        hindered: members.iter().any(hinders),
    })
}

/// Where a new tenant goes for good, and its membership: what was decided before its group was `entered` is looked at again, now that
/// no other can come before it.
pub(super) fn place(
    wish: &Wish<'_>,
    spec: &TenantSpec,
    before: Decision,
    entered: Option<Result<Membership, groups::GroupError>>,
    room: &Room<'_>,
) -> (Placement, Option<Membership>) {
    let known = known(wish, spec, room);
    let all = members(&known);
    let mut placement = Placement {
        way: Way::Time,
        reason: before.reason,
        trust: wish.key.as_ref().map(|key| key.trust.clone()),
        fingerprint: wish.new.fingerprint.clone(),
        prediction: space::predict(&all),
        ..Placement::default()
    };
    let (Some(entered), Some(key)) = (entered, &wish.key) else {
        return (placement, None);
    };
    let membership = match entered {
        Ok(membership) => membership,
        Err(error) => {
            tracing::warn!(trust = key.trust, %error, "no group");
            placement.reason = format!("the group cannot be had: {error}");
            return (placement, None);
        }
    };
    let decision = decide(wish, spec, room);
    (placement.way, placement.reason) = (decision.way, decision.reason);
    if wish.new.trust.is_none() {
        placement.reason += ", where its user's policy puts batch tenants";
    }
    if placement.way == Way::Time {
        return (placement, None);
    }
    (placement.sm_percent, placement.curve) = confine(wish.new.sm_percent, &all, wish.utility.1);
    placement.ranks_per_gpu = Some(wish.new.ranks_per_gpu)
        .filter(|it| *it > 1)
        .unwrap_or(0);
    placement.max_ctas = wish.new.max_ctas.or_else(|| {
        let others = room.members.iter().map(|it| spins(&it.placement));
        let (percent, processes) = (placement.percent_of_each(), placement.processes());
        let others: Vec<_> = others.collect();
        let sms = wish.sms.filter(|_| wish.new.limits_collectives)?;
        Some(space::blocks(sms, &others, percent, processes))
    });
    (placement, Some(membership))
}

/// What the collectives of a member take. One without a limit has NCCL's own.
fn spins(member: &Placement) -> space::Spinning {
    space::Spinning {
        percent: member.percent_of_each(),
        processes: member.processes(),
        blocks: member.max_ctas.unwrap_or(space::BLOCKS),
    }
}

/// A tenant and what is known of its program.
struct Known<'a> {
    spec: &'a TenantSpec,
    curve: Curve,
    program: Program,
}

impl Known<'_> {
    fn member(&self) -> Member<'_> {
        Member {
            spec: self.spec,
            curve: &self.curve,
            bandwidth: self.program.bandwidth().unwrap_or_default(),
            duty: self.program.duty(),
        }
    }
}

/// The members of a group, and the new tenant as the last.
fn known<'a>(wish: &Wish<'_>, spec: &'a TenantSpec, room: &Room<'a>) -> Vec<Known<'a>> {
    let known = |spec, points: &[(u32, f64)], fingerprint: Option<&str>| Known {
        spec,
        curve: Curve::of_percents(points.iter().copied()),
        program: (wish.key.as_ref().zip(fingerprint))
            .and_then(|(key, name)| wish.programs.find(key.uid, name))
            .unwrap_or_default(),
    };
    let of = |it: &&'a Tenant| known(&it.spec, &it.utility, it.placement.fingerprint.as_deref());
    let own = known(spec, &wish.utility.0, wish.new.fingerprint.as_deref());
    room.members.iter().map(of).chain([own]).collect()
}

fn members<'a>(known: &'a [Known<'_>]) -> Vec<Member<'a>> {
    known.iter().map(Known::member).collect()
}

/// What is said of a new tenant's program, or else known of it, and which of both.
pub(super) fn utility(
    new: &NewTenant,
    known: Option<&Program>,
) -> (Vec<(u32, f64)>, Option<CurveFrom>) {
    let measured = known.and_then(Program::utility);
    match (new.utility.is_empty(), measured) {
        (false, _) => (new.utility.clone(), Some(CurveFrom::Given)),
        (true, Some(curve)) => (curve.points().collect(), Some(CurveFrom::Measured)),
        (true, None) => (Vec::new(), None),
    }
}

/// To what percentage of the SMs the last of a group's members is confined, given what it asked for; and, where SMs are divided by
/// curves, where its own is from.
fn confine(
    asked: Option<u32>,
    members: &[Member],
    from: Option<CurveFrom>,
) -> (Option<u32>, Option<CurveFrom>) {
    let Some((own, others)) = members.split_last() else {
        return (None, None);
    };
    let (share, from) = match (asked, space::percentages(members)) {
        // Its own limit holds in any case.
        (Some(percent), _) => {
            let most = space::percentage(own.spec, []).unwrap_or(100);
            (Some(percent.min(most)), None)
        }
        (None, Some(shares)) => (shares.last().copied(), from),
        (None, None) => {
            let guaranteed = others.iter().map(|it| it.spec.guaranteed);
            (space::percentage(own.spec, guaranteed), None)
        }
    };
    (share.filter(|share| *share < 100), from)
}

#[cfg(test)]
mod tests {
    use gpumux_core::{Class, space::Bandwidth};

    use super::{super::testing::new, *};

    #[test]
    fn a_curve_is_named_only_where_sms_are_divided_by_it() {
        let spec = TenantSpec::default();
        let half = TenantSpec {
            limit: 0.5,
            ..TenantSpec::default()
        };
        let (small, none) = (
            Curve::of_percents([(20, 0.9), (100, 1.0)]),
            Curve::default(),
        );
        let from = Some(CurveFrom::Measured);
        let member = |spec, curve| Member {
            spec,
            curve,
            bandwidth: Bandwidth::default(),
            duty: 1.0,
        };
        let two = [member(&spec, &none), member(&spec, &small)];
        assert_eq!(confine(None, &two, from), (Some(20), from));
        assert_eq!(confine(None, &two[1..], from), (None, None), "the first");
        assert_eq!(confine(None, &[two[1]; 3], from), (None, None), "alike");
        let many = |count| [&[two[0]; 3], &vec![two[1]; count][..]].concat();
        assert_eq!(confine(None, &many(15), from), (Some(5), from));
        assert_eq!(confine(None, &many(18), from), (None, None), "too many");
        // What is asked for comes first, and the limit before that.
        assert_eq!(confine(Some(30), &two, from), (Some(30), None));
        assert_eq!(confine(Some(100), &two, from), (None, None));
        let limited = [two[0], member(&half, &small)];
        assert_eq!(confine(Some(70), &limited, from), (Some(50), None));
    }

    #[test]
    fn batch_tenant_without_a_domain_gets_its_users() {
        let rules = gpumux_core::admission::UserRules {
            batch_trust: Some("night".into()),
            ..Default::default()
        };
        let policy = UserPolicy::new("alice".into(), false, &rules);
        let domain = |new: &NewTenant, class, guaranteed| {
            let spec = TenantSpec {
                class,
                guaranteed,
                ..TenantSpec::default()
            };
            trust(new, &policy, &spec)
        };
        let (night, own) = (Some("night".to_owned()), Some("own".to_owned()));
        assert_eq!(domain(&new("a"), Class::Batch, 0.0), night);
        assert_eq!(domain(&new("a"), Class::Batch, 0.1), None, "guaranteed");
        assert_eq!(domain(&new("a"), Class::Standard, 0.0), None);
        let kept = NewTenant {
            kept: true,
            ..new("a")
        };
        assert_eq!(domain(&kept, Class::Batch, 0.0), None, "a container's");
        let named = NewTenant {
            trust: own.clone(),
            ..new("a")
        };
        assert_eq!(domain(&named, Class::Batch, 0.0), own);
        let nothing = UserPolicy::unlimited();
        assert_eq!(trust(&new("a"), &nothing, &TenantSpec::default()), None);
    }

    #[test]
    fn what_is_said_of_a_program_comes_before_what_is_known() {
        let known = |points: &[(u32, f64)]| Program::measured(points.iter().copied(), None);
        let said = NewTenant {
            utility: vec![(50, 1.0), (100, 1.5)],
            ..new("a")
        };
        assert_eq!(utility(&new("a"), Some(&known(&[]))), (Vec::new(), None));
        let one = known(&[(100, 2.0)]);
        let said_of = utility(&new("a"), Some(&one)).1;
        assert_eq!(said_of, None, "one point is no curve");
        let known = known(&[(25, 1.0), (100, 2.0)]);
        assert_eq!(
            utility(&new("a"), Some(&known)),
            (vec![(25, 1.0), (100, 2.0)], Some(CurveFrom::Measured))
        );
        assert_eq!(utility(&said, Some(&known)).1, Some(CurveFrom::Given));
        assert_eq!(utility(&said, None).0, said.utility);
    }
}
