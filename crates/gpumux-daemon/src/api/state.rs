//! The state of a tenant, of what is known of it.

use super::types::{Domain, TenantState};

/// What a tenant's state is made of.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Facts<'a> {
    /// Its channel groups.
    pub(crate) domains: &'a [Domain],
    /// It used a device before, maybe without a channel group now.
    pub(crate) used: bool,
    /// Some or all of its memory is on the host, or on its way.
    pub(crate) swapped: bool,
    /// It waits for room on a device.
    pub(crate) needs_memory: bool,
    /// Its processes were found undoing controls lately.
    pub(crate) tampers: bool,
    /// The driver does not let gpumux control its processes.
    pub(crate) uncontrolled: bool,
}

/// The state: what a person must know first comes first.
pub(crate) fn state(facts: Facts<'_>) -> TenantState {
    let has_work = |domain: &&Domain| domain.demand.may_run() && !domain.stopped;
    let mut working = facts.domains.iter().filter(has_work).peekable();
    if facts.tampers {
        TenantState::Tampers
    } else if facts.uncontrolled || facts.domains.iter().any(|domain| domain.error.is_some()) {
        TenantState::Faulty
    } else if facts.needs_memory {
        TenantState::Blocked
    } else if facts.swapped {
        TenantState::Swapped
    } else if facts.domains.is_empty() && !facts.used {
        TenantState::Starting
    } else if working.peek().is_none() {
        match facts.domains.iter().any(|domain| domain.stopped) {
            true => TenantState::Stopped,
            false => TenantState::Idle,
        }
    } else if working.all(|domain| domain.frozen) {
        TenantState::Queued
    } else {
        TenantState::Running
    }
}

#[cfg(test)]
mod tests {
    use gpumux_core::Demand;

    use super::*;

    fn domain(demand: Demand, frozen: bool) -> Domain {
        Domain {
            frozen,
            demand,
            ..Domain::default()
        }
    }

    #[test]
    fn state_follows_work_freezes_and_memory() {
        use Demand::{Busy, Idle, Unknown};
        let on = |domains: &[Domain]| {
            state(Facts {
                domains,
                ..Facts::default()
            })
        };
        assert_eq!(on(&[]), TenantState::Starting);
        for (domains, expected) in [
            (vec![domain(Idle, false)], TenantState::Idle),
            (vec![domain(Idle, true)], TenantState::Idle),
            (vec![domain(Busy, false)], TenantState::Running),
            (vec![domain(Unknown, false)], TenantState::Running),
            (vec![domain(Busy, true)], TenantState::Queued),
            (
                vec![domain(Busy, true), domain(Idle, false)],
                TenantState::Queued,
            ),
            (
                vec![domain(Busy, true), domain(Busy, false)],
                TenantState::Running,
            ),
        ] {
            assert_eq!(on(&domains), expected, "{domains:?}");
        }
        let stopped = |demand| Domain {
            stopped: true,
            ..domain(demand, true)
        };
        assert_eq!(on(&[stopped(Busy)]), TenantState::Stopped);
        assert_eq!(on(&[stopped(Idle)]), TenantState::Stopped);
        let another = domain(Busy, false);
        assert_eq!(on(&[stopped(Idle), another]), TenantState::Running);
        let busy = [domain(Busy, true)];
        let mut facts = Facts {
            used: true,
            ..Facts::default()
        };
        assert_eq!(state(facts), TenantState::Idle, "its contexts have ended");
        facts.domains = &busy;
        facts.swapped = true;
        assert_eq!(state(facts), TenantState::Swapped);
        facts.needs_memory = true;
        assert_eq!(state(facts), TenantState::Blocked);
        facts.uncontrolled = true;
        assert_eq!(state(facts), TenantState::Faulty);
        facts.uncontrolled = false;
        let broken = [Domain {
            error: Some("cannot freeze".into()),
            ..domain(Busy, true)
        }];
        facts.domains = &broken;
        assert_eq!(state(facts), TenantState::Faulty);
        facts.tampers = true;
        assert_eq!(state(facts), TenantState::Tampers);
    }

    #[test]
    fn every_state_has_the_same_word_in_json() {
        for state in TenantState::ALL {
            let json = serde_json::to_value(state).unwrap();
            assert_eq!(json, state.name());
            assert!(state.name().len() <= 8, "columns are as wide");
        }
    }
}
