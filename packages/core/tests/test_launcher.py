"""Warm worlds of ranks: what bodies find, and that calls do not see each other."""

from __future__ import annotations

import importlib.util
import os
import random
import sys
import types
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from polyshard.testing import World, launcher, run_ranks

# ---- bodies: what ranks run ----


def pid_of(rank: int) -> int:
    return os.getpid()


def describe(rank: int) -> tuple[int, int, int, str, int]:
    return (
        rank,
        dist.get_rank(),
        dist.get_world_size(),
        dist.get_backend(),
        torch.get_num_threads(),
    )


def add_up(rank: int, summand: float, *, factor: float = 1.0) -> float:
    total = torch.tensor([summand * rank * factor])
    dist.all_reduce(total)
    return total.item()


@dataclass
class Inner:
    tensor: torch.Tensor


@dataclass
class Outer:
    rank: int
    parts: list[Inner]


def nested(rank: int, given: Outer, numel: int) -> Outer:
    large = torch.full((numel,), float(rank), requires_grad=True)
    return Outer(rank, [*given.parts, Inner(large)])


def reduce_along_mesh(rank: int) -> tuple[float, float, float]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    sums = []
    for group in (mesh.get_group("outer"), mesh.get_group("inner"), dist.new_group([0, 3])):
        value = torch.tensor([float(rank)])
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.all_reduce(value, group=group)
        sums.append(value.item())
    return sums[0], sums[1], sums[2]


def surroundings(rank: int) -> tuple[str, str | None, list[str]]:
    return os.getcwd(), os.environ.get("POLYSHARD_LAUNCHER_TEST"), sys.path


def spoil(rank: int) -> None:
    os.environ["POLYSHARD_SPOILED"] = "1"
    os.environ.pop("PATH")
    os.chdir("/")
    sys.path.clear()
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(True)
    warnings.simplefilter("error")
    random.seed(rank)
    torch.manual_seed(rank)


def state(rank: int) -> dict[str, Any]:
    return {
        "spoiled": os.environ.get("POLYSHARD_SPOILED"),
        "path": os.environ.get("PATH"),
        "directory": os.getcwd(),
        "import paths": sys.path,
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device().type,
        "grad": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "filters": warnings.filters[:],
        "random": random.random(),
        "torch random": torch.rand(2).tolist(),
    }


def say(rank: int, text: str) -> None:
    print(text, end="")
    os.system("echo from a child process")


def destroy_group(rank: int) -> int:
    dist.destroy_process_group()
    return rank


# ---- tests ----


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_rank_runs_in_a_gloo_world(world_size: int) -> None:
    """Ranks see their world, results come by rank, and collectives work."""
    expected = [(rank, rank, world_size, "gloo", 1) for rank in range(world_size)]
    assert run_ranks(world_size, describe) == expected
    total = 3.0 * sum(range(world_size))
    assert run_ranks(world_size, add_up, 1.5, factor=2.0) == [total] * world_size
    assert run_ranks(world_size, partial(add_up, factor=2.0), 1.5) == [total] * world_size


def test_world_stays_warm() -> None:
    """Calls of one size run in the same processes, and other sizes have their own."""
    two = run_ranks(2, pid_of)
    four = run_ranks(4, pid_of)
    assert run_ranks(2, pid_of) == two
    assert run_ranks(4, pid_of) == four
    assert len({os.getpid(), *two, *four}) == 7


def test_pool_is_bounded() -> None:
    """Worlds that fit are kept, and the least recently used makes room for another."""
    pool = launcher._Pool()
    worlds = {size: pool.world(size) for size in (1, 2, 4, 8)}
    assert all(pool.world(size) is world for size, world in worlds.items())
    pool.world(6)
    assert pool.world(8) is worlds[8]
    assert pool.world(2) is not worlds[2]


def test_arguments_and_results_travel_by_value() -> None:
    """Nested dataclasses, and tensors of tens of megabytes, come back as they were."""
    given = Outer(-1, [Inner(torch.arange(3))])
    numel = 8 * 2**20
    for rank, result in enumerate(run_ranks(2, nested, given, numel)):
        assert result.rank == rank
        assert torch.equal(result.parts[0].tensor, torch.arange(3))
        large = result.parts[1].tensor
        assert large.requires_grad
        assert torch.equal(large, torch.full((numel,), float(rank)))


def test_bodies_can_make_groups_and_meshes() -> None:
    """A mesh and a sub-group made by a body work, and so they do in the next call."""
    for _ in range(2):
        assert run_ranks(4, reduce_along_mesh) == [(2, 1, 3), (4, 1, 1), (2, 5, 2), (4, 5, 3)]


def test_bodies_see_the_callers_surroundings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Directory, environment and import paths are the caller's at the time of the call."""
    run_ranks(2, pid_of)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("POLYSHARD_LAUNCHER_TEST", "seen")
    monkeypatch.syspath_prepend(str(tmp_path))
    for directory, variable, paths in run_ranks(2, surroundings):
        assert Path(directory) == tmp_path
        assert variable == "seen"
        assert paths == sys.path


def test_each_call_starts_clean() -> None:
    """What a body did to its process does not reach the next one; seeds are equal everywhere."""
    pids = run_ranks(2, pid_of)
    before = run_ranks(2, state)
    run_ranks(2, spoil)
    after = run_ranks(2, state)
    assert run_ranks(2, pid_of) == pids
    assert before == after
    assert before[0] == before[1]
    assert before[0]["spoiled"] is None
    assert before[0]["grad"]
    assert before[0]["threads"] == 1
    assert before[0]["directory"] == os.getcwd()


@pytest.mark.parametrize("name", ["json", "loose_tests.bodies"])
def test_body_outside_the_import_paths(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body runs from the file it was loaded from, whatever its module's name leads to."""
    file = tmp_path / "loose.py"
    file.write_text("def where(rank):\n    return __file__\n")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # pytest's importlib mode makes up the parents that a module's name calls for.
    monkeypatch.setitem(sys.modules, "loose_tests", types.ModuleType("loose_tests"))
    monkeypatch.setitem(sys.modules, name, module)
    with World(2) as world:
        assert world.run(module.where) == [str(file)] * 2


def test_output_is_passed_on(capsys: pytest.CaptureFixture[str]) -> None:
    """What ranks and their children print is printed here once, each line with its rank."""
    run_ranks(2, say, "first ")
    first = capsys.readouterr().out
    run_ranks(2, say, "second ")
    second = capsys.readouterr().out
    for output, text in ((first, "first"), (second, "second")):
        lines = [f"[rank {rank}] {text} from a child process" for rank in range(2)]
        assert output.splitlines() == lines


def test_body_that_destroys_the_group() -> None:
    """Its results count; the next call has a new world."""
    pids = run_ranks(2, pid_of)
    assert run_ranks(2, destroy_group) == [0, 1]
    assert set(run_ranks(2, pid_of)).isdisjoint(pids)
    assert run_ranks(2, add_up, 1.0) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("world_size", "body", "timeout", "told"),
    [
        (0, pid_of, 1.0, "world_size is 0; a world has from 1 to"),
        (1000, pid_of, 1.0, "world_size is 1000"),
        ("2", pid_of, 1.0, "world_size is '2'"),
        (2, pid_of, 0.0, "timeout is 0.0"),
        (2, lambda rank: rank, 1.0, "cannot be sent to other processes"),
    ],
)
def test_bad_arguments(world_size: Any, body: Any, timeout: float, told: str) -> None:
    """What cannot run is a ValueError that says why, before anything is started."""
    pids = run_ranks(2, pid_of)
    with pytest.raises(ValueError, match=told):
        run_ranks(world_size, body, timeout=timeout)
    assert run_ranks(2, pid_of) == pids


def test_body_of_the_running_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body that a script itself defines is refused: other processes cannot import it."""
    monkeypatch.setattr(pid_of, "__module__", "__main__")
    with pytest.raises(ValueError, match=r"__main__\.pid_of is defined in the script that runs"):
        run_ranks(2, pid_of)
