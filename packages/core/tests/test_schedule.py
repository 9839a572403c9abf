"""Scheduling decisions: what to gather ahead, and in which order to reduce."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyshard import SchedulePolicy
from polyshard.schedule import prefetch, reduction_order


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[int], int, list[int]]:
    """An order in which units may repeat, a position in it, and the units' sizes."""
    sizes = draw(st.lists(st.integers(0, 5), min_size=1, max_size=6))
    order = draw(st.lists(st.integers(0, len(sizes) - 1), min_size=1, max_size=12))
    position = draw(st.integers(0, len(order) - 1))
    return order, position, sizes


def following(order: list[int], position: int, sizes: list[int]) -> list[int]:
    """The units of some size after the position, each where it first comes."""
    return list(dict.fromkeys(unit for unit in order[position + 1 :] if sizes[unit]))


class TestPrefetch:
    @given(situations(), st.integers(0, 8))
    def test_so_many_units(self, situation: tuple[list[int], int, list[int]], units: int) -> None:
        """The next units of some size are chosen in order, as many as asked for."""
        order, position, sizes = situation
        chosen = prefetch(order, position, sizes=sizes, units=units, elements=None)
        assert chosen == following(order, position, sizes)[:units]

    @given(situations(), st.integers(0, 8), st.integers(0, 20))
    def test_so_many_elements(
        self, situation: tuple[list[int], int, list[int]], units: int, elements: int
    ) -> None:
        """The longest run of next units that fits is chosen, whatever `units` says."""
        order, position, sizes = situation
        chosen = prefetch(order, position, sizes=sizes, units=units, elements=elements)
        candidates = following(order, position, sizes)
        assert chosen == candidates[: len(chosen)]
        assert sum(sizes[unit] for unit in chosen) <= elements
        one_more = candidates[: len(chosen) + 1]
        assert one_more == chosen or sum(sizes[unit] for unit in one_more) > elements

    def test_off(self) -> None:
        """Zero turns it off, in either measure."""
        assert prefetch([0, 1], 0, sizes=[1, 1], units=0, elements=None) == []
        assert prefetch([0, 1], 0, sizes=[1, 1], units=1, elements=0) == []

    def test_units_of_nothing_cost_nothing(self) -> None:
        """A unit that gathers nothing is passed over, not counted."""
        assert prefetch([0, 1, 2], 0, sizes=[4, 0, 4], units=1, elements=None) == [2]


@st.composite
def completions(draw: st.DrawFn) -> tuple[int, list[int], list[int] | None]:
    count = draw(st.integers(1, 7))
    completed = draw(st.lists(st.integers(0, count - 1), max_size=10))
    return count, completed


class TestReductionOrder:
    @given(completions())
    def test_every_unit_once(self, case: tuple[int, list[int], list[int] | None]) -> None:
        """Completed units come first, in that order; the others follow in the order before."""
        count, completed = case
        order = reduction_order(count, completed)
        assert sorted(order) == list(range(count))
        known = list(dict.fromkeys(completed))
        assert list(order[: len(known)]) == known
        before = list(range(count - 1, -1, -1))
        rest = list(order[len(known) :])
        assert rest == sorted(rest, key=before.index)

    def test_before_the_first_backward(self) -> None:
        """Units reduce in reverse registration order until a backward has shown another."""
        assert reduction_order(4, None) == (3, 2, 1, 0)


class TestPolicy:
    def test_defaults(self) -> None:
        """One unit ahead, both ways."""
        policy = SchedulePolicy()
        assert (policy.forward_units, policy.backward_units) == (1, 1)
        assert (policy.forward_elements, policy.backward_elements) == (None, None)

    @pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(SchedulePolicy)])
    @pytest.mark.parametrize("value", [-1, 1.5, "1", True])
    def test_what_is_no_number(self, name: str, value: object) -> None:
        """A field that is no whole number of at least 0 is refused by its name."""
        with pytest.raises(ValueError, match=f"{name} is a number of at least 0, got"):
            SchedulePolicy(**{name: value})  # type: ignore[arg-type]

    @pytest.mark.parametrize("name", ["forward_units", "backward_units"])
    def test_none_is_no_number_of_units(self, name: str) -> None:
        """Only the limits in elements may be left open."""
        with pytest.raises(ValueError, match=name):
            SchedulePolicy(**{name: None})  # type: ignore[arg-type]

    def test_zero_is_off(self) -> None:
        """Zero is legal everywhere."""
        policy = SchedulePolicy(0, 0, 0, 0)
        assert dataclasses.astuple(policy) == (0, 0, 0, 0)
