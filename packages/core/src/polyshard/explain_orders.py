"""In which order `explain` says that units are expected, and how much is gathered at one time.

Reads contexts and units; changes nothing. What is prefetched is decided in `schedule`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from .context import FsdpContext, context_of
from .explained import ExplainedOrder
from .schedule import prefetch
from .spi import Lifetime
from .unit import Unit


def explain_orders(paths: Mapping[Unit, str]) -> tuple[ExplainedOrder, ...]:
    """One order for each root: for each context, and before a first forward for each unit that no
    other contains.

    Args:
        paths: where each unit is in the explained module, parents first.
    """
    contexts: dict[FsdpContext, None] = {}
    waiting: dict[Unit, list[Unit]] = {}  # by the unit that will be their root
    containers = _containers(paths)
    for unit in paths:
        context = context_of(unit)
        if context.sequence:
            contexts[context] = None
        else:
            root = containers[unit][-1] if containers[unit] else unit
            waiting.setdefault(root, []).append(unit)
    orders = []
    for context in contexts:
        units = context.units  # before the orders: it forgets them if a unit is gone
        backward = context.backward_order
        orders.append(
            _explained_order(
                paths, containers, units, context.forward_order, backward, has_run=True
            )
        )
    for units in waiting.values():
        orders.append(
            _explained_order(paths, containers, units, range(len(units)), None, has_run=False)
        )
    return tuple(orders)


def _explained_order(
    paths: Mapping[Unit, str],
    containers: Mapping[Unit, Sequence[Unit]],
    units: Sequence[Unit],
    forward: Sequence[int],
    backward: Sequence[int] | None,
    *,
    has_run: bool,
) -> ExplainedOrder:
    names = [paths.get(unit, unit.name) for unit in units]
    most_forward = most_backward = None
    if all(unit in paths for unit in units):
        most_forward = _most_gathered(units, containers, forward, is_forward=True)
        if backward is not None:
            most_backward = _most_gathered(units, containers, backward, is_forward=False)
    return ExplainedOrder(
        has_run=has_run,
        forward=tuple(names[index] for index in forward),
        backward=None if backward is None else tuple(names[index] for index in backward),
        most_gathered_forward=most_forward,
        most_gathered_backward=most_backward,
    )


def _containers(paths: Mapping[Unit, str]) -> dict[Unit, list[Unit]]:
    """The units that contain each unit, innermost first."""
    by_path = {path: unit for unit, path in paths.items()}
    found: dict[Unit, list[Unit]] = {}
    for unit, path in paths.items():
        found[unit] = []
        while path:
            path = path.rpartition(".")[0]
            if path in by_path:
                found[unit].append(by_path[path])
    return found


def _most_gathered(
    units: Sequence[Unit],
    containers: Mapping[Unit, Sequence[Unit]],
    order: Sequence[int],
    *,
    is_forward: bool,
) -> int:
    """Bytes of whole weights at one time, at most, if units come in this order.

    A unit is left when one comes that it does not contain; what was gathered ahead stays.
    """
    place_of = {unit: index for index, unit in enumerate(units)}
    sizes = [unit.gathered_numel for unit in units]
    nbytes = [_gathered_bytes(unit) for unit in units]
    # As in `Order`, units that gather nothing are left out before looking ahead.
    gathered = [index for index in order if sizes[index]]
    passed = list(accumulate(sizes[index] > 0 for index in order))
    entered: list[int] = []  # and not left
    held = set() if is_forward else {i for i in order if not units[i].reshard_after_forward}
    now = most = sum(nbytes[index] for index in held)
    for place, index in enumerate(order):
        around = {place_of[container] for container in containers[units[index]]}
        while entered and entered[-1] not in around:
            left = entered.pop()
            if left in held and (units[left].reshard_after_forward or not is_forward):
                held.remove(left)
                now -= nbytes[left]
        entered.append(index)
        policy = units[index].schedule
        ahead = prefetch(
            gathered,
            passed[place] - 1,
            sizes=sizes,
            units=policy.forward_units if is_forward else policy.backward_units,
            elements=policy.forward_elements if is_forward else policy.backward_elements,
        )
        for wanted in (index, *ahead):
            if wanted not in held:
                held.add(wanted)
                now += nbytes[wanted]
        most = max(most, now)
    return most


def _gathered_bytes(unit: Unit) -> int:
    """What `HeldBytes.gathered` sums up to."""
    return sum(
        group.full.flat.numel() * group.full.dtype.itemsize
        for group in unit.groups
        if group.full is not group.model and group.full.storage.lifetime is Lifetime.TRANSIENT
    )
