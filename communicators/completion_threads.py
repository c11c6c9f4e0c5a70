"""Threads that wait for what the backend completes without telling anybody."""

import queue
import threading
from collections.abc import Callable

from ..protocol.errors import CommunicatorError

IDLE_S = 5.0  # how long a waiter without work is kept
MAX_THREADS = 1024


class CompletionThreads:
    """Threads that wait for what the backend completes without telling anybody.

    Sends, receives and reduce-scatters of gloo have no future, and are not complete before somebody waits for them.
    Threads are made on demand, kept for a while, and end by themselves.
    """

    def __init__(self) -> None:
        """Start with no thread."""
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._idle = 0  # threads that no job has been promised to
        self._alive = 0

    def run(self, job: Callable[[], None]) -> None:
        """Run `job`, which must not raise, in a thread of its own for as long as it takes."""
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
