"""Sees every torch operation and says which bytes it reads and writes.

Knows the schemas of operations, and storages; knows no lanes. Entered on the thread that trains
and around all submitted work.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .clock import Event
from .memory import Findings, Memory, RaceError

# Methods that hand values to the host, past the dispatcher.
_TO_HOST = ("tolist", "item", "numpy", "__bool__", "__int__", "__float__")
# Functions that make tensors of values that the host has.
_FROM_HOST = ("tensor", "as_tensor", "from_numpy")


_PLAIN = (Tensor, torch.nn.Parameter)


class Memories:
    """The histories of all storages in use, by their Python objects, which live as long.

    Args:
        now: what happens at the moment, on whatever lane calls.
        home: the latest event of a lane, by index.
        findings: takes what is wrong.
    """

    def __init__(
        self,
        now: Callable[[str], Event],
        home: Callable[[int], Event],
        findings: Findings,
    ) -> None:
        self._now, self._home, self._findings = now, home, findings
        self._known: dict[int, tuple[Memory, weakref.ref[Any]]] = {}
        self._paused = threading.local()

    @property
    def is_paused(self) -> bool:
        """Whether operations of the calling thread are left out."""
        return getattr(self._paused, "yes", False)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No operation that the calling thread runs inside is recorded."""
        before, self._paused.yes = self.is_paused, True
        try:
            yield
        finally:
            self._paused.yes = before

    def of(self, tensor: Tensor, name: str | None = None) -> Memory:
        """The history of the storage behind ``tensor``, which begins here if it is new."""
        storage = tensor.untyped_storage()
        key = id(storage)
        known = self._known.get(key)
        if known is not None:
            return known[0]
        name = name or f"a tensor of {storage.nbytes()} bytes"
        memory = Memory(name, self._now("").lane, self._findings)
        self._known[key] = (memory, weakref.ref(storage, lambda _: self._freed(key)))
        return memory

    def _freed(self, key: int) -> None:
        memory, _ = self._known.pop(key)
        with suppress(RaceError):  # a finalizer cannot raise: it was noted
            memory.free(self._home(memory.home))

    def read(self, tensor: Tensor, label: str) -> None:
        """``tensor`` is read now."""
        if tensor.numel():
            self.of(tensor).read(*extent(tensor), self._now(label))

    def made(self, tensor: Tensor, label: str) -> None:
        """An operation gave ``tensor``; if its storage is new, it wrote that."""
        if tensor.numel() and id(tensor.untyped_storage()) not in self._known:
            self.write(tensor, label)

    def write(self, tensor: Tensor, label: str) -> None:
        """``tensor`` is overwritten now."""
        if tensor.numel():
            self.of(tensor).write(*extent(tensor), self._now(label))


def extent(tensor: Tensor) -> tuple[int, int]:
    """The bytes [start, stop) of its storage between the first and the last element."""
    size = tensor.element_size()
    start = int(tensor.storage_offset()) * size
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    span = sum(int((length - 1) * stride) for length, stride in steps)
    return start, start + (span + 1) * size


class _Plan:
    """Which arguments of an operation it reads and writes."""

    def __init__(self, function: Any) -> None:
        self.label = str(function)
        self.uses: list[tuple[int, str, bool]] = []
        for position, argument in enumerate(function._schema.arguments):
            alias = argument.alias_info
            if "Tensor" not in str(argument.type) or (alias is not None and not alias.is_write):
                continue  # a view reads nothing
            self.uses.append((position, argument.name, alias is not None))


class WatchOperations(TorchDispatchMode):
    """Records what operations on plain tensors touch; those of subclasses come by as what they
    do to plain ones."""

    def __init__(self, memories: Memories, come_by: Callable[[], None]) -> None:
        super().__init__()
        self._memories, self._come_by = memories, come_by
        self._plans: dict[Any, _Plan] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._memories.is_paused:
            return func(*args, **kwargs)
        if any(kind not in _PLAIN for kind in types):
            return NotImplemented
        plan = self._plans.get(func)
        if plan is None:
            plan = self._plans[func] = _Plan(func)
        self._come_by()
        for position, name, writes in plan.uses:
            value = args[position] if position < len(args) else kwargs.get(name)
            use = self._memories.write if writes else self._memories.read
            for tensor in _plain(value):
                use(tensor, plan.label)
        result = func(*args, **kwargs)
        for tensor in _plain(result):
            self._memories.made(tensor, plan.label)
        return result


@contextmanager
def watch_host(memories: Memories, refuse_in_capture: Callable[[str], None]) -> Iterator[None]:
    """Record what the host reads, and refuse in a capture what a graph cannot hold.

    PyTorch's functions are replaced for as long: a mode for them would be off inside backward.
    """

    def reads(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            refuse_in_capture(f"the host reads a tensor ({name})")
            if type(tensor) in _PLAIN:
                memories.read(tensor, f"host: {name}")
            return original(tensor, *args, **kwargs)

        return read

    def makes(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def make(*args: Any, **kwargs: Any) -> Any:
            refuse_in_capture(f"a tensor is made of values of the host ({name})")
            return original(*args, **kwargs)

        return make

    with ExitStack() as undo:
        for name in _TO_HOST:
            undo.enter_context(_replaced(Tensor, name, reads(name, getattr(Tensor, name))))
        for name in _FROM_HOST:
            undo.enter_context(_replaced(torch, name, makes(name, getattr(torch, name))))
        yield


@contextmanager
def _replaced(holder: Any, name: str, by: Callable[..., Any]) -> Iterator[None]:
    """An attribute is another one inside; an inherited one is inherited again afterwards."""
    own = vars(holder).get(name)
    setattr(holder, name, by)
    try:
        yield
    finally:
        if own is None:
            delattr(holder, name)
        else:
            setattr(holder, name, own)


def _plain(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.layout is torch.strided:
            yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _plain(item)
