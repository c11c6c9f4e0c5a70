"""Heartbeats of a node for the controller, and stall detection from the ranks' step clocks, by one timer."""

import asyncio
import time
from collections.abc import Callable, Iterable

from ..protocol.messages import FaultReported, NewcomerWaiting, NodeHeartbeat
from ..protocol.types import FaultKind, FaultReport, JobSettings, RankProgress, node_address
from .ranks import RankHost
from .stall_clock import StallClock, SuspensionClock

TICK_S = 0.1
LAG_S = 0.05  # a loop that is later than this did not run

_Post = Callable[..., None]


class Heartbeat:
    """Ticks in the running loop from `start` to `close`. `post(message, reliable=...)` sends to the controller."""

    def __init__(self, node: str, ranks: RankHost, *, post: _Post) -> None:
        self._node = node
        self._ranks = ranks
        self._post = post
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._interval_s = TICK_S
        self._next_heartbeat_s = 0.0
        self._heartbeat_s = TICK_S
        self._stalls: StallClock | None = None
        self._suspensions: SuspensionClock | None = None

    def start(self, settings: JobSettings) -> None:
        """Tick by these settings from now on. Call it again when the job's own are known."""
        self._heartbeat_s = settings.heartbeat_s
        self._interval_s = min(TICK_S, settings.heartbeat_s)
        self._stalls = StallClock(
            factor=settings.stall_factor,
            grace_s=settings.stall_grace_s,
            after_steps=settings.stall_after_steps,
        )
        self._suspensions = SuspensionClock(limit_s=settings.stall_suspended_s)
        self.close()
        self._tick(self._loop.time())

    def forget(self, rank: int) -> None:
        """Drop the history of a rank that gets a new process."""
        if self._stalls is not None:
            self._stalls.forget(rank)
        if self._suspensions is not None:
            self._suspensions.forget(rank)

    def close(self) -> None:
        """Stop ticking. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self, planned_s: float) -> None:
        now = self._loop.time()
        lag_s = now - planned_s
        self._ranks.watch_memory()
        readings = self._ranks.progress()
        self._judge(readings, now, lag_s)
        for process in self._ranks.waiting(readings):
            self._post(NewcomerWaiting(node=self._node, process=process))
        self._ranks.prepare(readings)
        if now >= self._next_heartbeat_s:
            self._next_heartbeat_s = now + self._heartbeat_s - self._interval_s / 2
            self._post(NodeHeartbeat(node=self._node, at_s=time.time(), ranks=readings), reliable=False)
        self._timer = self._loop.call_at(now + self._interval_s, self._tick, now + self._interval_s)

    def _judge(self, readings: Iterable[RankProgress], now: float, lag_s: float) -> None:
        """Report ranks that make no progress. Where this loop is late, the ranks may have been held up, too."""
        if self._stalls is None or self._suspensions is None:
            return
        if lag_s > LAG_S:
            self._stalls.held_up(lag_s)
            self._suspensions.held_up(lag_s)
        for reading in readings:
            stall = self._stalls.observe(reading)
            if stall is not None:
                self._report(FaultKind.STALL, stall.detail, reading)
            suspension = self._suspensions.observe(reading, now)
            if suspension is not None:
                self._report(FaultKind.UNRESPONSIVE, suspension.detail, reading)

    def _report(self, kind: FaultKind, detail: str, progress: RankProgress) -> None:
        report = FaultReport(
            kind=kind,
            at_s=time.time(),
            seen_by=node_address(self._node),
            detail=detail,
            rank=progress.rank,
            node=self._node,
            generation=progress.generation,
            incarnation=progress.incarnation,
        )
        self._post(FaultReported(report))
