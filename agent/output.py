"""Standard output of a training process: a log that cannot be written loses lines, but never fails a step.

Python raises from `print` when the file system behind it is full, read-only or gone. In a train function that would be
a fault of the rank, and its replacement would fail in the same way, so a full disk would end the job.
"""

import errno
import io
import os
import sys
from typing import Any

# The file system refuses the data. Other errors, such as a descriptor that the script has closed, are raised.
_CANNOT_TAKE = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE, errno.ENODEV, errno.EPIPE}
)


class LossyFile(io.FileIO):
    """A file that drops what the file system refuses, and writes how much was lost once it accepts data again."""

    def __init__(self, descriptor: int, name: str) -> None:
        """Write to `descriptor`, which stays the caller's; `name` is shown in messages."""
        super().__init__(descriptor, "wb", closefd=False)
        self.name = name
        self._lost_bytes = 0
        self._reason = ""

    def write(self, data: Any, /) -> int:
        """Write some of `data` and return how many bytes; all of them when they had to be dropped."""
        size_bytes = memoryview(data).nbytes
        try:
            if self._lost_bytes:
                super().write(f"midstep: {self._lost_bytes} bytes of output were lost: {self._reason}\n".encode())
                self._lost_bytes = 0
            return super().write(data)
        except OSError as error:
            if error.errno not in _CANNOT_TAKE:
                raise
            self._lost_bytes += size_bytes
            self._reason = os.strerror(error.errno)
            return size_bytes


def reopen_output() -> None:
    """Write `sys.stdout` and `sys.stderr` through a `LossyFile`, line by line.

    So a log has what a process printed just before it was killed.
    """
    sys.stdout = sys.__stdout__ = _stream(1, sys.stdout)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _stream(2, sys.stderr)  # type: ignore[misc]


def _stream(descriptor: int, present: object) -> io.TextIOWrapper:
    wrapped = present if isinstance(present, io.TextIOWrapper) else None
    file = LossyFile(descriptor, "<stdout>" if descriptor == 1 else "<stderr>")
    return io.TextIOWrapper(
        io.BufferedWriter(file),
        encoding=wrapped.encoding if wrapped is not None else None,
        errors=wrapped.errors if wrapped is not None else "backslashreplace",
        line_buffering=True,
    )
