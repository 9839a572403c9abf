"""Backends that break the contract are caught by the suite, each by the name of its clause."""

from __future__ import annotations

import pytest
import wrong_backends as wrong
import wrong_lanes as lanes
import wrong_timing as timing

from polyshard.spi import CollectiveBackend
from polyshard.testing.conformance.clauses import all_checks
from polyshard.testing.conformance.running import ConformanceFailure, run_check
from polyshard.testing.conformance.subject import Subject, backend_reference
from polyshard_gloo import GlooBackend

CHECKS = all_checks()

# What is wrong, the clause that it breaks, the test that finds it, and how many ranks that takes.
CAUGHT: list[tuple[type[CollectiveBackend], str, str, int]] = [
    (wrong.AveragesAreSums, "5.5", "averages_divide_by_the_ranks", 2),
    (wrong.ScattersSumsOfBf16, "5.5", "averages_divide_by_the_ranks", 2),
    (wrong.RotatesRanks, "5.1", "gathers_move_every_bit", 2),
    (wrong.DropsLastChunk, "5.1", "gathers_move_every_bit", 2),
    (wrong.SumsInItsDtype, "5.6", "half_precision_accumulates_in_fp32", 3),
    (wrong.TakesTwoForOne, "5.7", "a_list_is_its_tensors", 2),
    (timing.ReturnsEarly, "6.1", "a_ticket_covers_outputs", 2),
    (timing.SharesStaging, "6.1", "many_are_in_flight_on_two_lanes", 2),
    (wrong.TakesGroupsForOthers, "4.1", "axes_of_a_mesh_are_apart", 4),
    (wrong.FailsOnComplex, "5.8", "all_reduces_combine", 2),
    (wrong.ReducesWhatItDoesNotClaim, "5.8", "dtypes_that_are_not_claimed_are_refused", 2),
    (timing.LeaksStaging, "4.8", "close_gives_everything_back", 2),
    (timing.LeaksThreads, "4.8", "close_gives_everything_back", 2),
    (timing.HangsOnNothing, "5.7", "empty_calls_do_nothing", 2),
    (timing.SettlesNothing, "6.2", "inputs_are_free_after_settle", 2),
    (timing.ClosesOnce, "4.8", "closed_communicators_refuse", 2),
    (wrong.BumpsVersions, "7.2", "versions_stay", 2),
    (wrong.WritesAround, "5.10", "views_at_any_offset", 2),
    (wrong.ForgetsDtypes, "5.8", "gathers_move_every_bit", 2),
    (wrong.CountsTwice, "7.3", "traffic_counts_the_least", 2),
    (wrong.ComparesNoLabels, "3.1", "ranks_that_diverge_are_told", 2),
    (wrong.BroadcastsFromFirst, "5.4", "broadcasts_move_every_bit", 2),
    (wrong.AddsFromItself, "5.3", "all_reduce_gives_every_rank_the_same_bits", 3),
    (wrong.AddsInTurns, "5.9", "the_same_inputs_give_the_same_bits", 3),
    (wrong.ChecksNothing, "7.1", "wrong_calls_are_refused", 1),
    (wrong.IgnoresOptions, "4.1", "unknown_options_are_refused", 1),
    (lanes.InTheSubmittersMode, "1.2", "modes_of_the_submitter_stay_out", 1),
    (lanes.WaitsForNothing, "1.5", "a_wait_orders_later_work", 1),
    (lanes.KeepsWork, "1.6", "lanes_let_go_of_work_that_ran", 1),
    (lanes.SynchronizesNothing, "1.7", "synchronize_empties_the_lane", 1),
    (lanes.RunsOn, "2.2", "later_work_is_dropped", 1),
    (lanes.RaisesAtSubmit, "2.2", "later_work_is_dropped", 1),
    (lanes.HasOneLane, "3.3", "three_lanes_unless_asked_otherwise", 1),
    (lanes.HasOneLane, "1.3", "a_lane_goes_on_while_others_are_stuck", 1),
    (lanes.MakesNewLanes, "1.3", "lanes_are_the_same_at_every_call", 1),
    (lanes.KeepsPeersWaiting, "2.5", "a_rank_that_fails_lets_its_peers_know", 2),
    (lanes.KeepsFrames, "2.6", "errors_hold_no_buffers", 1),
    (lanes.LeavesMemory, "4.3", "transient_buffers_are_local", 1),
    (lanes.MovesAway, "4.4", "a_buffer_has_one_storage_for_life", 1),
    (lanes.StartsDirty, "4.2", "persistent_memory_is_zeros", 1),
    (lanes.ClearsAtAcquire, "4.5", "acquire_and_release_are_idempotent", 1),
    (lanes.ReleasesAll, "4.5", "persistent_buffers_are_never_released", 1),
    (lanes.Remembers, "4.6", "gradients_own_their_memory", 1),
    (lanes.RoundsTwice, "5.11", "packing_is_what_torch_does", 1),
    (lanes.RaisesWhenAsked, "0", "asking_whether_it_is_available_never_raises", 1),
    (lanes.StartsAtOnce, "0", "making_a_backend_costs_nothing", 1),
    (lanes.NeverEnds, "1.9", "a_process_ends_whatever_it_does", 1),
    (lanes.ForgetsLabels, "9.2", "closed_communicators_refuse", 1),
]

#: Tests that a right backend passes are not hurried; a wrong one that hangs is not waited for.
PATIENT, HASTY = 60.0, 4.0


def hold(backend: type[CollectiveBackend], test: str, ranks: int, timeout: float) -> None:
    """Hold a backend to one test of the suite."""
    subject = Subject(
        backend_reference(backend), world_size=ranks, timeout=timeout, largest_numel=60_000
    )
    run_check(CHECKS[f"test_{test}"], subject)


@pytest.mark.parametrize(
    ("backend", "clause", "test", "ranks"),
    CAUGHT,
    ids=[f"{backend.__name__}-{clause}" for backend, clause, _, _ in CAUGHT],
)
def test_wrong_ones_are_caught(
    backend: type[CollectiveBackend], clause: str, test: str, ranks: int
) -> None:
    """A backend that breaks a clause fails a test that names the clause."""
    with pytest.raises(ConformanceFailure) as raised:
        hold(backend, test, ranks, HASTY)
    assert f"clause {clause} (interface 1.0): " in str(raised.value)
    assert backend.__name__ in str(raised.value)


@pytest.mark.parametrize(("test", "ranks"), sorted({(test, ranks) for _, _, test, ranks in CAUGHT}))
def test_the_right_one_passes(test: str, ranks: int) -> None:
    """What catches wrong backends lets the right one pass, in the same circumstances."""
    hold(GlooBackend, test, ranks, PATIENT)


def test_inputs_that_are_in_use_for_long_are_right() -> None:
    """A transport whose peers read late passes, as long as settle waits for them."""
    for test in ("inputs_are_free_after_settle", "inputs_may_be_released_after_settle"):
        hold(timing.ReadsLate, test, 2, PATIENT)
