"""Placements: presets, the chain rule, PyTorch's own placements, mesh axes, order of shards."""

from __future__ import annotations

import re
from itertools import permutations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial as TorchPartial
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard

from polyshard import Flat, Partial, PlacementError, Placements, Replicate
from polyshard.placements import Placement, as_placement, resolve_axes

F, R, P = Flat(), Replicate(), Partial()
AXES = ("outer", "middle", "inner")
Triple = tuple[tuple[Placement, ...], tuple[Placement, ...], tuple[Placement, ...]]


def sharded(placements: tuple[Placement, ...]) -> set[int]:
    return {axis for axis, placement in enumerate(placements) if placement == F}


def is_legal(triple: Triple) -> bool:
    """A gradient alone may be Partial, and some order of the axes has all three sets as prefixes,
    the optimizer's the longest."""
    parameter, _, optimizer = triple
    if P in parameter or P in optimizer:
        return False
    sets = [sharded(kind) for kind in triple]
    if not (sets[0] | sets[1]) <= sets[2]:
        return False
    return any(
        all(set(order[: len(axes)]) == axes for axes in sets)
        for order in permutations(range(len(parameter)))
    )


def culprits(triple: Triple) -> set[str]:
    """The axes that a message about an illegal triple may name."""
    parameter, gradient, optimizer = triple
    alone = {
        AXES[axis]
        for axis in range(len(parameter))
        if P in (parameter[axis], optimizer[axis])
        or (optimizer[axis] == R and F in (parameter[axis], gradient[axis]))
    }
    return alone or {AXES[axis] for axis in sharded(parameter) ^ sharded(gradient)}


@st.composite
def triples(draw: st.DrawFn) -> Triple:
    kinds = st.sampled_from([F, R, P])
    count = draw(st.integers(1, 3))
    parameter, gradient, optimizer = (
        tuple(draw(st.lists(kinds, min_size=count, max_size=count))) for _ in range(3)
    )
    return parameter, gradient, optimizer


@st.composite
def legal_triples(draw: st.DrawFn) -> Triple:
    """Prefixes of some order of the axes."""
    count = draw(st.integers(1, 3))
    order = draw(st.permutations(range(count)))
    longest = draw(st.integers(0, count))
    parameter, gradient = draw(st.integers(0, longest)), draw(st.integers(0, longest))
    partial = draw(st.sets(st.integers(0, count - 1)))

    def placed(length: int, others: list[Placement]) -> tuple[Placement, ...]:
        return tuple(F if axis in order[:length] else others[axis] for axis in range(count))

    replicated: list[Placement] = [R] * count
    contributions: list[Placement] = [P if axis in partial else R for axis in range(count)]
    return (
        placed(parameter, replicated),
        placed(gradient, contributions),
        placed(longest, replicated),
    )


class TestChainRule:
    @given(triples())
    def test_any_triple(self, triple: Triple) -> None:
        """A triple is taken exactly if its sharded axes form a chain; an error names a culprit."""
        check(triple)

    @pytest.mark.parametrize("triple", list(product([F, R, P], repeat=3)), ids=str)
    def test_every_triple_of_one_axis(self, triple: tuple[Placement, ...]) -> None:
        """On one axis every combination is checked."""
        check(((triple[0],), (triple[1],), (triple[2],)))

    def test_every_legal_kind_of_two_axes(self) -> None:
        """On two axes every combination of legal kinds is checked; of 144, 60 are legal."""
        both = list(product([F, R], repeat=2))
        legal = 0
        for triple in product(both, product([F, R, P], repeat=2), both):
            check(triple)
            legal += is_legal(triple)
        assert legal == 60


def check(triple: Triple) -> None:
    axes = AXES[: len(triple[0])]
    if is_legal(triple):
        placements = Placements(axes, *triple)
        assert (placements.parameter, placements.gradient, placements.optimizer) == triple
        return
    with pytest.raises(PlacementError) as raised:
        Placements(axes, *triple)
    named = set(re.findall(r"'(outer|middle|inner)'", str(raised.value)))
    assert named
    assert named <= culprits(triple)


class TestMessages:
    @pytest.mark.parametrize(
        ("triple", "message"),
        [
            (((P,), (F,), (F,)), "axis 'dp' of 'parameter' is Partial.* Use Flat or Replicate"),
            (((F,), (F,), (P,)), "axis 'dp' of 'optimizer' is Partial.* Use Flat or Replicate"),
            (((F,), (P,), (R,)), "axis 'dp' of 'parameter' is Flat but 'optimizer' is Replicate"),
            (((R,), (F,), (R,)), "axis 'dp' of 'gradient' is Flat but 'optimizer' is Replicate"),
        ],
    )
    def test_one_axis(self, triple: Triple, message: str) -> None:
        """The message names axis and kind, what it got and what it would accept."""
        with pytest.raises(PlacementError, match=message):
            Placements(("dp",), *triple)

    def test_two_axes(self) -> None:
        """A broken chain names the two axes that break it."""
        with pytest.raises(PlacementError, match="axis 'a' is Flat for 'parameter' only and axis"):
            Placements(("a", "b"), (F, R), (R, F), (F, F))

    def test_a_placement_per_axis(self) -> None:
        """Too few or too many placements are refused with both numbers."""
        with pytest.raises(PlacementError, match="'gradient' has 1 placements for 2 dp axes"):
            Placements(("a", "b"), (F, F), (F,), (F, F))

    @pytest.mark.parametrize("axes", [(), []])
    def test_no_axes(self, axes: object) -> None:
        """At least one axis is needed."""
        with pytest.raises(PlacementError, match="dp_axes is empty"):
            Placements(axes, (), (), ())  # type: ignore[arg-type]

    @pytest.mark.parametrize("axis", [True, 1.0, None, ("dp",)])
    def test_what_is_no_axis(self, axis: object) -> None:
        """An axis is a name or an index."""
        with pytest.raises(PlacementError, match="a mesh axis is a name or an index"):
            Placements((axis,), (F,), (F,), (F,))  # type: ignore[arg-type]

    def test_repeated_axis(self) -> None:
        """An axis is named once."""
        with pytest.raises(PlacementError, match="axis 'dp' is named twice"):
            Placements(("dp", "dp"), (F, F), (F, F), (F, F))

    def test_partial_reduces_by_average_or_sum(self) -> None:
        """Other reductions are refused when the placement is made."""
        with pytest.raises(PlacementError, match="got 'max'"):
            Partial("max")  # type: ignore[arg-type]


class TestTorchPlacements:
    @pytest.mark.parametrize(
        ("theirs", "ours"),
        [
            (TorchShard(0), Flat()),
            (TorchReplicate(), Replicate()),
            (TorchPartial(), Partial("sum")),
            (TorchPartial("sum"), Partial("sum")),
            (TorchPartial("avg"), Partial("avg")),
        ],
    )
    def test_accepted(self, theirs: object, ours: Placement) -> None:
        """PyTorch's placements are taken, and its bare Partial means sum."""
        assert as_placement(theirs) == ours

    def test_our_partial_is_an_average(self) -> None:
        """Ours, bare, means average."""
        assert Partial().reduce_op == "avg"
        assert as_placement(Partial()) == Partial("avg")

    def test_in_placements(self) -> None:
        """A triple in PyTorch's words equals the one in ours."""
        assert Placements(
            ("dp",), [TorchReplicate()], [TorchPartial("avg")], [TorchShard(0)]
        ) == Placements.zero1("dp")

    @pytest.mark.parametrize("dim", [1, -1])
    def test_shards_of_other_dims_are_refused(self, dim: int) -> None:
        """Only rows are split."""
        with pytest.raises(PlacementError, match=rf"Shard\({dim}\) is not supported.*Flat\(\)"):
            as_placement(TorchShard(dim))

    def test_other_reductions_are_refused(self) -> None:
        """A maximum of gradients is no gradient."""
        with pytest.raises(PlacementError, match=r"'max'.* is not supported"):
            as_placement(TorchPartial("max"))

    @pytest.mark.parametrize("value", ["Flat", None, Flat, 0])
    def test_what_is_no_placement(self, value: object) -> None:
        """Anything else is refused, with what would be taken."""
        with pytest.raises(PlacementError, match="expected a placement"):
            as_placement(value)


class TestPresets:
    @pytest.mark.parametrize(
        ("placements", "parameter", "gradient", "optimizer"),
        [
            (Placements.ddp("i"), (R,), (P,), (R,)),
            (Placements.zero1("i"), (R,), (P,), (F,)),
            (Placements.zero2("i"), (R,), (F,), (F,)),
            (Placements.zero3("i"), (F,), (F,), (F,)),
            (Placements.hsdp("o", "i"), (R, F), (P, F), (R, F)),
            (Placements.hfsdp("o", "i"), (R, F), (P, F), (F, F)),
        ],
        ids=str,
    )
    def test_triples(
        self,
        placements: Placements,
        parameter: tuple[Placement, ...],
        gradient: tuple[Placement, ...],
        optimizer: tuple[Placement, ...],
    ) -> None:
        """Each preset is the triple of its row in the table of strategies."""
        assert placements.parameter == parameter
        assert placements.gradient == gradient
        assert placements.optimizer == optimizer
        assert placements.dp_axes == ("o", "i")[-len(parameter) :]

    def test_equal_to_the_triple_written_out(self) -> None:
        """A preset is nothing more than its triple."""
        assert Placements.zero3("dp") == Placements(["dp"], [F], [F], [F])
        assert hash(Placements.zero3("dp")) == hash(Placements(["dp"], [F], [F], [F]))
        assert Placements.zero3("dp") != Placements.zero2("dp")

    def test_one_value_per_kind(self) -> None:
        """A single axis and single placements need no sequences."""
        assert Placements("dp", F, F, F) == Placements.zero3("dp")  # type: ignore[arg-type]

    def test_text(self) -> None:
        """A preset names itself, another triple its placements."""
        assert str(Placements.hsdp("o", "i")) == "hsdp over o, i"
        text = str(Placements(("o", "i"), (R, R), (P, F), (F, F)))
        assert text == (
            "Placements(o, i: parameter=Replicate/Replicate, gradient=Partial/Flat, "
            "optimizer=Flat/Flat)"
        )


class TestShardOrder:
    def test_hfsdp(self) -> None:
        """The index of a shard is inner * outer_size + outer: inner varies slowest."""
        assert Placements.hfsdp("outer", "inner").shard_order == (1, 0)

    @pytest.mark.parametrize(
        ("placements", "order"),
        [
            (Placements.ddp("i"), ()),
            (Placements.zero1("i"), (0,)),
            (Placements.zero3("i"), (0,)),
            (Placements.hsdp("o", "i"), (1,)),
            (Placements(("o", "i"), (F, F), (F, F), (F, F)), (1, 0)),
            (Placements(("o", "i"), (F, R), (F, F), (F, F)), (0, 1)),
            (Placements(("o", "i"), (R, R), (F, P), (F, F)), (0, 1)),
        ],
        ids=str,
    )
    def test_known(self, placements: Placements, order: tuple[int, ...]) -> None:
        """Axes that join the chain later vary faster; those that join together, the outer one."""
        assert placements.shard_order == order

    @given(legal_triples())
    def test_every_kind_is_a_prefix(self, triple: Triple) -> None:
        """The sharded axes of every kind come first, and the optimizer's are all of them."""
        order = Placements(AXES[: len(triple[0])], *triple).shard_order
        assert set(order) == sharded(triple[2])
        assert len(set(order)) == len(order)
        for kind in triple:
            axes = sharded(kind)
            assert set(order[: len(axes)]) == axes


class TestResolveAxes:
    @pytest.mark.parametrize(
        ("axes", "resolved"),
        [
            (("tp", "dp"), (1, 0)),
            ((0,), (0,)),
            ((-1,), (2,)),
            (("pp", -3, 1), (2, 0, 1)),
        ],
    )
    def test_names_and_indices(
        self, axes: tuple[int | str, ...], resolved: tuple[int, ...]
    ) -> None:
        """Names and indices, negative ones from the end, become indices in the order given."""
        assert resolve_axes(axes, ("dp", "tp", "pp"), 3) == resolved

    def test_a_mesh_without_names(self) -> None:
        """Indices need no names; a name says that there are none."""
        assert resolve_axes((1, -2), None, 2) == (1, 0)
        with pytest.raises(PlacementError, match="no axis 'dp': its axes have no names"):
            resolve_axes(("dp",), None, 2)

    @pytest.mark.parametrize("axis", [3, -4])
    def test_missing_index(self, axis: int) -> None:
        """An index outside the mesh is refused with those it has."""
        with pytest.raises(PlacementError, match=rf"no axis {axis}: .*'dp'.*indices 0 to 2"):
            resolve_axes((axis,), ("dp", "tp", "pp"), 3)

    def test_missing_name(self) -> None:
        """A name the mesh lacks is refused with those it has."""
        with pytest.raises(PlacementError, match=r"no axis 'ep': its axes are \('dp', 'tp'\)"):
            resolve_axes(("ep",), ("dp", "tp"), 2)

    @pytest.mark.parametrize("axes", [("tp", 1), (1, -1), (-1, "tp")])
    def test_repeated_through_name_and_index(self, axes: tuple[int | str, ...]) -> None:
        """One mesh axis under two names is found."""
        first, second = map(repr, axes)
        with pytest.raises(PlacementError, match=f"axes {first} and {second} are the same"):
            resolve_axes(axes, ("dp", "tp"), 2)
