"""Every collective that torch offers over gloo gives, through a communicator, what plain gloo gives."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from tests.contract.makers import MAKERS, DeviceMaker, Maker, Setup
from torch.distributed import distributed_c10d as c10d

if TYPE_CHECKING:
    from tests.contract.gloo.conftest import Rank, Ranks

WORLD = 3
LACKS = ("Gloo does not support", "gloo does not support")  # reduce_scatter, for one, before torch 2.8
Result = list[Any]

pytestmark = [pytest.mark.makers("gloo", "fake", "npu"), pytest.mark.timeout(300)]


def own(rank: int, length: int = 6) -> torch.Tensor:
    return torch.arange(length, dtype=torch.float32) + 10 * rank


def all_reduce(rank: int) -> Result:
    results: Result = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT):
        tensor = own(rank)
        dist.all_reduce(tensor, op)
        results.append(tensor)
    return results


def all_reduce_of_integers(rank: int) -> Result:
    results: Result = []
    for kind in (torch.int64, torch.uint8, torch.float64, torch.bfloat16):
        tensor = torch.tensor([rank, 2, 3]).to(kind)
        dist.all_reduce(tensor)
        results.append(tensor)
    return results


def all_reduce_async(rank: int) -> Result:
    tensors = [own(rank, length) for length in (1, 100, 10_000)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in works:
        assert work is not None
        work.wait()
    return [*tensors]


def is_over(rank: int) -> Result:
    work = dist.all_reduce(own(rank), async_op=True)
    assert work is not None
    work.wait()
    return [work.is_completed()]


def all_reduce_future(rank: int) -> Result:
    work = dist.all_reduce(own(rank), async_op=True)
    assert work is not None
    return list(work.get_future().wait())


def all_reduce_of_nothing(rank: int) -> Result:
    tensor = torch.empty(0)
    dist.all_reduce(tensor)
    return [tensor]


def wait_with_timeout(rank: int) -> Result:
    tensor = own(rank)
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    return [work.wait(timedelta(seconds=20)), tensor]


def broadcast(rank: int) -> Result:
    tensor = own(rank)
    dist.broadcast(tensor, 1)
    return [tensor]


def reduce(rank: int) -> Result:
    tensor = own(rank)
    dist.reduce(tensor, 2)
    return [tensor] if rank == 2 else []


def all_gather(rank: int) -> Result:
    parts = [torch.empty(6) for _ in range(WORLD)]
    dist.all_gather(parts, own(rank))
    return parts


def all_gather_into_tensor(rank: int) -> Result:
    whole = torch.empty(6 * WORLD)
    dist.all_gather_into_tensor(whole, own(rank))
    return [whole]


def reduce_scatter(rank: int) -> Result:
    part = torch.empty(6)
    dist.reduce_scatter(part, [own(rank) + peer for peer in range(WORLD)])
    return [part]


def reduce_scatter_tensor(rank: int) -> Result:
    part = torch.empty(2)
    work = dist.reduce_scatter_tensor(part, own(rank), async_op=True)
    assert work is not None
    work.wait()
    return [part]


def gather(rank: int) -> Result:
    parts = [torch.empty(6) for _ in range(WORLD)] if rank == 0 else None
    dist.gather(own(rank), parts, 0)
    return parts or []


def scatter(rank: int) -> Result:
    part = torch.empty(6)
    dist.scatter(part, [own(peer) for peer in range(WORLD)] if rank == 1 else None, 1)
    return [part]


def all_to_all_single(rank: int) -> Result:
    output = torch.empty(6)
    dist.all_to_all_single(output, own(rank))
    return [output]


def all_to_all_uneven(rank: int) -> Result:
    output = torch.empty(WORLD * (rank + 1))
    dist.all_to_all_single(output, own(rank), [rank + 1] * WORLD, [1, 2, 3])
    return [output]


def all_to_all(rank: int) -> Result:
    parts = [torch.empty(2) for _ in range(WORLD)]
    dist.all_to_all(parts, list(own(rank).split(2)))  # type: ignore[no-untyped-call]
    return parts


def send_and_receive(rank: int) -> Result:
    tensor = torch.empty(6)
    if rank == 0:
        dist.send(own(0), 1, tag=5)
    if rank == 1:
        dist.recv(tensor, 0, tag=5)
        return [tensor]
    return []


def receive_from_anybody(rank: int) -> Result:
    tensor = torch.empty(6)
    if rank == 2:
        dist.send(own(2), 1, tag=70)
    if rank == 1:
        return [dist.recv(tensor, tag=70), tensor]
    return []


def many_at_once(rank: int) -> Result:
    right, left = (rank + 1) % WORLD, (rank - 1) % WORLD
    arriving = [torch.empty(6) for _ in range(20)]
    receiving = [dist.irecv(tensor, left, tag=tag) for tag, tensor in enumerate(arriving)]
    sending = [dist.isend(own(rank) + tag, right, tag=tag) for tag in range(20)]
    for work in [*receiving, *sending]:
        assert work is not None
        work.wait()
    return list(arriving)


def batch(rank: int) -> Result:
    tensor = torch.empty(6)
    ops = [
        dist.P2POp(dist.isend, own(rank), (rank + 1) % WORLD),
        dist.P2POp(dist.irecv, tensor, (rank - 1) % WORLD),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return [tensor]


def barrier(rank: int) -> Result:
    dist.barrier()
    work = dist.barrier(async_op=True)
    assert work is not None
    return [work.wait()]


def objects(rank: int) -> Result:
    everybody: list[Any] = [None] * WORLD
    dist.all_gather_object(everybody, {"rank": rank})
    words = [f"from {rank}"]
    dist.broadcast_object_list(words, 2)
    gathered: list[Any] | None = [None] * WORLD if rank == 0 else None
    dist.gather_object(rank, gathered, 0)
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, ["a", "b", "c"] if rank == 0 else None, 0)
    return [everybody, words, gathered, mine]


def coalesced(rank: int) -> Result:
    wholes = [torch.empty(6 * WORLD), torch.empty(6 * WORLD)]
    with c10d._coalescing_manager(async_ops=True) as manager:
        for index, whole in enumerate(wholes):
            dist.all_gather_into_tensor(whole, own(rank) + index)
    manager.wait()
    parts = [torch.empty(2), torch.empty(2)]
    with c10d._coalescing_manager():
        for index, part in enumerate(parts):
            dist.reduce_scatter_tensor(part, own(rank) + index)
    sums = [own(rank), own(rank)]
    with c10d._coalescing_manager():
        for tensor in sums:
            dist.all_reduce(tensor)
    return [*wholes, *parts, *sums]


def in_a_subgroup(rank: int) -> Result:
    group = dist.new_group([0, 2])
    if rank == 1:
        return []
    tensor = own(rank)
    dist.all_reduce(tensor, group=group)
    copy = own(rank)
    dist.broadcast(copy, 2, group=group)
    return [tensor, copy, dist.get_rank(group), dist.get_world_size(group), dist.get_process_group_ranks(group)]


def in_a_group_of_one(rank: int) -> Result:
    alone = [dist.new_group([each]) for each in range(WORLD)][rank]
    bucket, sums = own(rank), [own(rank), own(rank) + 1]
    results: Result = []
    for work in (
        dist.all_reduce(sums[0], group=alone, async_op=True),
        dist.all_reduce(sums[1], dist.ReduceOp.MAX, group=alone, async_op=True),
        dist.broadcast(bucket, rank, group=alone, async_op=True),
        dist.reduce(sums[0], rank, group=alone, async_op=True),
        dist.reduce_scatter_tensor(bucket[:], bucket, group=alone, async_op=True),
        dist.barrier(group=alone, async_op=True),
    ):
        assert work is not None
        results.append(work.wait())
    work = dist.all_reduce(own(rank), group=alone, async_op=True)
    assert work is not None
    results += work.get_future().wait()
    parts = [torch.empty(6) for _ in range(7)]
    dist.all_gather([parts[0]], own(rank), group=alone)
    dist.all_gather_into_tensor(parts[1], own(rank), group=alone)
    dist.reduce_scatter(parts[2], [own(rank)], group=alone)
    dist.gather(own(rank), [parts[3]], rank, group=alone)
    dist.scatter(parts[4], [own(rank)], rank, group=alone)
    dist.all_to_all_single(parts[5], own(rank), [6], [6], group=alone)
    dist.all_to_all([parts[6]], [own(rank)], group=alone)
    with c10d._coalescing_manager(alone):
        for tensor in sums:
            dist.reduce_scatter_tensor(tensor[:], tensor, group=alone)
    everybody: list[Any] = [None]
    dist.all_gather_object(everybody, {"rank": rank}, group=alone)
    return [*results, bucket, *sums, *parts, everybody]


def functionals(rank: int) -> Result:
    world = list(range(WORLD))
    results = [
        functional.all_reduce(own(rank), "sum", world),
        functional.all_gather_tensor(own(rank), 0, world),
        functional.reduce_scatter_tensor(own(rank), "sum", 0, world),
        functional.all_to_all_single(own(rank), None, None, world),
        functional.broadcast(own(rank), 1, world),
        *functional.all_reduce_coalesced([own(rank), own(rank)], "sum", world),
        *functional.all_gather_into_tensor_coalesced([own(rank), own(rank)], world),
        *functional.reduce_scatter_tensor_coalesced([own(rank), own(rank)], "sum", [0, 0], world),
    ]
    return [result + 0 for result in results]


def all_reduce_of_sparse(rank: int) -> Result:
    tensor = own(rank).to_sparse()
    dist.all_reduce(tensor)
    return [tensor.to_dense()]


def unknown_kind(rank: int) -> Result:
    dist.all_reduce(torch.ones(3, dtype=torch.complex64), dist.ReduceOp.MAX)
    return []


OPS: tuple[Callable[[int], Result], ...] = (
    all_reduce,
    all_reduce_of_integers,
    all_reduce_async,
    is_over,
    all_reduce_future,
    all_reduce_of_nothing,
    wait_with_timeout,
    broadcast,
    reduce,
    all_gather,
    all_gather_into_tensor,
    reduce_scatter,
    reduce_scatter_tensor,
    gather,
    scatter,
    all_to_all_single,
    all_to_all_uneven,
    all_to_all,
    send_and_receive,
    receive_from_anybody,
    many_at_once,
    batch,
    barrier,
    objects,
    coalesced,
    in_a_subgroup,
    in_a_group_of_one,
    functionals,
    all_reduce_of_sparse,
    unknown_kind,
)


PLAIN, OURS = "plain gloo", "through the communicator"


def plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


def run_all(rank: Rank) -> None:
    for op in OPS:
        if op.__name__ in rank.maker.lacks:
            rank.say(None)
            continue
        try:
            answer: Any = [plain(value) for value in op(rank.number)]
        except Exception as error:
            answer = f"{type(error).__name__}: {error}".splitlines()[0]
        rank.say(answer)
    rank.hear()


def with_plain_gloo(rank: Rank) -> None:
    rank.maker = MAKERS["gloo"]
    torch.set_default_device(None)
    store = dist.TCPStore(rank.store.host, rank.store.port, is_master=False)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank.number, world_size=WORLD)
    run_all(rank)


def with_communicator(rank: Rank) -> None:
    Setup(rank)
    run_all(rank)


@pytest.fixture(scope="module")
def answers(module_ranks: Ranks) -> dict[str, list[list[Any]]]:
    found = {}
    for name, program in ((PLAIN, with_plain_gloo), (OURS, with_communicator)):
        module_ranks.start_all(WORLD, program)
        found[name] = [module_ranks.hear_all() for _ in OPS]
        module_ranks.say("end")
    return found


@pytest.mark.parametrize("index", range(len(OPS)), ids=[op.__name__ for op in OPS])
def test_a_collective_gives_what_plain_gloo_gives(
    answers: dict[str, list[list[Any]]], maker: Maker, index: int
) -> None:
    if OPS[index].__name__ in maker.lacks:
        pytest.skip(maker.lacks[OPS[index].__name__])
    lacking = [answer for answer in answers[PLAIN][index] if any(words in str(answer) for words in LACKS)]
    more = OPS[index] is in_a_group_of_one or isinstance(maker, DeviceMaker)
    if lacking and more:  # midstep does all of a group of one by itself, and HCCL has collectives that gloo lacks
        pytest.skip(f"torch {torch.__version__}: {lacking[0]}")
    assert answers[OURS][index] == answers[PLAIN][index]
    assert any(answer for answer in answers[PLAIN][index])


def receive_from_any(rank: Rank) -> None:
    setup = Setup(rank)
    try:
        dist.recv(torch.empty(6))
    except RuntimeError as error:
        rank.say(str(error))
    setup.check()
    rank.say("checked")


@pytest.mark.makers("fake", "npu")
def test_a_receive_from_any_rank_is_refused_on_a_device_and_leaves_the_links_up(ranks: Ranks) -> None:
    ranks.start_all(WORLD, receive_from_any)
    assert all("does not support recv" in text for text in ranks.hear_all())
    assert ranks.hear_all() == ["checked"] * WORLD


KINDS = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8)


def in_every_kind(rank: Rank) -> None:
    """Do the collectives that frameworks do on devices, in every kind of number that they have there."""
    Setup(rank)
    before, after = (rank.number - 1) % WORLD, (rank.number + 1) % WORLD
    for kind in KINDS:
        given = torch.full((2,), rank.number + 1).to(kind)
        dist.broadcast(given, 1)
        assert given.tolist() == [2, 2]
        parts = [torch.zeros(2, dtype=kind) for _ in range(WORLD)]
        dist.all_gather(parts, torch.full((2,), rank.number).to(kind))
        assert [each.tolist() for each in parts] == [[0, 0], [1, 1], [2, 2]]
        out = torch.zeros(WORLD, dtype=kind)
        dist.all_to_all_single(out, torch.full((WORLD,), rank.number).to(kind))
        assert out.tolist() == [0, 1, 2]
        taken = torch.zeros(2, dtype=kind)
        batch = [dist.P2POp(dist.isend, given + rank.number, after), dist.P2POp(dist.irecv, taken, before)]
        for work in dist.batch_isend_irecv(batch):
            work.wait()
        assert taken.tolist() == [2 + before] * 2
        if kind == torch.uint8:
            continue
        total = torch.full((2,), rank.number + 1).to(kind)
        dist.all_reduce(total)
        assert total.tolist() == [6, 6]
        part = torch.zeros(2, dtype=kind)
        dist.reduce_scatter_tensor(part, torch.arange(2 * WORLD).to(kind))
        assert part.tolist() == [3 * 2 * rank.number, 3 * (2 * rank.number + 1)]
    rank.say("done")
    rank.hear()


def test_collectives_take_every_kind_of_number_that_models_have(ranks: Ranks) -> None:
    """HCCL adds up no uint8."""
    ranks.start_all(WORLD, in_every_kind)
    assert ranks.hear_all() == ["done"] * WORLD
