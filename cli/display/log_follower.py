"""Follows what the training processes print, as it comes.

The logs are the buffer: their reader may be as slow as it likes, and no line is held in memory for it.
"""

import contextlib
import logging
import os
import re
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from .plain import TolerantOutput

_NAME = re.compile(r"rank-(\d+)\.(\d+)\.log")
_MOST_BYTES = 1 << 20  # per file and look, so that a flood of output cannot take the launcher's memory
# Status and new lines of logs are for a reader's eyes: there is no event for them, and more often is not seen.
LOOK_S = 0.2
STUCK_S = 10.0  # a reader that takes nothing for so long gets no more once the job is over
DRAIN_S = 60.0  # and no reader gets longer than this

_log = logging.getLogger(__name__)


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


class Poller:
    """Calls `look`, which says whether there was anything new, until it is finished.

    `advanced` is a number that grows while a look that takes long gets on. `last` is called once, after the last look.
    `on_error` is called in the thread with what a look raised, which ends nothing.
    """

    def __init__(
        self,
        name: str,
        look: Callable[[], bool],
        *,
        advanced: Callable[[], int],
        on_error: Callable[[Exception], None],
        last: Callable[[], object],
    ) -> None:
        self._look = look
        self._advanced = advanced
        self._on_error = on_error
        self._last = last
        self._finishing = threading.Event()
        # A daemon: a write without a reader must not keep the launcher from ending.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def finish(self) -> bool:
        """Look until nothing is new, and end; False: given up, as it gets no further. Ctrl-C gives up at once."""
        self._finishing.set()
        deadline = time.monotonic() + DRAIN_S
        try:
            while self._thread.is_alive():
                before = self._advanced()
                self._thread.join(min(STUCK_S, max(0.0, deadline - time.monotonic())))
                stuck = self._advanced() == before or time.monotonic() >= deadline
                if stuck and self._thread.is_alive():
                    return False
        except KeyboardInterrupt:
            return False
        return True

    def _run(self) -> None:
        while True:
            finishing = self._finishing.is_set()
            if not self._looked():
                if finishing:
                    break
                self._finishing.wait(LOOK_S)
        self._guarded(self._last)

    def _looked(self) -> bool:
        found = False

        def look() -> None:
            nonlocal found
            found = self._look()

        self._guarded(look)
        return found

    def _guarded(self, act: Callable[[], object]) -> None:
        try:
            act()
        except Exception as error:  # whatever a view or a stream raises: the job is not about that
            self._on_error(error)


class RankOutput:
    """Shows each line with its rank while it is entered, and what is left at the exit. Never ends anything else."""

    def __init__(self, logs: Path) -> None:
        self._output = TolerantOutput(sys.stdout)
        self._follower = LogFollower(logs, self._show)
        self._poller = Poller(
            "midstep-output",
            self._look,
            advanced=lambda: self._output.written_bytes,
            on_error=lambda error: _log.warning("the ranks' output cannot be shown: %s", error),
            last=self._follower.show_rest,
        )

    def __enter__(self) -> "RankOutput":
        """Begin to show."""
        self._poller.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Show what is left, within the limits of `Poller.finish`."""
        self._poller.finish()
        self._output.close("the agent has ended")

    def _look(self) -> bool:
        return not self._output.gone and self._follower.look()

    def _show(self, rank: int, line: bytes) -> None:
        self._output.write(b"[rank %d] %b" % (rank, line))
