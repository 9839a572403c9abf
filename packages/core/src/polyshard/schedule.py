"""What to gather ahead and in which order to reduce, and the states of what is gathered. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Residence(Enum):
    """Where the full parameters are; the arrows are the only legal moves.

    RELEASED -> GATHERING (a gather was submitted) -> READY (compute waited for it) -> RELEASED;
    GATHERING -> RELEASED (prefetched, then not needed).
    """

    RELEASED = "released"
    GATHERING = "gathering"
    READY = "ready"


@dataclass(frozen=True)
class SchedulePolicy:
    """How far ahead of compute units are gathered.

    Args:
        forward_units, backward_units: how many units ahead; 0 turns prefetching off.
        forward_elements, backward_elements: instead, as many of the next units as together hold
            at most this many elements; 0 turns prefetching off.

    Raises:
        ValueError: for a negative number.
    """

    forward_units: int = 1
    backward_units: int = 1
    forward_elements: int | None = None
    backward_elements: int | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is None and name.endswith("_elements"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{name} is a number of at least 0, got {value!r}.")


def prefetch(
    order: Sequence[int],
    position: int,
    *,
    sizes: Sequence[int],
    units: int,
    elements: int | None,
) -> list[int]:
    """The units to gather ahead of the compute of ``order[position]``.

    Args:
        order: unit indices in the order in which they are expected.
        position: where in it compute stands.
        sizes: elements gathered by each unit; units of none are passed over, they cost nothing.
        units: how many to gather ahead, unless ``elements`` is given.
        elements: how many elements may be gathered ahead together.
    """
    chosen: list[int] = []
    total = 0
    for ahead in range(position + 1, len(order)):
        unit = order[ahead]
        if sizes[unit] == 0 or unit in chosen:
            continue
        total += sizes[unit]
        if total > elements if elements is not None else len(chosen) == units:
            break
        chosen.append(unit)
    return chosen


def reduction_order(num_units: int, done: Sequence[int] | None) -> tuple[int, ...]:
    """The order in which every rank reduces the units of a root.

    Args:
        num_units: units are numbered in registration order.
        done: the order in which backward was done with units on one agreed rank; None before the
            first backward. Reverse registration order serves for all others, which come last.
    """
    first = dict.fromkeys(done or ())
    return (*first, *(unit for unit in range(num_units - 1, -1, -1) if unit not in first))
