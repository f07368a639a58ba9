//! What a policy wants for one device, and the controls that bring it about.

use serde::Serialize;

use crate::{
    Class, Control, Demand, DomainId, DomainState, Micros, Rhythm, RunState, Snapshot, Timeslice,
};

/// What one domain shall have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DomainPlan {
    /// Which domain.
    pub id: DomainId,
    /// Its slice.
    pub timeslice: Timeslice,
    /// Whether it may run.
    pub run: RunState,
    /// Why, in a few words, for people.
    pub reason: &'static str,
}

/// What the policy orders now. Names every domain of its snapshot exactly once, in the same order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Plan {
    /// Per domain.
    pub domains: Vec<DomainPlan>,
    /// When the policy is to be asked again although nothing else happened.
    pub next: Option<Micros>,
}

impl Plan {
    /// The fewest pulls that turn what the snapshot shows into this plan: see [`controls`].
    pub fn controls(&self, snapshot: &Snapshot) -> Vec<Control> {
        controls(self.domains.iter().zip(&snapshot.domains))
    }
}

/// Domains with such timeslices make progress beside each other.
const LONG: Timeslice = Timeslice(500);

/// The fewest pulls that give each domain what it shall have, in the order to pull them:
/// freezes before slices before thaws, and long slices before short ones, so that two runnable
/// domains never share a 1 µs slice on the way. Thaws of those that have a long slice come before all: they are latency domains'.
/// Last come freezes of those without work: none need wait for them.
pub(crate) fn controls<'a>(
    pairs: impl Iterator<Item = (&'a DomainPlan, &'a DomainState)> + Clone,
) -> Vec<Control> {
    let thawed = |(want, have): &(&DomainPlan, &DomainState)| {
        want.run == RunState::Enabled && have.run == RunState::Frozen
    };
    let first = |(want, have): &(&DomainPlan, &DomainState)| {
        want.timeslice == have.timeslice && want.timeslice >= LONG
    };
    let thaw = |(_, have): (&DomainPlan, &DomainState)| Control::Thaw(have.id);
    let thaws = pairs.clone().filter(thawed);
    let mut controls: Vec<Control> = thaws.clone().filter(first).map(thaw).collect();
    let (mut slices, mut last) = (Vec::new(), Vec::new());
    for (want, have) in pairs {
        if want.run == RunState::Frozen && have.run == RunState::Enabled {
            match have.demand.may_run() {
                true => controls.push(Control::Freeze(have.id)),
                false => last.push(Control::Freeze(have.id)),
            }
        }
        if want.timeslice != have.timeslice {
            slices.push((have.id, want.timeslice));
        }
    }
    slices.sort_by_key(|(_, timeslice)| std::cmp::Reverse(*timeslice));
    let slices = slices.into_iter();
    controls.extend(slices.map(|(id, timeslice)| Control::SetTimeslice(id, timeslice)));
    controls.extend(thaws.filter(|pair| !first(pair)).map(thaw));
    controls.extend(last);
    controls
}

/// Lets freezes and thaws wait for latency domains that are at work, or will be before the control has been pulled. To freeze or thaw
/// any group, RM interrupts the one that runs; if another waits, that one runs first: two switches, 0.2 to 0.4 ms, for the one that
/// was at work (`timings::neighbours`, docs/fidelity.md).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Calm {
    /// When a control of the plan first waited.
    since: Option<Micros>,
}

impl Calm {
    /// The longest that a plan's controls wait together: [`Calm`] is made anew when a plan has been carried out. Of longer work an
    /// interruption takes less than a tenth: none waits for work that has lasted for so long.
    pub const MOST: Micros = Micros::from_millis(3);

    /// Whether the first of the controls that are left of a plan should not be pulled now. They belong together: between them the
    /// device is idle, or two domains may meet. `most` is the longest that they wait; `at_work` says of a domain whether it has work and may run.
    pub fn awaits(
        &mut self,
        mut controls: impl Iterator<Item = Control> + Clone,
        snapshot: &Snapshot,
        now: Micros,
        most: Micros,
        at_work: impl Fn(DomainId) -> bool,
    ) -> bool {
        let mut latency = snapshot.domains.iter().filter(|domain| {
            let tenant = snapshot.tenant(domain.tenant);
            tenant.is_some_and(|tenant| tenant.spec.class == Class::Latency)
        });
        let costs = controls.clone().map(|control| snapshot.costs.of(control).0);
        let Some(control) = controls.next() else {
            return false;
        };
        let pulled = now + Micros(costs.sum()) + Rhythm::SLACK;
        let comes = |at: Micros| now <= at + Rhythm::SLACK && at <= pulled;
        let lasts = |domain: &DomainState| {
            domain.demand == Demand::Busy && domain.demand_since + most <= now
        };
        !matches!(control, Control::SetTimeslice(..))
            && latency.clone().all(|domain| domain.id != control.domain())
            && latency.any(|domain| {
                at_work(domain.id) && !lasts(domain) || domain.expected.is_some_and(comes)
            })
            && now.saturating_sub(*self.since.get_or_insert(now)) < most
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TenantId;
    use crate::testing::{domain, snapshot};

    #[test]
    fn controls_on_others_wait_for_latency_work_but_not_for_long() {
        let classes = [Class::Latency, Class::Batch];
        let mut now = snapshot(&classes, vec![domain(1, 0), domain(2, 1)]);
        let mut awaits = |calm: &mut Calm, control, at: u64, since: u64, busy: u64| {
            now.domains[0].demand_since = Micros(since);
            calm.awaits([control].into_iter(), &now, Micros(at), Calm::MOST, |id| {
                id == DomainId(busy)
            })
        };
        let freeze = Control::Freeze(DomainId(2));
        let mut calm = Calm::default();
        assert!(awaits(&mut calm, freeze, 1_000, 1_000, 1));
        assert!(awaits(&mut calm, freeze, 3_999, 3_500, 1), "another piece");
        assert!(
            !awaits(&mut calm, freeze, 4_000, 3_500, 1),
            "3 ms are enough"
        );
        assert!(!awaits(&mut calm, freeze, 4_500, 4_000, 1), "nor once more");
        let mut calm = Calm::default();
        assert!(awaits(&mut calm, freeze, 4_500, 4_000, 1), "another plan");
        let mut calm = Calm::default();
        assert!(!awaits(&mut calm, freeze, 7_000, 4_000, 1), "long work");
        assert!(
            !awaits(&mut calm, freeze, 7_000, 6_500, 2),
            "only batch work runs"
        );
        let own = Control::Thaw(DomainId(1));
        assert!(!awaits(&mut calm, own, 5_000, 4_500, 1), "its own control");
        let slice = Control::SetTimeslice(DomainId(2), Timeslice(1));
        assert!(!awaits(&mut calm, slice, 5_000, 4_500, 1));
    }

    #[test]
    fn controls_wait_for_expected_work() {
        let mut now = snapshot(
            &[Class::Latency, Class::Batch],
            vec![domain(1, 0), domain(2, 1)],
        );
        now.domains[0].expected = Some(Micros(10_000));
        let freeze = Control::Freeze(DomainId(2));
        let all = |at: u64, controls: &[Control]| {
            Calm::default().awaits(
                controls.iter().copied(),
                &now,
                Micros(at),
                Calm::MOST,
                |_| false,
            )
        };
        let awaits = |at: u64| all(at, &[freeze]);
        let begin = 10_000 - now.costs.freeze.0 - Rhythm::SLACK.0;
        assert!(!awaits(begin - 1), "there is time for it");
        assert!(
            all(begin - 1, &[freeze, Control::Thaw(DomainId(3))]),
            "not for both"
        );
        assert!(awaits(begin) && awaits(10_000 + Rhythm::SLACK.0));
        assert!(!awaits(10_001 + Rhythm::SLACK.0), "it does not come");
        now.domains[0].tenant = TenantId(1);
        let batch = Calm::default().awaits(
            [freeze].into_iter(),
            &now,
            Micros(10_000),
            Calm::MOST,
            |_| false,
        );
        assert!(!batch, "nobody waits for batch work");
    }
}
