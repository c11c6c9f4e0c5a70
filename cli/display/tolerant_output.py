"""An output of the launcher that may fail, fill up or be closed at any time without harm to the job.

Bytes go to the descriptor itself. A lock of Python's own stream would be held by a thread whose reader does not read,
and the interpreter would wait for that lock when it ends.
"""

import contextlib
import errno
import io
import os
import select
from typing import TextIO

# The output is there, and may take more later; after any other error it is gone.
_PASSING = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM})
_WAIT_MS = 1000


class TolerantOutput:
    """Writes whole lines to one stream. `written_bytes` grows as its reader takes them."""

    def __init__(self, stream: TextIO | None) -> None:
        self.gone = "closed" if stream is None else ""
        self.written_bytes = 0
        self._stream = stream
        self._descriptor = _descriptor_of(stream)
        self._lost_lines = 0
        self._lost_because = ""
        self._torn = False

    def write(self, line: bytes) -> None:
        """Write a line; waits for a reader that is slow. What cannot be written is dropped, and counted when it can."""
        if self.gone:
            return
        try:
            self._say_what_is_lost()
            self._put(line + b"\n")
        except OSError as error:
            if error.errno not in _PASSING:
                self.close(error.strerror or str(error))
                return
            self._lost_lines += 1
            self._lost_because = error.strerror or str(error)
        except Exception as error:  # a stream that is no file, in its own words
            self.close(f"{type(error).__name__}: {error}")

    def close(self, why: str) -> None:
        """Write nothing from now on. The stream stays open: it is not this object's own."""
        self.gone = self.gone or why

    def _say_what_is_lost(self) -> None:
        if self._lost_lines:
            self._put(f"midstep: {self._lost_lines} lines could not be written here: {self._lost_because}\n".encode())
            self._lost_lines = 0

    def _put(self, data: bytes) -> None:
        if self._descriptor is None:
            self._put_text(data)
            return
        left = memoryview(b"\n" + data if self._torn else data)
        whole = len(left)
        while left:
            try:
                taken = os.write(self._descriptor, left)
            except BlockingIOError:  # another process has made it non-blocking for all that share it
                _await_room(self._descriptor)
                continue
            except OSError:
                self._torn = self._torn or len(left) < whole
                raise
            self.written_bytes += taken
            left = left[taken:]
        self._torn = False

    def _put_text(self, data: bytes) -> None:
        assert self._stream is not None
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        text = data.decode(errors="replace")
        self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        self._stream.flush()
        self.written_bytes += len(data)


def hold_standard_descriptors() -> None:
    """Put /dev/null where stdin, stdout or stderr was closed: the next file to be opened would take its place."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free


def _descriptor_of(stream: TextIO | None) -> int | None:
    with contextlib.suppress(AttributeError, OSError, ValueError, io.UnsupportedOperation):
        return None if stream is None else stream.fileno()
    return None


def _await_room(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    poll.poll(_WAIT_MS)
