"""Where the threads of a process stand when it does not follow an order, for those who find out why it was replaced.

A rank that does not stop or link up in time is killed, and then nothing is left to look at. The dump is made by a
thread of the interpreter's that needs no lock of Python's, so also when a library has stopped the whole interpreter.
"""

import faulthandler
import os
from pathlib import Path

from ..protocol.private_files import make_private_directory, open_for_appending

STUCK_S = (
    4.0  # stop, clean, rebuild and repair of ordinary size are done by then; the dump of one that is not harms none
)


class StackDump:
    """Writes all threads' stacks into the debug log unless it is disarmed in time. The caller holds a lock."""

    def __init__(self, path: Path, after_s: float = STUCK_S) -> None:
        """Open nothing before it is armed."""
        self._path = path
        self._after_s = after_s
        self._descriptor = -1
        self._armed = False

    def arm(self) -> None:
        """Begin to wait again: an order has come. A log that cannot be written costs the dump, and never a step."""
        try:
            if self._descriptor < 0:
                make_private_directory(self._path.parent)
                self._descriptor = open_for_appending(self._path)
            faulthandler.dump_traceback_later(self._after_s, file=self._descriptor)
            self._armed = True
        except (OSError, RuntimeError):  # no file, or no further thread
            return

    def disarm(self) -> None:
        """Stop waiting: the order has been followed."""
        if self._armed:
            faulthandler.cancel_dump_traceback_later()
            self._armed = False

    def close(self) -> None:
        """Stop waiting, and close the log. Idempotent."""
        self.disarm()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
