"""The corners of PyTorch that units rely on without its promise: each test notices a change.

docs/notes/private-torch-api.md says why there is no public way.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from polyshard.autograd import (
    NEVER_SAVED,
    BackwardSession,
    SavedMark,
    current_graph_task,
    producers,
    set_versions,
)

MODIFIED = "modified by an inplace operation"


@pytest.fixture(autouse=True)
def _no_garbage_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def leaf() -> Tensor:
    return torch.tensor([2.0, 3.0], requires_grad=True)


class TestVersions:
    """torch._C._autograd._unsafe_set_version_counter and Tensor._version."""

    def test_set_and_read(self) -> None:
        """Versions of several tensors are set at once, up to the one that is never saved."""
        tensors = [leaf(), leaf()]
        set_versions(tensors, [5, NEVER_SAVED])
        assert [tensor._version for tensor in tensors] == [5, NEVER_SAVED]
        set_versions(tensors, [6, 0])
        assert [tensor._version for tensor in tensors] == [6, 0]

    def test_backward_compares_them(self) -> None:
        """A saved tensor is accepted at the version it was saved with and at no other."""
        weight, x = leaf(), leaf()
        set_versions([weight], [7])
        loss = (weight * x).sum()
        set_versions([weight], [8])
        with pytest.raises(RuntimeError, match=MODIFIED):
            loss.backward(retain_graph=True)
        set_versions([weight], [7])
        loss.backward()
        assert x.grad is not None
        assert x.grad.tolist() == [2.0, 3.0]

    @pytest.mark.parametrize(
        "use",
        [
            lambda w, x: (w * x).sum(),
            lambda w, x: (x.view(1, 2) @ w.view(2, 1)).sum(),
            lambda w, x: (w.norm() * x).sum(),
            lambda w, x: nn.functional.linear(x, w.view(1, 2)).sum(),
        ],
    )
    def test_released_storage_is_not_touched(self, use: Callable[[Tensor, Tensor], Tensor]) -> None:
        """A tensor whose storage has no memory and whose version nothing was saved with makes
        backward raise before any kernel reads it."""
        buffer = torch.tensor([2.0, 3.0])
        weight, x = nn.Parameter(torch.empty(2)), leaf()
        weight.data = buffer.view(2)
        loss = use(weight, x)
        buffer.untyped_storage().resize_(0)
        set_versions([weight], [NEVER_SAVED])
        with pytest.raises(RuntimeError) as error:
            loss.backward()
        # Where there is a unit in this process, its words for it come first.
        message = str(error.value.__cause__ or error.value)
        assert MODIFIED in message
        assert f"version {NEVER_SAVED};" in message

    def test_parameters_over_one_buffer_count_apart(self) -> None:
        """Tensors whose `.data` was set to views of one buffer have counters of their own, which
        writes to the buffer and to each other leave alone, and which setting `.data` keeps."""
        buffer = torch.zeros(4)
        one, other = nn.Parameter(torch.empty(2)), nn.Parameter(torch.empty(2))
        set_versions([one, other], [3, 4])
        one.data, other.data = buffer[:2], buffer[2:]
        assert (one._version, other._version) == (3, 4)
        buffer.add_(1.0)
        with torch.no_grad():
            one.mul_(2.0)
        assert (one._version, other._version) == (4, 4)
        assert buffer.tolist() == [2.0, 2.0, 1.0, 1.0]
        one.data.zero_()
        assert one._version == 4


class TestSavedMark:
    """torch._C._autograd._get_current_graph_task_keep_graph, and what is saved, asked back."""

    @pytest.mark.parametrize("retain", [True, False])
    def test_asked_back(self, retain: bool) -> None:
        """A region is recomputed up to the mark, again in a backward that may come again, and not
        where its graph is not retained."""
        seen: list[str] = []
        marks: list[SavedMark] = []

        def region(x: Tensor) -> Tensor:
            seen.append("begins")
            marks.append(SavedMark())
            seen.append("goes on")
            return x.clone()  # saves nothing

        y = checkpoint(region, leaf(), use_reentrant=False)
        assert y.grad_fn is not None
        y.grad_fn.register_prehook(lambda grads: marks[0].ask_back())
        y.sum().backward(retain_graph=True)
        assert seen == ["begins", "goes on", "begins"]  # nothing is saved after it
        y.sum().backward(retain_graph=retain)
        assert seen == ["begins", "goes on", "begins", "begins"]
        if not retain:
            y = (2 * y).sum()  # its own graph is there: only the region is not held any more
            y.backward()
            assert seen == ["begins", "goes on", "begins", "begins"]


class TestGraphTask:
    """torch._C._current_graph_task_id."""

    def test_outside(self) -> None:
        """Outside of any backward it is -1."""
        assert current_graph_task() == -1

    def test_inside(self) -> None:
        """It is one number throughout a backward, another one in the next."""
        seen: list[int] = []
        for _ in range(2):
            x = leaf()
            y = x * 2
            for tensor in (x, y):
                tensor.register_hook(lambda grad: seen.append(current_graph_task()))
            y.sum().backward()
        assert -1 not in seen
        assert seen[0] == seen[1] != seen[2] == seen[3]
        assert current_graph_task() == -1

    def test_nested(self) -> None:
        """A backward inside a backward has a number of its own, and forwards recomputed there
        are known to be inside one."""
        seen: list[tuple[str, int]] = []

        def inner(x: Tensor) -> Tensor:
            seen.append(("forward", current_graph_task()))
            y = x * 2
            if y.requires_grad:
                y.register_hook(lambda grad: seen.append(("inner", current_graph_task())))
            return y

        out = checkpoint(inner, leaf(), use_reentrant=True)
        out.register_hook(lambda grad: seen.append(("outer", current_graph_task())))
        out.sum().backward()
        assert [place for place, _ in seen] == ["forward", "outer", "forward", "inner"]
        first, outer, recomputed, nested = (task for _, task in seen)
        assert first == -1
        assert outer == recomputed != -1
        assert nested not in (outer, -1)


class Failure(Exception):
    """Raised on purpose."""


class TestCallbacks:
    """torch.autograd.Variable._execution_engine.queue_callback."""

    def test_runs_at_the_end(self) -> None:
        """A callback runs once, after every gradient, before backward returns."""
        x = leaf()
        y = x * 2
        seen: list[object] = []

        def queue(grad: Tensor) -> None:
            torch.autograd.Variable._execution_engine.queue_callback(
                lambda: seen.append(None if x.grad is None else x.grad.tolist())
            )

        y.register_hook(queue)
        y.sum().backward()
        assert seen == [[2.0, 2.0]]
        y = x * 2
        y.sum().backward()
        assert len(seen) == 1

    def test_several_run_in_order(self) -> None:
        """Callbacks run in the order in which they were queued, and may queue more."""
        x, seen = leaf(), []
        queue = torch.autograd.Variable._execution_engine.queue_callback

        def first() -> None:
            seen.append("first")
            queue(lambda: seen.append("third"))

        def queue_two(grad: Tensor) -> None:
            queue(first)
            queue(lambda: seen.append("second"))

        x.register_hook(queue_two)
        x.sum().backward()
        assert seen == ["first", "second", "third"]

    def test_outside_of_backward(self) -> None:
        """There is nothing to queue it on outside of a backward."""
        with pytest.raises(RuntimeError):
            torch.autograd.Variable._execution_engine.queue_callback(lambda: None)

    def test_an_exception_comes_out_of_backward(self) -> None:
        """What a callback raises, backward raises."""
        x = leaf()

        def fail() -> None:
            raise Failure

        x.register_hook(lambda grad: torch.autograd.Variable._execution_engine.queue_callback(fail))
        with pytest.raises(Failure):
            x.sum().backward()

    def test_a_failed_backward_drops_its_callbacks(self) -> None:
        """A backward that raises never calls back, and what the callback held is gone before the
        caller sees the exception."""
        x = leaf()
        y = x * 2

        class Held:
            pass

        held: list[weakref.ref[Held]] = []
        alive_at_failure: list[bool] = []

        def queue(grad: Tensor) -> None:
            owned = Held()
            held.append(weakref.ref(owned))
            torch.autograd.Variable._execution_engine.queue_callback(lambda: print(owned))

        def fail(grad: Tensor) -> None:
            alive_at_failure.append(held[0]() is not None)
            raise Failure

        y.register_hook(queue)
        x.register_hook(fail)
        try:
            y.sum().backward()
        except Failure:
            dead = held[0]() is None
        assert alive_at_failure == [True]
        assert dead


class TestSession:
    """What BackwardSession makes of the two names above."""

    def events(self) -> tuple[BackwardSession, list[str]]:
        seen: list[str] = []
        return BackwardSession(
            on_end=lambda: seen.append("end"),
            on_failure=lambda: seen.append("failed"),
            on_nested_end=lambda task: seen.append("nested end"),
        ), seen

    def test_ends_once(self) -> None:
        """However often it was entered, a backward ends once; the next one again."""
        session, seen = self.events()
        x = leaf()
        y = x * 2
        for tensor in (x, y):
            tensor.register_hook(lambda grad: session.enter())
        for expected in (1, 2):
            y.sum().backward(retain_graph=True)
            assert seen == ["end"] * expected
            assert not session.running

    def test_nested_ones_end_with_the_outermost(self) -> None:
        """A backward that was entered inside another ends nothing."""
        session, seen = self.events()

        def inner(x: Tensor) -> Tensor:
            y = x * 2
            if y.requires_grad:
                y.register_hook(lambda grad: session.enter())
            return y

        x = leaf()
        x.register_hook(lambda grad: seen.append("outer gradient"))
        out = checkpoint(inner, x * 3, use_reentrant=True)
        out.register_hook(lambda grad: session.enter())
        out.sum().backward()
        assert seen == ["nested end", "outer gradient", "end"]

    def test_a_failure_is_noticed_at_once(self) -> None:
        """A backward that raises is over when the caller sees the exception."""
        session, seen = self.events()
        x = leaf()
        y = x * 2
        y.register_hook(lambda grad: session.enter())

        def fail(grad: Tensor) -> None:
            raise Failure

        handle = x.register_hook(fail)
        try:
            y.sum().backward(retain_graph=True)
        except Failure:
            seen.append("seen by the caller")
        assert seen == ["failed", "seen by the caller"]
        handle.remove()
        y.sum().backward()
        assert seen == ["failed", "seen by the caller", "end"]


class TestEngineOrder:
    """Of the nodes that are ready, autograd runs the one made last first."""

    @pytest.mark.parametrize("short", [False, True])
    def test_later_branches_run_first(self, short: bool) -> None:
        """A node runs after all that were made after it, whether or not they lead to it."""
        seen: list[str] = []

        def marked(name: str, tensor: Tensor) -> Tensor:
            assert tensor.grad_fn is not None
            tensor.grad_fn.register_prehook(lambda grads: seen.append(name))
            return tensor

        early = marked("early", leaf() * 2)
        aside = marked("aside", leaf() * 3)  # does not lead to `early`
        for step in range(1 if short else 5):
            aside = marked(f"aside {step}", aside.sin())
        late = marked("late", early * 4)
        (marked("sum", late + aside)).sum().backward()
        assert seen[-1] == "early"
        assert seen.index("sum") < seen.index("late") < seen.index("aside")


class TestNodeMetadata:
    """Node.metadata, in whose stub it is a method."""

    @pytest.mark.parametrize("kind", ["native", "custom"])
    def test_one_dict_for_the_life_of_a_node(self, kind: str) -> None:
        """It is the same dict each time the node is looked at."""
        out = leaf() * 2 if kind == "native" else Doubled.apply(leaf())
        assert out.grad_fn is not None
        out.grad_fn.metadata["polyshard.test"] = mark = [1]
        assert out.grad_fn.metadata["polyshard.test"] is mark

    def test_it_is_freed_with_the_node(self) -> None:
        """What a hook and the metadata share does not keep the node alive."""
        out = leaf() * 2
        assert out.grad_fn is not None
        calls = {object()}
        out.grad_fn.metadata["polyshard.test"] = calls
        out.grad_fn.register_prehook(lambda grads, calls=calls: None)
        reference = weakref.ref(calls)
        del calls, out
        assert reference() is None


class Doubled(torch.autograd.Function):
    """A node that is written in Python."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad * 2


class TestBase:
    """Tensor._base."""

    def test_a_view_knows_its_base(self) -> None:
        """A view's base is the tensor that owns the graph node certain to run."""
        y = leaf() * 2
        view = y.view(1, 2)
        assert view._base is y
        assert y._base is None
        assert list(producers(view)) == [view.grad_fn, y.grad_fn]
        assert list(producers(y)) == [y.grad_fn]
        assert list(producers(leaf())) == []

    @pytest.mark.parametrize("shape", [(5, 4), (2, 5, 4)])
    @pytest.mark.parametrize("in_place", [True, False])
    def test_hooks_on_producers_run(self, shape: tuple[int, ...], in_place: bool) -> None:
        """One of the hooks on what produced a linear layer's output runs before any node of the
        layer, also after the output was changed in place."""
        layer = nn.Linear(4, 4)
        seen: list[str] = []
        x = torch.ones(shape)
        out = layer(x)
        for node in producers(out):
            node.register_prehook(lambda grads: seen.append("hook"))
        layer.weight.register_hook(lambda grad: seen.append("weight"))
        out = out.add_(x) if in_place else out + x
        out.sum().backward()
        assert seen[0] == "hook"
        assert seen[-1] == "weight"


class TestParameterDicts:
    """nn.Module._parameters."""

    def test_one_dict_for_life(self) -> None:
        """A module looks its parameters up in one dict, which its methods keep."""
        module = nn.Linear(2, 2)
        holder = module._parameters
        module.to(torch.float64)
        module.load_state_dict(nn.Linear(2, 2).state_dict())
        module.weight = nn.Parameter(torch.zeros(2, 2))
        module.register_parameter("extra", None)
        module.requires_grad_(False)
        assert module._parameters is holder
        other = nn.Parameter(torch.ones(2, 2))
        holder["weight"] = other
        assert module.weight is other
        assert next(module.parameters()) is other
        assert module.state_dict(keep_vars=True)["weight"] is other
