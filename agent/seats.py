"""A rank's place on a node, which outlives its processes: its black box, and what was last asked for."""

import asyncio
import time

from ..platforms.processes import WatchedProcess
from ..protocol.blackbox import BlackBox
from ..protocol.bounds import fits
from ..protocol.types import RankProgress, RunningProcess


class Life:
    """One process of a rank."""

    __slots__ = ("early", "expected", "process", "running", "seat")

    def __init__(self, seat: "Seat", running: RunningProcess) -> None:
        self.seat = seat
        self.running = running
        self.process: WatchedProcess | None = None
        self.expected = False  # it has been told to end
        self.early = False  # it gets ready while another process holds the rank, and has not been announced

    def clock(self) -> RankProgress | None:
        """Read the step clock, which its process may have spoilt: what is not about this life does not count."""
        reading = self.seat.box.read_progress(time.monotonic())
        if reading is None or reading.incarnation != self.running.incarnation:
            return None
        return reading if fits(reading) else None


class Seat:
    """A rank's place on this node."""

    __slots__ = ("box", "life", "oldest_session", "ordered", "starting")

    def __init__(self, box: BlackBox) -> None:
        self.box = box
        self.life: Life | None = None
        self.ordered = -1  # the latest incarnation that a start or a stop was about
        self.oldest_session = 0
        self.starting = asyncio.Lock()
