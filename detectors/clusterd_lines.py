"""The dialogue with TaskD in a process of its own: what it says comes as lines of JSON, and what it hears goes as such.

TaskD calls MindIO's controller in its own process (`mindio_ttp.controller_ttp`, docs/mindio.md). The signals are
ClusterD's, which TaskD hands on, and the reports are what it hands back; so `midstep clusterd` stands in ClusterD's
place for both.
"""

import logging
import queue
import threading
from typing import IO

import msgspec

from .clusterd_signals import Heard, Report

MOST_LINES = 1024
PUT_S = 10.0
encode_line = msgspec.json.Encoder().encode
read_signal = msgspec.json.Decoder(Heard).decode
read_report = msgspec.json.Decoder(Report).decode
_log = logging.getLogger(__name__)


class LineClient:
    """The bridge's end. `signals` has what comes in; `has_left` is set when the other process is gone."""

    def __init__(self, incoming: IO[bytes], outgoing: IO[bytes]) -> None:
        """Read nothing before `start`."""
        self.signals: queue.Queue[Heard | None] = queue.Queue(MOST_LINES)
        self.has_left = threading.Event()
        self._incoming, self._outgoing = incoming, outgoing

    def start(self) -> None:
        """Read from now on, until the other process closes its end, or ends."""
        threading.Thread(target=self._read, name="midstep-taskd", daemon=True).start()

    def tell(self, report: Report) -> None:
        """Write a report."""
        try:
            self._outgoing.write(encode_line(report) + b"\n")
            self._outgoing.flush()
        except OSError as error:
            _log.warning("%s was not heard: %s", type(report).__name__, error)
            self.has_left.set()

    def _read(self) -> None:
        try:
            for line in self._incoming:
                self.signals.put(read_signal(line), timeout=PUT_S)
        except (msgspec.MsgspecError, queue.Full, ValueError) as error:
            _log.error("the process with TaskD in it is not understood: %s", error)
        self.has_left.set()
