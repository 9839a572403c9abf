"""Small exchanges by which all ranks decide alike.

Knows transports and units' numbers; decides nothing itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from .schedule import reduction_order
from .spi import Op
from .transport import Transport
from .unit import Unit


def agree_on_order(done: Sequence[int], units: Sequence[Unit]) -> tuple[int, ...]:
    """The order in which to reduce ``units`` from now on, the same on every rank: that in which the
    first rank's backward was ``done`` with them, if all who take part can hear of it."""
    transports = dict.fromkeys(unit.transport for unit in units)
    widest = max(transports, key=lambda transport: len(transport.ranks))
    # Whoever tells the order is heard by all ranks that take part, or by none.
    heard = all(transport.ranks <= widest.ranks for transport in transports)
    if not heard or len(units) == 1:
        return reduction_order(len(units), None)
    return reduction_order(len(units), _from_first_rank(done, len(units), widest))


def _from_first_rank(done: Sequence[int], num_units: int, transport: Transport) -> list[int]:
    """What the first rank of the mesh was done with, in its order."""
    message = torch.full((num_units,), -1, dtype=torch.int64)
    message[: len(done)] = torch.tensor(done, dtype=torch.int64)
    message = message.to(transport.device)
    label = "order of reductions"
    # From the first rank along one axis after the other: what arrives is the first rank's.
    communicators = transport.communicators("reduce")
    lane = transport.reduce_lane
    lane.wait(transport.mark_compute())
    for communicator in reversed(list(communicators.values())):
        lane.submit(partial(communicator.broadcast, [message], 0, label=label), label=label)
        lane.submit(communicator.settle, label=label)
    transport.compute_lane.wait(lane.mark())
    return [index for index in message.tolist() if index >= 0]


def agree_on_written(unit: Unit) -> list[bool]:
    """Per parameter of the unit, whether its full weight was written, on any rank."""
    transport = unit.transport
    message = unit.written()
    label = f"{unit.name}: written weights"
    _sum_over_ranks(message, transport, label)
    return [seen > 0 for seen in message.tolist()]


def _sum_over_ranks(message: Tensor, transport: Transport, label: str) -> None:
    lane = transport.reduce_lane
    lane.wait(transport.mark_compute())
    for communicator in transport.communicators("reduce").values():
        reduce = partial(communicator.all_reduce, [message], Op.SUM, label=label)
        lane.submit(reduce, label=label)
        lane.submit(communicator.settle, label=label)
    transport.compute_lane.wait(lane.mark())
