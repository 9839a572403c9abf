"""Two runs of the same operations: a plain process with all data, and a rank of a sharded model.

Owns when they agree. Knows no drawn case: scripts carry the source of what is here, as far as they
use it, so it needs nothing but torch and polyshard.

Where the two may differ by right, and what is done about it:

- What raises on some ranks only is left out on all of them, gradients are cleared: ranks that do
  not do alike are an error of their own. The plain process runs first, so it is known.
- After an error in backward the gradients say nothing, so they are cleared on both sides.
- Gradients that are still ``Partial`` between microbatches are compared once they are finished.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from polyshard import (
    BackendError,
    full_state_dict,
    load_full_state_dict,
    microbatch,
    unsharded,
)


class Mishap(Exception):
    """What goes wrong in user code."""


class Difference(AssertionError):
    """The sharded model does not do what the plain one does."""


class OnSomeRanks(Exception):
    """The plain process raised for the data of some ranks only."""


class Run:
    """Operations on a model for ``ranks``: all of them in the plain process, else this one.

    ``share`` scales each rank's loss; ``has_pending``: gradients may wait for a last microbatch;
    ``expected`` is what the plain run has seen.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        batch: Callable[[int, int], Tensor],
        ranks: Sequence[int],
        share: float,
        tolerance: float,
        has_pending: bool,
        expected: Sequence[dict[str, Any]] | None = None,
    ) -> None:
        self.model, self.optimizer, self.batch = model, optimizer, batch
        self.ranks, self.share, self.tolerance = ranks, share, tolerance
        self.has_pending = has_pending
        self.expected, self.known = expected, {}
        self.seen: list[dict[str, Any]] = []  # by operation
        self.noted: dict[str, Tensor | None] = {}  # in the operation that runs
        self.losses: dict[str, dict[int, Tensor]] = {}
        self.inputs: dict[str, dict[int, Tensor]] = {}
        self.last: dict[str, bool] = {}
        self.final = True  # no gradients wait for a last microbatch

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """One operation; the plain run remembers what it did, the other compares."""
        self.noted, error = {}, None
        self.known = {} if self.expected is None else self.expected[len(self.seen)]
        try:
            yield
        except Exception as caught:
            error = caught
        kind = "" if error is None else type(error).__name__
        self.seen.append({"error": kind})
        if self.expected is not None:
            wanted = self.known["error"]
            if bool(kind) != bool(wanted) or isinstance(error, BackendError):
                happened = f"raised {kind}: {error}" if error else "did not raise"
                instead = f"raises {wanted}" if wanted else "does not raise"
                raise Difference(f"{what}: {happened}; the plain process {instead}") from error
        if error is not None and not (isinstance(error, Mishap) and "forward" in str(error)):
            self.optimizer.zero_grad()
            self.final = True
            if not isinstance(error, Mishap):
                self.losses.clear()
        for key, value in self.values():
            if self.expected is None:
                self.seen[-1][key] = None if value is None else value.detach().clone()
            else:
                self.compare(what, key, value, self.known[key])

    def values(self) -> Iterator[tuple[str, Tensor | None]]:
        """What is to agree now, the same keys in the same order on every rank."""
        yield from self.noted.items()
        for name, parameter in self.model.named_parameters():
            yield f"weight {name}", parameter
            if self.final:
                yield f"gradient of {name}", parameter.grad

    def compare(self, what: str, key: str, value: Tensor | None, wanted: Tensor | None) -> None:
        """Raise Difference unless both are None, or equal within the tolerance."""
        if value is None or wanted is None:
            if value is not wanted:
                found = "is None" if value is None else "is there"
                instead = "is None" if wanted is None else "has it"
                raise Difference(f"{what}: {key} {found}; in the plain process it {instead}")
            return
        if value.shape != wanted.shape:
            raise Difference(f"{what}: {key} has shape {value.shape}, not {wanted.shape}")
        value, wanted = value.detach(), wanted.detach()
        limit = 0.0
        if wanted.numel() and (wanted.is_floating_point() or wanted.is_complex()):
            limit = self.tolerance * (1 + wanted.abs().nan_to_num(0, 0, 0).max().item())
        if hasattr(value, "to_local"):  # this rank's rows
            chunks = value.__create_chunk_list__()
            if not chunks:
                return
            value = value.to_local()
            if wanted.dim():
                wanted = wanted.narrow(0, chunks[0].offsets[0], chunks[0].sizes[0])
        same = value.to(wanted.dtype).reshape(wanted.shape)
        if not torch.allclose(same, wanted, rtol=0, atol=limit, equal_nan=True):
            raise Difference(f"{what}: {key} differs:\n{value}\nplain process:\n{wanted}")

    def each(self, action: Callable[[int], Any]) -> dict[int, Any]:
        """Do it for every rank that this run plays; results by rank."""
        if self.known.get("error") == OnSomeRanks.__name__:
            raise OnSomeRanks
        results, errors = {}, []
        for rank in self.ranks:
            try:
                results[rank] = action(rank)
            except Exception as error:
                errors.append(error)
        if results and errors:
            raise OnSomeRanks from errors[0]
        if errors:
            raise errors[0]
        return results

    def forward(
        self, name: str, data: int, loss: Callable[[Tensor, int], Tensor], *, last: bool = True
    ) -> None:
        """The losses ``name`` by rank. ``last``: is it a last microbatch."""
        inputs = {rank: self.batch(data, rank) for rank in self.ranks}
        is_scoped = not (last or self.expected is None)
        with microbatch(self.model, is_last=False) if is_scoped else nullcontext():
            losses = self.each(lambda rank: loss(inputs[rank], rank))
        self.losses[name], self.inputs[name], self.last[name] = losses, inputs, last
        self.noted |= {f"loss {name} of rank {rank}": value for rank, value in losses.items()}

    def backward(self, *names: str, retain_graph: bool = False) -> None:
        """Through the sum of these losses, as far as their forwards did not raise."""
        names = tuple(name for name in names if name in self.losses)
        if not names:
            return

        def one(rank: int) -> None:
            total = torch.stack([self.losses[name][rank] for name in names]).sum()
            (total * self.share).backward(retain_graph=retain_graph)

        self.each(one)
        self.final = not self.has_pending or any(self.last[name] for name in names)
        for name in names:
            for rank, value in self.inputs[name].items():
                if value.requires_grad:
                    grad = None if value.grad is None else value.grad / self.share
                    self.noted[f"input gradient {name} of rank {rank}"] = grad
            if not retain_graph:
                del self.losses[name]

    def finish(self, plain: nn.Module, plain_optimizer: torch.optim.Optimizer) -> None:
        """At the end: whole weights, and the state of the optimizers."""
        whole = full_state_dict(self.model)
        for name in dict(plain.named_parameters(remove_duplicate=False)):
            self.compare("at the end", f"saved {name}", whole[name], plain.get_parameter(name))
        pairs = zip(plain.named_parameters(), self.model.parameters(), strict=True)
        for (name, parameter), sharded in pairs:
            wanted = plain_optimizer.state.get(parameter, {})
            state = self.optimizer.state.get(sharded, {})
            if state.keys() != wanted.keys():
                raise Difference(f"at the end: optimizer state of {name}: {set(state)}")
            for key, value in wanted.items():
                if isinstance(value, Tensor):
                    self.compare("at the end", f"state {key} of {name}", state[key], value)

    @contextmanager
    def raising(self, module: nn.Module, phase: str) -> Iterator[None]:
        """Inside, ``module`` raises when its forward or its backward comes by."""

        def blow(*anything: object) -> None:
            raise Mishap(phase)

        def hook(module: nn.Module, args: object, output: Any) -> None:
            if phase == "forward":
                blow()
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(blow)

        handle = module.register_forward_hook(hook)
        try:
            yield
        finally:
            handle.remove()

    @contextmanager
    def unsharded(self) -> Iterator[None]:
        """Inside, weights are whole; in the plain process they always are."""
        with nullcontext() if self.expected is None else unsharded(self.model):
            yield

    def save_full(self) -> dict[str, Tensor]:
        """All whole tensors."""
        if self.expected is None:
            return {name: value.clone() for name, value in self.model.state_dict().items()}
        return full_state_dict(self.model)

    def load_full(self, state: dict[str, Tensor]) -> None:
        """What ``save_full`` gave."""
        if self.expected is None:
            self.model.load_state_dict(state)
        else:
            load_full_state_dict(self.model, state)


class BufferedRun(Run):
    """Each rank that the plain process plays has buffers of its own."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.buffers = {
            rank: {name: value.clone() for name, value in self.model.named_buffers()}
            for rank in self.ranks
        }
        self.before = copy.deepcopy(self.buffers)

    def each(self, action: Callable[[int], Any]) -> dict[int, Any]:
        """With each rank's own buffers in their places."""

        def act(rank: int) -> Any:
            for name, value in self.buffers[rank].items():
                path, _, last = name.rpartition(".")
                self.model.get_submodule(path)._buffers[last] = value
            return action(rank)

        return super().each(act)

    def values(self) -> Iterator[tuple[str, Tensor | None]]:
        """The buffers too; as they were before where ranks leave out what the plain process did."""
        yield from super().values()
        undo = self.seen[-1]["error"] == OnSomeRanks.__name__
        for rank in self.ranks:
            for name, value in self.buffers[rank].items():
                if undo:
                    value.copy_(self.before[rank][name])
                yield f"buffer {name} of rank {rank}", value
        self.before = copy.deepcopy(self.buffers)
