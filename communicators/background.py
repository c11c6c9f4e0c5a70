"""Background threads for backend calls that cannot be interrupted: connecting, waiting for completion, destroying.

None of these calls can be aborted from another thread, and none can be trusted to be quick. Connecting gloo stalls for
seconds when a peer dies at the wrong moment; a send without a future is complete only when a thread waits for it;
destroying a gloo group waits for its threads. So each runs in a thread that the recovery can stop waiting for.
"""

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from ..protocol.errors import CommunicatorError

T = TypeVar("T")

IDLE_S = 5.0  # how long a completion thread without work is kept
MAX_THREADS = 1024


class Abandoned(Exception):
    """The owner of a background task no longer waits for it."""


class BackgroundTask(Generic[T]):
    """Work in a background thread that its owner can stop waiting for."""

    def __init__(self, work: Callable[["BackgroundTask[T]"], T], deadline: float) -> None:
        """Start `work`. It calls `remaining_s` between its steps. `deadline` is on the monotonic clock."""
        self.deadline = deadline
        self.stage = "the store has not answered"  # what is missing, if this is as far as it gets
        self._work = work
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._abandoned = False
        self._result: T | None = None
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="midstep-connect", daemon=True).start()

    def _run(self) -> None:
        result: T | None = None
        error: BaseException | None = None
        try:
            result = self._work(self)
        except Exception as caught:  # handed to the owner
            error = caught
        with self._lock:
            if not self._abandoned:
                self._result, self._error = result, error
                self._over.set()
        # An unwanted result is dropped here: destroying a gloo group may block for as long as its timeout.

    def remaining_s(self) -> float:
        """Return the seconds left. Raises Abandoned when the task was abandoned or no time is left."""
        left_s = self.deadline - time.monotonic()
        if self._abandoned or left_s <= 0:
            raise Abandoned
        return left_s

    def abandon(self) -> None:
        """Wake the owner and discard the result. Any thread."""
        with self._lock:
            self._abandoned = True
            self._over.set()

    def result(self) -> T:
        """Wait for the result until the deadline.

        Raises Abandoned after `abandon`, TimeoutError with the stage that was reached, or what the work raised.
        """
        in_time = self._over.wait(max(0.0, self.deadline - time.monotonic()))
        with self._lock:
            if self._abandoned:
                raise Abandoned
            if not in_time and not self._over.is_set():
                self._abandoned = True
                raise TimeoutError(self.stage)
            if isinstance(self._error, Abandoned):
                raise TimeoutError(self.stage)
            if self._error is not None:
                raise self._error
            result, self._result = self._result, None
        assert result is not None
        return result


class CompletionThreads:
    """A pool of threads that wait for works of the backend that have no future.

    Sends, receives and reduce-scatters of gloo are complete only when a thread waits for them. Threads are started on
    demand, kept for a while, and end by themselves.
    """

    def __init__(self) -> None:
        """Start with no thread."""
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._idle = 0  # threads that no job has been promised to
        self._alive = 0

    def run(self, job: Callable[[], None]) -> None:
        """Run `job`, which must not raise, in a thread of its own. Raises CommunicatorError when all are busy."""
        with self._lock:
            if self._idle:
                self._idle -= 1
                self._jobs.put(job)
                return
            if self._alive >= MAX_THREADS:
                raise CommunicatorError(
                    f"{MAX_THREADS} sends, receives or reduce-scatters are being waited for at once; "
                    "wait for some before more are started"
                )
            self._alive += 1
        threading.Thread(target=self._serve, args=(job,), name="midstep-completion", daemon=True).start()

    def _serve(self, job: Callable[[], None]) -> None:
        while True:
            job()
            del job  # it holds a tensor
            with self._lock:
                self._idle += 1
            try:
                job = self._jobs.get(timeout=IDLE_S)
            except queue.Empty:
                with self._lock:
                    if self._jobs.empty():
                        self._idle -= 1
                        self._alive -= 1
                        return
                job = self._jobs.get()  # promised between the timeout and the lock


COMPLETION_THREADS = CompletionThreads()


class Disposal:
    """Destroys gloo groups in background threads.

    Destroying one takes milliseconds, unless gloo has not noticed that a connection is gone (the write of its own
    thread was the first to fail): then the collective stays until its timeout, and so does the destruction.
    """

    def __init__(self) -> None:
        """Start with no thread."""
        self._threads: list[threading.Thread] = []

    def dispose(self, groups: list[Any]) -> None:
        """Destroy `groups` in a thread. The caller keeps no reference to them; the list is emptied."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        if any(group is not None for group in groups):
            thread = threading.Thread(target=groups.clear, name="midstep-disposal", daemon=True)
            thread.start()
            self._threads.append(thread)

    def wait(self, until: float) -> None:
        """Wait for the threads under way, at most until `until` on the monotonic clock."""
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
