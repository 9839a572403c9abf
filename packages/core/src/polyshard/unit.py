"""A unit: one module given to fully_shard, and the groups of parameters it owns.

Knows its groups and where they show; knows no other unit. Holds its module weakly.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .autograd import storages_of
from .calls import Call, ForwardPass
from .errors import UnsupportedError
from .group import ParameterGroup
from .parameter import ManagedParameter
from .precision import MixedPrecisionPolicy
from .schedule import SchedulePolicy
from .structure import UNIT, Named, Structure
from .transport import Transport


class Unit:
    """What is gathered, released and reduced together.

    Args:
        module: held weakly.
        groups: possibly none, for a module without parameters of its own.
    """

    def __init__(
        self,
        module: nn.Module,
        groups: Sequence[ParameterGroup],
        *,
        transport: Transport,
        precision: MixedPrecisionPolicy,
        schedule: SchedulePolicy,
        reshard_after_forward: bool,
        structure: Structure,
    ) -> None:
        self.module = weakref.ref(module)
        self.name = type(module).__name__
        self.groups, self.transport = tuple(groups), transport
        self.precision, self.schedule = precision, schedule
        self.reshard_after_forward, self._structure = reshard_after_forward, structure
        self.parameters: tuple[ManagedParameter, ...] = tuple(
            parameter for group in groups for parameter in group.parameters
        )
        #: Elements that gathering the unit allocates.
        self.gathered_numel = sum(group.gathered_numel for group in groups)
        #: Whether entering the unit needs the other ranks.
        self.is_collective = any(group.is_collective for group in groups)
        self._shows_full = True  # in the places where its parameters are registered
        #: The context that it runs under. Kept alive here, in a cycle that can be collected while a
        #: pass lasts, and for the context alone: a unit knows nothing above itself.
        self.scheduled_by: object = None
        self.index = 0  # in the context's registration order
        self.depth = 0  # forwards of the module that are running, one inside the other
        self.recomputing = False  # the forward that runs is a recomputation inside a backward
        self.forward_methods: set[str] = set()  # of the module, that count as forwards
        self.held = 0  # `unsharded` scopes around it
        self.pinned = False  # an output is a view of what was gathered
        self.entered_forward = False  # since gradients were last final
        self.entered_without_grad = False  # likewise: a reentrant checkpoint may recompute it
        self.call: Call | None = None  # the latest, if gradients are recorded
        self.entered_calls: set[Call] = set()  # in the backward that runs
        self.not_left: set[Call] = set()  # those of them that it has not left
        self.met_in_backward = False  # by the backward that runs: recomputed, or a call entered
        self.may_rest = False  # it has left some, and not released the weights since

    @property
    def is_left_together(self) -> bool:
        """Backward leaves its calls only at points that all ranks share: what was reduced before
        the unit is recomputed must be the same on each."""
        return self.is_collective and self.entered_without_grad

    def rename(self, name: str) -> None:
        """Take the name that the root knows the unit by; the same on every rank."""
        self.name = name or self.name
        for group in self.groups:
            group.rename(f"{self.name} ({str(group.dtypes.compute).removeprefix('torch.')})")

    # -- weights ------------------------------------------------------------------------------

    def examine_modules(self) -> None:
        """Raise if a parameter came into the unit's modules that nobody looks after."""
        module = self.module()
        if module is not None and not self._structure.is_unchanged:
            self._structure.accept(module, unit=self.name)

    def take_structure(self, named_modules: Named) -> None:
        """These are the unit's modules, as paths inside it and modules."""
        self._structure = Structure(named_modules)

    def refuse_unwritten(self) -> None:
        """Raise if a parameter came without values, on meta, and was given none since."""
        for group in self.groups:
            for index in group.weights.unwritten():
                raise UnsupportedError(
                    f"parameter {group.parameters[index].name!r} of unit {self.name!r} was on meta "
                    "when the unit was made and has no values yet. Load a state dict, or run each "
                    "module's reset_parameters() with the same seed on all ranks; "
                    "module.to_empty(device=...) gives buffers their memory before."
                )

    def groups_by_holder(self) -> dict[int, list[ParameterGroup]]:
        """The groups of the parameters that a module holds directly, by id of its dict of them."""
        found: dict[int, dict[ParameterGroup, None]] = {}
        for group in self.groups:
            for parameter in group.parameters:
                for slot in parameter.slots:
                    found.setdefault(id(slot.holder), {})[group] = None
        return {holder: list(groups) for holder, groups in found.items()}

    def submit_gather(
        self, groups: Sequence[ParameterGroup] | None = None, *, forward: bool
    ) -> None:
        """Start gathering all groups, or these; no-op where that was done."""
        phase = "forward" if forward else "backward"
        for group in self.groups if groups is None else groups:
            group.submit_gather(label=f"{group.label}: gather for {phase}")

    def await_gather(self, groups: Sequence[ParameterGroup] | None = None) -> None:
        """Make compute wait for the gathered parameters."""
        for group in self.groups if groups is None else groups:
            group.await_gather()

    def joined(self) -> None:
        """Compute has waited for all lanes."""
        for group in self.groups:
            group.joined()

    def release(self, *, copies: bool = False) -> None:
        """Let go of gathered parameters, unless someone outside still looks at them."""
        if self.held or self.depth or (self.pinned and not copies):
            return
        for group in self.groups:
            group.release(copies=copies)

    def leave(self, call: Call, *, more_to_come: bool, everywhere: bool) -> None:
        """Backward is done with a call: whatever used the weights in it has run.

        Args:
            more_to_come: other calls of this unit wait for their backward.
            everywhere: all ranks are at this point, so that what is released and then gathered
                again is so on all of them. Else only what cannot come again is released now.
        """
        self.not_left.discard(call)
        comes_again = more_to_come or call.recomputed or self.entered_without_grad
        self.may_rest = self.reshard_after_forward or not more_to_come
        if everywhere or not comes_again:
            self.rest()

    def rest(self) -> None:
        """Release what backward has left."""
        if self.may_rest and not self.not_left:
            self.may_rest = False
            self.show_sharded()
            self.release()

    def sync_requires_grad(self) -> None:
        """Freezing and unfreezing is honoured from the next forward on."""
        for group in self.groups:
            group.sync_requires_grad()

    def show_full(self) -> None:
        """Let the module see full parameters."""
        if self._shows_full:
            return
        self._shows_full = True
        for parameter in self.parameters:
            parameter.show_full(self.name)

    def show_sharded(self) -> None:
        """Let the world see sharded parameters, unless a forward or `unsharded` scope is open."""
        if self.held or self.depth or not self._shows_full:
            return
        self._shows_full = False
        for parameter in self.parameters:
            parameter.show_sharded()

    def written(self) -> Tensor:
        """Per parameter, 1.0 where the full one was written since it was gathered, on this rank."""
        return torch.cat([group.written() for group in self.groups])

    def write_back(self, written: Sequence[bool]) -> None:
        """Take the full parameters that were ``written`` on any rank into the main weights."""
        start = 0
        for group in self.groups:
            group.write_back(written[start : start + len(group.parameters)])
            start += len(group.parameters)

    def refuse_writes(self) -> None:
        """Raise if the forward that just ran overwrote a gathered weight: it would be lost.

        Not so inside `unsharded`, which may write, and whose end keeps what was written.
        """
        if self.held:
            return
        self.refuse_other_faces()
        for group in self.groups:
            written = group.written_in_forward()
            if written is not None:
                lost = "the gathered copy is dropped, so the change would be lost"
                if not group.gathered_numel:
                    lost = "each rank has changed it by its own data, so the ranks now differ"
                raise UnsupportedError(
                    f"the forward of unit {self.name!r} wrote to its own parameter "
                    f"{written.name!r} (F.embedding(max_norm=...) does); {lost}. Change weights "
                    "between steps, inside `with unsharded(module):`."
                )

    def refuse_other_faces(self) -> None:
        """Raise if a whole weight was exchanged while it was shown: what took its place is lost."""
        for group in self.groups:
            storage = group.full.flat.untyped_storage()
            start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
            for parameter in group.parameters:
                full = parameter.full
                lies_there = (
                    start in storages_of(full)
                    if hasattr(full, "__tensor_flatten__")
                    else not full.numel() or start <= full.data_ptr() < end
                )
                if not (parameter.shows_full and lies_there):
                    raise UnsupportedError(
                        f"parameter {parameter.name!r} of unit {self.name!r} was given other "
                        "memory, or another one was put in its place, while it was whole (by "
                        ".data = ..., set_(), swap_tensors() or an assignment); that would be "
                        "lost. Copy values into it, inside `with unsharded(module):`."
                    )

    def shares_storage(self, tensors: Sequence[Tensor]) -> bool:
        """Whether one of ``tensors`` is a view of what was gathered."""
        gathered = {
            group.full.flat.untyped_storage().data_ptr()
            for group in self.groups
            if group.gathered_numel
        }
        return any(address in gathered for tensor in tensors for address in storages_of(tensor))

    # -- gradients ----------------------------------------------------------------------------

    @property
    def entered_backward(self) -> bool:
        """The backward that runs has entered a call of the unit."""
        return bool(self.entered_calls)

    @property
    def trainable(self) -> bool:
        return any(group.gradients.expected for group in self.groups)

    @property
    def started(self) -> bool:
        """Gradients arrived that were not reduced yet."""
        return any(group.gradients.started for group in self.groups)

    def take_part(self, forward_pass: ForwardPass) -> None:
        """A forward enters the unit, or a backward comes to one that may have."""
        self.entered_forward |= (id(self), True) in forward_pass.entered
        self.entered_without_grad |= (id(self), False) in forward_pass.entered

    def reduce(self, *, final: bool) -> None:
        """Submit the reductions of all groups, in their order."""
        for group in self.groups:
            if group.gradients.expected:
                group.gradients.reduce(final=final)

    def release_inputs(self) -> None:
        """Give back the reduce inputs, waiting for their reductions."""
        for group in self.groups:
            group.gradients.release_input()

    def collect(self, *, final: bool) -> None:
        """Show reduced gradients as ``.grad``."""
        for group in self.groups:
            if group.gradients.expected:
                group.gradients.collect(final=final)

    def end_backward(self) -> None:
        """Forget where the backward that ends stood."""
        self.show_sharded()
        self.not_left.clear()
        self.may_rest = self.met_in_backward = False
        self.entered_calls.clear()

    def abandon(self) -> None:
        """Forget the pass that failed: gradients in the making, gathered storage, shown faces."""
        self.depth = 0
        self.pinned = False
        for group in self.groups:
            group.gradients.abandon()
        self.end_backward()
        self.release(copies=True)


def unit_of(module: nn.Module) -> Unit | None:
    """The unit that a module is, or None."""
    return vars(module).get(UNIT)
