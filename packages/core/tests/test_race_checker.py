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
from torch import Tensor

from polyshard import BackendError
from polyshard.spi import Buffer, Communicator, Lane, LaneRole, Lifetime, Op, Role, Use
from polyshard.testing import run_ranks
from polyshard.testing.race import Policy, RaceBackend, RaceError

CPU = torch.device("cpu")
POLICIES = list(Policy)


class Bench:
    """A backend, its lanes, and buffers of four numbers."""

    def __init__(self, policy: Policy, seed: int = 0) -> None:
        self.backend = RaceBackend(policy, seed=seed, timeout=10.0)
        self.compute = self.backend.compute_lane(CPU)
        self._communicators: dict[LaneRole, Communicator] = {}
        self._held: list[Tensor] = []

    def lane(self, role: LaneRole) -> Lane:
        return self.backend.lane(role, CPU)

    def communicator(self, purpose: LaneRole) -> Communicator:
        if purpose not in self._communicators:
            group = dist.group.WORLD
            assert group is not None
            self._communicators[purpose] = self.backend.communicator(group, CPU, purpose=purpose)
        return self._communicators[purpose]

    def buffer(self, role: Role, lifetime: Lifetime = Lifetime.TRANSIENT) -> Buffer:
        purpose: LaneRole = "gather" if "gather" in role.value else "reduce"
        uses = [Use(self.communicator(purpose), role)]
        return self.backend.allocate(uses, 4, torch.float32, CPU, lifetime)

    def gather(self, *, wait: bool = True) -> Buffer:
        """Four ones, gathered for 'block: gather'."""
        buffer, communicator = self.buffer(Role.GATHER_OUTPUT), self.communicator("gather")
        shard = self.buffer(Role.GATHER_INPUT, Lifetime.PERSISTENT).tensor
        shard.fill_(1.0)
        self._held.append(shard)
        lane = self.lane("gather")
        lane.wait(self.compute.mark())

        def work() -> None:
            buffer.acquire()
            communicator.all_gather([buffer.tensor], [shard], label="block: gather")

        lane.submit(work, label="block: gather")
        if wait:
            self.compute.wait(lane.mark())
        return buffer

    def release(self, buffer: Buffer, *, wait: bool = True) -> None:
        """After what compute does with it."""
        lane = self.lane("gather")
        if wait:
            lane.wait(self.compute.mark())
        lane.submit(buffer.release, label="block: release")

    def end(self) -> None:
        """Settle what was lent, and join the lanes."""
        for purpose, communicator in self._communicators.items():
            self.lane(purpose).submit(communicator.settle, label=f"settle {purpose}")
        for role in ("gather", "reduce", "outer"):
            self.compute.wait(self.lane(role).mark())


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


def differ(rank: int, policy: Policy) -> str:
    """The ranks gather and reduce in an order of their own."""
    backend = RaceBackend(policy, timeout=10.0)
    group = dist.group.WORLD
    assert group is not None
    lane, compute = backend.lane("reduce", CPU), backend.compute_lane(CPU)
    communicator = backend.communicator(group, CPU, purpose="reduce")
    try:
        with backend.checking():
            values = [torch.ones(3), torch.ones(3)]
            lane.wait(compute.mark())
            for index in (0, 1) if rank == 0 else (1, 0):
                label = f"block {index}: reduce"
                value = values[index]
                lane.submit(
                    lambda value=value, label=label: communicator.all_reduce(
                        [value], Op.SUM, label=label
                    ),
                    label=label,
                )
            compute.wait(lane.mark())
    except BackendError as error:
        return str(error)
    return "no error"


def independent(rank: int, policy: Policy) -> list[float]:
    """The ranks wait for two lanes in an order of their own; each lane's own order is the same."""
    backend = RaceBackend(policy, timeout=10.0)
    group = dist.group.WORLD
    assert group is not None
    compute, values = backend.compute_lane(CPU), [torch.ones(3), torch.ones(3)]
    roles: list[LaneRole] = ["gather", "reduce"]
    communicators = [backend.communicator(group, CPU, purpose=role) for role in roles]
    with backend.checking():
        for index in (0, 1) if rank == 0 else (1, 0):
            lane = backend.lane(roles[index], CPU)
            lane.wait(compute.mark())
            lane.submit(
                lambda index=index: communicators[index].all_reduce(
                    [values[index]], Op.SUM, label="block"
                ),
                label="block",
            )
        for index in (0, 1) if rank == 0 else (1, 0):
            lane = backend.lane(roles[index], CPU)
            lane.submit(communicators[index].settle, label="settle")
            compute.wait(lane.mark())
        return [value.sum().item() for value in values]


def one_fails(rank: int) -> str:
    backend = RaceBackend(Policy.EARLY, timeout=30.0)
    group = dist.group.WORLD
    assert group is not None
    lane, compute = backend.lane("reduce", CPU), backend.compute_lane(CPU)
    communicator = backend.communicator(group, CPU, purpose="reduce")

    def work() -> None:
        if rank == 1:
            raise ValueError("no more")
        communicator.all_reduce([torch.ones(1)], Op.SUM, label="block: reduce")

    lane.submit(work, label="block: reduce")
    try:
        compute.wait(lane.mark())
    except BackendError as error:
        return str(error)
    return "no error"


class TestRanks:
    @pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.value)
    def test_orders_that_differ(self, policy: Policy) -> None:
        """Where the order of collectives differs, every rank says what it and the other are at."""
        for message in run_ranks(2, differ, policy):
            assert "order of collectives differs between ranks" in message
            assert "block 0: reduce" in message
            assert "block 1: reduce" in message

    @pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.value)
    def test_lanes_that_do_not_wait_for_each_other(self, policy: Policy) -> None:
        """The order between lanes may differ: none holds up another."""
        assert run_ranks(2, independent, policy) == [[6.0, 6.0]] * 2

    def test_a_rank_that_fails(self) -> None:
        """The others are told at once."""
        assert all("no more" in message for message in run_ranks(2, one_fails))


def test_every_promise_of_the_core_is_checked() -> None:
    """Each clause of the contract that binds the core is one that the race checker watches."""
    docs = Path(__file__).parents[3] / "docs"
    contract = (docs / "contract.md").read_text()
    promised = re.findall(r"^- \*\*([\d.]+)\*\* \*\*core\*\*", contract, re.MULTILINE)
    table = [row for row in (docs / "notes" / "races.md").read_text().splitlines() if "|" in row]
    watched = {clause for row in table for clause in re.findall(r"\d\.\d+", row)}
    assert promised
    assert set(promised) <= watched
