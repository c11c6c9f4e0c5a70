"""What a node prepares for the next fault, and what it tells the controller of that.

With `standby.depth: built` a process is built for each rank that trains here; on a spare node for the ranks that the
controller names. What it takes is reported when all is there, and not while some of it is yet to come.
"""

import os
import time
from collections.abc import Callable, Mapping

from ..protocol.messages import BuildAhead, Message, ProcessesPrepared, StartProcess
from ..protocol.prepared import PreparedProcesses, builds_ahead
from ..protocol.rank_logs import built_log
from ..protocol.types import JobSpec, StandbyDepth
from . import channel
from .built_pool import BuiltPool
from .environment import rank_environment, rank_program
from .warm_pool import WarmPool


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
        self._told: dict[StandbyDepth, tuple[int, ...]] = {}

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

    def keep(self, job: JobSpec, training: Mapping[int, channel.RunProgram], here: frozenset[int]) -> None:
        """Have built what is missing, and tell what is there. Every 100 ms.

        `training`: the programs of ranks whose next process may be built now. `here`: all ranks with a process here.
        """
        self._tell_imported()
        if not builds_ahead(job):
            return
        if self._programs is None:
            self._programs = {start.rank: self._program(job, start) for start in self._order.starts}
        foreign = {rank: program for rank, program in self._programs.items() if rank not in here}
        for rank, program in training.items():
            self.built.keep(rank, program, built_log(job.job_directory, rank))
        for rank, program in foreign.items():
            self.built.keep(rank, program, built_log(job.job_directory, rank, self._node))
        self._tell_built(here.union(foreign))

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
        if any(map(self.built.is_awaited, wanted)) or not (wanted or before):
            return
        prepared = self.built.prepared()
        if prepared.ranks != before:
            self._tell(prepared)

    def _tell(self, prepared: PreparedProcesses) -> None:
        self._told[prepared.depth] = prepared.ranks
        self._post(ProcessesPrepared(self._node, prepared))
