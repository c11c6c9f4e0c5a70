"""How the launcher sees that its controller lives and does not hang: a byte now and then on an inherited pipe.

The loop that drives the job writes it, so it stops when that loop does; a thread of its own would never stop.
"""

import contextlib
import os
import time

STARTING = b"s"  # it takes the journal over and replays it
STANDING_BY = b"c"  # another controller leads, and this one waits
SERVING = b"r"  # its loop turns
BEAT_S = 0.25


class KeepAlive:
    """The controller's end of the pipe. Never blocks and never fails: to be watched is no condition for working."""

    def __init__(self, descriptor: int | None = None) -> None:
        """Without a descriptor nothing is written."""
        self._descriptor = descriptor
        self._stage = STARTING  # or standing by
        self._next_s = 0.0
        if descriptor is not None:
            os.set_blocking(descriptor, False)
            os.set_inheritable(descriptor, False)

    def beat(self) -> None:
        """Show that this process gets on. Costs next to nothing when it has done so just before."""
        now = time.monotonic()
        if self._descriptor is None or now < self._next_s:
            return
        self._next_s = now + BEAT_S
        # A full pipe holds beats enough. One that is broken has lost the launcher, and the kernel ends this process.
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self._descriptor, self._stage)

    def stand_by(self) -> None:
        """Beat while another controller leads."""
        self._enter(STANDING_BY)

    def start(self) -> None:
        """Beat while the journal is read."""
        self._enter(STARTING)

    def serve(self) -> None:
        """Beat from the loop."""
        self._enter(SERVING)

    def _enter(self, stage: bytes) -> None:
        if self._stage is not stage:
            self._stage, self._next_s = stage, 0.0
        self.beat()
