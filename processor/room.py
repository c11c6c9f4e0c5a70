"""Memory for state that arrives, in big pages where the kernel has them at hand.

What a process has never written to has no memory behind it: the kernel finds and clears a page when it is first
written. For the optimizer state of a newcomer that costs as much time as its transfer, in pages of 4 KiB; in pages of
2 MiB it is little. But where free memory is scattered the kernel can take long to find a big one, so it is asked for
one after the other, before the transfer, and only for as long as each comes quickly.
"""

import contextlib
import math
import mmap
import time

import torch

LEAST_BYTES = 8 * 1024 * 1024  # less is not worth the trouble
_ALIGNED_BYTES = 64
_PIECE_BYTES = 2 * 1024 * 1024
_SLOW_S = 0.001  # several times what a big page takes, and more than 2 MiB in small ones


class Room:
    """Memory that is given out once, from front to back."""

    def __init__(self, size_bytes: int) -> None:
        """Reserve `size_bytes`, and get as much as comes quickly."""
        self._size_bytes = size_bytes
        self._used = 0
        self._memory: mmap.mmap | None = None  # lives on as long as a tensor in it does
        if size_bytes >= LEAST_BYTES:
            self._memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with contextlib.suppress(OSError):  # a kernel without big pages
                self._memory.madvise(mmap.MADV_HUGEPAGE)
                self._get(self._memory)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor with nothing of worth in it; from elsewhere when it does not fit."""
        count = math.prod(shape)
        length = count * dtype.itemsize
        if self._memory is None or not count or self._used + length > self._size_bytes:
            return torch.empty(shape, dtype=dtype)
        tensor = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=self._used).view(shape)
        self._used += aligned(length)
        return tensor

    def _get(self, memory: mmap.mmap) -> None:
        for start in range(0, self._size_bytes, _PIECE_BYTES):
            began_s = time.monotonic()
            memory[start] = 0
            if time.monotonic() - began_s > _SLOW_S:
                rest = start + _PIECE_BYTES
                if rest < self._size_bytes:
                    memory.madvise(mmap.MADV_NOHUGEPAGE, rest)
                return


def aligned(length: int) -> int:
    """Return the room that a tensor of so many bytes takes."""
    return -(-length // _ALIGNED_BYTES) * _ALIGNED_BYTES
