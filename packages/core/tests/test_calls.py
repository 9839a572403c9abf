"""Which calls a backward has entered and left, by ticks alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from polyshard.calls import Call, EnteredCalls, ForwardPass, tick


def call_at(start: int, *, recomputed: bool = False, together: bool = False) -> Call:
    unit: Any = SimpleNamespace(is_left_together=together)
    call = Call(unit, ForwardPass(is_last=True), task=7 if recomputed else -1)
    call.start = start
    return call


class TestEnteredCalls:
    @given(st.lists(st.integers(0, 20), max_size=12), st.integers(-1, 20))
    def test_what_began_later_is_left(self, starts: list[int], moment: int) -> None:
        """Reaching a moment leaves the calls that began after it, latest first, each once."""
        entered = EnteredCalls()
        calls = [call_at(start) for start in starts]
        for call in calls:
            entered.enter(call, task=0)
        left = list(entered.passed(moment, everywhere=True))
        assert {id(call) for call in left} == {id(c) for c in calls if c.start > moment}
        assert [call.start for call in left] == sorted((c.start for c in left), reverse=True)
        assert list(entered.passed(moment, everywhere=True)) == []
        assert len(list(entered.passed(-1, everywhere=True))) == len(calls) - len(left)

    @given(st.lists(st.booleans(), max_size=12), st.integers(-1, 12))
    def test_some_stay_until_all_ranks_are_there(self, kinds: list[bool], moment: int) -> None:
        entered = EnteredCalls()
        calls = [call_at(start, together=together) for start, together in enumerate(kinds)]
        for call in calls:
            entered.enter(call, task=0)
        later = [call for call in reversed(calls) if call.start > moment]
        left = list(entered.passed(moment, everywhere=False))
        assert left == [call for call in later if not call.unit.is_left_together]
        rest = list(entered.passed(moment, everywhere=True))
        assert rest == [call for call in later if call.unit.is_left_together]

    def test_recomputed_ones_end_with_their_task(self) -> None:
        """The end of a nested backward leaves what was recomputed for it and entered, once."""
        entered = EnteredCalls()
        outer, mine, other = call_at(1), call_at(5, recomputed=True), call_at(6, recomputed=True)
        entered.enter(outer, task=0)
        entered.enter(mine, task=1)
        entered.enter(other, task=2)
        assert list(entered.ended(1)) == [mine]
        assert list(entered.ended(1)) == []
        assert list(entered.passed(2, everywhere=True)) == [other]
        assert list(entered.ended(2)) == []
        assert list(entered.passed(0, everywhere=True)) == [outer]


class TestCall:
    def test_counted_once(self) -> None:
        """However many outputs are hooked, a call is open once; one that is recomputed never."""
        call = call_at(tick())
        key = id(call.unit)
        for _ in range(3):
            call.count()
        assert call.forward_pass.open_calls[key] == 1
        for _ in range(2):  # where the graph is retained, another backward finds it open again
            call.forward_pass.begin_backward()
            assert call.forward_pass.open_calls[key] == 1
            for _ in range(2):
                call.uncount()
            assert call.forward_pass.open_calls[key] == 0
        recomputed = call_at(tick(), recomputed=True)
        recomputed.count()
        assert not recomputed.forward_pass.open_calls
