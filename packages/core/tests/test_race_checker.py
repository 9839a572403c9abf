"""The race checker finds each kind of mistake, names what is missing, and accepts what is right."""

# Where in a program a race is found depends on the policy.
# ruff: noqa: PT012, SIM117

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from race_bench import CPU, Bench
from torch import Tensor

from polyshard import BackendError
from polyshard.spi import Buffer, Lifetime, Op, Role, Use
from polyshard.testing.race import Policy, RaceError

POLICIES = list(Policy)


@pytest.fixture(scope="module", autouse=True)
def _world() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.fixture(params=POLICIES, ids=lambda policy: policy.value)
def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench(request.param)


class TestWhatIsRight:
    def test_a_pass(self, bench: Bench) -> None:
        """Gathered, waited for, read, released after it was read, settled and joined: no alarm."""
        with bench.backend.checking():
            for _ in range(3):
                with bench.backend.root_pass():
                    buffer = bench.gather()
                    assert buffer.tensor.sum().item() == 4.0
                    bench.release(buffer)
                    bench.end()

    def test_memory_is_poisoned(self, bench: Bench) -> None:
        """What was acquired and not written holds NaN, or the largest integer."""
        with bench.backend.checking():
            buffer = bench.buffer(Role.REDUCE_OUTPUT)
            buffer.acquire()
            assert buffer.tensor.isnan().all()
            uses = [Use(bench.communicator("reduce"), Role.REDUCE_OUTPUT)]
            whole = bench.backend.allocate(uses, 2, torch.int8, CPU, Lifetime.TRANSIENT)
            whole.acquire()
            assert whole.tensor.tolist() == [127, 127]


class TestReading:
    def test_before_a_ticket_made_it_ready(self, bench: Bench) -> None:
        """Compute reads what no ticket made ready: unit, buffer and missing wait are named."""
        message = "(?s)compute reads a gather output of 4 .*(block: gather|not gathered)"
        with pytest.raises(RaceError, match=message), bench.backend.checking():
            buffer = bench.gather(wait=False)
            buffer.tensor.sum()

    def test_the_missing_wait(self) -> None:
        """The message says which lane has to wait for which, and from which work on."""
        bench = Bench(Policy.EARLY)
        missing = "compute must wait for a ticket of gather that was marked after 'block: gather'"
        with pytest.raises(RaceError, match=missing), bench.backend.checking():
            buffer = bench.gather(wait=False)
            buffer.tensor.sum()

    def test_after_release(self, bench: Bench) -> None:
        """Compute reads what was released: the release is named."""
        with (
            pytest.raises(RaceError, match="released in 'block: release'"),
            bench.backend.checking(),
        ):
            buffer = bench.gather()
            view = buffer.tensor[:2]
            bench.release(buffer)
            bench.end()
            view.sum()

    def test_by_the_host(self, bench: Bench) -> None:
        """Reading past the dispatcher is seen as well."""
        with pytest.raises(RaceError, match=r"host: tolist|not gathered"), bench.backend.checking():
            buffer = bench.gather(wait=False)
            buffer.tensor.tolist()

    def test_on_a_lane(self, bench: Bench) -> None:
        """A lane reads what compute wrote with no wait between them."""
        value = torch.zeros(4)
        with pytest.raises(BackendError, match="gather must wait"), bench.backend.checking():
            value.fill_(2.0)
            bench.lane("gather").submit(lambda: value.sum(), label="block: late")
            bench.end()


class TestReleasing:
    def test_while_compute_may_read(self, bench: Bench) -> None:
        """A release that does not wait for compute, which reads: an error on the lane."""
        with (
            pytest.raises(RaceError, match=r"gather releases a gather output.*while compute reads"),
            bench.backend.checking(),
        ):
            buffer = bench.gather()
            buffer.tensor.sum()
            bench.release(buffer, wait=False)
            bench.end()

    def test_on_another_lane(self, bench: Bench) -> None:
        """What one lane acquired another releases."""
        with (
            pytest.raises(RaceError, match=r"compute releases .* 'gather' acquired"),
            bench.backend.checking(),
        ):
            bench.gather().release()

    def test_never(self, bench: Bench) -> None:
        """What is still held at the end is named, with the work that acquired it."""
        with pytest.raises(RaceError, match=r"acquired in 'block: gather'.*never released"):
            with bench.backend.checking():
                buffer = bench.gather()
        assert buffer.tensor.numel() == 4

    def test_by_dropping_it(self, bench: Bench) -> None:
        """A buffer that a lane acquired is dropped instead of released."""
        with pytest.raises(RaceError, match="dropped without being released"):
            with bench.backend.checking():
                bench.gather()
                gc.collect()
                bench.end()

    def test_a_tensor_that_a_lane_uses(self) -> None:
        """A tensor of compute's is dropped while a lane that compute has not joined uses it: its
        memory would be handed out again."""
        bench = Bench(Policy.EARLY)
        with pytest.raises(RaceError, match="compute frees a tensor"), bench.backend.checking():
            value = torch.zeros(4) + 1
            lane = bench.lane("reduce")
            lane.wait(bench.compute.mark())

            def use(value: Tensor = value) -> None:
                value.add_(1)

            lane.submit(use, label="block: counts")
            del value, use
            bench.end()


class TestLending:
    def reduced(self, bench: Bench, *, settle: bool) -> Buffer:
        buffer, communicator = bench.buffer(Role.GATHER_INPUT), bench.communicator("reduce")
        buffer.acquire()
        buffer.tensor.fill_(1.0)
        lane = bench.lane("reduce")
        lane.wait(bench.compute.mark())

        def work() -> None:
            communicator.all_reduce([buffer.tensor], Op.SUM, label="block: reduce")

        lane.submit(work, label="block: reduce")
        if settle:
            lane.submit(communicator.settle, label="block: settle")
        return buffer

    def test_packing_into_what_is_reduced(self, bench: Bench) -> None:
        """Compute packs into an input that an earlier reduction still reads."""
        with pytest.raises(RaceError, match="block: reduce"), bench.backend.checking():
            buffer = self.reduced(bench, settle=True)
            bench.backend.ops.pack(buffer.tensor, [(0, torch.ones(2))], 1.0)
            bench.end()

    def test_overwriting_before_settle(self, bench: Bench) -> None:
        """An input is overwritten that was waited for and not settled: peers may read it."""
        with (
            pytest.raises(RaceError, match=r"peers may still read .* settle\(\) of the reduce"),
            bench.backend.checking(),
        ):
            buffer = self.reduced(bench, settle=False)
            bench.compute.wait(bench.lane("reduce").mark())
            buffer.tensor.zero_()

    def test_overwriting_after_settle(self, bench: Bench) -> None:
        """An input may be overwritten once compute waited for a settle after it."""
        with bench.backend.checking():
            buffer = self.reduced(bench, settle=True)
            bench.compute.wait(bench.lane("reduce").mark())
            buffer.tensor.zero_()
            buffer.release()


class TestPasses:
    def test_not_joined(self, bench: Bench) -> None:
        """A root pass ends while compute has not joined a lane: its last work is named."""
        with (
            pytest.raises(RaceError, match=r"not joined lane 'outer'.*'block: outer'"),
            bench.backend.checking(),
            bench.backend.root_pass(),
        ):
            bench.lane("outer").submit(lambda: None, label="block: outer")

    def test_not_settled(self, bench: Bench) -> None:
        """A root pass ends while peers may read what was lent in it."""
        with (
            pytest.raises(RaceError, match="nothing settles the gather communicator"),
            bench.backend.checking(),
            bench.backend.root_pass(),
        ):
            bench.release(bench.gather())
            bench.compute.wait(bench.lane("gather").mark())

    def test_a_ticket_of_an_earlier_pass(self, bench: Bench) -> None:
        """A ticket is waited for after its pass has ended."""
        with (
            pytest.raises(RaceError, match="no ticket outlives its pass"),
            bench.backend.checking(),
        ):
            with bench.backend.root_pass():
                ticket = bench.lane("gather").mark()
            bench.compute.wait(ticket)


class TestCapture:
    @pytest.mark.parametrize(
        ("what", "message"),
        [
            (lambda bench: bench.lane("gather").synchronize(1.0), "blocks the host"),
            (lambda bench: bench.communicator("outer"), "a communicator is made"),
            (
                lambda bench: bench.buffer(Role.GATHER_INPUT, Lifetime.PERSISTENT),
                "allocated for life",
            ),
            (lambda bench: torch.ones(2).tolist(), "host reads a tensor"),
            (lambda bench: torch.ones(2).sum().item(), "host reads a tensor"),
            (lambda bench: torch.tensor([1.0]), "values of the host"),
        ],
    )
    def test_what_a_graph_cannot_hold(self, what: object, message: str) -> None:
        """Waits of the host, rendezvous and copies from and to the host are refused."""
        bench = Bench(Policy.LATE)
        bench.communicator("gather")
        with pytest.raises(RaceError, match=message), bench.backend.checking():
            with bench.backend.capture():
                what(bench)  # type: ignore[operator]

    def test_a_ticket_from_before(self) -> None:
        """A ticket that was made before the capture cannot be waited for in it."""
        bench = Bench(Policy.LATE)
        with pytest.raises(RaceError, match="no ticket outlives"), bench.backend.checking():
            ticket = bench.lane("gather").mark()
            with bench.backend.capture():
                bench.compute.wait(ticket)

    def test_a_pass(self) -> None:
        """A pass over what is there can be captured."""
        bench = Bench(Policy.LATE)
        with bench.backend.checking():
            buffer, communicator = bench.buffer(Role.GATHER_OUTPUT), bench.communicator("gather")
            shard = bench.buffer(Role.GATHER_INPUT, Lifetime.PERSISTENT).tensor
            lane = bench.lane("gather")

            def work() -> None:
                buffer.acquire()
                communicator.all_gather([buffer.tensor], [shard], label="block: gather")

            with bench.backend.capture():
                lane.wait(bench.compute.mark())
                lane.submit(work, label="block: gather")
                bench.compute.wait(lane.mark())
                buffer.tensor.sum()
                bench.release(buffer)
                bench.end()


class TestPolicies:
    def order(self, policy: Policy, seed: int = 0) -> list[str]:
        """In which order independent work of two lanes runs, and when compute has gone on."""
        bench, ran = Bench(policy, seed), list[str]()
        with bench.backend.checking():
            for number in range(3):
                for role in ("gather", "reduce"):
                    label = f"{role} {number}"
                    bench.lane(role).submit(lambda label=label: ran.append(label), label=label)
            ran.append("compute")
            bench.end()
        return ran

    def test_early(self) -> None:
        """Early work is done when it is submitted."""
        assert self.order(Policy.EARLY)[-1] == "compute"

    def test_late(self) -> None:
        """Late work runs when compute waits for it, and no sooner."""
        assert self.order(Policy.LATE)[0] == "compute"

    def test_random(self) -> None:
        """A seed repeats its order; other seeds have others; each lane keeps its own."""
        orders = [self.order(Policy.RANDOM, seed) for seed in range(10)]
        assert orders == [self.order(Policy.RANDOM, seed) for seed in range(10)]
        assert len(set(map(tuple, orders))) > 5
        for order in orders:
            for role in ("gather", "reduce"):
                own = [label for label in order if label.startswith(role)]
                assert own == [f"{role} {number}" for number in range(3)]


def test_every_promise_of_the_core_is_checked() -> None:
    """Each clause of the contract that binds the core is one that the race checker watches."""
    docs = Path(__file__).parents[3] / "docs"
    contract = (docs / "contract.md").read_text()
    promised = re.findall(r"^- \*\*([\d.]+)\*\* \*\*core\*\*", contract, re.MULTILINE)
    table = [row for row in (docs / "notes" / "races.md").read_text().splitlines() if "|" in row]
    watched = {clause for row in table for clause in re.findall(r"\d\.\d+", row)}
    assert promised
    assert set(promised) <= watched
