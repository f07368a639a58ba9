//! Each fault that a control loop had, or may have, is put back: a test must fail then.

use std::panic::{AssertUnwindSafe, catch_unwind};

use gpumux_core::controller::Mutation;

use super::{properties, sequences, world::MUTATION};

/// Whether a test fails while controllers have this fault.
fn finds(mutation: Mutation, test: fn()) -> bool {
    MUTATION.set(Some(mutation));
    let result = catch_unwind(AssertUnwindSafe(test));
    MUTATION.set(None);
    result.is_err()
}

#[test]
fn every_known_fault_is_found() {
    let single: fn() = sequences::latency_beside_batch_survives_every_sequence;
    let gang: fn() = sequences::a_gang_beside_others_survives_every_sequence;
    let all: [(Mutation, fn()); 12] = [
        (Mutation::ThawFirst, single),
        (Mutation::TrustFailures, single),
        (Mutation::NoRetry, single),
        (
            Mutation::NoBackoff,
            properties::failing_controls_are_tried_seldom,
        ),
        (Mutation::NoDeadline, single),
        (Mutation::ForgetSwapped, single),
        (Mutation::NoGangs, gang),
        (
            Mutation::DeferForEver,
            properties::controls_wait_for_latency_work_but_not_for_long,
        ),
        (
            Mutation::ControlTheGone,
            properties::no_control_follows_the_end_of_a_tenant,
        ),
        (Mutation::IgnoreFound, single),
        (
            Mutation::TolerateForEver,
            properties::neighbours_timeslice_follows_the_shape_of_requests,
        ),
        (
            Mutation::TrustThaws,
            properties::group_that_something_froze_runs_again,
        ),
    ];
    let missed: Vec<_> = (all.iter())
        .filter(|(mutation, test)| !finds(*mutation, *test))
        .map(|(mutation, _)| mutation)
        .collect();
    println!(
        "covered: {} faults of a controller put back, {} found",
        all.len(),
        all.len() - missed.len()
    );
    assert!(missed.is_empty(), "not found: {missed:?}");
}
