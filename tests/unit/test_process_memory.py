"""Ranks of one host read each other's memory, and where that cannot be their links carry the shards as ever."""

import ctypes
import errno
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from functools import partial

import pytest
import torch

from midstep.processor import process_memory
from midstep.processor.process_memory import LEAST_BYTES, THREAD_BYTES
from midstep.processor.transfer import Transferred, run_transfers
from midstep.protocol.errors import ChecksumMismatch
from midstep.protocol.types import RepairPart, RestoreSource, ShardTransfer

from .transfer_wire import DEADLINE_S, Handle, PlainShards, Wire, WireLinks, together

COUNT = 3 * LEAST_BYTES // 4
LETTER_BYTES = 16 * 1024


class Links(WireLinks):
    """Notes how long the longest message is."""

    longest = 0

    def isend(self, tensor: torch.Tensor, rank: int) -> Handle:
        Links.longest = max(Links.longest, tensor.nbytes)
        return super().isend(tensor, rank)


@pytest.fixture(autouse=True)
def none_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Links, "longest", 0)


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))


def tensors(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    small = [torch.randn(1 + index % 3, generator=generator) for index in range(1500)]  # more than the kernel takes
    return [torch.randn(COUNT, generator=generator), torch.empty(0), *small, torch.randn(COUNT, generator=generator)]


def size_of(shard: Sequence[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in shard)


def run(transfers: Sequence[ShardTransfer], frameworks: Sequence[PlainShards]) -> list[Transferred | BaseException]:
    wire = Wire()

    def work(rank: int) -> Transferred:
        own = tuple(each for each in transfers if rank in (each.source, each.destination))
        part = RepairPart(target_step=3, restore=RestoreSource.REPLICA, transfers=own)
        return run_transfers(
            part,
            rank=rank,
            framework=frameworks[rank],  # type: ignore[arg-type]
            links=Links(wire, rank),
            read_local_state=lambda of, step: None,
        )

    return together(*(partial(work, rank) for rank in range(len(frameworks))))


def pair() -> tuple[list[torch.Tensor], list[PlainShards], list[ShardTransfer]]:
    """A source, a newcomer, and the transfer of all that the source has."""
    shard = tensors(1)
    return shard, [PlainShards({"a": shard}), PlainShards()], [ShardTransfer("a", 0, size_of(shard), 0, 1)]


def assert_arrived(frameworks: Sequence[PlainShards], shard: Sequence[torch.Tensor], rank: int = 1) -> None:
    held = frameworks[rank].held["a"]
    assert all(torch.equal(one, other) for one, other in zip(held, shard, strict=True))


@pytest.mark.parametrize("thread_bytes", [THREAD_BYTES, 1])
def test_a_shard_is_read_from_three_sources_and_nothing_of_it_is_sent(
    monkeypatch: pytest.MonkeyPatch, cores: None, thread_bytes: int
) -> None:
    """Ranges may begin and end anywhere, in the middle of a number too; so they do in one thread and in several."""
    monkeypatch.setattr(process_memory, "THREAD_BYTES", thread_bytes)
    shard = tensors(1)
    size = size_of(shard)
    cuts = [0, size // 3 + 1, 2 * size // 3 + 2, size]
    frameworks = [*(PlainShards({"a": [each.clone() for each in shard]}) for _ in range(3)), PlainShards()]
    received = run([ShardTransfer("a", cuts[i], cuts[i + 1] - cuts[i], i, 3) for i in range(3)], frameworks)[3]
    assert isinstance(received, Transferred)
    assert received.bytes_read == size
    assert_arrived(frameworks, shard, 3)
    assert Links.longest < LEAST_BYTES


def test_ranks_that_read_and_are_read_around_a_circle_do_not_deadlock() -> None:
    shards = [tensors(rank) for rank in range(3)]
    frameworks = [
        PlainShards({str(rank): shard, str((rank + 1) % 3): shards[(rank + 1) % 3]})
        for rank, shard in enumerate(shards)
    ]
    size = size_of(shards[0])
    transfers = [ShardTransfer(str(rank), 0, size, rank, (rank + 1) % 3) for rank in range(3)]
    for received in run(transfers, frameworks):
        assert isinstance(received, Transferred)
        assert received.bytes_read == size


def test_little_is_sent_without_asking() -> None:
    shard = [torch.arange(100.0)]
    frameworks = [PlainShards({"a": shard}), PlainShards()]
    received = run([ShardTransfer("a", 0, 400, 0, 1)], frameworks)[1]
    assert isinstance(received, Transferred)
    assert received.bytes_read == 0
    assert_arrived(frameworks, shard)


def _not_permitted(pid: int, places: object) -> None:
    raise PermissionError(errno.EPERM, "Operation not permitted")


def _another_process(pid: int, places: Sequence[tuple[int, int, int]]) -> None:
    """Copy from a process in which something else lies there."""
    for _, target, length in places:
        ctypes.memset(target, 0, length)


@pytest.mark.parametrize("copying", [_not_permitted, _another_process])
def test_where_memory_cannot_be_read_the_links_carry_the_shard(
    monkeypatch: pytest.MonkeyPatch, copying: object
) -> None:
    monkeypatch.setattr(process_memory, "_copy", copying)
    monkeypatch.setattr(process_memory, "_hashes", pytest.fail)  # what is sent is hashed when it is sent
    shard, frameworks, transfers = pair()
    received = run(transfers, frameworks)[1]
    assert isinstance(received, Transferred)
    assert received.bytes_read == 0
    assert_arrived(frameworks, shard)
    assert Links.longest > LEAST_BYTES


def test_where_a_process_can_be_read_and_its_tensors_cannot_the_links_carry_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The memory of a driver is that of a process, and the kernel reads none of it."""
    copy = process_memory._copy

    def without_tensors(pid: int, places: Sequence[tuple[int, int, int]]) -> None:
        if places[-1][-1] > LETTER_BYTES:
            raise OSError(errno.EFAULT, "Bad address")
        copy(pid, places)

    monkeypatch.setattr(process_memory, "_copy", without_tensors)
    shard, frameworks, transfers = pair()
    received = run(transfers, frameworks)[1]
    assert isinstance(received, Transferred)
    assert received.bytes_read == 0
    assert_arrived(frameworks, shard)
    assert Links.longest > LEAST_BYTES


def test_an_end_that_does_not_fit_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the source is on the host and the newcomer on a device: it is seen when memory for it was found."""
    shard, frameworks, transfers = pair()
    sized = process_memory.Range
    monkeypatch.setattr(process_memory, "Range", lambda addresses, sizes: sized(addresses, (*sizes[:-1], 1)))
    received = run(transfers, frameworks)[1]
    assert isinstance(received, Transferred)
    assert received.bytes_read == 0
    assert_arrived(frameworks, shard)


def test_much_is_done_in_several_threads_at_once_and_what_one_raises_is_raised(cores: None) -> None:
    both, done = threading.Barrier(2, timeout=DEADLINE_S), []

    def work(item: int) -> None:
        both.wait()  # one thread for all of it would wait here in vain
        done.append(item)

    process_memory._in_threads(work, range(2), 2 * THREAD_BYTES)
    assert sorted(done) == [0, 1]
    threads: set[int] = set()

    def failing(item: int) -> None:
        threads.add(threading.get_ident())
        both.wait()
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("of another thread")

    with pytest.raises(ValueError, match="of another thread"):
        process_memory._in_threads(failing, range(2), 2 * THREAD_BYTES)
    assert len(threads) == 2


def test_little_is_done_in_the_thread_that_asks(cores: None) -> None:
    threads: set[int] = set()
    process_memory._in_threads(lambda _: threads.add(threading.get_ident()), range(9), THREAD_BYTES)
    assert threads == {threading.get_ident()}


def test_ranks_of_two_hosts_do_not_try(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = iter(["a", "b"])
    monkeypatch.setattr("midstep.processor.transfer.this_host", lambda: next(hosts))
    monkeypatch.setattr(process_memory, "_copy", pytest.fail)
    shard, frameworks, transfers = pair()
    assert isinstance(run(transfers, frameworks)[1], Transferred)
    assert_arrived(frameworks, shard)


def test_a_changed_bit_is_found_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = process_memory._copy

    def changing(pid: int, places: Sequence[tuple[int, int, int]]) -> None:
        copy(pid, places)
        _, target, length = places[-1]
        if length > LETTER_BYTES:
            ctypes.memset(target + 17, 0xFF, 1)

    monkeypatch.setattr(process_memory, "_copy", changing)
    _, frameworks, transfers = pair()
    sent, error = run(transfers, frameworks)
    assert isinstance(sent, Transferred)
    assert isinstance(error, ChecksumMismatch)
    assert "shard 'a', bytes 0 to" in str(error)
    assert "from rank 0" in str(error)
    assert "a" not in frameworks[1].held


PROCESS = """
import ctypes, sys
memory = ctypes.create_string_buffer(bytes(range(256)), 256)
print(ctypes.addressof(memory), flush=True)
sys.stdin.read()
"""


def test_the_memory_of_another_process_is_read_until_it_ends() -> None:
    """The kernel lets a process read its child; what an unrelated one needs, `_allow` asks for."""
    target = ctypes.create_string_buffer(256)
    with subprocess.Popen([sys.executable, "-c", PROCESS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        places = [(int(child.stdout.readline()), ctypes.addressof(target), 256)]
        process_memory._copy(child.pid, places)
        assert target.raw == bytes(range(256))
        with pytest.raises(OSError, match="Bad address"):
            process_memory._copy(child.pid, [(8, ctypes.addressof(target), 256)])
        child.kill()
    with pytest.raises(ProcessLookupError):
        process_memory._copy(child.pid, places)


def test_a_host_is_named_by_its_boot_and_its_process_ids() -> None:
    assert os.readlink("/proc/self/ns/pid") in process_memory.this_host()
