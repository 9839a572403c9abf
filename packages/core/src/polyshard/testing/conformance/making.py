"""Tests of making communicators (clauses 4.1, 4.8)."""

from __future__ import annotations

import torch

from ...spi import Communicator, Op
from .bench import ROLES, Bench, mesh_shape
from .clauses import clause
from .data import Violation, require


@clause("4.1", since=(1, 0))
def communicators_know_their_place(bench: Bench) -> None:
    """A communicator has the rank and size of its group and its device, for every purpose; its
    traffic begins empty."""
    for role in ROLES:
        made = bench.communicator(role)
        require(
            (made.rank, made.size, made.device) == (bench.rank, bench.size, bench.device),
            f"a communicator for {role!r} says rank {made.rank} of {made.size} on {made.device}, "
            f"expected {bench.rank} of {bench.size} on {bench.device}",
        )
        _require_works(bench, made, list(range(bench.size)), f"a communicator for {role!r}")


@clause("4.1", since=(1, 0))
def making_one_concerns_its_group_only(bench: Bench) -> None:
    """communicator() needs the ranks of its group and no others, whatever communicators each of
    them made, or closed, before."""
    mesh = bench.mesh()
    _, inner_size = mesh_shape(bench.size)
    row, column = divmod(bench.rank, inner_size)
    in_column = list(range(column, bench.size, inner_size))
    kept: list[Communicator] = []
    if row == 0:
        # Only the first row makes these: a collective over more ranks than those would hang.
        kept = [bench.communicator("gather", mesh.get_group("inner")) for _ in range(3)]
        for made in kept:
            _require_works(bench, made, list(range(inner_size)), "one made by a single row")
    outer = bench.communicator("gather", mesh.get_group("outer"))
    _require_works(bench, outer, in_column, "one whose ranks made different numbers before")
    for made in kept:
        bench.forget(made)
        made.close()
    again = bench.communicator("reduce", mesh.get_group("outer"))
    _require_works(bench, again, in_column, "one whose ranks closed different numbers before")
    _require_works(bench, outer, in_column, "an older one")


@clause("4.1", since=(1, 0))
def unknown_options_are_refused(bench: Bench) -> None:
    """An option that does not exist raises ValueError, on the rank that gave it, and leaves the
    group as it was."""
    try:
        bench.backend.communicator(
            bench.world,
            bench.device,
            purpose="gather",
            options={**bench.subject.options, "an option that no backend has": 1},
        )
    except ValueError:
        pass
    except Exception as error:
        raise Violation(f"an unknown option raised {type(error).__name__}: {error}") from error
    else:
        raise Violation("an unknown option raised nothing, expected ValueError")
    made = bench.communicator()
    _require_works(bench, made, list(range(bench.size)), "one made after a refusal")


@clause("4.1", "4.8", since=(1, 0))
def many_are_made_and_closed(bench: Bench) -> None:
    """Communicators can be made, used and closed over and over, several at a time, each apart
    from the others."""
    for _ in range(3):
        made = [bench.communicator(role) for role in (*ROLES, "gather")]
        for number, one in enumerate(made):
            total = torch.full((3,), float(number), device=bench.device)
            bench.all_reduce(one, [total], Op.SUM, f"communicator {number}")
            require(
                total.tolist() == [float(number * bench.size)] * 3,
                f"communicator {number} of several sums {number} to {total.tolist()}",
            )
        bench.meet()
        for one in made:
            bench.forget(one)
            one.close()


def _require_works(bench: Bench, made: Communicator, ranks: list[int], what: str) -> None:
    """``made`` gathers among ``ranks``, in their order."""
    own = torch.tensor([bench.rank], dtype=torch.int64, device=bench.device)
    every = torch.full((made.size,), -1, dtype=torch.int64, device=bench.device)
    bench.all_gather(made, [every], [own])
    require(every.tolist() == ranks, f"{what} gathers from {every.tolist()}, expected {ranks}")
