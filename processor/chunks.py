"""A shard as one run of bytes, cut into chunks that both ends of a transfer derive alike.

The cut follows from the sizes of the tensors and nothing else. Big tensors are cut for themselves, so that their chunks
need no copy; the small ones between them are put together, so that a thousand scalars do not make a thousand messages.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..communicators.host_memory import copy_into, flat_view, is_on
from ..protocol.errors import ChecksumMismatch, RecoveryError
from ..protocol.types import ShardTransfer

if TYPE_CHECKING:
    import torch

CHUNK_BYTES = 4 * 1024 * 1024
DIRECT_BYTES = 256 * 1024  # a piece of a tensor from this size on travels without staging
HOST = "cpu"


@dataclasses.dataclass(frozen=True)
class TensorRange:
    """Bytes [start, start + length) of one tensor of a shard."""

    tensor: int
    start: int
    length: int


@dataclasses.dataclass(frozen=True)
class Chunk:
    """What travels as one message: a piece of a tensor, or several small ones put together."""

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
        # Tensors are contiguous by contract, so these are views: what is written here is written there.
        self._flat = [flat_view(tensor) for tensor in tensors]
        self._home = home
        self.sizes = [len(flat) for flat in self._flat]

    @property
    def size_bytes(self) -> int:
        """All bytes of the shard."""
        return sum(self.sizes)

    @property
    def at_home(self) -> bool:
        """Whether all of it can be sent and received as it lies."""
        return all(is_on(flat, self._home) for flat in self._flat)

    def direct(self, chunk: Chunk) -> Any:
        """Return the chunk's own memory if it can be sent from or received into, else None."""
        if len(chunk.pieces) > 1 or not is_on(self._flat[chunk.pieces[0].tensor], self._home):
            return None
        return self._view(chunk.pieces[0])

    def gather(self, chunk: Chunk, staging: "torch.Tensor") -> None:
        """Copy the chunk out of the tensors."""
        for view, part in self._parts(chunk, staging):
            copy_into(part, view)

    def scatter(self, chunk: Chunk, staging: "torch.Tensor") -> None:
        """Copy the chunk into the tensors."""
        for view, part in self._parts(chunk, staging):
            copy_into(view, part)

    def _view(self, piece: TensorRange) -> Any:
        return self._flat[piece.tensor][piece.start : piece.start + piece.length]

    def _parts(self, chunk: Chunk, staging: "torch.Tensor") -> Iterator[tuple[Any, Any]]:
        at = 0
        for piece in chunk.pieces:
            yield self._view(piece), staging[at : at + piece.length]
            at += piece.length


@dataclasses.dataclass(frozen=True)
class TransferEnd:
    """One end of a transfer: this rank's, with the memory that it sends from or receives into."""

    transfer: ShardTransfer
    rank: int
    memory: ShardMemory

    @property
    def sending(self) -> bool:
        """Whether this rank is the source."""
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
