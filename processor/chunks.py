"""A shard as one run of bytes, cut into chunks that both ends of a transfer derive alike.

The cut follows from the sizes of the tensors and nothing else. Big tensors are cut for themselves, so that their chunks
need no copy; runs of small ones are put together, so that a thousand scalars do not make a thousand messages.
"""

import bisect
import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import torch

from ..protocol.errors import RecoveryError

CHUNK_BYTES = 4 * 1024 * 1024
DIRECT_BYTES = 256 * 1024  # a piece of a tensor from this size on travels without staging


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Bytes [start, start + length) of a shard; `tensor` is the index of the one tensor they lie in, if direct."""

    start: int
    length: int
    tensor: int | None = None


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
    gathered = None  # start of a run of small pieces
    at = offset
    for index, start, piece in _pieces(sizes, offset, offset + length):
        at = start
        if gathered is not None and (piece >= DIRECT_BYTES or start + piece - gathered > CHUNK_BYTES):
            chunks.append(Chunk(gathered, start - gathered))
            gathered = None
        if piece >= DIRECT_BYTES:
            steps = range(start, start + piece, CHUNK_BYTES)
            chunks += [Chunk(step, min(CHUNK_BYTES, start + piece - step), index) for step in steps]
        elif gathered is None:
            gathered = start
        at = start + piece
    if gathered is not None:
        chunks.append(Chunk(gathered, at - gathered))
    return chunks


def _pieces(sizes: Sequence[int], begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield (index, start, length) of what lies of each tensor in bytes [begin, end)."""
    start = 0
    for index, size in enumerate(sizes):
        low, high = max(start, begin), min(start + size, end)
        if low < high:
            yield index, low, high - low
        start += size


class ShardMemory:
    """The memory of a shard's tensors, addressed by byte offsets."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        # Tensors are contiguous by contract, so these are views: what is written here is written there.
        self._flat = [tensor.detach().view(-1).view(torch.uint8) for tensor in tensors]
        self.sizes = [flat.numel() for flat in self._flat]
        self._starts = list(itertools.accumulate(self.sizes, initial=0))

    @property
    def size_bytes(self) -> int:
        """All bytes of the shard."""
        return self._starts[-1]

    def direct(self, chunk: Chunk) -> torch.Tensor | None:
        """Return the chunk's own memory if it can be sent from or received into, else None."""
        if chunk.tensor is None or self._flat[chunk.tensor].device.type != "cpu":
            return None
        begin = chunk.start - self._starts[chunk.tensor]
        return self._flat[chunk.tensor][begin : begin + chunk.length]

    def gather(self, chunk: Chunk, staging: torch.Tensor) -> None:
        """Copy the chunk out of the tensors."""
        for view, part in self._parts(chunk, staging):
            part.copy_(view)

    def scatter(self, chunk: Chunk, staging: torch.Tensor) -> None:
        """Copy the chunk into the tensors."""
        for view, part in self._parts(chunk, staging):
            view.copy_(part)

    def _parts(self, chunk: Chunk, staging: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        end = chunk.start + chunk.length
        index = bisect.bisect_right(self._starts, chunk.start) - 1
        while index < len(self.sizes) and self._starts[index] < end:
            low, high = max(self._starts[index], chunk.start), min(self._starts[index + 1], end)
            if low < high:
                view = self._flat[index][low - self._starts[index] : high - self._starts[index]]
                yield view, staging[low - chunk.start : high - chunk.start]
            index += 1
