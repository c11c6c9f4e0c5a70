"""Follows what the training processes print, as it comes.

The logs are the buffer: their reader may be as slow as it likes, and no line is held in memory for it.
"""

import contextlib
import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

_NAME = re.compile(r"rank-(\d+)\.(\d+)\.log")
_MOST_BYTES = 1 << 20  # per file and look, so that a flood of output cannot take the launcher's memory


class LogFollower:
    """Reads what has been added to the logs of a job since the last look, and hands on each line with its rank."""

    def __init__(self, directory: Path, show: Callable[[int, bytes], None]) -> None:
        self._directory = directory
        self._show = show
        self._read: dict[Path, int] = {}
        self._parts: dict[Path, bytes] = {}

    def look(self) -> bool:
        """Show all complete lines that are new, and tell whether there was anything new. A log that cannot be read is
        tried again at the next look.
        """
        found = False
        for rank, path in self._logs():
            with contextlib.suppress(OSError), _regular(path) as file:
                found |= self._look_at(rank, path, file)
        return found

    def show_rest(self) -> None:
        """Show what came last and did not end with a line break."""
        for rank, path in self._logs():
            part = self._parts.pop(path, b"")
            if part:
                self._show(rank, part)

    def unread_bytes(self) -> int:
        """Count what is in the logs and has not been read."""
        unread = 0
        for _, path in self._logs():
            with contextlib.suppress(OSError):
                unread += max(0, path.stat().st_size - self._read.get(path, 0))
        return unread

    def _look_at(self, rank: int, path: Path, file: BinaryIO) -> bool:
        read = self._read.get(path, 0)
        if os.fstat(file.fileno()).st_size < read:  # it was truncated
            read = 0
        file.seek(read)
        data = file.read(_MOST_BYTES)
        self._read[path] = read + len(data)
        *lines, rest = (self._parts.pop(path, b"") + data).split(b"\n")
        self._parts[path] = rest[-_MOST_BYTES:]
        for line in lines:
            self._show(rank, line)
        return bool(data)

    def _logs(self) -> Iterator[tuple[int, Path]]:
        for path in sorted(self._directory.glob("rank-*.log")):
            match = _NAME.fullmatch(path.name)
            if match is not None:
                yield int(match[1]), path


@contextlib.contextmanager
def _regular(path: Path) -> Iterator[BinaryIO]:
    """Open a log; raises OSError for what is none. To open a pipe, or to read from one, could take for ever."""
    with open(path, "rb", buffering=0, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(f"{path} is not a regular file")
        yield file
