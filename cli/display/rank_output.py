"""Shows what the ranks of one node print, on the stdout of their agent: what `kubectl logs` of its pod shows."""

import logging
import sys
from pathlib import Path
from types import TracebackType

from .log_follower import LogFollower
from .poller import Poller
from .tolerant_output import TolerantOutput

_log = logging.getLogger(__name__)


class RankOutput:
    """Shows each line with its rank while it is entered, and what is left at the exit. Never ends anything else."""

    def __init__(self, logs: Path) -> None:
        self._output = TolerantOutput(sys.stdout)
        self._follower = LogFollower(logs, self._show)
        self._poller = Poller(
            "midstep-output",
            self._look,
            advanced=lambda: self._output.written_bytes,
            on_error=lambda error: _log.warning("the ranks' output cannot be shown: %s", error),
            last=self._follower.show_rest,
        )

    def __enter__(self) -> "RankOutput":
        """Begin to show."""
        self._poller.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Show what is left, within the limits of `Poller.finish`."""
        self._poller.finish()
        self._output.close("the agent has ended")

    def _look(self) -> bool:
        return not self._output.gone and self._follower.look()

    def _show(self, rank: int, line: bytes) -> None:
        self._output.write(b"[rank %d] %b" % (rank, line))
