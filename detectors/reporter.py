"""Reports a detector's faults to the controller, with keys of its own that allow nothing else."""

import asyncio
import logging
import time
from collections import deque
from pathlib import Path
from types import TracebackType

from ..protocol.discovery import Lookup
from ..protocol.errors import ForeignVersion, MidstepError
from ..protocol.keys import ClientKeys, JobKeys
from ..protocol.link import ControllerLink
from ..protocol.mailbox import Mailbox
from ..protocol.messages import Envelope, FaultReported
from ..protocol.transport import DealerSocket
from ..protocol.types import CONTROLLER, FaultReport, detector_address

FLUSH_S = 15.0  # for the last reports to be acknowledged
GIVE_UP_S = 24 * 3600.0  # a report that was not acknowledged for so long is out of date
AT_ONCE = 1000  # unacknowledged reports; a mailbox takes some thousands, and one document can have more
MAX_WAITING = 100_000
PACE_S = 0.05

_log = logging.getLogger(__name__)


class NotTaken(MidstepError):
    """Reports that the controller has not acknowledged."""


class FaultReporter:
    """Sends fault reports to a controller until it has acknowledged each. Use as an async context, in a running loop.

    Reports wait while there is no controller; one that it refuses is sent again, and given up in the end.
    """

    def __init__(
        self, job: str, controller: str, name: str, keys: Path | ClientKeys, *, lookup: Lookup = lambda: None
    ) -> None:
        """Connect.

        Args:
            job: Name of the job.
            controller: Its first endpoint, `tcp://host:port`.
            name: The detector's.
            keys: Directory with the folder of this detector, or its keys.
            lookup: Returns the endpoint of a controller that listens elsewhere by now.

        Raises ConfigurationError for missing keys or an invalid endpoint.
        """
        address = detector_address(name)
        mailbox = Mailbox(job=job, address=address, session=time.time_ns(), retry_max_s=2.0, give_up_s=GIVE_UP_S)
        curve = JobKeys.load_client(keys, address) if isinstance(keys, Path) else keys
        socket = DealerSocket(controller, identity=address, curve=curve)
        self._link = ControllerLink(
            mailbox,
            socket,
            on_command=self._command,
            on_new_controller=lambda: None,
            on_foreign=self._misunderstand,
            lookup=lookup,
        )
        self._foreign: ForeignVersion | None = None
        self._waiting: deque[FaultReport] = deque()  # until few enough are unacknowledged
        self._timer: asyncio.TimerHandle | None = None

    @property
    def connected(self) -> bool:
        """True while there is a connection to a controller."""
        return self._link.connected

    def tell(self, report: FaultReport) -> None:
        """Send a report once few enough others are unacknowledged. Its `seen_by` must be this detector."""
        if len(self._waiting) >= MAX_WAITING:
            _log.error("a report is dropped, since %d wait for the controller: %s", MAX_WAITING, report.detail)
            return
        self._waiting.append(report)
        if self._timer is None:
            self._send()

    async def flush(self, limit_s: float = FLUSH_S) -> None:
        """Wait until all reports are acknowledged. Raises NotTaken after `limit_s`."""
        deadline = time.monotonic() + limit_s
        while self._waiting and time.monotonic() < deadline:
            await asyncio.sleep(PACE_S)
        if self._waiting or not await self._link.flush(max(0.0, deadline - time.monotonic())):
            why = "It may have ended, or refuse these reports: `midstep status` counts what it refuses."
            if self._foreign is not None:
                why = f"It cannot be understood: {self._foreign}"
            raise NotTaken(f"the controller has not acknowledged all reports within {limit_s:g} s. {why}")

    def close(self) -> None:
        """Drop the connection and the waiting reports. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        self._waiting.clear()
        self._link.close()

    def _send(self) -> None:
        """Send what may be unacknowledged at once, and the rest later."""
        self._timer = None
        while self._waiting and self._link.mailbox.behind(CONTROLLER) < AT_ONCE:
            self._link.post(FaultReported(self._waiting.popleft()))
        if self._waiting:
            self._timer = asyncio.get_running_loop().call_later(PACE_S, self._send)

    async def __aenter__(self) -> "FaultReporter":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _misunderstand(self, error: ForeignVersion) -> None:
        self._foreign = error

    @staticmethod
    def _command(envelope: Envelope) -> None:
        _log.warning("a %s is not for a detector", type(envelope.body).__name__)
