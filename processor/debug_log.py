"""A debug log beside the log of a rank, for developers and not for operators.

Every survivor of a fault gets an exception out of its collective. That is how it is stopped, and no news: the incident
is reported once, by the launcher. So tracebacks of survivors go into a file beside the rank's log, which is not shown
unasked.
"""

import os
import time
import traceback
from pathlib import Path

from ..protocol.private_files import make_private_directory, open_for_appending


class DebugLog:
    """Appends to one file, from any thread. A file that cannot be written costs lines, and never a step."""

    def __init__(self, path: Path) -> None:
        """Open nothing before there is something to note."""
        self._path = path

    def note(self, text: str, error: BaseException | None = None) -> None:
        """Write a line with the time of day, and the traceback of `error` below it."""
        at_s = time.time()
        clock = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at_s))
        lines = [f"{clock}.{int(at_s % 1 * 1000):03d} {text}\n"]
        if error is not None:
            lines += traceback.format_exception(error)
        try:
            make_private_directory(self._path.parent)
            descriptor = open_for_appending(self._path)
            try:
                os.write(descriptor, "".join(lines).encode(errors="backslashreplace"))
            finally:
                os.close(descriptor)
        except OSError:  # what matters is reported to the controller; a full disk must not become a fault of the rank
            return
