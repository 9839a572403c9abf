"""Owns ShardedTensor: what parameters, gradients and optimizer state are at rest.

A DTensor over one rank's rows of a flat buffer. It never lies: an operation gives what it would
give on the whole tensor, or raises UnsupportedError. Knows no flat buffer, no unit and no backend;
which operations run, and how, is in ``sharded_ops``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.utils.hooks import RemovableHandle

from .errors import UnsupportedError
from .row_split import Geometry, Rows, RowSplit
from .sharded_checkpoint import chunks, write_items
from .sharded_collectives import gather_rows, reduce_partial
from .sharded_fallback import dispatch_is_honoured, function_fallback
from .sharded_ops import dispatch
from .sharded_refusals import REMEDY, refuse

__all__ = ["ShardedTensor", "WriteCounter", "dispatch_is_honoured"]

_register_hook: Callable[..., RemovableHandle] = Tensor.register_hook
_new_dtensor = Tensor._dtensor__new__


class WriteCounter:
    """How often a main weight was written through dispatch; shared by all that alias it."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class ShardedTensor(DTensor):
    """A tensor of which this rank holds some rows, no row, or all of them.

    Made by :meth:`wrap`. Its ``shape`` is that of the whole tensor. What runs on it: elementwise,
    foreach and fused operations (so every elementwise optimizer), reductions over the whole tensor
    (collective over the mesh axes it is split over, giving plain 0-D tensors), copies and casts.
    Operands lie alike or hold one value. Placed Partial, only what keeps the pending sum right
    runs. All else raises UnsupportedError naming the tensor and what to do instead.

    Where torch ignores a DTensor subclass's dispatch (torch 2.11; see
    :func:`dispatch_is_honoured`), elementwise operations, and with them optimizers, ``to_local``
    and ``full_tensor`` work, and the rest is refused; writes are then counted only if made in
    Python.

    Attributes:
        writes: the counter shared by all tensors over the same main weight.
    """

    __slots__ = ("_geometry", "_hook_target", "_name", "_owner", "writes")

    _geometry: Geometry
    _name: str
    _hook_target: Tensor | None  # where register_hook goes; set by whoever computes gradients
    _owner: object  # whose memory this is, for the owner's own use; copies have none
    writes: WriteCounter

    def __new__(cls, *args: object, **kwargs: object) -> ShardedTensor:
        raise TypeError("a ShardedTensor is made by ShardedTensor.wrap(...)")

    @classmethod
    def wrap(
        cls,
        local: Tensor,
        *,
        shape: Sequence[int],
        mesh: DeviceMesh,
        placements: Sequence[Placement],
        name: str,
        writes: WriteCounter | None = None,
    ) -> ShardedTensor:
        """A sharded tensor over ``local``, sharing its memory. Local; no communication.

        Args:
            local: this rank's rows, contiguous, of shape ``(rows, *shape[1:])``; of shape
                ``shape`` where no axis is split. A 0-D tensor's one row has shape ``(1,)`` or
                ``()`` on its owner and ``(0,)`` elsewhere.
            shape: of the whole tensor.
            mesh: whose axes ``placements`` describes, one each.
            placements: ``RowSplit``, PyTorch's ``Replicate``, or its ``Partial`` (sum or avg).
            name: the parameter's, for messages.
            writes: the counter of the main weight this is over; a new one by default.

        Writes through ``local`` itself, or through other views of its buffer, are not seen by
        ``epoch``: whoever makes them adds to ``writes.count``.

        Raises:
            PlacementError: placements that do not fit the mesh or the shape.
            ValueError: a local tensor of another shape, not contiguous, made under inference mode,
                or itself a DTensor.
        """
        if not dispatch_is_honoured() and "__torch_function__" not in vars(cls):
            cls.__torch_function__ = classmethod(function_fallback)  # type: ignore
        geometry = Geometry.of(shape, mesh, placements)
        if isinstance(local, DTensor):
            raise ValueError(f"{name!r}: local is a {type(local).__name__}; give its local tensor.")
        if not geometry.shape and local.numel() == geometry.local_shape.numel() == 1:
            local = local.reshape(geometry.local_shape)
        if local.shape != geometry.local_shape or not local.is_contiguous():
            raise ValueError(
                f"{name!r}: local has shape {tuple(local.shape)} and strides {local.stride()}; "
                f"this rank's rows {geometry.rows} need a contiguous tensor of shape "
                f"{tuple(geometry.local_shape)}."
            )
        if local.is_inference():
            raise ValueError(
                f"{name!r}: local was made under torch.inference_mode(), where writes are not "
                "counted; make it outside."
            )
        with torch.inference_mode(False):
            # Views of one buffer share a version counter; `.data` starts one of its own, so that
            # a write to one weight does not look like a write to its neighbours.
            return cls._assemble(local.data, geometry, name, writes)

    @classmethod
    def _assemble(
        cls, local: Tensor, geometry: Geometry, name: str, writes: WriteCounter | None = None
    ) -> ShardedTensor:
        tensor = _new_dtensor(cls, local, geometry.spec(local.dtype), requires_grad=False)
        tensor._geometry = geometry
        tensor._name = name
        tensor._hook_target = tensor._owner = None
        tensor.writes = WriteCounter() if writes is None else writes
        return tensor

    def _alias(
        self, local: Tensor | None = None, geometry: Geometry | None = None
    ) -> ShardedTensor:
        """Another tensor over the same memory, or over a view of it that ``geometry`` describes."""
        # As views are: an alias of a normal tensor is one, also under inference mode.
        with torch.inference_mode(self.is_inference()):
            return self._assemble(
                self._local_tensor if local is None else local,
                self._geometry if geometry is None else geometry,
                self._name,
                self.writes,
            )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return dispatch(cls, func, args, kwargs or {})

    # What it is

    @property
    def row_split(self) -> RowSplit | None:
        """Where the rows lie, or None where every rank holds all of them."""
        return self._geometry.split

    @property
    def rows(self) -> Rows:
        """This rank's rows ``(start, stop)`` of dim 0; a 0-D tensor counts as one row."""
        return self._geometry.rows

    @property
    def epoch(self) -> int:
        """A count that grows with every write to the memory, and with no read.

        Seen are writes by dispatch (in place, foreach, fused; through ``detach``, ``.data``, an
        alias or a Parameter over it; under inference mode) and writes through ``to_local()``.
        Not seen, as for plain tensors: fused writes to ``to_local()`` and its ``.data``, NumPy
        and raw pointers.
        """
        local = self._local_tensor
        return self.writes.count + (0 if local.is_inference() else local._version)

    def __repr__(self) -> str:  # type: ignore[override]
        start, stop = self.rows
        held = "whole" if self._geometry.is_whole else f"rows {start}:{stop}"
        grad = ", requires_grad=True" if self.requires_grad else ""
        return (
            f"ShardedTensor({self._name!r}, shape={tuple(self.shape)}, {held}, "
            f"placements={self.placements}, dtype={self.dtype}, device={self.device}{grad})"
        )

    # Reading

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """This rank's rows, sharing memory; writes to them count in ``epoch``.

        A split 0-D tensor has local shape ``(1,)`` or ``(0,)``. Gradients do not flow through: a
        backward that reaches the result raises UnsupportedError.
        """
        if grad_placements is not None:
            refuse(self, "to_local(grad_placements=...)", "gradients do not flow through it")
        local: Tensor = self._without_gradient(self._local_tensor, "to_local()")
        return local

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """The whole tensor: a fresh plain copy. Collective over the mesh axes of the placements.

        Gradients do not flow through: a backward that reaches the result raises UnsupportedError.
        """
        if grad_placements is not None:
            refuse(self, "full_tensor(grad_placements=...)", "gradients do not flow through it")
        whole = gather_rows(reduce_partial(self._local_tensor, self._geometry), self._geometry)
        result: Tensor = self._without_gradient(whole, "full_tensor()")
        return result

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> ShardedTensor:
        """The same values, placed otherwise on the same mesh: a fresh tensor. Collective.

        To Replicate, RowSplit, or where it is already. Holds the whole tensor in between. Returns
        when it is done, whatever ``async_op`` says. Gradients do not flow through.
        """
        if device_mesh is not None and device_mesh != self.device_mesh:
            refuse(self, "redistribute()", "it stays on its mesh")
        if placements is None:
            raise ValueError("redistribute() needs placements, one per mesh axis.")
        geometry = self._geometry
        target = Geometry.of(geometry.shape, geometry.mesh, placements)
        local = (
            self._local_tensor if forward_dtype is None else self._local_tensor.to(forward_dtype)
        )
        if target is geometry:
            moved = local.clone()
        elif target.is_partial:
            refuse(self, "redistribute()", "a finished value has no contributions to split it into")
        else:
            moved = gather_rows(reduce_partial(local, geometry), geometry)
            if not target.is_whole:
                moved = target.local_of(moved).clone()
        placed = self._assemble(moved, target, self._name)
        result: ShardedTensor = self._without_gradient(placed, "redistribute()")
        return result

    def _without_gradient(self, value: Any, way: str) -> Any:
        if torch.is_grad_enabled() and self.requires_grad:
            return _NoGradient.apply(self, value, f"{way} of {self._name!r}")
        return value

    def __setitem__(self, key: Any, value: Any) -> None:
        """``tensor[mask] = number`` with a bool mask that lies alike; other keys are refused."""
        masks = isinstance(key, ShardedTensor) and key.dtype == torch.bool
        if masks and (not isinstance(value, Tensor) or value.numel() == 1):
            self.masked_fill_(key, value.reshape(()) if isinstance(value, Tensor) else value)
        else:
            super().__setitem__(key, value)

    # Autograd and attributes that PyTorch would take in without effect

    @property
    def data(self) -> ShardedTensor:
        """An alias without autograd history; writes through it count."""
        return self._alias()

    @data.setter
    def data(self, value: Tensor) -> None:
        refuse(
            self,
            "assigning .data",
            "the memory belongs to a flat buffer, which would keep the old values",
            "Write into it: `with torch.no_grad(): tensor.copy_(value)`.",
        )

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
        """Register on the full parameter, whose gradient is computed; not on the rows at rest."""
        if self._hook_target is not None:
            return _register_hook(self._hook_target, hook)
        if self.is_leaf:
            refuse(
                self,
                "register_hook()",
                "no gradient of a backward arrives at the rows at rest, so it would never run",
                "Register it before fully_shard.",
            )
        return _register_hook(self, hook)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> NoReturn:
        """Refused: the gradient at rest is not accumulated by autograd."""
        refuse(
            self,
            "register_post_accumulate_grad_hook()",
            "gradients are reduced into it, not accumulated by autograd, so it would never run",
            "Use register_hook(), or read .grad after backward.",
        )

    # Copies of the object

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedTensor:
        """Independent rows, counter and gradient; aliases copied together stay aliases."""
        if not self.is_leaf:
            raise RuntimeError(
                f"{self._name!r}: only graph leaves can be deep-copied; detach() it first."
            )
        # Rows and counter by their own identity: what shares them shares the copies.
        if id(self._local_tensor) not in memo:
            memo[id(self._local_tensor)] = self._local_tensor.detach().clone()
        if id(self.writes) not in memo:
            memo[id(self.writes)] = WriteCounter()
        result = self._assemble(
            memo[id(self._local_tensor)], self._geometry, self._name, memo[id(self.writes)]
        )
        memo[id(self)] = result
        result.requires_grad_(self.requires_grad)
        for key, value in vars(self).items():
            setattr(result, key, copy.deepcopy(value, memo))
        if self.grad is not None:
            result.grad = copy.deepcopy(self.grad, memo)
        return result

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        refuse(
            self,
            "pickling (torch.save, copy.copy)",
            "it would write one rank's rows under the name of the whole",
            "Use torch.distributed.checkpoint, or save polyshard.full_state_dict(module).",
        )

    def __tensor_flatten__(self) -> NoReturn:
        refuse(
            self,
            "tracing (torch.compile)",
            "compiled code would write it unseen",
            "Compile the modules; run what touches their weights at rest outside.",
        )

    # Distributed checkpoints

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        return write_items(self, fqn)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return chunks(self)

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self._local_tensor if self.shape else self._local_tensor.reshape(())


class _NoGradient(torch.autograd.Function):
    """Hands a value on and refuses the gradient that comes back."""

    @staticmethod
    def forward(ctx: Any, source: ShardedTensor, value: Tensor, way: str) -> Tensor:
        ctx.way = way
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        raise UnsupportedError(
            f"a backward reached {ctx.way}: gradients do not flow through it, for no rank knows "
            f"the others' part. {REMEDY}"
        )


def _refused_method(name: str, reason: str) -> Callable[..., NoReturn]:
    def method(self: ShardedTensor, *args: object, **kwargs: object) -> NoReturn:
        refuse(self, f"{name}()", reason)

    method.__name__ = name
    return method


# Methods that never reach dispatch and would hand out the wrapper's missing memory.
for _name in (
    "__array__",
    "__dlpack__",
    "apply_",
    "as_subclass",
    "data_ptr",
    "map_",
    "numpy",
    "share_memory_",
    "storage",
    "tolist",
    "untyped_storage",
):
    setattr(
        ShardedTensor, _name, _refused_method(_name, "the whole tensor has no memory on this rank")
    )
