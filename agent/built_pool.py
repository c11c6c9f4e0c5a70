"""The processes of a node that are built ahead: each for one rank, its script at the train function.

With `standby.depth: built`. A replacement then has neither to import nor to build its model: it learns which process of
the rank it is, and joins. One is built after the other. A process that cannot be built, or does not fit its place any
more, costs a log line: the rank gets another process of the pool.
"""

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil

from ..platforms.processes import open_log
from ..protocol import environment as names
from ..protocol.errors import AgentError
from ..protocol.prepared import PreparedProcesses
from ..protocol.rank_logs import last_words
from ..protocol.types import Activity, RankProgress, StandbyDepth
from . import channel
from .warm_pool import ANSWER_S, IdleProcess, WarmPool

MAX_FAILURES = 2  # of one rank's program, to be built or to stay: what fails twice would fail again
# What a process learns when it gets its rank, and not before.
_OF_THE_FAULT = frozenset(
    {
        names.INCARNATION,
        names.GENERATION,
        names.EARLY,
        names.STORE,
        names.STORE_SECRET,
        names.STARTED_S,
        "MASTER_ADDR",
        "MASTER_PORT",
    }
)

_TRAINING = frozenset({Activity.COMPUTING, Activity.COLLECTIVE, Activity.COMMITTING, Activity.UPDATING})

_log = logging.getLogger(__name__)


def is_time(clock: RankProgress) -> bool:
    """Say whether a rank has come so far in training that its next process may be built beside it."""
    return clock.median_step_s > 0 and clock.activity in _TRAINING


def built_ahead(program: channel.RunProgram) -> channel.RunProgram:
    """Return the program of a rank as a newcomer runs it, which makes its groups without peers."""
    return msgspec.structs.replace(program, environment={**program.environment, names.CONNECTED: "0"})


def fits(built: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    """Say whether a process that was built with one environment can go on with another."""
    return all(built.get(name) == wanted.get(name) for name in (built.keys() | wanted.keys()) - _OF_THE_FAULT)


class _Built(NamedTuple):
    """A process that is built, for which program of its rank, in which environment it has run, and what it took."""

    idle: IdleProcess
    program: channel.RunProgram
    environment: Mapping[str, str]
    took_s: float
    memory_bytes: int


class BuiltPool:
    """Keeps one built process for each rank that it is asked for. Belongs to the running loop."""

    def __init__(self, pool: WarmPool) -> None:
        self._pool = pool
        self._built: dict[int, _Built] = {}
        self._failures: Counter[int] = Counter()
        self._building: tuple[int, asyncio.Task[None]] | None = None
        self._closed = False

    def keep(self, rank: int, program: channel.RunProgram, log: Path) -> None:
        """Have a process built for a rank unless it has one that fits, or another rank's is being built."""
        built = self._built.get(rank)
        if built is not None and built.idle.process.alive:
            if built.program is program or fits(built.environment, built_ahead(program).environment):
                return
            self.discard(rank)
        elif built is not None:
            self._failures[rank] += 1
            _log.warning("process %d, which was built ahead for rank %d, has ended", built.idle.process.pid, rank)
            self.discard(rank)
        if self._building is not None or self._closed or self._failures[rank] >= MAX_FAILURES:
            return
        task = asyncio.get_running_loop().create_task(self._build(rank, program, log))
        self._building = rank, task
        task.add_done_callback(self._build_ended)

    async def take(self, rank: int, environment: Mapping[str, str]) -> IdleProcess | None:
        """Return the process that was built for a rank, if it is there, fits this environment, and answers."""
        built = self._built.pop(rank, None)
        if built is None:
            return None
        if fits(built.environment, environment):
            return built.idle if await built.idle.answers(ANSWER_S) else None
        _log.info("the process that was built for rank %d does not fit its place any more", rank)
        _end(built.idle)
        return None

    def is_awaited(self, rank: int) -> bool:
        """Say whether a process of a rank is yet to be built, and can be."""
        return rank not in self._built and self._failures[rank] < MAX_FAILURES

    def prepared(self) -> PreparedProcesses:
        """Return what is built, and what it took: the longest time, and the memory of all."""
        return PreparedProcesses(
            StandbyDepth.BUILT,
            tuple(sorted(self._built)),
            max((built.took_s for built in self._built.values()), default=0.0),
            sum(built.memory_bytes for built in self._built.values()),
        )

    def discard(self, rank: int) -> None:
        """End the process that was built, or is being built, for a rank: it is not to come back here."""
        if self._building is not None and self._building[0] == rank:
            self._building[1].cancel()
        built = self._built.pop(rank, None)
        if built is not None:
            _end(built.idle)

    def close(self) -> None:
        """End all of them. Idempotent."""
        self._closed = True
        if self._building is not None:
            self._building[1].cancel()
        for rank in tuple(self._built):
            self.discard(rank)

    async def _build(self, rank: int, program: channel.RunProgram, log: Path) -> None:
        try:
            idle = await self._pool.take()
        except AgentError as error:
            _log.warning("no process is built ahead for rank %d: %s", rank, error)
            return
        began_s, ahead = time.monotonic(), built_ahead(program)
        try:
            output = open_log(log)
            try:
                await idle.build(ahead, output)
            finally:
                os.close(output)
        except (AgentError, OSError) as error:
            self._failures[rank] += 1
            _log.warning(
                "no process is built ahead for rank %d, %s: %s\n%s",
                rank,
                "and it is tried once more" if self._failures[rank] < MAX_FAILURES else "nor will one be",
                error,
                last_words(log) or "(it has printed nothing)",
            )
            _end(idle)
        except asyncio.CancelledError:
            _end(idle)
            raise
        else:
            pid = idle.process.pid
            took_s = time.monotonic() - began_s
            self._built[rank] = built = _Built(idle, program, ahead.environment, took_s, _memory_bytes(pid))
            _log.info(
                "process %d is built ahead for rank %d: %.2f s, %.0f MB of memory",
                pid,
                rank,
                built.took_s,
                built.memory_bytes / 1e6,
            )

    def _build_ended(self, task: asyncio.Task[None]) -> None:
        self._building = None
        if not task.cancelled() and task.exception() is not None:
            _log.error("building a process ahead has failed", exc_info=task.exception())


def _memory_bytes(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_full_info().uss)
    except psutil.Error:  # it has just ended, which is seen soon
        return 0


def _end(idle: IdleProcess) -> None:
    idle.process.kill()
    idle.close()
