"""Where the threads of a process stand when it does not follow an order, for those who find out why it was replaced.

A rank that does not stop or link up in time is killed, and then nothing is left to look at. The stacks are read by a
thread that holds the interpreter's lock: `faulthandler.dump_traceback_later` reads them without it, while the other
threads run, and has crashed a process that was well.
"""

import sys
import threading
import time
import traceback

from .debug_log import DebugLog

STUCK_S = (
    4.0  # stop, clean, rebuild and repair of ordinary size are done by then; the dump of one that is not harms none
)
CLOSE_S = 1.0


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
