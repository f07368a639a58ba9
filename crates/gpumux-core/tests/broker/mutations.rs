//! Each fault that the broker, or one before it, had is put back: a test must fail then.

use std::panic::{AssertUnwindSafe, catch_unwind};

use gpumux_core::broker::Mutation;

use super::{
    crossing, elastic, ends, faults, host, model, parts, programs, restarts, sessions, turns,
    world::MUTATION,
};

/// Whether a test fails while brokers have this fault.
fn finds(mutation: Mutation, test: fn()) -> bool {
    MUTATION.set(Some(mutation));
    let result = catch_unwind(AssertUnwindSafe(test));
    MUTATION.set(None);
    result.is_err()
}

#[test]
fn every_known_fault_is_found() {
    let all: [(Mutation, fn()); 32] = [
        (
            Mutation::DemandByMessage,
            faults::a_tenant_whose_threads_poll_comes_back_without_a_request,
        ),
        (
            Mutation::DemandByMessage,
            model::every_order::two_equal_tenants_take_turns,
        ),
        (
            Mutation::NoBackoff,
            faults::a_stopped_victim_delays_others_only_once,
        ),
        (
            Mutation::TurnsAgainstGuarantees,
            turns::guaranteed_memory_does_not_wait_for_a_turn,
        ),
        (
            Mutation::IdleAtOnce,
            turns::an_owner_that_worked_lately_keeps_its_guarantee,
        ),
        (Mutation::CountTwice, restarts::a_restart_counts_memory_once),
        (
            Mutation::ForeignAtOnce,
            restarts::request_waits_for_neighbours_that_return,
        ),
        (
            Mutation::ForeignAtOnce,
            restarts::guarantee_is_kept_while_a_borrower_has_not_returned,
        ),
        (
            Mutation::KeepReservation,
            host::a_full_host_lets_others_give_way_and_nothing_is_kept_for_a_failed_move,
        ),
        (
            Mutation::OutliveAsker,
            faults::an_order_does_not_outlive_its_asker,
        ),
        (
            Mutation::RoomForYounger,
            turns::a_large_request_is_not_passed_without_end,
        ),
        (
            Mutation::ForgetReturning,
            turns::a_return_keeps_its_place_until_all_are_back,
        ),
        (
            Mutation::CopyDroppable,
            elastic::guaranteed_memory_comes_of_free_pages_first,
        ),
        (
            Mutation::LeaveAtOnce,
            ends::memory_of_an_ended_process_is_waited_for,
        ),
        (
            Mutation::LeaveAtOnce,
            ends::tenant_returns_when_an_ended_process_is_freed_and_moves_no_other,
        ),
        (
            Mutation::RefuseEarly,
            faults::a_request_waits_for_leases_that_come_back_late,
        ),
        (
            Mutation::KeepGatesClosed,
            faults::copy_behind_a_collective_of_a_peer_delays_a_move,
        ),
        (
            Mutation::TakeComing,
            turns::one_that_can_never_be_served_keeps_nothing_from_others,
        ),
        (
            Mutation::ReturnAtOnce,
            programs::large_ones_take_turns_that_leave_time_for_work,
        ),
        (
            Mutation::ExchangeAmongWaiting,
            turns::two_that_wait_for_a_third_do_not_exchange_their_memory_without_end,
        ),
        (
            Mutation::MoveInVain,
            host::full_host_moves_no_tenant_for_a_claim,
        ),
        (
            Mutation::MoveInVain,
            parts::nothing_is_freed_on_one_device_when_the_host_is_full,
        ),
        (
            Mutation::PartByPart,
            parts::ranks_have_memory_together_or_not_at_all,
        ),
        (
            Mutation::PartByPart,
            model::every_order::ranks_have_their_parts_together_in_every_order,
        ),
        (
            Mutation::ForgetGrants,
            parts::report_that_crosses_a_grant_leaves_no_room_to_others,
        ),
        (
            Mutation::ForgetGrants,
            crossing::memory_is_handed_out_once_while_packets_cross,
        ),
        (
            Mutation::ForgetGrants,
            model::every_order::packets_that_cross_in_every_order,
        ),
        (
            Mutation::SessionBeginsAnew,
            sessions::tenant_that_waits_keeps_its_place_over_a_new_session,
        ),
        (
            Mutation::SessionBeginsAnew,
            sessions::request_keeps_its_place_over_a_new_session,
        ),
        (
            Mutation::SessionBeginsAnew,
            sessions::turn_is_no_longer_for_new_sessions,
        ),
        (
            Mutation::FreeWithoutSession,
            sessions::request_waits_for_a_neighbour_without_session,
        ),
        (
            Mutation::NoHedge,
            faults::a_stopped_victim_delays_others_only_once,
        ),
    ];
    let missed: Vec<_> = (all.iter())
        .filter(|(mutation, test)| !finds(*mutation, *test))
        .map(|(mutation, _)| mutation)
        .collect();
    println!(
        "covered: {} faults of a broker put back, {} found",
        all.len(),
        all.len() - missed.len()
    );
    assert!(missed.is_empty(), "not found: {missed:?}");
}
