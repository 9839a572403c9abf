"""Collectives of the gloo backend on 1 to 4 ranks, against one process that has all data."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from polyshard.spi import Communicator, Op
from polyshard.testing import run_ranks
from polyshard_gloo import GlooBackend

CPU = torch.device("cpu")
RANKS = [1, 2, 3, 4]
REDUCE_DTYPES = sorted(GlooBackend.capabilities.reduce_dtypes, key=str)
MOVED_DTYPES = [
    *REDUCE_DTYPES,
    torch.bool,
    torch.uint16,
    torch.uint64,
    torch.complex32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
# Lengths per rank. Headers carry about 8 kB with them; messages are of 2 MB and more.
LISTS = [
    [],
    [0],
    [1],
    [7],
    [0, 3, 0, 5],
    [1021],
    [4099],
    [1, 4099, 0, 2],
    [300_001],
    [17] * 700,
]
LONG_LISTS = [[2_500_003], [1_300_001, 3, 0, 700_000, 11]]


def data(rank: int, lengths: list[int], dtype: torch.dtype, *, seed: int = 0) -> list[Tensor]:
    """What ``rank`` contributes; every rank can make every rank's."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    tensors = []
    for numel in lengths:
        if dtype.is_complex or dtype.is_floating_point:
            wide = torch.complex64 if dtype.is_complex else torch.float32
            tensor = torch.randn(numel, generator=generator, dtype=wide)
        else:
            tensor = torch.randint(0, 200, (numel,), generator=generator)
        tensors.append(tensor.to(dtype))
    return tensors


def combined(contributions: list[Tensor], op: Op) -> Tensor:
    """Added in rank order, half precision in fp32, divided and rounded once."""
    dtype = contributions[0].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total = contributions[0].to(wide)
    for contribution in contributions[1:]:
        total = total + contribution.to(wide)
    if op is Op.AVG:
        total = total / len(contributions)
    return total.to(dtype)


def assert_bits(got: list[Tensor], expected: list[Tensor]) -> None:
    assert [tensor.dtype for tensor in got] == [tensor.dtype for tensor in expected]
    for tensor, reference in zip(got, expected, strict=True):
        assert torch.equal(tensor.view(torch.uint8), reference.view(torch.uint8))


def communicator(purpose: str = "gather") -> Communicator:
    return GlooBackend().communicator(dist.group.WORLD, CPU, purpose=purpose)


def check_moves(rank: int, dtypes: list[torch.dtype], lists: list[list[int]]) -> None:
    """all_gather and broadcast of every list and dtype."""
    moved = communicator()
    ranks = range(moved.size)
    for dtype in dtypes:
        for lengths in lists:
            shards = [data(other, lengths, dtype) for other in ranks]
            expected = [
                torch.cat([shards[other][i] for other in ranks]) for i in range(len(lengths))
            ]
            outputs = [torch.ones(moved.size * n).to(dtype) for n in lengths]
            moved.all_gather(outputs, shards[rank], label="gather")
            assert_bits(outputs, expected)
            assert_bits(shards[rank], data(rank, lengths, dtype))
            for source in ranks:
                buffers = data(rank, lengths, dtype)
                moved.broadcast(buffers, source, label="broadcast")
                assert_bits(buffers, shards[source])
    moved.close()


def check_reductions(rank: int, dtypes: list[torch.dtype], lists: list[list[int]]) -> None:
    """reduce_scatter and all_reduce of every list, dtype and op, out of place and in place."""
    reduced = communicator("reduce")
    ranks = range(reduced.size)
    for dtype in dtypes:
        for op in Op if dtype.is_floating_point or dtype.is_complex else (Op.SUM,):
            for lengths in lists:
                whole = [n * reduced.size for n in lengths]
                inputs = [data(other, whole, dtype) for other in ranks]
                sums = [
                    combined([inputs[other][i] for other in ranks], op) for i in range(len(whole))
                ]
                slots = [tensor.tensor_split(reduced.size)[rank] for tensor in sums]
                outputs = [torch.ones(n).to(dtype) for n in lengths]
                given = data(rank, whole, dtype)
                reduced.reduce_scatter(outputs, given, op, label="scatter")
                assert_bits(outputs, slots)
                assert_bits(given, inputs[rank])
                aliased = [tensor.tensor_split(reduced.size)[rank] for tensor in given]
                reduced.reduce_scatter(aliased, given, op, label="scatter in place")
                assert_bits(aliased, slots)
                # Not a multiple of the ranks, where it can be otherwise.
                uneven = [max(0, n - 1) for n in whole]
                buffers = [
                    tensor[:n].clone() for tensor, n in zip(inputs[rank], uneven, strict=True)
                ]
                reduced.all_reduce(buffers, op, label="all reduce")
                assert_bits(buffers, [tensor[:n] for tensor, n in zip(sums, uneven, strict=True)])
    reduced.close()


@pytest.mark.parametrize("world_size", RANKS)
class TestAgainstOneProcess:
    def test_moves(self, world_size: int) -> None:
        """Gathers and broadcasts of any dtype, list and length carry every bit."""
        run_ranks(world_size, check_moves, MOVED_DTYPES, LISTS[:8], timeout=240)

    def test_long_moves(self, world_size: int) -> None:
        """Gathers and broadcasts of many messages carry every bit."""
        run_ranks(world_size, check_moves, [torch.float32], LISTS[8:] + LONG_LISTS, timeout=240)

    def test_reductions(self, world_size: int) -> None:
        """Sums and averages of any supported dtype, list and length have the bits of the sum in
        rank order, with half precision in fp32."""
        run_ranks(world_size, check_reductions, REDUCE_DTYPES, LISTS[:8], timeout=240)

    def test_long_reductions(self, world_size: int) -> None:
        """Sums and averages of many messages have the bits of the sum in rank order."""
        dtypes = [torch.float32, torch.bfloat16, torch.int8]
        run_ranks(world_size, check_reductions, dtypes, LISTS[8:] + LONG_LISTS, timeout=240)


def check_alike(rank: int) -> None:
    every = communicator("reduce")
    for numel in (100, 1_000_003):
        for dtype in (torch.float32, torch.bfloat16):
            (buffer,) = data(rank, [numel], dtype)
            every.all_reduce([buffer], Op.AVG, label="all reduce")
            gathered = torch.empty(every.size * numel, dtype=dtype)
            every.all_gather([gathered], [buffer], label="gather")
            for other in gathered.tensor_split(every.size):
                assert_bits([other], [buffer])


def test_all_reduce_is_alike_everywhere() -> None:
    """Every rank ends an all-reduce with the same bits."""
    run_ranks(3, check_alike)


def check_views(rank: int, numel: int) -> None:
    """Shards at odd offsets of one buffer, and a shard that is its slot in the output."""
    gather, reduce = communicator(), communicator("reduce")
    size = gather.size
    # Offsets of an odd number of elements: views are not aligned as allocations are.
    store = torch.zeros(3 + 2 * numel + 5 + size * numel, dtype=torch.bfloat16)
    shards = [store[3 : 3 + numel], store[3 + numel : 3 + 2 * numel]]
    whole = store[3 + 2 * numel + 5 :]
    guards = [store[:3], store[3 + 2 * numel : 3 + 2 * numel + 5]]
    for guard in guards:
        guard.fill_(9)
    for shard, values in zip(shards, data(rank, [numel, numel], torch.bfloat16), strict=True):
        shard.copy_(values)
    other = torch.empty(size * numel, dtype=torch.bfloat16)
    gather.all_gather([whole, other], shards, label="views")
    expected = [data(r, [numel, numel], torch.bfloat16) for r in range(size)]
    assert_bits([whole, other], [torch.cat([e[i] for e in expected]) for i in (0, 1)])
    slot = whole[rank * numel : (rank + 1) * numel]
    slot.fill_(rank + 1)
    gather.all_gather([whole], [slot], label="slot")
    assert whole.view(size, numel).float().mean(1).tolist() == [r + 1.0 for r in range(size)]
    reduce.reduce_scatter([slot], [whole], Op.SUM, label="slot")
    assert slot.tolist() == [size * (rank + 1.0)] * numel
    assert [guard.unique().tolist() for guard in guards] == [[9.0]] * 2


@pytest.mark.parametrize("numel", [5, 60_001])
def test_views_and_aliases(numel: int) -> None:
    """Views at any offset of one buffer work, a shard may be its slot, and nothing around them
    is touched."""
    run_ranks(2, check_views, numel)


def check_versions(rank: int, numel: int) -> None:
    moved = communicator()
    full, shard = torch.zeros(moved.size * numel), torch.ones(numel)
    buffers = [full, shard]
    before = [buffer._version for buffer in buffers]
    with torch.no_grad():
        moved.all_gather([full], [shard], label="gather")
        moved.reduce_scatter([shard], [full], Op.AVG, label="scatter")
        moved.all_reduce([full], Op.AVG, label="reduce")
        moved.broadcast([full], 1, label="broadcast")
    assert [buffer._version for buffer in buffers] == before


@pytest.mark.parametrize("numel", [5, 60_001])
def test_refills_do_not_bump_versions(numel: int) -> None:
    """Autograd does not take a refilled buffer for a changed one."""
    run_ranks(2, check_versions, numel)


def check_mesh(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    backend = GlooBackend()
    outer = backend.communicator(mesh.get_group("outer"), CPU, purpose="outer")
    inner = backend.communicator(mesh.get_group("inner"), CPU, purpose="gather")
    assert (outer.rank, inner.rank) == divmod(rank, 2)
    first, second = torch.zeros(2), torch.zeros(4)
    inner.all_gather([first], [torch.tensor([float(rank)])], label="inner")
    outer.all_gather([second], [first], label="outer")
    assert first.tolist() == [rank // 2 * 2.0, rank // 2 * 2 + 1.0]
    assert second.tolist() == [0.0, 1.0, 2.0, 3.0]
    total = torch.tensor([float(rank)])
    inner.all_reduce([total], Op.SUM, label="inner")
    outer.all_reduce([total], Op.SUM, label="outer")
    assert total.item() == 6.0


def test_two_axes() -> None:
    """Communicators of two axes of one mesh see the ranks of their axis only."""
    run_ranks(4, check_mesh)


def check_uneven_history(rank: int) -> None:
    """Groups whose members made different numbers of communicators before."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    backend = GlooBackend()
    kept = []
    if rank < 2:
        kept = [
            backend.communicator(mesh.get_group("inner"), CPU, purpose="gather") for _ in range(3)
        ]
    outer = backend.communicator(mesh.get_group("outer"), CPU, purpose="gather")
    ranks = torch.zeros(2, dtype=torch.int64)
    outer.all_gather([ranks], [torch.tensor([rank])], label="outer")
    assert ranks.tolist() == [rank % 2, rank % 2 + 2]
    for made in kept:
        made.close()
    # The same group again, after others were closed on some of its ranks only.
    again = backend.communicator(mesh.get_group("outer"), CPU, purpose="gather")
    again.all_gather([ranks], [torch.tensor([10 * rank])], label="again")
    assert ranks.tolist() == [10 * (rank % 2), 10 * (rank % 2 + 2)]


def test_making_one_concerns_its_group_only() -> None:
    """A communicator needs only the ranks of its group, whatever each of them made before."""
    run_ranks(4, check_uneven_history)


def check_opposite_order(rank: int) -> None:
    backend = GlooBackend()
    gather = backend.communicator(dist.group.WORLD, CPU, purpose="gather")
    reduce = backend.communicator(dist.group.WORLD, CPU, purpose="reduce")
    gather_lane, reduce_lane = backend.lane("gather", CPU), backend.lane("reduce", CPU)
    compute = backend.compute_lane(CPU)
    size, gathered, reduced = gather.size, [], []
    for step in range(40):
        numel = (10, 5000)[step % 2]
        full = torch.zeros(size * numel)
        shard = torch.full((numel,), float(rank + step))
        total = torch.full((numel,), float(rank * step))
        gathered.append(full)
        reduced.append(total)
        submits = [
            lambda f=full, s=shard, n=step: gather_lane.submit(
                lambda: gather.all_gather([f], [s], label=f"gather {n}"), label=f"gather {n}"
            ),
            lambda t=total, n=step: reduce_lane.submit(
                lambda: reduce.all_reduce([t], Op.SUM, label=f"reduce {n}"), label=f"reduce {n}"
            ),
        ]
        for submit in submits if rank % 2 else reversed(submits):
            submit()
    # Now and then the lanes wait for each other, again in another order on each rank.
    compute.wait((gather_lane if rank % 2 else reduce_lane).mark())
    compute.wait((reduce_lane if rank % 2 else gather_lane).mark())
    for step in range(40):
        means = gathered[step].view(size, -1).mean(1).tolist()
        assert means == [float(other + step) for other in range(size)]
        assert reduced[step].unique().tolist() == [float(sum(r * step for r in range(size)))]


@pytest.mark.parametrize("world_size", [2, 3])
def test_lanes_in_any_order(world_size: int) -> None:
    """Ranks may interleave gathers and reductions differently: lanes and communicators are
    independent."""
    run_ranks(world_size, check_opposite_order)


def check_inputs_are_free(rank: int) -> None:
    backend = GlooBackend()
    gather = backend.communicator(dist.group.WORLD, CPU, purpose="gather")
    lane, compute = backend.lane("gather", CPU), backend.compute_lane(CPU)
    size, numel = gather.size, 700_001
    shard, outputs = torch.empty(numel), []
    for step in range(6):
        compute.wait(lane.mark())
        shard.fill_(10 * step + rank)
        outputs.append(torch.empty(size * numel))
        lane.submit(
            lambda out=outputs[-1]: gather.all_gather([out], [shard], label="gather"),
            label="gather",
        )
        lane.submit(gather.settle, label="settle")
    compute.wait(lane.mark())
    for step, output in enumerate(outputs):
        for other, part in enumerate(output.view(size, numel)):
            assert part.unique().tolist() == [10.0 * step + other]


def test_inputs_may_be_overwritten_after_settle() -> None:
    """A rank that is ahead and overwrites its input does not change what its peers receive."""
    run_ranks(3, check_inputs_are_free)
