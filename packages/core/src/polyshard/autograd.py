"""The few corners of the autograd engine that hooks need, in one place.

Knows no units. The private names are explained in docs/notes/private-torch-api.md.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, ValuesView
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

#: A version no tensor is ever saved with: using released storage in backward then raises.
NEVER_SAVED = 2**31 - 1


def set_versions(tensors: Sequence[Tensor], versions: Sequence[int]) -> None:
    """Set the counters by which autograd notices that a saved tensor was overwritten."""
    torch._C._autograd._unsafe_set_version_counter(tuple(tensors), tuple(versions))


def current_graph_task() -> int:
    """An id of the backward that runs on this thread, -1 outside of any."""
    return torch._C._current_graph_task_id()


def producers(tensor: Tensor) -> Iterator[Node]:
    """The nodes whose backward runs first for ``tensor``: its own and, for a view, its base's.

    After an in-place change of a view its own node is new and only the base's is certain to run.
    """
    if tensor.grad_fn is not None:
        yield tensor.grad_fn
    base = tensor._base
    if base is not None and base.grad_fn is not None:
        yield base.grad_fn


class SavedMark:
    """What a forward saves for backward at one point, to have a region recomputed up to there.

    Outside of a checkpointed region (``use_reentrant=False``), asking for it back does nothing.
    """

    __slots__ = ("_node",)

    def __init__(self) -> None:
        nothing = torch.empty(0, device="cpu", requires_grad=True)
        self._node = nothing.sin().grad_fn

    def ask_back(self) -> None:
        """Inside a backward, once in each."""
        node = self._node
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            self._node = None  # holds the region with its inputs; backward will not come again
        if node is None:
            return
        try:
            _ = node._saved_self  # type: ignore[attr-defined]
        except RuntimeError as error:
            # The region's input was overwritten: an error only if backward needs it, which says so.
            if "modified by an inplace operation" not in str(error):
                raise


def before_node(node: Node, call: Callable[[], None]) -> None:
    """Run ``call`` each time backward reaches ``node``; of several calls the latest given first.

    A module that hands its input on shares the node with whoever produced that input: backward has
    to reach the module first, as it does where the module computes something.
    """
    metadata: dict[str, Any] = node.metadata  # type: ignore[assignment]
    calls: list[Callable[[], None]] | None = metadata.get(_BEFORE)
    if calls is None:
        calls = metadata[_BEFORE] = []
        node.register_prehook(_LatestFirst(calls))
    calls.append(call)


_BEFORE = "polyshard.before"


class _LatestFirst:
    # Holds the list, not the node: a node that held itself would never be freed.
    __slots__ = ("_calls",)

    def __init__(self, calls: list[Callable[[], None]]) -> None:
        self._calls = calls

    def __call__(self, _grads: object) -> None:
        for call in reversed(self._calls):
            call()


def tensors_in(value: object, *, depth: int = 8) -> Iterator[Tensor]:
    """Tensors in nested containers, dataclasses and plain objects, each container visited once.

    Args:
        depth: how many objects that are no containers to look into, one inside the other.
    """
    seen: set[int] = set()
    waiting = [(value, depth)]
    while waiting:
        item, depth = waiting.pop()
        if isinstance(item, Tensor):
            yield item
            continue
        if item is None or isinstance(item, _ATOMS) or id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Mapping):
            children = list(item.values())
        elif isinstance(item, _CONTAINERS):
            children = list(item)
        elif depth and not isinstance(item, type | torch.nn.Module):
            children, depth = list(_attributes(item)), depth - 1
        else:
            continue
        waiting += [(child, depth) for child in reversed(children)]


def _attributes(item: object) -> Iterator[object]:
    """What an object holds, in its dict and in its slots."""
    yield from getattr(item, "__dict__", {}).values()
    for base in type(item).__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            with suppress(AttributeError):  # not set; or a name that Python has changed
                yield object.__getattribute__(item, name)


def storages_of(tensor: Tensor) -> Iterator[int]:
    """Addresses of the memory behind a tensor; that of the tensors it wraps, if it is a wrapper."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from storages_of(getattr(tensor, name))
    elif tensor.layout is torch.strided:
        yield tensor.untyped_storage().data_ptr()


_CONTAINERS = (list, tuple, set, frozenset, deque, ValuesView)
_ATOMS = (str, bytes, int, float, complex, bool, torch.Size, torch.dtype, torch.device)


class _Task:
    """One running backward. Owned by the engine's callback alone: dead once the engine drops it."""

    __slots__ = ("__weakref__", "id")

    def __init__(self, id: int) -> None:
        self.id = id


class BackwardSession:
    """The outermost backward and the ones nested in it (reentrant checkpointing).

    ``on_end`` runs once, when the outermost has finished. A backward that raised never calls
    back; its task object dies with it, so it cannot be mistaken for a running outer one, and
    ``on_failure`` runs then, before the caller sees the exception. ``on_nested_end`` runs, with
    its id, when a nested one has finished.
    """

    def __init__(
        self,
        on_end: Callable[[], None],
        on_failure: Callable[[], None],
        on_nested_end: Callable[[int], None],
    ) -> None:
        self._on_end, self._on_failure, self._on_nested_end = on_end, on_failure, on_nested_end
        self._tasks: list[weakref.ref[_Task]] = []

    def enter(self) -> None:
        """Note that the current backward concerns us; cheap when it is already known."""
        current = current_graph_task()
        alive = [reference for reference in self._tasks if reference() is not None]
        if any((task := reference()) and task.id == current for reference in alive):
            return
        task = _Task(current)
        self._tasks = [*alive, weakref.ref(task, self._failed)]

        def finished() -> None:
            self._leave(task)

        torch.autograd.Variable._execution_engine.queue_callback(finished)

    @property
    def running(self) -> bool:
        """True while a backward that concerns us has not finished or failed."""
        return any(reference() is not None for reference in self._tasks)

    def nests(self, task: int) -> bool:
        """Whether the current backward is nested in ``task``."""
        alive = {known.id for reference in self._tasks if (known := reference())}
        return task in alive and task != current_graph_task()

    def _leave(self, task: _Task) -> None:
        self._tasks = [known for known in self._tasks if known() not in (None, task)]
        if self._tasks:
            self._on_nested_end(task.id)
        else:
            self._on_end()

    def _failed(self, reference: weakref.ref[_Task]) -> None:
        """A task died that has not left."""
        if reference in self._tasks:
            self._tasks.remove(reference)
            if not self.running:
                self._on_failure()
