//! The state of a tenant, in one word: the same in `ps`, `top`, the web page, `explain`, metrics and the API.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::types::Domain;

/// What a tenant does.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum TenantState {
    /// No process of it has used a GPU yet.
    #[default]
    Starting,
    /// It has no work for a GPU.
    Idle,
    /// It has work, and may run.
    Running,
    /// It has work, and is frozen until its turn comes.
    Queued,
    /// Its process is stopped (SIGSTOP, a debugger), with work that it launched before.
    Stopped,
    /// Some or all of its memory is swapped out, or on its way.
    Swapped,
    /// It waits for room in a GPU's memory.
    Blocked,
    /// A control (freeze, thaw, timeslice) of one of its channel groups failed, or the driver does not allow them.
    Faulty,
    /// Its processes undo gpumux's controls.
    Tampers,
}

impl TenantState {
    /// Every state, in the order of a tenant's life.
    pub const ALL: [Self; 9] = [
        Self::Starting,
        Self::Idle,
        Self::Running,
        Self::Queued,
        Self::Stopped,
        Self::Swapped,
        Self::Blocked,
        Self::Faulty,
        Self::Tampers,
    ];

    /// The word for it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Idle => "idle",
            Self::Running => "running",
            Self::Queued => "queued",
            Self::Stopped => "stopped",
            Self::Swapped => "swapped",
            Self::Blocked => "blocked",
            Self::Faulty => "faulty",
            Self::Tampers => "tampers",
        }
    }

    /// What the word means, in one line.
    pub const fn meaning(self) -> &'static str {
        match self {
            Self::Starting => "no process of it has used a GPU yet",
            Self::Idle => "has no work for a GPU",
            Self::Running => "has work, and may run",
            Self::Queued => "has work, and is frozen until its turn comes",
            Self::Stopped => "its process is stopped (SIGSTOP, Ctrl-Z, a debugger)",
            Self::Swapped => "some or all of its memory is on the host",
            Self::Blocked => "waits for room in a GPU's memory",
            Self::Faulty => "gpumux cannot control it: `gpumux explain NAME` names the error",
            Self::Tampers => {
                "its processes undo what gpumux sets: `gpumux explain NAME` has the details"
            }
        }
    }
}

impl std::fmt::Display for TenantState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

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
