"""Transfers over links in memory: any ranges, any sources, no deadlock, and no changed bit gets through."""

import contextlib
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch

from midstep.communicators.base import DeviceMessage
from midstep.processor import range_transfer, transfer
from midstep.processor.range_transfer import CHUNK_BYTES, FIRST_BYTES, ShardMemory
from midstep.processor.transfer import Transferred, run_transfers
from midstep.protocol.errors import ChecksumMismatch, RecoveryError, StateLost
from midstep.protocol.types import LocalStateTransfer, RepairLinks, RepairPart, RestoreSource, ShardTransfer

from .transfer_wire import Handle, PlainShards, Wire, WireLinks, together


@pytest.fixture(autouse=True)
def over_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of one process could read each other's memory: here the links carry everything."""
    monkeypatch.setattr(transfer, "this_host", lambda: "")


class _DeviceLinks(WireLinks):
    """Links of a device as well: a batch begins when the one before it is over, and is over when all of it is."""

    device_type = "cpu"
    carries_shards = True

    def __init__(self, wire: Wire, rank: int) -> None:
        super().__init__(wire, rank)
        self._device = WireLinks(wire, rank, "device")
        self._batches: list[Sequence[DeviceMessage]] = []
        self._over = 0

    def exchange(self, messages: Sequence[DeviceMessage]) -> Any:
        self._batches.append(messages)
        number = len(self._batches)
        return Handle(lambda: self._until_over(number))

    def _until_over(self, number: int) -> None:
        while self._over < number:
            batch = self._batches[self._over]
            for handle in [(self._device.isend if m.sending else self._device.irecv)(m.tensor, m.peer) for m in batch]:
                handle.wait()
            self._over += 1


def _run(
    transfers: list[ShardTransfer],
    own: list[LocalStateTransfer],
    frameworks: list[PlainShards],
    copies: dict[int, dict[int, bytes]] | None = None,
    wire: Wire | None = None,
    *,
    over: RepairLinks = RepairLinks.HOST,
    kind: type[WireLinks] = _DeviceLinks,
) -> list[Transferred | BaseException]:
    """Run all ranks in threads, each with its own part of the plan."""
    shared = wire or Wire()

    def work(rank: int) -> Transferred:
        part = RepairPart(
            target_step=3,
            restore=RestoreSource.REPLICA,
            transfers=tuple(t for t in transfers if rank in (t.source, t.destination)),
            local_states=tuple(t for t in own if rank in (t.rank, t.source)),
            links=over,
        )
        held = (copies or {}).get(rank, {})
        return run_transfers(
            part,
            rank=rank,
            framework=frameworks[rank],  # type: ignore[arg-type]
            links=kind(shared, rank),
            read_local_state=lambda of, step: held.get(of) if step == 3 else None,
        )

    return together(*(partial(work, rank) for rank in range(len(frameworks))))


def _tensors(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = [3, 1, CHUNK_BYTES // 4 + 11, 70_000, 0, 5, 2 * CHUNK_BYTES // 4, 1]
    return [torch.randn(size, generator=generator) for size in sizes]


def _equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def _size(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


WAYS = pytest.mark.parametrize("over", RepairLinks)


@WAYS
def test_a_shard_striped_over_three_sources_arrives_whole(over: RepairLinks) -> None:
    """Ranges may begin and end anywhere, in the middle of a number too."""
    tensors = _tensors(1)
    size = _size(tensors)
    cuts = [0, 5, size // 3 + 1, size]
    transfers = [ShardTransfer("a", cuts[i], cuts[i + 1] - cuts[i], i, 3) for i in range(3)]
    frameworks = [PlainShards({"a": [t.clone() for t in tensors]}) for _ in range(3)] + [PlainShards()]
    results = _run(transfers, [], frameworks, over=over)
    assert isinstance(results[3], Transferred)
    assert results[3].bytes_received >= size
    assert results[3].bytes_over_devices == (size if over is RepairLinks.DEVICE else 0)
    assert _equal(frameworks[3].held["a"], tensors)


@pytest.mark.parametrize("on_device", [(), ("rank1",), ("rank0", "rank2", "rank3")])
def test_ranks_that_send_and_receive_around_a_circle_do_not_deadlock(
    monkeypatch: pytest.MonkeyPatch, on_device: tuple[str, ...]
) -> None:
    """Every rank is source and destination at once, of several shards and with both neighbours.

    Some have more under way than others, as device memory needs staging.
    """
    monkeypatch.setattr(range_transfer, "IN_FLIGHT", 4)
    monkeypatch.setattr(range_transfer, "IN_FLIGHT_OF_DEVICE", 1)
    monkeypatch.setattr(ShardMemory, "at_home", property(lambda _: threading.current_thread().name not in on_device))
    _run_around_a_circle(RepairLinks.HOST)


@pytest.mark.parametrize("in_flight", [1, 3])
def test_batches_of_devices_do_not_wait_in_a_circle(monkeypatch: pytest.MonkeyPatch, in_flight: int) -> None:
    """A device begins a batch only when the one before it is over, and shards have different numbers of chunks."""
    monkeypatch.setattr(range_transfer, "BATCHES_IN_FLIGHT", in_flight)
    _run_around_a_circle(RepairLinks.DEVICE)


def _run_around_a_circle(over: RepairLinks) -> None:
    ranks = 4
    shards = {f"s{i}": _tensors(i)[i:] for i in range(ranks)}
    frameworks = [PlainShards({f"s{i}": [t.clone() for t in shards[f"s{i}"]]}) for i in range(ranks)]
    transfers = [
        ShardTransfer(f"s{i}", 0, _size(shards[f"s{i}"]), i, (i + step) % ranks)
        for i in range(ranks)
        for step in range(1, ranks)
    ]
    results = _run(transfers, [], frameworks, over=over)
    assert all(isinstance(result, Transferred) for result in results)
    for framework in frameworks:
        assert all(_equal(framework.held[name], tensors) for name, tensors in shards.items())


def test_two_lost_ranks_get_their_own_states_back_from_where_the_copies_are() -> None:
    """From another rank's black box, or from the own one that outlived the process."""
    copies = {0: {2: b"state of two" * 1000}, 1: {1: b"mine", 2: b"not asked for"}}
    own = [LocalStateTransfer(2, 0), LocalStateTransfer(1, 1)]
    results = _run([], own, [PlainShards() for _ in range(3)], copies)
    assert [getattr(result, "local_state", result) for result in results] == [None, b"mine", copies[0][2]]


@pytest.mark.parametrize("length", [0, 1, FIRST_BYTES - 17, FIRST_BYTES - 16, FIRST_BYTES - 15, 100_000])
def test_an_own_state_of_any_length_arrives(length: int) -> None:
    """In one message or in two."""
    blob = bytes(range(256)) * (length // 256 + 1)
    results = _run([], [LocalStateTransfer(1, 0)], [PlainShards(), PlainShards()], {0: {1: blob[:length]}})
    assert results[1] == Transferred(length, blob[:length])


@WAYS
def test_a_changed_bit_is_found_and_named(over: RepairLinks) -> None:
    """Shard, range and source are in the error, and the shard is not adopted."""
    tensors = _tensors(2)
    wire = Wire()
    frameworks = [PlainShards({"a": tensors}), PlainShards()]

    def damage(arrived: torch.Tensor) -> None:
        if arrived.numel() == CHUNK_BYTES:
            arrived[17] ^= 1

    wire.damage = damage
    results = _run([ShardTransfer("a", 0, _size(tensors), 0, 1)], [], frameworks, wire=wire, over=over)
    assert isinstance(results[1], ChecksumMismatch)
    assert "'a'" in str(results[1])
    assert "from rank 0" in str(results[1])
    assert "a" not in frameworks[1].held


def test_a_changed_own_state_is_found() -> None:
    """Small messages carry a checksum too."""
    wire = Wire()

    def damage(arrived: torch.Tensor) -> None:
        if arrived.dtype is torch.uint8:
            arrived[0] ^= 1

    wire.damage = damage
    results = _run([], [LocalStateTransfer(1, 0)], [PlainShards(), PlainShards()], {0: {1: b"abc"}}, wire)
    assert isinstance(results[1], ChecksumMismatch)


def test_a_copy_that_is_gone_is_named() -> None:
    """The plan counted on it."""
    results = _run([], [LocalStateTransfer(0, 0)], [PlainShards()])
    assert isinstance(results[0], StateLost)
    assert "rank 0" in str(results[0])


def test_a_plan_that_does_not_cover_the_shard_is_refused() -> None:
    """A shard with holes is never adopted."""
    tensors = [torch.ones(10)]
    frameworks = [PlainShards({"a": tensors}), PlainShards()]
    part = RepairPart(3, RestoreSource.REPLICA, transfers=(ShardTransfer("a", 0, 36, 0, 1),))
    wire = Wire()

    def wait_in_vain() -> None:
        with contextlib.suppress(AssertionError):  # nobody takes what it sends
            _run_quietly(part, 0, frameworks[0], wire)

    source = threading.Thread(target=wait_in_vain, daemon=True)
    source.start()
    with pytest.raises(RecoveryError, match="36 bytes"):
        _run_quietly(part, 1, frameworks[1], wire)
    source.join(0.1)


def _run_quietly(part: RepairPart, rank: int, framework: PlainShards, wire: Wire) -> None:
    run_transfers(
        part,
        rank=rank,
        framework=framework,  # type: ignore[arg-type]
        links=WireLinks(wire, rank),
        read_local_state=lambda of, step: None,
    )


def test_links_that_carry_no_memory_of_a_device_carry_shards_from_host_to_host() -> None:
    """A plan for devices reaches a communicator without links of its own only by mistake; nothing is lost by it."""
    tensors = _tensors(3)
    frameworks = [PlainShards({"a": tensors}), PlainShards()]
    transfers = [ShardTransfer("a", 0, _size(tensors), 0, 1)]
    results = _run(transfers, [], frameworks, over=RepairLinks.DEVICE, kind=WireLinks)
    assert isinstance(results[1], Transferred)
    assert results[1].bytes_over_devices == 0
    assert _equal(frameworks[1].held["a"], tensors)


@pytest.mark.parametrize("length", [0, 1, 3, 4, 4 * range_transfer.BLOCK_WORDS, 4 * range_transfer.BLOCK_WORDS + 7])
def test_the_checksum_of_a_device_follows_from_bytes_alone(length: int) -> None:
    """Both ends have the same bytes at other addresses, and a single bit that differs is seen wherever it is."""
    generator = torch.Generator().manual_seed(length)
    data = torch.randint(0, 256, (length,), dtype=torch.uint8, generator=generator)
    moved = torch.cat((torch.zeros(3, dtype=torch.uint8), data))[3:]
    assert torch.equal(range_transfer.sums(data), range_transfer.sums(moved))
    for place in {0, length // 2, length - 1} if length else ():
        changed = data.clone()
        changed[place] ^= 0x80
        assert not torch.equal(range_transfer.sums(data), range_transfer.sums(changed))


def test_a_part_with_nothing_to_do_does_nothing() -> None:
    """Most ranks of a big world only wait for the others."""
    assert _run([], [], [PlainShards()]) == [Transferred(0, None)]
