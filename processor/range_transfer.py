"""Move ranges of shards between two ranks, from host to host or from device to device.

A shard is one run of bytes: its tensors, one behind the other. Both ends of a transfer cut a range of it into the same
chunks, by the sizes of the tensors and nothing else. Big tensors are cut for themselves, so that their chunks need no
copy; the small ones between them are put together, so that a thousand scalars do not make a thousand messages.

From host to host several chunks are under way at once, and behind each range comes a checksum. Hashing and copying one
chunk overlaps with the flight of the next. Why this cannot deadlock: the ranges move in rounds. In round k each rank
goes through its transfers in the one global order, waits for chunk k and posts chunk k + n, where n is how many it has
under way. A rank that waits for another one is therefore ahead of it by more rounds than that rank's n, which cannot
hold around a circle; and two transfers between one pair are posted in the same order at both ends, as a rank has one n
for all of its transfers.

From device to device a rank sends and receives in round k the chunks k of all its transfers as one batch, which starts
as a whole: rank A's batch k waits only for batches of its peers with the same number, and those only for earlier ones.
Nothing hashes on a device: the checksum of a range is the sum of its 32-bit words for each 64 KiB. It is made on both
devices and compared over the hosts, so that a link that changes bytes does not carry the proof as well.

What does not lie in one tensor, or not where the links can reach it, goes through a bounded staging memory. Letters are
the small messages of unknown length: headers, rank-local states, checksums. They always go from host to host.
"""

import dataclasses
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import xxhash

from ..communicators import host_memory
from ..communicators.base import DeviceLinks, DeviceMessage, Transfer
from ..communicators.host_memory import address_of, copy_into, flat_view, is_on, memory_of
from ..protocol.errors import ChecksumMismatch, RecoveryError
from ..protocol.types import ShardTransfer

if TYPE_CHECKING:
    import torch

CHUNK_BYTES = 4 * 1024 * 1024
DIRECT_BYTES = 256 * 1024  # a piece of a tensor from this size on travels without staging
HOST = "cpu"
FIRST_BYTES = 16 * 1024  # of a letter: most need no second message
_HEAD = struct.Struct("<QQ")  # of a letter: its length and hash
# Chunks of one transfer under way at once. So many that a busy machine, on which a thread may wait some milliseconds
# for its core, still has something to send; fewer where each needs host memory beside the device's.
IN_FLIGHT = 64
IN_FLIGHT_OF_DEVICE = 16  # through staging memory of the host
# Over links without a thread behind them: while this thread hashes a chunk, only what the sockets hold is on its way.
IN_FLIGHT_OF_PAIR = 2
BATCHES_IN_FLIGHT = 16  # from device to device: each may need staging
BLOCK_WORDS = 16 * 1024  # in one sum of a device's checksum
_WORD_BYTES = 4


class TensorRange(NamedTuple):
    """Bytes [start, start + length) of one tensor of a shard."""

    tensor: int
    start: int
    length: int


@dataclasses.dataclass(frozen=True)
class Chunk:
    """One message: a piece of a tensor, or several small ones put together."""

    pieces: tuple[TensorRange, ...]

    @property
    def length(self) -> int:
        """Bytes of all pieces."""
        return sum(piece.length for piece in self.pieces)


def cut(sizes: Sequence[int], offset: int, length: int) -> list[Chunk]:
    """Cut bytes [offset, offset + length) of tensors of these sizes into chunks of at most `CHUNK_BYTES`.

    Raises RecoveryError when the range goes beyond the shard.
    """
    if offset < 0 or length < 0 or offset + length > sum(sizes):
        raise RecoveryError(
            f"the repair plan asks for bytes {offset} to {offset + length} of a shard that has {sum(sizes)} here; do "
            "all ranks hold the same state?"
        )
    chunks: list[Chunk] = []
    small: list[TensorRange] = []
    gathered = 0
    for piece in _pieces(sizes, offset, offset + length):
        if piece.length >= DIRECT_BYTES:
            end = piece.start + piece.length
            steps = range(piece.start, end, CHUNK_BYTES)
            chunks += [Chunk((TensorRange(piece.tensor, step, min(CHUNK_BYTES, end - step)),)) for step in steps]
            continue
        if gathered + piece.length > CHUNK_BYTES:
            chunks.append(Chunk(tuple(small)))
            small, gathered = [], 0
        small.append(piece)
        gathered += piece.length
    if small:
        chunks.append(Chunk(tuple(small)))
    return chunks


def _pieces(sizes: Sequence[int], begin: int, end: int) -> Iterator[TensorRange]:
    """Yield what lies of each tensor in bytes [begin, end) of the shard."""
    at = 0
    for index, size in enumerate(sizes):
        low, high = max(at, begin), min(at + size, end)
        if low < high:
            yield TensorRange(index, low - at, high - low)
        at += size


class ShardMemory:
    """The memory of a shard's tensors, as bytes. `home`: the type of device on which a message can lie."""

    def __init__(self, tensors: "Sequence[torch.Tensor]", home: str = HOST) -> None:
        self._tensors = tensors
        self._flat: dict[int, Any] = {}
        self._home = home
        self.sizes = [tensor.nbytes for tensor in tensors]

    @property
    def addresses(self) -> list[int]:
        """Where each tensor begins in the memory of this process."""
        return list(map(address_of, self._tensors))

    @property
    def size_bytes(self) -> int:
        """All bytes of the shard."""
        return sum(self.sizes)

    @property
    def at_home(self) -> bool:
        """True if all of it can be sent and received in place."""
        return all(is_on(tensor, self._home) for tensor in self._tensors)

    def direct(self, chunk: Chunk) -> Any:
        """Return the chunk's own memory if it can be sent from or received into, else None."""
        if len(chunk.pieces) > 1 or not is_on(self._tensors[chunk.pieces[0].tensor], self._home):
            return None
        return self.view(chunk.pieces[0])

    def gather(self, chunk: Chunk, staging: "torch.Tensor") -> None:
        """Copy the chunk out of the tensors."""
        for view, part in self._parts(chunk, staging):
            copy_into(part, view)

    def scatter(self, chunk: Chunk, staging: "torch.Tensor") -> None:
        """Copy the chunk into the tensors."""
        for view, part in self._parts(chunk, staging):
            copy_into(view, part)

    def view(self, piece: TensorRange) -> Any:
        """Return a piece of one tensor, where it lies."""
        flat = self._flat.get(piece.tensor)
        if flat is None:
            # Tensors are contiguous by contract, so this is a view: what is written here is written there.
            flat = self._flat[piece.tensor] = flat_view(self._tensors[piece.tensor])
        return flat[piece.start : piece.start + piece.length]

    def _parts(self, chunk: Chunk, staging: "torch.Tensor") -> Iterator[tuple[Any, Any]]:
        at = 0
        for piece in chunk.pieces:
            yield self.view(piece), staging[at : at + piece.length]
            at += piece.length


@dataclasses.dataclass(frozen=True)
class TransferEnd:
    """One end of a transfer: this rank's, with the memory that it sends from or receives into."""

    transfer: ShardTransfer
    rank: int
    memory: ShardMemory

    @property
    def sending(self) -> bool:
        """True if this rank is the source."""
        return self.transfer.source == self.rank

    @property
    def peer(self) -> int:
        """The rank at the other end."""
        return self.transfer.destination if self.sending else self.transfer.source

    def chunks(self) -> list[Chunk]:
        """Return the chunks of the transfer, which are the same at both ends."""
        return cut(self.memory.sizes, self.transfer.offset_bytes, self.transfer.length_bytes)

    def changed(self) -> ChecksumMismatch:
        """Return the error of a transfer that arrived with another checksum."""
        t = self.transfer
        return ChecksumMismatch(
            f"shard {t.shard_id!r}, bytes {t.offset_bytes} to {t.offset_bytes + t.length_bytes}, arrived at rank "
            f"{self.rank} from rank {t.source} with another checksum than it was sent with"
        )


class Handle(Protocol):
    """A send or receive under way."""

    def wait(self) -> Any:
        """Return when it is done; raises when it failed or was aborted."""
        ...


class PeerLinks(Protocol):
    """The part of a communicator that a transfer between hosts needs."""

    def isend(self, tensor: "torch.Tensor", rank: int) -> Handle:
        """Start sending a CPU tensor."""
        ...

    def irecv(self, tensor: "torch.Tensor", rank: int) -> Handle:
        """Start receiving into a CPU tensor."""
        ...


class Letters:
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


def move_over_hosts(ends: Sequence[TransferEnd], links: PeerLinks, in_flight: int | None = None) -> None:
    """Move all ranges, in rounds. Runs in repair, in the train thread of all ranks that have a part, or before it.

    `ends` are in the order that all ranks keep, `in_flight` is for links that need another number than gloo's. Raises
    ChecksumMismatch when all are done, and what the links raise.
    """
    if in_flight is None:
        in_flight = IN_FLIGHT if all(end.memory.at_home for end in ends) else IN_FLIGHT_OF_DEVICE
    ranges = [_HostRange(end, links, in_flight) for end in ends]
    for index in range(in_flight):
        for item in ranges:
            item.post(index)
    for index in range(max((item.rounds for item in ranges), default=0)):
        for item in ranges:
            item.complete(index)
            item.post(index + in_flight)
    for item in ranges:
        if not item.matches:
            raise item.end.changed()


class _HostRange:
    """One transfer under way: its chunks in order, then a message with the checksum over them."""

    def __init__(self, end: TransferEnd, links: PeerLinks, in_flight: int) -> None:
        self.end = end
        self._in_flight = in_flight
        self.matches = True
        self._sending = end.sending
        self._links = links
        self._memory = end.memory
        self._chunks = end.chunks()
        self._hash = xxhash.xxh3_64()
        self._digest = host_memory.empty((1,), host_memory.dtype_of("int64"))
        self._staging: dict[int, Any] = {}
        self._pending: dict[int, tuple[Handle, Any]] = {}

    @property
    def rounds(self) -> int:
        """The number of messages: chunks, and the checksum."""
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
        self._pending[index] = (start(buffer, self.end.peer), buffer)

    def _stage(self, index: int, chunk: Chunk) -> Any:
        place = index % self._in_flight  # its last user is done when this one is posted
        held = self._staging.get(place)
        if held is None or len(held) < chunk.length:
            held = self._staging[place] = host_memory.empty_bytes(chunk.length)
        return held[: chunk.length]


def _signed(digest: int) -> int:
    return digest - 2**64 if digest >= 2**63 else digest


def move_over_devices(ends: Sequence[TransferEnd], links: DeviceLinks, letters: Letters) -> None:
    """Move all ranges, in rounds. Runs in repair, in the train thread of all ranks that have a part.

    `ends` are in the order that all ranks keep; their memory is at home on the device. Raises ChecksumMismatch, when
    all are done, and whatever links, letters and the device raise.
    """
    ranges = [_DeviceRange(end, links.device_type) for end in ends]
    under_way: deque[_Batch] = deque()
    for index in range(max((item.rounds for item in ranges), default=0)):
        if len(under_way) == BATCHES_IN_FLIGHT:
            under_way.popleft().complete()
        messages = [(item, item.message(index)) for item in ranges if index < item.rounds]
        under_way.append(_Batch(index, messages, links.exchange([message for _, message in messages])))
    while under_way:
        under_way.popleft().complete()
    for item in ranges:
        if item.end.sending:
            letters.send(item.checksum(), item.end.peer)
    changed = [
        item.end
        for item in ranges
        if not item.end.sending
        and letters.receive(item.end.peer, f"the checksum of shard {item.end.transfer.shard_id!r}") != item.checksum()
    ]
    letters.finish()
    if changed:
        raise changed[0].changed()


@dataclasses.dataclass(frozen=True)
class _Batch:
    """Messages under way together: chunk `index` of each range that has so many. It keeps their memory."""

    index: int
    messages: list[tuple["_DeviceRange", DeviceMessage]]
    transfer: Transfer

    def complete(self) -> None:
        """Wait for it, and take in what came. On a device it is the device that waits, before what it does next."""
        self.transfer.wait()
        for item, message in self.messages:
            item.arrived(self.index, message.tensor)


class _DeviceRange:
    """One transfer under way: its chunks in order, and the sums of those that have moved."""

    def __init__(self, end: TransferEnd, device_type: str) -> None:
        self.end = end
        self._device_type = device_type
        self._chunks = end.chunks()
        self._staging: dict[int, Any] = {}
        self._sums: list[Any] = []

    @property
    def rounds(self) -> int:
        """The number of chunks."""
        return len(self._chunks)

    def message(self, index: int) -> DeviceMessage:
        """Return chunk `index`, to be sent or received."""
        chunk = self._chunks[index]
        buffer = self.end.memory.direct(chunk)
        if buffer is None:
            buffer = self._stage(index, chunk)
            if self.end.sending:
                self.end.memory.gather(chunk, buffer)
        if self.end.sending:
            self._sums.append(sums(buffer))
        return DeviceMessage(buffer, self.end.peer, self.end.sending)

    def arrived(self, index: int, buffer: "torch.Tensor") -> None:
        """Take in chunk `index`, if it was to be received."""
        if self.end.sending:
            return
        self._sums.append(sums(buffer))
        chunk = self._chunks[index]
        if self.end.memory.direct(chunk) is None:
            self.end.memory.scatter(chunk, buffer)

    def checksum(self) -> bytes:
        """Return the sums of all chunks, as this end has them. Waits for the device."""
        import torch  # a job without a device need not have it

        return torch.cat(self._sums).cpu().numpy().tobytes() if self._sums else b""

    def _stage(self, index: int, chunk: Chunk) -> "torch.Tensor":
        place = index % BATCHES_IN_FLIGHT  # its last user is done when this one is posted
        held = self._staging.get(place)
        if held is None or len(held) < chunk.length:
            import torch

            held = self._staging[place] = torch.empty(chunk.length, dtype=torch.uint8, device=self._device_type)
        return held[: chunk.length]


def sums(data: "torch.Tensor") -> "torch.Tensor":
    """Return the sums of the 32-bit words of flat bytes, one for each 64 KiB and one for the rest, on their device."""
    import torch

    length, ragged = len(data), len(data) % _WORD_BYTES
    if ragged or data.storage_offset() % _WORD_BYTES:
        whole = data.new_zeros(length + (_WORD_BYTES - ragged) % _WORD_BYTES)
        whole[:length] = data
        data = whole
    words = data.view(torch.int32)
    end = len(words) - len(words) % BLOCK_WORDS
    blocks = words[:end].view(-1, BLOCK_WORDS).sum(dim=1, dtype=torch.int64)
    return torch.cat((blocks, words[end:].sum(dtype=torch.int64).view(1)))
