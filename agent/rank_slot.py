"""A rank's slot on a node, which outlives its processes: its black box, its present process, its latest order."""

import asyncio
import logging
import signal
import time
from pathlib import Path

from ..platforms.processes import WatchedProcess
from ..protocol.blackbox import BlackBox
from ..protocol.bounds import fits
from ..protocol.shared_signals import is_left_to_launcher
from ..protocol.types import Activity, RankProgress, RunningProcess
from . import channel
from .linux import ignores, is_stopped

_log = logging.getLogger(__name__)


class RankProcess:
    """One process of a rank. `watched` is set once it has its assignment."""

    __slots__ = ("early", "expected", "log", "program", "running", "slot", "watched")

    def __init__(self, slot: "RankSlot", running: RunningProcess, log: Path, *, early: bool) -> None:
        """`log`: what it prints."""
        self.slot = slot
        self.log = log
        self.running = running
        self.watched: WatchedProcess | None = None
        self.program: channel.RunProgram | None = None  # as `watched`
        self.expected = False  # its exit is: it has been ordered to end
        self.early = early  # it gets ready while another process holds the rank, and has not been announced

    def clock(self) -> RankProgress | None:
        """Read the step clock. Returns None for a reading of another process, or one that its process has damaged."""
        reading = self.slot.box.read_progress(time.monotonic())
        if reading is None or reading.incarnation != self.running.incarnation:
            return None
        return reading if fits(reading) else None

    def reset_clock(self) -> None:
        """Write the step clock of a process that starts."""
        now = time.monotonic()
        self.slot.box.write_progress(
            pid=self.running.pid,
            incarnation=self.running.incarnation,
            generation=self.running.generation,
            step=0,
            activity=Activity.STARTING,
            collectives=0,
            activity_began_s=now,
            step_began_s=now,
            median_step_s=0.0,
        )

    def end(self, grace_s: float) -> None:
        """Ask the process to end, and kill it after `grace_s`."""
        self.expected = True
        if self.watched is None:
            return
        pid = self.running.pid
        is_deaf = is_stopped(pid) or (is_left_to_launcher() and ignores(pid, signal.SIGTERM))
        if grace_s <= 0 or is_deaf:  # SIGTERM would do nothing
            self.watched.kill()
        else:
            self.watched.signal(signal.SIGTERM)
            asyncio.get_running_loop().call_later(grace_s, self.watched.kill)

    async def wait(self, timeout_s: float) -> None:
        """Wait until the process has exited; log an error after `timeout_s`."""
        if self.watched is not None and not await self.watched.wait(timeout_s):
            _log.error("process %d of rank %d does not exit after SIGKILL", self.running.pid, self.running.rank)


class RankSlot:
    """A rank's slot on this node."""

    __slots__ = ("box", "oldest_session", "ordered", "process", "starting")

    def __init__(self, box: BlackBox) -> None:
        self.box = box
        self.process: RankProcess | None = None
        self.ordered = -1  # the latest incarnation that a start or a stop was about
        self.oldest_session = 0
        self.starting = asyncio.Lock()
