"""Communicators over a group that notes what it is asked, without other ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from recorded_cuda import CPU, FakeGroup, RecordedCuda, RecordedNccl
from torch import Tensor
from torch.distributed import HashStore

from polyshard import BackendError, UnsupportedError
from polyshard.spi import Communicator, Op
from polyshard_nccl.board import Board
from polyshard_nccl.communicator import Connection, NcclCommunicator
from polyshard_nccl.lanes import StreamLane


class Fixed:
    """A communicator of ``size`` ranks, of which this is the first and the others are silent."""

    def __init__(self, size: int = 4, capability: tuple[int, int] = (9, 0)) -> None:
        self.backend = RecordedNccl()
        lane = self.backend.lane("gather", CPU)
        assert isinstance(lane, StreamLane)
        self.lane, self.group = lane, FakeGroup(self.backend.cuda, "gather")
        connection = Connection(
            self.group,
            Board(HashStore(), 0, range(size)),
            lane,
            timeout=60.0,
            shares_stream=False,
            user_buffers=None,
        )
        self.communicator = NcclCommunicator(
            connection if size > 1 else None,
            rank=0,
            size=size,
            device=CPU,
            capability=capability,
            lane=lane,
            domain=self.backend._domain,
            watcher=self.backend._watcher,
        )

    @property
    def launched(self) -> list[str]:
        return self.backend.cuda.log


def zeros(*lengths: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.zeros(length, dtype=dtype) for length in lengths]


def each_collective(
    communicator: Communicator, lengths: list[int], dtype: torch.dtype = torch.float32
) -> None:
    """All four on lists of these lengths."""
    wholes = [communicator.size * length for length in lengths]
    many: dict[str, Any] = {"label": "unit"}
    communicator.all_gather(zeros(*wholes, dtype=dtype), zeros(*lengths, dtype=dtype), **many)
    parts = zeros(*lengths, dtype=dtype)
    communicator.reduce_scatter(parts, zeros(*wholes, dtype=dtype), Op.SUM, **many)
    communicator.all_reduce(zeros(*lengths, dtype=dtype), Op.SUM, **many)
    communicator.broadcast(zeros(*lengths, dtype=dtype), 1, **many)


@pytest.mark.parametrize("lengths", [[3], [3, 5], [1, 2, 3, 4]])
def test_a_list_is_one_launch(lengths: list[int]) -> None:
    """Every collective on any list of tensors is one launch."""
    fixed = Fixed()
    each_collective(fixed.communicator, lengths)
    text = "+".join(map(str, lengths))
    assert fixed.launched[:3] == [
        f"compute: gather all_gather {text} float32",
        f"compute: gather reduce_scatter sum {text} float32",
        f"compute: gather all_reduce sum {text} float32",
    ]
    flat = f"{text} float32" if len(lengths) == 1 else f"{4 * sum(lengths)} uint8"
    assert fixed.launched[3:] == [f"compute: gather broadcast from 1 {flat}"]


def test_nothing_to_move() -> None:
    """Empty lists and empty tensors launch nothing, and are left out beside others: what has no
    memory has no address."""
    fixed = Fixed()
    each_collective(fixed.communicator, [])
    each_collective(fixed.communicator, [0, 0])
    assert fixed.launched == []
    each_collective(fixed.communicator, [0, 3, 0])
    assert len(fixed.launched) == 4
    assert all(line.endswith(" 3 float32") for line in fixed.launched)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int16, torch.complex64, torch.float8_e5m2])
def test_any_dtype_moves(dtype: torch.dtype) -> None:
    """Gathers and broadcasts of what NCCL does not know go as bytes, without a copy."""
    fixed = Fixed(size=2)
    shard, whole = torch.zeros(3, dtype=dtype), torch.zeros(6, dtype=dtype)
    fixed.communicator.all_gather([whole], [shard], label="unit")
    fixed.communicator.broadcast([shard], 0, label="unit")
    nbytes = 3 * dtype.itemsize
    assert fixed.launched == [
        f"compute: gather all_gather {nbytes} uint8",
        f"compute: gather broadcast from 0 {nbytes} uint8",
    ]


def test_complex_numbers_are_pairs() -> None:
    """Sums of complex numbers are sums of twice as many real ones."""
    fixed = Fixed(size=2)
    fixed.communicator.all_reduce(zeros(3, dtype=torch.complex64), Op.AVG, label="unit")
    assert fixed.launched == ["compute: gather all_reduce sum 6 float32"]


@pytest.mark.parametrize(
    ("size", "capability", "dtype", "native"),
    [
        (4, (8, 0), torch.float32, True),
        (4, (8, 0), torch.bfloat16, True),
        (3, (8, 0), torch.float32, False),
        (4, (8, 0), torch.float16, False),
        (4, (9, 0), torch.float32, False),
        (3, (9, 0), torch.bfloat16, False),
    ],
)
def test_averages(size: int, capability: tuple[int, int], dtype: torch.dtype, native: bool) -> None:
    """An average is NCCL's own or a sum that is divided on the same stream, once; autograd's
    version of what is written stays."""
    fixed = Fixed(size, capability)
    parts, wholes = zeros(3, 2, dtype=dtype), zeros(3 * size, 2 * size, dtype=dtype)
    for part in parts:
        part.data.fill_(size)
    fixed.communicator.reduce_scatter(parts, wholes, Op.AVG, label="unit")
    fixed.communicator.all_reduce(parts, Op.AVG, label="unit")
    op = "avg" if native else "sum"
    name = str(dtype).removeprefix("torch.")
    assert fixed.launched == [
        f"compute: gather reduce_scatter {op} 3+2 {name}",
        f"compute: gather all_reduce {op} 3+2 {name}",
    ]
    # The group beneath is silent: what is seen is the division alone, twice.
    expected = torch.tensor(float(size) if native else 1 / size, dtype=dtype)
    assert all(part.eq(expected).all() for part in parts)
    assert all(part._version == 0 for part in parts)


@pytest.mark.parametrize("op", [Op.SUM, Op.AVG])
def test_one_rank_copies(op: Op) -> None:
    """A group of one rank launches nothing: outputs are inputs, averages their own sums."""
    fixed = Fixed(size=1)
    value = torch.arange(5.0)
    for call in (
        lambda out: fixed.communicator.all_gather([out], [value], label="unit"),
        lambda out: fixed.communicator.reduce_scatter([out], [value], op, label="unit"),
    ):
        out = torch.zeros(5)
        call(out)
        assert torch.equal(out, value)
        assert out._version == 0
    same = value.clone()
    fixed.communicator.all_reduce([same], op, label="unit")
    fixed.communicator.broadcast([same], 0, label="unit")
    fixed.communicator.settle()
    assert torch.equal(same, value)
    assert fixed.launched == []


@pytest.mark.parametrize(
    ("outputs", "shards", "error"),
    [
        (zeros(8, 8), zeros(2), ValueError),
        (zeros(8, 9), zeros(2, 2), ValueError),
        ([*zeros(8), torch.zeros(8, dtype=torch.half)], zeros(2, 2), ValueError),
        (zeros(8, 8), [*zeros(2), torch.zeros(4)[::2]], ValueError),
        (zeros(8, 8), [*zeros(2), torch.zeros(2, 1)], ValueError),
        (zeros(8, 8), [*zeros(2), torch.zeros(2, device="meta")], ValueError),
        (zeros(8, dtype=torch.int16), zeros(2, dtype=torch.int16), UnsupportedError),
        (zeros(8, dtype=torch.int32), zeros(2, dtype=torch.int32), UnsupportedError),
    ],
)
def test_bad_lists_launch_nothing(
    outputs: list[Tensor], shards: list[Tensor], error: type[Exception]
) -> None:
    """A list of which one member is wrong is refused as a whole: torch's calls for lists check
    nothing and read the first member only."""
    fixed = Fixed()
    with pytest.raises(error, match=r"^unit: "):
        fixed.communicator.reduce_scatter(shards, outputs, Op.AVG, label="unit")
    assert fixed.launched == []
    assert fixed.communicator.traffic.total_calls == 0


def test_an_error_of_nccl_names_the_work() -> None:
    """What NCCL raises is told with label, collective, rank and device, on every lane."""
    fixed = Fixed()
    fixed.group.error = RuntimeError("unhandled system error")
    fixed.lane.submit(
        lambda: fixed.communicator.all_gather(zeros(8), zeros(2), label="blocks.3 gather"),
        label="blocks.3 gather",
    )
    said = r"^blocks.3 gather: NCCL's all_gather failed on rank 0 of 4, on cpu: unhandled system"
    with pytest.raises(BackendError, match=said):
        fixed.backend.compute_lane(CPU).mark()


def test_closed() -> None:
    """A closed communicator says so, may be closed again, and so may one of a single rank."""
    for size in (1, 4):
        fixed = Fixed(size)
        fixed.communicator.close()
        fixed.communicator.close()
        with pytest.raises(BackendError, match=r"^unit: this communicator was closed"):
            each_collective(fixed.communicator, [1])


def test_collectives_are_noted_with_the_tickets() -> None:
    """A ticket knows the label and kind of the collectives before it, for messages."""
    fixed = Fixed()
    fixed.lane.submit(lambda: each_collective(fixed.communicator, [2]), label="blocks.0 reduce")
    ticket: Any = fixed.lane.mark()
    assert ticket.labels == ("blocks.0 reduce",)
    assert ticket.described.startswith("unit (all_gather), unit (reduce_scatter), unit (all_re")
    assert ticket.connections == (fixed.communicator.connection,)


def test_registered_memory() -> None:
    """With user_buffers memory comes from one pool that NCCL allocates for, at every acquire."""
    from polyshard.spi import Lifetime, Role, Use
    from polyshard_nccl.memory import UserBuffers

    fixed = Fixed()
    cuda: RecordedCuda = fixed.backend.cuda
    buffers, connection = UserBuffers(CPU, cuda), fixed.communicator.connection
    assert connection is not None
    buffers.register(fixed.group.transport)
    buffers.register(fixed.group.transport)
    connection.user_buffers = buffers
    uses = [Use(fixed.communicator, Role.GATHER_OUTPUT)]
    buffer = fixed.backend.allocate(uses, 8, torch.float32, CPU, Lifetime.TRANSIENT)
    cuda.log.append("--")
    buffer.acquire()
    buffer.acquire()
    buffer.tensor.fill_(1.0)
    buffer.release()
    connection.abort()
    connection.abort()
    assert cuda.log == [
        "pool from NCCL's allocator",
        "register pool with gather",
        "register pool with gather",
        "compute: allocate from pool",
        "--",
        "compute: acquire 8 float32",
        "compute: allocate from pool",
        "compute: acquire 8 float32",
        "compute: release 8 float32",
        "deregister pool with gather",
        "abort gather",
    ]
