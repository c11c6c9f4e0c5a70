"""Prefault memory for state that is about to arrive, beside other work.

What a process has never written to has no memory behind it: the kernel finds and clears a page when it is first
written. For the optimizer state of a newcomer that costs as much time as its transfer, in pages of 4 KiB; in pages of
2 MiB it is little. So a thread prefaults the memory as soon as the size is known, before anything is written to it,
and in big pages for as long as they are found quickly: where free memory is scattered the kernel can take long.
"""

import contextlib
import ctypes
import math
import mmap
import threading
import time

import torch

LEAST_BYTES = 8 * 1024 * 1024  # less is not worth the trouble
_ALIGNED_BYTES = 64
_PIECE_BYTES = 2 * 1024 * 1024
_SLOW_S = 0.001  # several times what a big page takes, and about as much as 2 MiB in small ones
_STALLED_S = 0.02  # by how much big pages may be slower in all, as one now and then has to be pieced together
_MADV_POPULATE_WRITE = 23  # Python has no name for it: get the memory, leave what is in it
_STOP_S = 5.0  # a piece takes milliseconds

# Not mmap.madvise, which keeps all other Python threads waiting meanwhile.
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class PrefaultedMemory:
    """Anonymous memory that a thread prefaults while tensors are allocated in it, from front to back."""

    def __init__(self, size_bytes: int) -> None:
        """Reserve `size_bytes`, and start to prefault them. Tensors may be written to meanwhile."""
        self.size_bytes = size_bytes
        self._used = 0
        self._memory: mmap.mmap | None = None  # lives on as long as a tensor in it does
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        if size_bytes >= LEAST_BYTES:
            self._memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._thread = threading.Thread(
                target=self._get, args=(self._memory,), name="midstep-prefault", daemon=True
            )
            self._thread.start()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialized CPU tensor; outside of this memory when it does not fit."""
        count = math.prod(shape)
        length = count * dtype.itemsize
        if self._memory is None or not count or self._used + length > self.size_bytes:
            return torch.empty(shape, dtype=dtype, device="cpu")
        tensor = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=self._used).view(shape)
        self._used += aligned(length)
        return tensor

    def close(self) -> None:
        """End the thread. What it has not prefaulted is faulted in when it is written; tensors stay valid."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(_STOP_S)

    def _get(self, memory: mmap.mmap) -> None:
        """Get the memory piece by piece, until all is there, it is closed, or the kernel refuses."""
        start = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        with contextlib.suppress(OSError):  # a kernel without big pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        quick, left_s = True, _STALLED_S
        for offset in range(0, self.size_bytes, _PIECE_BYTES):
            # CPU time of this thread: waiting for a core says nothing about the pages.
            began_s = time.thread_time()
            length = min(_PIECE_BYTES, self.size_bytes - offset)
            if self._stopped.is_set() or _madvise(start + offset, length, _MADV_POPULATE_WRITE) != 0:
                return  # a kernel before 5.14, or no memory: the first write will show it
            left_s += _SLOW_S - (time.thread_time() - began_s)
            if quick and left_s < 0 and offset + length < self.size_bytes:
                quick = False
                memory.madvise(mmap.MADV_NOHUGEPAGE, offset + length)


def aligned(length: int) -> int:
    """Return the bytes that a tensor of `length` bytes takes, with its alignment."""
    return -(-length // _ALIGNED_BYTES) * _ALIGNED_BYTES
