"""Poll something in a thread of its own, so that nothing else waits for it or fails with it."""

import threading
import time
from collections.abc import Callable

# Status and new lines of logs are for a reader's eyes: there is no event for them, and more often is not seen.
LOOK_S = 0.2
STUCK_S = 10.0  # a reader that takes nothing for so long gets no more once the job is over
DRAIN_S = 60.0  # and no reader gets longer than this


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
