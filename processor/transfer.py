"""Transfer lost state from the ranks that have it to those that need it, by the repair plan.

A shard is one run of bytes: its tensors, one behind the other. A transfer moves a range of it in chunks, several under
way at once, so that hashing and copying one chunk overlaps with the flight of the next. A chunk inside one tensor is
sent from, and received into, the tensor's own memory.

Why it cannot deadlock: everything small (headers, local states) is sent first, and no rank waits before it has sent all
of its own. The ranges then move in rounds: in round k each rank goes through its transfers in the one global order,
waits for chunk k and posts chunk k + n, where n is how many it has under way. A rank that waits for another one is
therefore ahead of it by more rounds than that rank's n, which cannot hold around a circle; and two transfers between
one pair are posted in the same order at both ends, as a rank has one n for all of its transfers.

Every wait ends with the communicator's own deadline, or when it is aborted.
"""

import dataclasses
import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import xxhash

from ..communicators import host_memory
from ..communicators.host_memory import memory_of
from ..protocol.errors import ChecksumMismatch, RecoveryError, StateLost
from ..protocol.types import LocalStateTransfer, RepairPart, ShardTransfer
from .chunks import Chunk, ShardMemory, cut
from .framework import Framework, OpenShard

if TYPE_CHECKING:
    import torch

# Chunks of one transfer under way at once. So many that a busy machine, on which a thread may wait some milliseconds
# for its core, still has something to send; fewer where each needs host memory beside the device's.
IN_FLIGHT = 64
IN_FLIGHT_OF_DEVICE = 16
FIRST_BYTES = 16 * 1024  # of a letter: most need no second message

_HEAD = struct.Struct("<QQ")

ReadOwnState = Callable[[int, int], bytes | None]


class Handle(Protocol):
    """A send or receive under way."""

    def wait(self) -> Any:
        """Return when it is done; raises when it failed or was aborted."""
        ...


class PeerLinks(Protocol):
    """What a transfer needs of a communicator."""

    def isend(self, tensor: "torch.Tensor", rank: int) -> Handle:
        """Start sending a CPU tensor."""
        ...

    def irecv(self, tensor: "torch.Tensor", rank: int) -> Handle:
        """Start receiving into a CPU tensor."""
        ...


@dataclasses.dataclass(frozen=True)
class Transferred:
    """What was received: the bytes of all, and this rank's local state if the plan brings it."""

    bytes_received: int
    local_state: bytes | None


def run_transfers(
    part: RepairPart, *, rank: int, framework: Framework, links: PeerLinks, read_local_state: ReadOwnState
) -> Transferred:
    """Carry out this rank's part of the plan. Runs in repair, in the train thread, on all ranks that have a part.

    `read_local_state(rank, step)` reads a copy of a local state from the black box here. Shards that arrived whole
    are adopted before this returns. Raises ChecksumMismatch (naming shard, range and source), StateLost when a copy
    that the plan counts on is gone, RecoveryError when plan and shard do not fit, and whatever the links raise.
    """
    transfers = sorted(part.transfers, key=lambda t: (t.shard_id, t.destination, t.offset_bytes, t.source))
    local_states = sorted(part.local_states, key=lambda t: (t.rank, t.source))
    letters = _Letters(rank, links)
    opened = {t.shard_id: framework.open_shard(t.shard_id) for t in transfers if t.source == rank}
    # The header comes with the first byte; a part holds only this rank's transfers, so it is a rule.
    headers = [t for t in transfers if t.offset_bytes == 0]
    for transfer in headers:
        if transfer.source == rank:
            letters.send(opened[transfer.shard_id].header, transfer.destination)
    own = _local_states(local_states, rank, part.target_step, letters, read_local_state)
    accepted = {
        t.shard_id: framework.accept_shard(t.shard_id, letters.receive(t.source, f"the header of shard {t.shard_id!r}"))
        for t in headers
        if t.destination == rank
    }
    for item in local_states:
        if item.rank == rank and item.source != rank:
            own = letters.receive(item.source, f"the rank-local state of rank {rank}")
    letters.finish()
    received = _move(transfers, rank, links, opened, accepted)
    for shard_id, shard in accepted.items():
        framework.adopt_shard(shard_id, shard)
    return Transferred(received + letters.bytes_received, own)


def _local_states(
    items: Sequence[LocalStateTransfer], rank: int, step: int, letters: "_Letters", read: ReadOwnState
) -> bytes | None:
    """Send the rank-local states that others lost; return this rank's own if it is here."""
    mine = None
    for item in items:
        if item.source != rank:
            continue
        blob = read(item.rank, step)
        if blob is None:
            raise StateLost(
                f"the plan takes rank {item.rank}'s local state of step {step} from the black box of rank {rank}, "
                "but it is not there, or was torn while it was written"
            )
        if item.rank == rank:
            mine = blob
        else:
            letters.send(blob, item.rank)
    return mine


class _Letters:
    """Small messages of unknown length: a first one of fixed size, with length and checksum, and a rest if need be."""

    def __init__(self, rank: int, links: PeerLinks) -> None:
        self._rank = rank
        self._links = links
        self._sent: list[tuple[Handle, Any]] = []
        self.bytes_received = 0

    def send(self, data: bytes, rank: int) -> None:
        """Start sending; never waits."""
        letter = _HEAD.pack(len(data), xxhash.xxh3_64_intdigest(data)) + data
        whole = host_memory.from_bytes(bytearray(letter.ljust(FIRST_BYTES, b"\0")))
        for tensor in (whole[:FIRST_BYTES], whole[FIRST_BYTES:]):
            if len(tensor):
                self._sent.append((self._links.isend(tensor, rank), tensor))

    def receive(self, rank: int, what: str) -> bytes:
        """Return what `rank` sends next. Raises ChecksumMismatch."""
        first = self._take(FIRST_BYTES, rank)
        length, digest = _HEAD.unpack_from(first)
        end = _HEAD.size + length
        data = first[_HEAD.size : end]
        if end > FIRST_BYTES:
            data += self._take(end - FIRST_BYTES, rank)
        self.bytes_received += length
        if xxhash.xxh3_64_intdigest(data) != digest:
            raise ChecksumMismatch(f"{what}, {length} bytes from rank {rank} to rank {self._rank}, arrived changed")
        return data

    def _take(self, length: int, rank: int) -> bytes:
        tensor = host_memory.empty_bytes(length)
        self._links.irecv(tensor, rank).wait()
        return bytes(memory_of(tensor))

    def finish(self) -> None:
        """Wait until everything sent has left."""
        for handle, _ in self._sent:
            handle.wait()
        self._sent.clear()


class _Range:
    """One transfer under way: its chunks in order, then a message with the checksum over them."""

    def __init__(
        self, transfer: ShardTransfer, rank: int, links: PeerLinks, memory: ShardMemory, in_flight: int
    ) -> None:
        self.transfer = transfer
        self._in_flight = in_flight
        self.matches = True
        self._sending = transfer.source == rank
        self._peer = transfer.destination if self._sending else transfer.source
        self._links = links
        self._memory = memory
        self._chunks = cut(memory.sizes, transfer.offset_bytes, transfer.length_bytes)
        self._hash = xxhash.xxh3_64()
        self._digest = host_memory.empty((1,), host_memory.dtype_of("int64"))
        self._staging: dict[int, Any] = {}
        self._pending: dict[int, tuple[Handle, Any]] = {}

    @property
    def rounds(self) -> int:
        """How many messages there are: chunks, and the checksum."""
        return len(self._chunks) + 1

    def post(self, index: int) -> None:
        """Start message `index`, if there is one."""
        if index >= self.rounds:
            return
        if index == len(self._chunks):
            if self._sending:
                self._digest[0] = _signed(self._hash.intdigest())
            self._start(index, self._digest)
            return
        chunk = self._chunks[index]
        buffer = self._memory.direct(chunk)
        if buffer is None:
            buffer = self._stage(index, chunk)
            if self._sending:
                self._memory.gather(chunk, buffer)
        self._start(index, buffer)
        if self._sending:
            self._hash.update(memory_of(buffer))  # while it is on its way

    def complete(self, index: int) -> None:
        """Wait for message `index`, if there is one, and take it in."""
        if index >= self.rounds:
            return
        handle, buffer = self._pending.pop(index)
        handle.wait()
        if self._sending:
            return
        if index == len(self._chunks):
            self.matches = int(self._digest[0]) == _signed(self._hash.intdigest())
            return
        chunk = self._chunks[index]
        self._hash.update(memory_of(buffer))
        if self._memory.direct(chunk) is None:
            self._memory.scatter(chunk, buffer)

    def _start(self, index: int, buffer: Any) -> None:
        start = self._links.isend if self._sending else self._links.irecv
        self._pending[index] = (start(buffer, self._peer), buffer)

    def _stage(self, index: int, chunk: Chunk) -> Any:
        place = index % self._in_flight  # its last user is done when this one is posted
        held = self._staging.get(place)
        if held is None or len(held) < chunk.length:
            held = self._staging[place] = host_memory.empty_bytes(chunk.length)
        return held[: chunk.length]


def _move(
    transfers: Sequence[ShardTransfer],
    rank: int,
    links: PeerLinks,
    opened: dict[str, OpenShard],
    accepted: dict[str, OpenShard],
) -> int:
    """Move all ranges, in rounds; return the bytes that came in. A wrong checksum is raised when all are done."""
    sources = {shard_id: ShardMemory(shard.tensors) for shard_id, shard in opened.items()}
    targets = {shard_id: ShardMemory(shard.tensors) for shard_id, shard in accepted.items()}
    _covered(transfers, rank, targets)
    on_host = all(memory.on_host for memory in (*sources.values(), *targets.values()))
    in_flight = IN_FLIGHT if on_host else IN_FLIGHT_OF_DEVICE
    ranges = [
        _Range(t, rank, links, sources[t.shard_id] if t.source == rank else targets[t.shard_id], in_flight)
        for t in transfers
    ]
    for index in range(in_flight):
        for item in ranges:
            item.post(index)
    for index in range(max((item.rounds for item in ranges), default=0)):
        for item in ranges:
            item.complete(index)
            item.post(index + in_flight)
    for item in ranges:
        if not item.matches:
            t = item.transfer
            raise ChecksumMismatch(
                f"shard {t.shard_id!r}, bytes {t.offset_bytes} to {t.offset_bytes + t.length_bytes}, arrived at rank "
                f"{rank} from rank {t.source} with another checksum than it was sent with"
            )
    return sum(t.length_bytes for t in transfers if t.destination == rank)


def _covered(transfers: Sequence[ShardTransfer], rank: int, targets: dict[str, ShardMemory]) -> None:
    for shard_id, memory in targets.items():
        planned = sum(t.length_bytes for t in transfers if t.destination == rank and t.shard_id == shard_id)
        if planned != memory.size_bytes:
            raise RecoveryError(
                f"the repair plan moves {planned} bytes of shard {shard_id!r} to rank {rank}, but its source says that "
                f"it has {memory.size_bytes}; do all ranks hold the same state?"
            )


def _signed(digest: int) -> int:
    return digest - 2**64 if digest >= 2**63 else digest
