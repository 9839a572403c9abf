"""What every rank must agree on before anything changes, and how the first difference is named.

Knows descriptions (plain strings) and process groups; knows no parameters and no backend.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from .errors import BackendError, PlacementError


def agree(
    subject: str,
    description: Sequence[str],
    failure: BaseException | None,
    groups: Sequence[ProcessGroup],
    *,
    vote: int = 0,
) -> frozenset[int]:
    """Compare ``description`` line by line over the ranks of ``groups``, one per mesh axis.

    Args:
        subject: what is described, for the message.
        failure: this rank's own objection; every rank then raises: the objecting one its own
            error, the others one that says which rank objected and why.
        vote: any number, which may differ.

    Returns:
        The votes of all ranks; alike on all.

    Raises:
        PlacementError: on every rank, naming the first line that differs and two ranks.
        BackendError: where another rank objected.
    """
    rank = dist.get_rank()
    digest = hashlib.sha256("\n".join(description).encode()).hexdigest()
    mine = (
        {("digest", digest): rank, ("vote", vote): rank}
        if failure is None
        else {("objection", rank): f"{type(failure).__name__}: {failure}"}
    )
    try:
        found = _spread(mine, groups)
    except RuntimeError as error:
        raise BackendError(
            f"{subject} takes all ranks of the mesh together, and it failed on rank {rank}: "
            f"{error} Every rank has to call it, in the same order; or a rank has ended."
        ) from error
    objections = {key: text for (kind, key), text in found.items() if kind == "objection"}
    digests = {key: owner for (kind, key), owner in found.items() if kind == "digest"}
    if failure is not None:
        raise failure
    if objections:
        first = min(objections)
        raise BackendError(f"{subject}: rank {first} refused: {objections[first]}")
    if len(digests) == 1:
        return frozenset(key for kind, key in found if kind == "vote")
    # Two ranks suffice to name a difference: the lowest ones of the two most basic digests.
    owners = sorted(digests.values())[:2]
    described = _spread({rank: list(description)} if rank in owners else {}, groups)
    raise PlacementError(_first_difference(subject, described))


def _spread(entries: dict[Any, Any], groups: Sequence[ProcessGroup]) -> dict[Any, Any]:
    """The union of all ranks' entries, axis by axis; of equal keys the lowest value stays."""
    for group in groups:
        gathered: list[dict[Any, Any] | None] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, entries, group=group)
        merged: dict[Any, Any] = {}
        for part in gathered:
            for key, value in (part or {}).items():
                merged[key] = min(merged[key], value) if key in merged else value
        entries = merged
    return entries


def _first_difference(subject: str, described: dict[int, list[str]]) -> str:
    (first, expected), (second, found) = sorted(described.items())
    for ours, theirs in zip(expected, found, strict=False):
        if ours != theirs:
            break
    else:
        longer = max((expected, found), key=len)
        line = longer[min(len(expected), len(found))]
        owner = first if longer is expected else second
        other = second if owner == first else first
        return (
            f"{subject}: rank {owner} has {line}, rank {other} does not; every rank must build "
            "the same model with the same arguments."
        )
    return (
        f"{subject}: rank {first} has {ours}, rank {second} has {theirs}; every rank must build "
        "the same model with the same arguments."
    )
