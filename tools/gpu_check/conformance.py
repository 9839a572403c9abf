"""The conformance suite over a backend on the one GPU, without pytest."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from polyshard.testing.conformance.clauses import all_checks
from polyshard.testing.conformance.running import ConformanceFailure, run_check
from polyshard.testing.conformance.subject import Subject

from .site import CheckFailed, Site, Skip

#: What tests say that one rank cannot answer.
_NEEDS_PEERS = "one rank has no peers"
_TIMEOUT = 60.0

# For a dry run: a few tests, one that drives its own worlds among them.
_FEW = ("test_all_gather", "test_training_with_zero2", "test_ranks_that_diverge")


@dataclass(frozen=True)
class OneGpu(Subject):
    """A subject all of whose ranks share the first GPU."""

    def device(self, rank: int) -> torch.device:
        return super().device(0)


def run(site: Site, *, backend: str, ranks: int, part: int, parts: int) -> None:
    """Every ``parts``-th test of the suite, from ``part`` on; each is a step."""
    if site.dry_run:
        if ":" in backend:
            site.require_cuda("a connected NCCL backend")
        backend = "gloo"
    subject = OneGpu(backend, site.device_type, ranks, timeout=_TIMEOUT)
    chosen = sorted(all_checks().items())[part::parts]
    if site.dry_run:
        chosen = [each for each in chosen if each[0].startswith(_FEW)][:2] or chosen[:1]
    seconds: dict[str, float] = {}
    for name, check in chosen:
        began = time.perf_counter()
        with site.step(name):
            try:
                run_check(check, subject)
            except ConformanceFailure as failure:
                if ranks == 1 and failure.findings.startswith(_NEEDS_PEERS):
                    raise Skip(_NEEDS_PEERS) from None
                raise CheckFailed(f"{failure.findings}\n{failure}") from None
        seconds[name] = round(time.perf_counter() - began, 2)
    outcomes = list(site.steps.values())
    site.figures["tests"] = len(outcomes)
    site.figures["passed"] = sum(outcome == "passed" for outcome in outcomes)
    site.figures["need peers"] = sum(outcome.startswith("skipped") for outcome in outcomes)
    slowest = sorted(seconds, key=lambda name: -seconds[name])[:5]
    site.figures["slowest, seconds"] = {name: seconds[name] for name in slowest}
