"""One group's main weights: what they start from, and what was written to them or to the full ones.

Knows the buffer they lie in and its transport; knows nothing of gathering.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from .buffer import DBuffer
from .parameter import ManagedParameter
from .placements import Replicate
from .precision import unwritten_value
from .transport import Transport


class MainWeights:
    """What the optimizer steps.

    Args:
        buffer: a part of it belongs to each parameter, by index.
    """

    def __init__(
        self,
        label: str,
        parameters: Sequence[ManagedParameter],
        transport: Transport,
        buffer: DBuffer,
    ) -> None:
        self.label, self._parameters = label, parameters
        self._transport, self._buffer = transport, buffer
        #: Parameters that came without values, on meta, with their epochs at that time.
        self._unwritten = {i: 0 for i, p in enumerate(parameters) if p.local.is_meta}

    # -- where they come from -----------------------------------------------------------------

    @torch.no_grad()
    def take_from_parameters(self) -> None:
        """Sharded axes keep each rank's own rows; replicated axes take the first rank's values."""
        buffer = self._buffer
        for index in range(len(self._parameters)):
            if index in self._unwritten:
                buffer.view(index).fill_(unwritten_value(buffer.dtype))
            else:
                buffer.view(index).copy_(self._rows(index))
        self._take_first_values()

    @torch.no_grad()
    def take_from(self, other: MainWeights) -> None:
        """Start from others that lie alike, each rank its rows."""
        self._buffer.flat.copy_(other._buffer.flat)
        self._unwritten = dict.fromkeys(other.unwritten(), 0)

    def install(self) -> None:
        """The parameters have their sharded faces now, which count what is written."""
        self._unwritten = {i: self._parameters[i].sharded.epoch for i in self._unwritten}

    def _take_first_values(self) -> None:
        buffer, transport = self._buffer, self._transport
        replicated = [
            axis
            for axis, placement in enumerate(buffer.placements)
            if isinstance(placement, Replicate) and buffer.grid.sizes[axis] > 1
        ]
        communicators = transport.communicators("reduce")
        lane = transport.reduce_lane
        lane.wait(transport.mark_compute())
        label = f"{self.label}: first values"
        for axis in replicated:
            broadcast = partial(communicators[axis].broadcast, [buffer.flat], 0, label=label)
            lane.submit(broadcast, label=label)
            lane.submit(communicators[axis].settle, label=label)
        transport.compute_lane.wait(lane.mark())

    # -- what was written ---------------------------------------------------------------------

    def unwritten(self) -> list[int]:
        """Parameters that came without values and were given none since."""
        if self._unwritten:
            self._unwritten = {
                index: epoch
                for index, epoch in self._unwritten.items()
                if self._parameters[index].sharded.epoch == epoch
            }
        return list(self._unwritten)

    def written(self, versions: Sequence[int], *, are_full: bool) -> Tensor:
        """Per parameter, 1.0 where the full one is not what it was gathered as, on this rank.

        Args:
            versions: which the full parameters had when they were gathered.
            are_full: the full parameters are views of the main weights themselves.
        """
        unwritten, seen = self.unwritten(), []
        for index, parameter in enumerate(self._parameters):
            full = self._rows(index)
            if are_full or index in unwritten:
                changed = torch.tensor(
                    parameter.full._version != versions[index], device=full.device
                )
            else:
                changed = (self._buffer.view(index).to(full.dtype) != full).any()
            if index in unwritten:  # also through `.data`, which no version counts
                changed = changed | ~full.isnan().all()
            seen.append(changed)
        return torch.stack(seen).float()

    def write_back(
        self, written: Sequence[bool], versions: Sequence[int], *, are_full: bool
    ) -> None:
        """Take in the full parameters that were ``written``, each rank its own rows.

        Where the main weight is more precise, rows that still equal its rounded value keep it.

        Args:
            written: by parameter, the same on every rank.
            versions, are_full: as for :meth:`written`.
        """
        first_values = any(written[index] for index in self.unwritten())
        for index, parameter in enumerate(self._parameters):
            if not written[index]:
                continue
            if not are_full:
                local, rows = self._buffer.view(index), self._rows(index)
                if local.dtype != rows.dtype:
                    rows = torch.where(local.to(rows.dtype) == rows, local, rows.to(local.dtype))
                local.copy_(rows)
            # The epoch goes on where the full parameter's version stands: what was computed from
            # it since its last write was computed from these weights.
            writes = parameter.full._version - versions[index]
            parameter.sharded.writes.count += max(1, writes)
        if first_values:
            self._take_first_values()

    def _rows(self, index: int) -> Tensor:
        """The rows of full parameter ``index`` that are held here."""
        rows = self._parameters[index].local
        if self._buffer.num_shards == 1:
            return rows
        start, stop = self._buffer.rows(index)
        return (rows if rows.dim() else rows.view(1))[start:stop]
