"""Where gloo groups that nobody uses any more are destroyed: in a thread, so that nobody waits for them.

Destroying a gloo group waits for its threads. That takes milliseconds, but for a collective that gloo does not tell
that its connection is gone (the write of its own thread was the first to fail): that one stays until its timeout.
"""

import threading
import time
from typing import Any


class Disposal:
    """Takes over the last references to gloo groups."""

    def __init__(self) -> None:
        """Begin with none."""
        self._threads: list[threading.Thread] = []

    def take(self, groups: list[Any]) -> None:
        """Destroy `groups` in a thread. The caller keeps no reference to them; the list is emptied."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        if any(group is not None for group in groups):
            thread = threading.Thread(target=groups.clear, name="midstep-disposal", daemon=True)
            thread.start()
            self._threads.append(thread)

    def wait(self, until: float) -> None:
        """Wait for those that are under way, at most until `until` on the monotonic clock."""
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
