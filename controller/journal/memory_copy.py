"""A journal that cannot be written, in memory: enough to end its job in order, and for nothing else.

Used by the controller of last resort (`controller.when_lost: stop`). What it records is lost with its process.
"""

import contextlib
import fcntl
import os
import sqlite3
from pathlib import Path

from ...protocol.errors import JournalError
from . import sqlite_file
from .journal import Journal


class ReadLock:
    """The lock of a journal on a disk that cannot be written: taken all the same, but without leaving a name in it."""

    def __init__(self, path: Path) -> None:
        """Take the lock at once, if there is such a file. Raises JournalError when a controller holds it."""
        self._descriptor = -1
        with sqlite_file.explained(path, "take the lock"), contextlib.suppress(FileNotFoundError):
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.close()
                raise JournalError(
                    f"{path}: another controller is active on this journal. A copy of it must not act beside that one."
                ) from None

    def begin(self, term: int) -> None:
        """No process has to find a controller that only ends its job."""

    def beat(self) -> None:
        """No controller deposes it either."""

    def require(self) -> None:
        """It leads for as long as it lives."""

    def overthrow(self) -> bool:
        """It was waited for."""
        return False

    def close(self) -> None:
        """Let the next one in. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def open_copy(path: Path, *, head: Path | None = None) -> Journal:
    """Become the controller of the job with a copy of its journal, as far as that can be read.

    `head`: the note of the journal's end, with which it is compared. Raises JournalError: it cannot be read, or another
    controller is active; JournalDamaged when it is not what was written.
    """
    with contextlib.ExitStack() as stack:
        lock = ReadLock(path.with_name(path.name + ".lock"))
        stack.callback(lock.close)
        memory = sqlite3.connect(":memory:", isolation_level=None)
        stack.callback(memory.close)
        with (
            contextlib.closing(sqlite_file.open_for_reading(path)) as original,
            sqlite_file.explained(path, "copy the journal"),
        ):
            memory.text_factory = original.text_factory
            original.backup(memory)
        return Journal.begin(path, lock, memory, stack, head=head, in_memory=True)
