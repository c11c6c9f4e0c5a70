"""What a signal to the launcher means: the first asks the job to stop, with a checkpoint; a second ends it at once."""

import asyncio
import contextlib
import logging
import signal
from pathlib import Path
from typing import Self

from ..controller.doors.control_requests import Accepted, StopJobRequest
from ..controller.doors.control_socket import ask
from ..protocol.errors import MidstepError

ASK_S = 1.0
PAUSE_S = 0.5
# A terminal that is closed sends SIGHUP, and its shell may send another: neither is a user who will not wait.
INSISTING = frozenset({signal.SIGINT, signal.SIGTERM})
HEARD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_log = logging.getLogger(__name__)


class StopSignals:
    """Listens while it is entered, in the running loop. `insisted` is set when the job is to end at once.

    Signals that were ignored when the launcher was started stay ignored, as `nohup` asks for.
    """

    def __init__(self, run_directory: Path) -> None:
        self.insisted = asyncio.Event()
        self._run_directory = run_directory
        self._asking: asyncio.Task[None] | None = None

    @property
    def asked(self) -> bool:
        """Whether a signal has asked for the end of the job."""
        return self._asking is not None

    async def __aenter__(self) -> Self:
        """Begin to listen."""
        for number in HEARD:
            if signal.getsignal(number) is not signal.SIG_IGN:
                asyncio.get_running_loop().add_signal_handler(number, self._heard, number)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop asking. The signals stay caught until the loop is closed: what is cleared away is not interrupted."""
        if self._asking is not None:
            self._asking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._asking

    def _heard(self, number: signal.Signals) -> None:
        if self._asking is None:
            _log.warning("%s: asking the job to stop; Ctrl-C once more ends it at once", number.name)
            self._asking = asyncio.get_running_loop().create_task(self._ask(f"midstep run received {number.name}"))
        elif number in INSISTING:
            self.insisted.set()

    async def _ask(self, reason: str) -> None:
        """Ask until it is durable. A controller that is starting or has died is asked again when it is back."""
        request = StopJobRequest(reason, insist=False)
        while True:
            try:
                if isinstance(await asyncio.to_thread(ask, self._run_directory, request, ASK_S), Accepted):
                    return
            except MidstepError as error:
                _log.debug("the job could not be asked to stop yet: %s", error)
            await asyncio.sleep(PAUSE_S)
