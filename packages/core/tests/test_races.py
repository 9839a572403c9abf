"""The core's scheduling has no races: whole training runs under the race checker.

Each seed draws a program (prefetch, recomputation, microbatches, units skipped and repeated, ...)
that runs under every policy, and is compared with a plain process. Strategies take turns: a seed
runs under one of three, or with POLYSHARD_RACE_FULL=1 under all. POLYSHARD_RACE_SEEDS is how many
seeds there are, 50 without it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
from race_checks import MeshFor, checks, one_rank
from race_programs import AXES, STRATEGIES, Net, Program, batch, run
from torch.distributed.device_mesh import init_device_mesh

from polyshard import fully_shard
from polyshard.testing import run_ranks
from polyshard.testing.race import Policy, RaceBackend

SEEDS = range(int(os.environ.get("POLYSHARD_RACE_SEEDS", "50")))
TURNS = 1 if os.environ.get("POLYSHARD_RACE_FULL") else 3
TIMEOUT = 60.0 + 10.0 * len(SEEDS)


@pytest.fixture(scope="module")
def mesh() -> Iterator[MeshFor]:
    with one_rank() as mesh:
        yield mesh


def run_seeds(rank: int, strategy: str, shapes: list[tuple[int, ...]], seeds: Sequence[int]) -> int:
    """Every program under every policy, on meshes in turn; returns how many runs there were."""
    axes = AXES if len(STRATEGIES[strategy].dp_axes) == 2 else ("dp",)
    meshes = [init_device_mesh("cpu", shape, mesh_dim_names=axes) for shape in shapes]
    runs = 0
    for seed in seeds:
        program = Program.drawn(seed)
        for policy in Policy:
            try:
                # Each rank has an order of its own.
                own = 10 * seed + rank
                run(program, strategy, policy, mesh=meshes[seed // TURNS % len(meshes)], seed=own)
            except BaseException as error:
                error.add_note(f"seed {seed}, policy {policy.value}: {program}")
                raise
            runs += 1
    return runs


@pytest.mark.timeout(TIMEOUT)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_programs_of_two_ranks(strategy: str) -> None:
    """Drawn programs run right and without a race on two ranks, under every policy."""
    shapes = [(2,)] if len(STRATEGIES[strategy].dp_axes) == 1 else [(2, 1), (1, 2)]
    seeds = SEEDS[list(STRATEGIES).index(strategy) % TURNS :: TURNS]
    ran = run_ranks(2, run_seeds, strategy, shapes, seeds, timeout=TIMEOUT)
    assert ran == [len(Policy) * len(seeds)] * 2


@pytest.mark.parametrize(
    "strategy", [name for name in STRATEGIES if "dp" not in STRATEGIES[name].dp_axes]
)
def test_programs_of_four_ranks(strategy: str) -> None:
    """Drawn programs on both axes of a mesh of 2 x 2 ranks."""
    seeds = SEEDS[:: 25 * TURNS]
    ran = run_ranks(4, run_seeds, strategy, [(2, 2)], seeds, timeout=TIMEOUT)
    assert ran == [len(Policy) * len(seeds)] * 4


def test_what_mutants_are_put_to(mesh: MeshFor) -> None:
    """The core as it is passes every check that its mutants have to fail."""
    for check in checks(mesh):
        check()


def test_programs_differ() -> None:
    """The seeds draw what they are to draw: each choice comes up, and each is left out."""
    programs = [Program.drawn(seed) for seed in range(50)]
    for field in Program.__dataclass_fields__:
        counts = Counter(getattr(program, field) for program in programs)
        assert len(counts) > 1, field


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_can_be_captured(strategy: str, mesh: MeshFor) -> None:
    """After two steps, a forward and its backward do nothing that a CUDA graph cannot hold."""
    backend = RaceBackend(Policy.LATE)
    with backend.checking():
        model = Net()
        for module in (*model.blocks, model):
            fully_shard(module, mesh(strategy), STRATEGIES[strategy], backend=backend)
        batches = [batch(step, 0, 0) for step in range(3)]
        for x in batches[:2]:
            with backend.root_pass():
                loss = model(x, (0, 1, 2)).square().mean()
            with backend.root_pass():
                loss.backward()
            model.zero_grad()
        with backend.capture():
            model(batches[2], (0, 1, 2)).square().mean().backward()
        del model, loss
