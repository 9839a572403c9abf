"""One group's weights: parameters of one dtype in one flat buffer, gathered and released.

Knows its transport and precision; knows no modules, no order and no other group. Gradients are
in gradients.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Partial as TorchPartial
from torch.distributed.tensor import Placement as TorchPlacement
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.utils.hooks import RemovableHandle

from .autograd import NEVER_SAVED, set_versions
from .buffer import DBuffer, ShardGrid, Spreads
from .derivative_guard import guard_derivatives
from .gradients import GroupGradients
from .layout import GlobalLayout
from .main_weights import MainWeights
from .parameter import ManagedParameter
from .placements import Flat, Partial, Placement, Placements, Replicate
from .precision import GroupDtypes
from .released import give_back, withdraw
from .row_split import RowSplit
from .schedule import Residence
from .sharded_tensor import ShardedTensor
from .spi import Role, Ticket
from .step_guard import guard_steps
from .transport import Transport


class ParameterGroup:
    """The parameters of one unit that share dtype and requires_grad.

    Three buffers, of which neighbours may be one and the same:

    - ``main``: what the optimizer steps, in its placements and precision; always held.
    - ``model``: the compute-precision copy in the parameter placements.
    - ``full``: every tensor whole; what forward and backward see.

    Nothing that others can see changes before :meth:`install`.

    Args:
        weights: main weights that lie as these will, to start from; by default those of the full
            parameters, on replicated axes the first rank's. Parameters on meta have none: until
            they are written, using them is an error.
    """

    def __init__(
        self,
        label: str,
        parameters: Sequence[ManagedParameter],
        transport: Transport,
        placements: Placements,
        dtypes: GroupDtypes,
        grad_divisor: float,
        *,
        weights: MainWeights | None = None,
    ) -> None:
        self.label, self.parameters, self.transport = label, tuple(parameters), transport
        self.placements, self.dtypes, self.grad_divisor = placements, dtypes, grad_divisor
        grid = ShardGrid(transport.sizes, transport.coordinates, placements.shard_order)
        shapes = [tuple(parameter.local.shape) for parameter in parameters]
        self.grid = grid
        self.layout = GlobalLayout.build(shapes, grid.num_shards)
        self._spreads = Spreads(self.layout, grid)
        whole = (Replicate(),) * len(grid.sizes)
        self._gatherers = transport.communicators("gather")
        self.main = self._allocate(
            placements.optimizer, dtypes.main, Role.GATHER_INPUT, persistent=True
        )
        same = placements.parameter == placements.optimizer and dtypes.main == dtypes.compute
        self.model = (
            self.main
            if same
            else self._allocate(
                placements.parameter, dtypes.compute, Role.GATHER_INPUT, Role.GATHER_OUTPUT
            )
        )
        sharded = any(isinstance(placement, Flat) for placement in placements.parameter)
        self.full = (
            self._allocate(whole, dtypes.compute, Role.GATHER_OUTPUT) if sharded else self.model
        )
        self.gradients = GroupGradients(
            label, self.parameters, transport, self._spreads, placements, dtypes, grad_divisor
        )
        #: Called when autograd has finished a full parameter's gradient; set by the unit.
        self.on_grad: Callable[[ParameterGroup, int, Tensor], None] | None = None
        #: Whether gathering needs the other ranks.
        self.is_collective = sharded or placements.parameter != placements.optimizer
        # Peers read what one gather made as the input of the next, and what was cast in its slot.
        full_steps = len(grid.split_axes(placements.parameter))
        model_steps = len(grid.split_axes(placements.optimizer)) - full_steps
        cast = dtypes.main != dtypes.compute
        self._lends_full = full_steps > 1
        self._lends_model = full_steps > 0 or model_steps > (0 if cast else 1)
        self.residence = Residence.RELEASED
        self._whole_main: DBuffer | None = None  # where the backend keeps such buffers
        self._ticket: Ticket | None = None
        self._copied_epochs: list[int] | None = None  # of the main weight when copies were made
        self._gathered_epochs: list[int] | None = None  # of the latest gather
        self._stamped: list[int] | None = None  # versions the full parameters carry
        self._mesh_placements: dict[
            tuple[int, tuple[Placement, ...]], tuple[TorchPlacement, ...]
        ] = {}
        self._full_parameters = [parameter.full for parameter in self.parameters]
        self._hooked: dict[int, RemovableHandle] = {}
        self.weights = MainWeights(label, self.parameters, transport, self.main)
        if weights is None:
            self.weights.take_from_parameters()
        else:
            self.weights.take_from(weights)

    # -- sharding -----------------------------------------------------------------------------

    def install(self) -> None:
        """Turn the users' parameters into views of ``full`` and make their sharded faces."""
        with torch.no_grad():
            if self.full is not self.main:  # acquiring that would lose the weights it holds
                self.full.storage.acquire()
            views = [self.full.view(index) for index in range(len(self.parameters))]
            if self.full is not self.main:
                self.transport.release(self.full.storage)
            for index, parameter in enumerate(self.parameters):
                sharded = self.wrap(self.main.view(index), index, self.placements.optimizer)
                requires_grad = parameter.full.requires_grad
                shown = nn.Parameter(sharded, requires_grad=requires_grad)
                parameter.sharded = cast(ShardedTensor, shown)
                parameter.copy_attributes()
                parameter.view(views[index])
                if self.dtypes.main_grad != self.dtypes.main:
                    parameter.sharded.grad_dtype = self.dtypes.main_grad
                parameter.sharded._hook_target = parameter.full
                parameter.full.grad = None
        self._full_parameters = [parameter.full for parameter in self.parameters]
        self.weights.install()
        self.gradients.install(self.wrap)
        guard_steps()
        guard_derivatives(self)
        self.sync_requires_grad()
        self._stamp_released()

    def uninstall(self) -> None:
        """Take back the hooks of :meth:`install`. What the parameters were, its caller knows."""
        for handle in self._hooked.values():
            handle.remove()
        give_back(self._full_parameters)

    def twin(self) -> ParameterGroup:
        """Another group with parameters and weights of its own, equal to these."""
        parameters = [parameter.twin() for parameter in self.parameters]
        return ParameterGroup(
            self.label,
            parameters,
            self.transport,
            self.placements,
            self.dtypes,
            self.grad_divisor,
            weights=self.weights,
        )

    def rename(self, label: str) -> None:
        """Go by this name from now on."""
        self.label = self.weights.label = self.gradients.label = label

    def wrap(self, local: Tensor, index: int, placements: Sequence[Placement]) -> ShardedTensor:
        """``local`` as this rank's rows of tensor ``index`` under ``placements``."""
        parameter = self.parameters[index]
        return ShardedTensor.wrap(
            local,
            shape=parameter.shape,
            mesh=self.transport.mesh_with(parameter.other_mesh),
            placements=self._on_mesh(index, tuple(placements)),
            name=parameter.name,
        )

    def _on_mesh(self, index: int, placements: tuple[Placement, ...]) -> tuple[TorchPlacement, ...]:
        """Placements of tensor ``index`` on the mesh of the dp axes, in its order; made once,
        gradients are wrapped at every step."""
        known = self._mesh_placements.get((index, placements))
        if known is not None:
            return known
        places = [sorted(self.transport.axes).index(axis) for axis in self.transport.axes]
        count, _ = self.grid.shard(placements)
        split = tuple(places[axis] for axis in self.grid.split_axes(placements))
        result: list[TorchPlacement] = [TorchReplicate()] * len(places)
        for axis, placement in zip(places, placements, strict=True):
            if isinstance(placement, Flat):
                result[axis] = RowSplit(self.layout.row_ranges(index, num_shards=count), split)
            elif isinstance(placement, Partial):
                result[axis] = TorchPartial(placement.reduce_op)
        result += self.parameters[index].other_placements
        return self._mesh_placements.setdefault((index, placements), tuple(result))

    def _allocate(
        self,
        placements: Sequence[Placement],
        dtype: torch.dtype,
        *roles: Role,
        persistent: bool = False,
    ) -> DBuffer:
        spread = self._spreads.of(placements)
        communicators = list(self._gatherers.values())
        storage = self.transport.allocate(
            {role: communicators for role in roles},
            spread.numel,
            dtype,
            persistent=persistent,
        )
        return DBuffer.over(spread, storage)

    # -- gathering ----------------------------------------------------------------------------

    @property
    def gathered_numel(self) -> int:
        """Elements that a gather allocates; 0 where the full parameters are always there."""
        numel = self.full.flat.numel() if self.full is not self.model else 0
        return numel + (self.model.flat.numel() if self.model is not self.main else 0)

    @property
    def is_ready(self) -> bool:
        """The full parameters are there, and compute has waited for them."""
        return self.full is self.main or self.residence is Residence.READY

    def epochs(self) -> list[int]:
        """How often each main weight was written."""
        return [parameter.sharded.epoch for parameter in self.parameters]

    def submit_gather(self, *, label: str) -> None:
        """Start making the full parameters. No-op while they are there or on their way.

        Copies of an earlier pass are gone by now, unless a window is open: then they serve while
        no weight was written. What was gathered from older weights is renewed: a forward sees the
        new ones, and so does what a backward recomputes; the versions that :meth:`await_gather`
        sets make autograd compare with those that were saved.
        """
        if self.full is self.main:
            return
        epochs = self.epochs()
        if self.residence is not Residence.RELEASED and epochs != self._gathered_epochs:
            self.release()
        if self.residence is not Residence.RELEASED:
            return
        self._gathered_epochs, renew = epochs, False
        if self.model is not self.main:
            renew, self._copied_epochs = epochs != self._copied_epochs, epochs
        main, model, full, gatherers = self.main, self.model, self.full, self._gatherers

        def gather() -> None:
            if renew:
                model.storage.acquire()
                main.redistribute(model, gatherers, label=label)
            if full is not model:
                full.storage.acquire()
                model.redistribute(full, gatherers, label=label)

        if renew or full is not model:
            lane = self.transport.gather_lane
            # The optimizer wrote the weights, and compute last used the storage, on compute.
            lane.wait(self.transport.mark_compute())
            lane.submit(gather, label=label)
            self._ticket = lane.mark()
        self.residence = Residence.GATHERING

    def await_gather(self) -> None:
        """Make compute wait for the gather, and date the full parameters to their weights."""
        if self.residence is Residence.GATHERING:
            if self._ticket is not None:
                self.transport.compute_lane.wait(self._ticket)
                self._ticket = None
            self.residence = Residence.READY
        self._stamp(self.epochs())

    def joined(self) -> None:
        """Compute has waited for all lanes: no ticket outlives a pass."""
        self._ticket = None

    def release(self, *, copies: bool = False) -> None:
        """Let go of the full parameters and, at the end of a window, of all copies."""
        if self.residence is Residence.RELEASED and not copies:
            return
        dropped, lent = [], False
        if self.full is not self.model and self.residence is not Residence.RELEASED:
            dropped.append(self.full.storage)
            lent = self._lends_full
        if copies and self.model is not self.main and self._copied_epochs is not None:
            self._copied_epochs = None
            dropped.append(self.model.storage)
            lent = lent or self._lends_model
        if dropped:
            lane = self.transport.gather_lane
            # Compute may still read what was gathered, and peers what they gathered from it.
            lane.wait(self.transport.mark_compute())
            for communicator in self._gatherers.values() if lent else ():
                lane.submit(communicator.settle, label=f"{self.label}: settle")
            for storage in dropped:
                work = partial(self.transport.release, storage)
                lane.submit(work, label=f"{self.label}: release")
        self.residence = Residence.RELEASED
        self._ticket = None
        if self.full is not self.main:
            self._stamp_released()

    def written_in_forward(self) -> ManagedParameter | None:
        """A parameter whose full weight was overwritten since it was gathered, or None."""
        for parameter, version in zip(self.parameters, self._stamped or (), strict=False):
            if parameter.full._version != version:
                return parameter
        return None

    def written(self) -> Tensor:
        """Per parameter, 1.0 where the full one is not what it was gathered as, on this rank."""
        assert self._stamped is not None
        return self.weights.written(self._stamped, are_full=self.full is self.main)

    def write_back(self, written: Sequence[bool]) -> None:
        """Copy the full parameters that were ``written`` into the main weights, each rank its rows.

        Args:
            written: the same on every rank, for it decides what is gathered anew.
        """
        assert self._stamped is not None
        self.weights.write_back(written, self._stamped, are_full=self.full is self.main)

    @property
    def kept_whole_main(self) -> DBuffer | None:
        """What :meth:`whole_main` fills, where the backend has it allocated once and kept."""
        return self._whole_main

    @contextmanager
    def whole_main(self) -> Iterator[DBuffer]:
        """Every main weight whole, for as long as the scope lasts; collective."""
        whole = (Replicate(),) * len(self.grid.sizes)
        target = self._whole_main or self._allocate(whole, self.dtypes.main, Role.GATHER_OUTPUT)
        if self.transport.keeps(Role.GATHER_OUTPUT):
            self._whole_main = target
        label = f"{self.label}: full weights"

        def gather() -> None:
            target.storage.acquire()
            self.main.redistribute(target, self._gatherers, label=label)
            for communicator in self._gatherers.values():
                communicator.settle()

        lane = self.transport.gather_lane
        lane.wait(self.transport.mark_compute())
        lane.submit(gather, label=label)
        self.transport.compute_lane.wait(lane.mark())
        try:
            yield target
        finally:
            lane.wait(self.transport.mark_compute())
            lane.submit(partial(self.transport.release, target.storage), label=label)

    # -- autograd -----------------------------------------------------------------------------

    def sync_requires_grad(self) -> None:
        """Freezing and unfreezing the sharded parameters is honoured from the next forward on."""
        trained = set()
        with torch._C.DisableTorchFunctionSubclass():  # released ones are asked nothing but this
            for index, parameter in enumerate(self.parameters):
                wanted = parameter.sharded.requires_grad
                if wanted:
                    trained.add(index)
                if parameter.full.requires_grad != wanted:
                    parameter.full.requires_grad_(wanted)
                if wanted and index not in self._hooked:
                    # Weakly: a hook lives as long as its tensor and must not keep the group alive.
                    ready = _GradReady(weakref.ref(self), index)
                    self._hooked[index] = parameter.full.register_post_accumulate_grad_hook(ready)
        self.gradients.expect(frozenset(trained))

    def date(self) -> None:
        """Full parameters that are there carry the versions of their weights as they are now."""
        if self.is_ready:
            self._stamp(self.epochs())

    def _stamp(self, epochs: list[int]) -> None:
        if self._stamped is None:
            give_back(self._full_parameters)
        if epochs != self._stamped:
            set_versions(self._full_parameters, epochs)
            self._stamped = epochs

    def _stamp_released(self) -> None:
        if self.full is self.main:
            self._stamp(self.epochs())
        else:
            set_versions(self._full_parameters, [NEVER_SAVED] * len(self._full_parameters))
            withdraw(self._full_parameters)
            self._stamped = None


class _GradReady:
    __slots__ = ("_group", "_index")

    def __init__(self, group: weakref.ref[ParameterGroup], index: int) -> None:
        self._group, self._index = group, index

    def __call__(self, parameter: Tensor) -> None:
        group = self._group()
        if group is not None:
            assert group.on_grad is not None
            group.on_grad(group, self._index, parameter)
