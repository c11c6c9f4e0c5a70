"""The processes that a node prepares for the next fault, and what it tells the controller of them.

With `standby.depth: built` each rank that trains here has a second process whose script has run up to the train
function; with `auto` each rank that `build_choice.py` chooses; on a spare node the controller names the ranks. A
replacement then has neither to import nor to build its model: it learns which process of the rank it is, and joins.
One is built after the other. A process that cannot be built, or does not fit its place any more, costs a log line: the
rank gets another process of the pool. The cost is reported when all are there.
"""

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from ..platforms.processes import open_log
from ..protocol import environment as names
from ..protocol.errors import AgentError
from ..protocol.messages import BuildAhead, Message, ProcessesPrepared, StartProcess
from ..protocol.rank_logs import built_log, last_words
from ..protocol.reports import PreparedProcesses, builds_ahead
from ..protocol.types import Activity, JobSpec, RankProgress, StandbyDepth
from . import channel
from .build_choice import BuildChoice, TrainingProcess, own_bytes_of
from .channel import rank_environment, rank_program
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
        channel.ERROR_FILE,
        "MASTER_ADDR",
        "MASTER_PORT",
    }
)
_TRAINING = frozenset({Activity.COMPUTING, Activity.COLLECTIVE, Activity.COMMITTING, Activity.UPDATING})
_log = logging.getLogger(__name__)


class Preparations:
    """The processes that a node prepares. Belongs to the running loop; `post` sends a report to the controller."""

    def __init__(self, node: str, agent_socket: str, pool: WarmPool, *, post: Callable[[Message], None]) -> None:
        self._node = node
        self._agent_socket = agent_socket
        self._pool = pool
        self.built = BuiltPool(pool)
        self._post = post
        self._order = BuildAhead()
        self._programs: dict[int, channel.RunProgram] | None = {}  # those of the order; None: yet to be made
        self._told: dict[StandbyDepth, tuple[tuple[int, ...], str]] = {}
        self._choice: BuildChoice | None = None  # where the policy leaves it to this node

    def take_order(self, order: BuildAhead, here: frozenset[int]) -> None:
        """Build for these ranks of other nodes, and for no others but those that are `here`."""
        before = {start.rank for start in self._order.starts}
        for rank in before - {start.rank for start in order.starts} - here:
            self.built.discard(rank)
        self._order, self._programs = order, None
        self._told.pop(StandbyDepth.BUILT, None)

    def introduce(self) -> None:
        """Say again what is here: to a controller that is new, or that had counted this node as lost."""
        self._told.clear()

    def keep(self, job: JobSpec, training: Mapping[int, TrainingProcess], here: frozenset[int]) -> None:
        """Have built what is missing, and tell what is there. Every 100 ms.

        `training`: the ranks whose next process may be built now. `here`: all ranks with a process here.
        """
        self._tell_imported()
        if job.settings.standby_depth is not StandbyDepth.BUILT and not builds_ahead(job, StandbyDepth.AUTO):
            return
        own, wanted = {rank: each.program for rank, each in training.items()}, here
        if job.settings.standby_depth is StandbyDepth.AUTO:
            own, wanted = self._chosen(job, training)
        if self._programs is None:
            self._programs = {start.rank: self._program(job, start) for start in self._order.starts}
        foreign = {rank: program for rank, program in self._programs.items() if rank not in here}
        for rank, program in own.items():
            self.built.keep(rank, program, built_log(job.job_directory, rank))
        for rank, program in foreign.items():
            self.built.keep(rank, program, built_log(job.job_directory, rank, self._node))
        self._tell_built(wanted.union(foreign))

    def _chosen(
        self, job: JobSpec, training: Mapping[int, TrainingProcess]
    ) -> tuple[dict[int, channel.RunProgram], frozenset[int]]:
        """Return the programs of ranks that are to have a built process, and all ranks that have one or are to."""
        if self._choice is None:
            folders = (job.job_directory, job.settings.checkpoint_directory or job.job_directory)
            self._choice = BuildChoice([os.path.realpath(folder) for folder in folders])
        before, why = self.built.ranks, self._choice.why
        chosen = self._choice.chosen(training, before, time.monotonic())
        if self._choice.why != why:
            _log.info("no process is built ahead: %s", self._choice.why)
        if self._choice.gives_back:
            for rank in before:
                self.built.discard(rank)
        return chosen, self.built.ranks | chosen.keys()

    def close(self) -> None:
        """End what is built. Idempotent."""
        self.built.close()

    def _program(self, job: JobSpec, start: StartProcess) -> channel.RunProgram:
        environment = rank_environment(
            os.environ,
            job,
            start,
            node=self._node,
            agent_socket=self._agent_socket,
            started_s=time.monotonic(),
        )
        return rank_program(job, environment)

    def _tell_imported(self) -> None:
        if StandbyDepth.IMPORTED in self._told:
            return
        cost = self._pool.cost()
        if cost is not None:
            self._tell(PreparedProcesses(StandbyDepth.IMPORTED, (), cost.imports_s, cost.memory_bytes))

    def _tell_built(self, wanted: frozenset[int]) -> None:
        before = self._told.get(StandbyDepth.BUILT)
        why = "" if self._choice is None else self._choice.why
        if any(map(self.built.is_awaited, wanted)) or not (wanted or before or why):
            return
        prepared = self.built.prepared()
        if not prepared.ranks:
            prepared = msgspec.structs.replace(prepared, why=why)
        if (prepared.ranks, prepared.why) != before:
            self._tell(prepared)

    def _tell(self, prepared: PreparedProcesses) -> None:
        self._told[prepared.depth] = prepared.ranks, prepared.why
        self._post(ProcessesPrepared(self._node, prepared))


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

    @property
    def ranks(self) -> frozenset[int]:
        """Return the ranks that have a built process, or whose is being built."""
        return frozenset(self._built) | ({self._building[0]} if self._building is not None else set())

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
            self._built[rank] = built = _Built(idle, program, ahead.environment, took_s, own_bytes_of(pid))
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


class _Built(NamedTuple):
    """A process that is built, for which program of its rank, in which environment it has run, and what it took."""

    idle: IdleProcess
    program: channel.RunProgram
    environment: Mapping[str, str]
    took_s: float
    memory_bytes: int


def is_time(clock: RankProgress) -> bool:
    """Say whether a rank has come so far in training that its next process may be built beside it."""
    return clock.median_step_s > 0 and clock.activity in _TRAINING


def built_ahead(program: channel.RunProgram) -> channel.RunProgram:
    """Return the program of a rank as a newcomer runs it, which makes its groups without peers."""
    return msgspec.structs.replace(program, environment={**program.environment, names.CONNECTED: "0"})


def fits(built: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    """Say whether a process that was built with one environment can go on with another."""
    return all(built.get(name) == wanted.get(name) for name in (built.keys() | wanted.keys()) - _OF_THE_FAULT)


def _end(idle: IdleProcess) -> None:
    idle.process.kill()
    idle.close()
