"""The agent's side of MindSpore's scheduler, at which ranks of `midstep run --mindio` meet for MindSpore's own groups.

The agent that starts rank 0 of a world runs it. A scheduler keeps the names and groups of the processes that it has
seen, so a world that starts again gets another one, at another port. Within a world the next scheduler has the port of
the one that exited, and MindSpore's processes register there by themselves.
"""

import math
import os
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec

from ..adapters.mindio.cluster import PORT, needs_scheduler, scheduler_variables
from ..platforms.processes import WatchedProcess, open_log
from ..protocol.messages import StartProcess
from ..protocol.rank_logs import output_log
from ..protocol.types import JobSpec
from . import channel
from .fork_server_host import Watchdog
from .kept_process import KeptProcess
from .warm_pool import WarmPool

LOG = "mindspore-scheduler.log"


class SchedulerHost:
    """The scheduler of one node, if it is this node's to run. `on_failed` is called when it is given up."""

    def __init__(self, node: str, host: str, pool: WarmPool, *, on_failed: Callable[[str], None]) -> None:
        self._node = node
        self._host = host
        self._pool = pool
        self._on_failed = on_failed
        self._job: JobSpec | None = None
        self._order: StartProcess | None = None  # of rank 0 in the world that started last
        self._port: socket.socket | None = None
        self._assignment: channel.ServeScheduler | None = None
        self._log = Path()
        self._starts = 0  # of the scheduler in this world
        self._announcer: KeptProcess | None = None
        self._kept: KeptProcess | None = None
        self._watchdog: Watchdog | None = None

    def welcome(self, job: JobSpec) -> None:
        """Take over the job's description, for which the start of a rank may have waited. A second one is ignored."""
        if self._job is None:
            self._job = job
            self._begin_world()

    def look(self, order: StartProcess) -> None:
        """Look at the start of a rank's process, before it: rank 0 of a new world needs a new scheduler."""
        if self._order is not None and order.restart_count > self._order.restart_count:
            self._end_world()
        if self._order is None and order.rank == 0 and order.connected:
            self._order = order
            self._begin_world()

    def announce_again(self) -> None:
        """Say again where the scheduler is: the rendezvous store has forgotten it."""
        if self._announcer is not None:
            self._announcer.close()
        if self._assignment is not None:
            self._announcer = self._keep("what says where MindSpore's scheduler is", announces=True)

    def close(self) -> None:
        """End the scheduler. Idempotent."""
        self._end_world()

    def _begin_world(self) -> None:
        if self._job is None or self._order is None:
            return
        job, order = self._job, self._order
        environment = channel.rank_environment(os.environ, job, order, node=self._node, agent_socket="", started_s=0.0)
        if not needs_scheduler(environment):
            return
        log = output_log(job.job_directory, order.rank, order.incarnation).with_name(LOG)
        try:
            address = self._reserve(int(environment.get(PORT) or 0))
        except (OSError, ValueError) as error:
            self._on_failed(f"MindSpore's scheduler cannot listen on {self._host}: {error}; see --host and {PORT}")
            return
        self._assignment = channel.ServeScheduler(scheduler_variables(environment, *address))
        self._log = log
        self._kept = self._keep("MindSpore's scheduler", announces=False)

    def _keep(self, what: str, *, announces: bool) -> KeptProcess:
        async def begin() -> WatchedProcess:
            idle = await self._pool.take()
            self._starts += not announces
            assert self._assignment is not None
            assignment = msgspec.structs.replace(self._assignment, again=self._starts > 1, announces=announces)
            output = open_log(self._log)
            try:
                process = idle.assign(assignment, (output,), kept.exited)
            finally:
                os.close(output)
            if not announces:  # it has no channel by which it could be asked: only one that is stopped is found
                self._watchdog = Watchdog(what, process, lambda: None, answer_s=math.inf)
            return process

        kept = KeptProcess(what, begin, on_failed=self._on_failed, check=f"See {self._log}", done=os.EX_OK)
        kept.start()
        return kept

    def _end_world(self) -> None:
        self._order, self._assignment, self._starts = None, None, 0
        for each in (self._watchdog, self._kept, self._announcer):
            if each is not None:
                each.close()
        self._watchdog = self._kept = self._announcer = None
        if self._port is not None:
            self._port.close()
            self._port = None

    def _reserve(self, port: int) -> tuple[str, int]:
        """Hold a port for the scheduler, which binds it beside this process, each time it starts.

        `port`: the user's, which is held by nothing; 0: any.
        """
        family, kind, protocol, _, address = socket.getaddrinfo(self._host, port, type=socket.SOCK_STREAM)[0]
        if port:
            return str(address[0]), port
        self._port = socket.socket(family, kind, protocol)
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._port.bind(address)
        host, port = self._port.getsockname()[:2]
        return host, port
