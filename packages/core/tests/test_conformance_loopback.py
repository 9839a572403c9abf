"""The backend for groups of one rank keeps the contract, as far as one rank can."""

from __future__ import annotations

from polyshard.testing import BackendConformance, LoopbackBackend

ALONE = "it serves groups of one rank, which have no peers"


class TestLoopback(BackendConformance):
    backend = LoopbackBackend
    device_type = "cpu"
    world_size = 1
    expected_failures = {  # noqa: RUF012
        "test_submit_does_not_wait": "with one rank there is nothing to wait for: its collectives "
        "are copies, which are done when submit returns",
        "test_a_rank_that_fails_lets_its_peers_know": ALONE,
        "test_a_rank_that_died_is_an_error": ALONE,
        "test_a_rank_that_does_not_come_is_an_error": ALONE,
        "test_ranks_that_diverge_are_told": ALONE,
        "test_data_of_two_collectives_never_mixes": ALONE,
    }
