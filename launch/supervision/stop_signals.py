"""What a signal to the launcher means: the first asks the job to stop, with a checkpoint; a second ends it at once."""

import asyncio
import logging
import signal
from collections.abc import Callable
from types import TracebackType

# A terminal that is closed sends SIGHUP, and its shell may send another: neither means that a user is impatient.
INSISTING = frozenset({signal.SIGINT, signal.SIGTERM})
HEARD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_log = logging.getLogger(__name__)


class StopSignals:
    """Listens while it is entered, in the running loop. `insisted` is set when the job is to end at once.

    Signals that were ignored when the launcher was started stay ignored, as `nohup` asks for.
    """

    def __init__(self, stop: Callable[[str], None], what: str = "asking the job to stop") -> None:
        """Call `stop` once, with the reason, when a signal arrives. `what`: what that does, in words."""
        self.insisted = asyncio.Event()
        self.asked = False
        self._stop = stop
        self._what = what

    def __enter__(self) -> "StopSignals":
        """Begin to listen."""
        for number in HEARD:
            if signal.getsignal(number) is not signal.SIG_IGN:
                asyncio.get_running_loop().add_signal_handler(number, self._heard, number)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the signals caught until the loop is closed: what is cleared away is not interrupted."""

    def _heard(self, number: signal.Signals) -> None:
        if not self.asked:
            self.asked = True
            _log.warning("%s: %s; Ctrl-C once more ends it at once", number.name, self._what)
            self._stop(f"midstep run received {number.name}")
        elif number in INSISTING:
            self.insisted.set()
