"""A debug log beside the log of a rank, for developers and not for operators.

Every survivor of a fault gets an exception out of its collective. That is how it is stopped, and no news: the incident
is reported once, by the launcher. So tracebacks of survivors go into a file beside the rank's log, which is not shown
unasked.

The stacks of all threads go there, too, when the train thread does not follow an order in time: a rank that does not
stop or link up is killed, and then nothing is left to look at. A thread that holds the interpreter's lock reads them.
`faulthandler.dump_traceback_later` reads them without it, while other threads run, and has crashed a healthy process.
"""

import os
import sys
import threading
import time
import traceback
from pathlib import Path

from ..protocol.private_files import make_private_directory, open_for_appending

STUCK_S = 4.0  # stop, clean, rebuild and repair of ordinary size are done by then; a dump of others does no harm
CLOSE_S = 1.0


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


class StackDump:
    """Writes all threads' stacks into the debug log unless it is disarmed in time. For any thread."""

    def __init__(self, log: DebugLog, after_s: float = STUCK_S) -> None:
        """Start nothing before it is armed."""
        self._log = log
        self._after_s = after_s
        self._changed = threading.Condition()
        self._due_s: float | None = None
        self._closed = False
        self._thread: threading.Thread | None = None

    def arm(self) -> None:
        """Begin to wait again: an order has come. Where no thread can be started there is no dump, and no fault."""
        with self._changed:
            if self._closed:
                return
            self._due_s = time.monotonic() + self._after_s
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="midstep-stack-dump", daemon=True)
                try:
                    thread.start()
                except RuntimeError:
                    return
                self._thread = thread
            self._changed.notify_all()

    def disarm(self) -> None:
        """Stop waiting: the order has been followed."""
        with self._changed:
            self._due_s = None

    def close(self) -> None:
        """Stop waiting, and end the thread. Idempotent."""
        with self._changed:
            self._closed, self._due_s = True, None
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while self._is_stuck():
            self._log.note(
                f"an order has not been followed for {self._after_s:g} s; the threads stand here:\n{_stacks()}"
            )

    def _is_stuck(self) -> bool:
        """Wait until an order is overdue; False when there is nothing more to wait for."""
        with self._changed:
            while not self._closed:
                left_s = None if self._due_s is None else self._due_s - time.monotonic()
                if left_s is not None and left_s <= 0:
                    self._due_s = None
                    return True
                self._changed.wait(left_s)
            return False


def _stacks() -> str:
    """Return the stack of each thread but the one that asks, by the threads' names."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    own = threading.get_ident()
    return "".join(
        f"Thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
        if ident != own
    )
