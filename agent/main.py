"""The agent of a node: one process with one event loop that owns everything on the node and decides nothing.

It joins the controller, starts and watches processes as ordered, speaks for its ranks, and reads their step clocks.
While there is no controller it keeps the training running and resends its reports. When it exits, for whatever reason,
everything that it has started exits too.

A node that has joined by itself leaves when it is asked to, or was not needed for too long. A node that is asked keeps
its ranks while the controller moves them between two steps, and leaves when none is there, or when its time is over.
"""

import asyncio
import contextlib
import logging
import math
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import psutil
import zmq

from ..platforms.processes import ChildReaper
from ..protocol import messages as m
from ..protocol.discovery import GIVE_UP_S, read_endpoint
from ..protocol.environment import visible_devices
from ..protocol.errors import ConfigurationError, ForeignVersion
from ..protocol.exits import NOT_ADMITTED, RESTART_HERE, AgentEnd, heard, write_agent_end
from ..protocol.keys import JobKeys
from ..protocol.link import Absence, ControllerLink
from ..protocol.mailbox import Mailbox
from ..protocol.private_files import replace_file
from ..protocol.run_directories import Fate, remove_abandoned
from ..protocol.transport import DealerSocket
from ..protocol.types import ArmedFault, FaultAction, JobSettings, JobSpec, node_address
from .heartbeat import Heartbeat
from .last_words import LastWords
from .linux import adopt_orphans
from .node_check import NodeChecker
from .ranks import RankHost
from .relay import Relay, listen
from .scheduler_host import SchedulerHost
from .store_host import StoreHost
from .warm_pool import WarmPool

RETRY_MAX_S = 2.0
FLUSH_S = 0.5  # for reports that are still unacknowledged when the agent exits
GRACE_S = 30.0  # from SIGTERM to SIGKILL, as Slurm and Kubernetes have it
CLEAR_UP_S = 1.0  # of it, to say that the node is lost and to end what is left
_log = logging.getLogger(__name__)
LOOK_S = 0.5
SOON_S = 1.0  # a rank whose process is started again is away for less
LEFTOVERS_S = 5.0


class OwnProgram(msgspec.Struct, frozen=True):
    """A command and where it runs. `environment`: beside that of the agent."""

    command: tuple[str, ...]
    is_module: bool
    no_python: bool
    working_directory: str
    environment: dict[str, str]

    def of(self, job: JobSpec) -> JobSpec:
        """Return the job as this machine runs it."""
        return msgspec.structs.replace(
            job,
            command=self.command,
            is_module=self.is_module,
            no_python=self.no_python,
            working_directory=self.working_directory,
            environment={**job.environment, **self.environment},
        )


class AgentOptions(msgspec.Struct, frozen=True):
    """Options of an agent. `host`: the address under which other nodes reach this one's store.

    `session`: a number above those of all agents of this name before. `endpoints`: of controllers, for a node that has
    joined by itself; it belongs to no launcher that ends it. `proxies`: are tried before those. `program`,
    `log_directory`: of this machine.
    """

    job: str
    node: str
    controller: str
    keys: str
    run_directory: str
    failure_domain: str = ""
    host: str = "127.0.0.1"
    life_fd: int | None = None
    session: int = 0
    endpoints: tuple[str, ...] = ()
    proxies: tuple[str, ...] = ()
    program: OwnProgram | None = None
    log_directory: str | None = None
    outlived: bool = False  # by the controller, when its launcher ends: it says then that the node is lost
    grace_s: float = GRACE_S  # from a signal to leave to the kill that follows it, as the environment gives it


class Agent:
    """The agent of one node. Construct it in the running loop; `run` returns when it has ended everything."""

    def __init__(self, options: AgentOptions) -> None:
        self._options = options
        self._settings = JobSettings()
        self._environment = dict(os.environ)  # of what the job has run here
        self._launcher = os.getppid()
        self._ending: str | None = None
        self._end = asyncio.Event()
        self._exit_code = 0
        self._folder = Path(options.run_directory) / options.node
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        address = node_address(options.node)
        keys = JobKeys.load_client(options.keys, address)
        adopt_orphans()
        self._reaper = ChildReaper()
        self._pool = WarmPool(os.environ, self._reaper)
        self._store = StoreHost(options.host, self._pool, on_moved=self._store_moved, on_failed=self._service_failed)
        self._scheduler = SchedulerHost(options.node, options.host, self._pool, on_failed=self._service_failed)
        router = listen(str(self._folder / "agent.sock"), self._context)
        session = options.session or time.time_ns()
        self._link = ControllerLink(
            Mailbox(
                job=options.job,
                address=address,
                session=session,
                retry_max_s=RETRY_MAX_S,
                give_up_s=GIVE_UP_S,
            ),
            DealerSocket(options.controller, identity=address, curve=keys, context=self._context),
            on_command=self._command,
            on_new_controller=self._follow,
            on_acknowledged=self._acknowledged,
            on_foreign=self._misunderstand,
            lookup=(lambda: None) if options.endpoints else partial(read_endpoint, self._folder.parent),
        )
        self._absence = None
        if options.endpoints:
            self._absence = Absence(self._link, options.endpoints, self._give_up, proxies=options.proxies)
        self._has_met_one = False  # a controller
        self._ranks = RankHost(options.node, router.endpoint, self._pool, post=self._say)
        self._relay = Relay(
            router,
            job=options.job,
            node=options.node,
            session=session,
            oldest_session=self._ranks.oldest_session,
            ranks=self._ranks.numbers,
            post=self._link.post,
        )
        self._heartbeat = Heartbeat(options.node, self._ranks, post=self._link.post, sign=self._link.sign)
        self._checker = NodeChecker(options.node, self._reaper, post=self._link.post)
        say = partial(self._link.post, reliable=False)
        self._words = LastWords(options.node, self._ranks.logs, post=say, is_connected=lambda: self._link.connected)
        self._departure = Departure(lambda: bool(self._ranks.running()), self._leave)
        router.attach(asyncio.get_running_loop(), self._relay.received)

    async def run(self) -> int:
        """Serve until the job ends, the launcher exits or a signal comes. Then end everything that runs here.

        Returns the exit status.
        """
        self._pool.start()
        self._store.start()
        self._watch_for_end()
        self._link.post(self._joined())
        self._heartbeat.start(self._settings)
        self._words.start()
        await self._end.wait()
        _log.info("the agent of %s ends: %s", self._options.node, self._ending)
        await self._shut_down()
        if self._options.endpoints:
            write_agent_end(Path(self._options.run_directory), AgentEnd(self._exit_code, self._ending or ""))
        return self._exit_code

    # --- commands -----------------------------------------------------------------------------------------------

    def _command(self, envelope: m.Envelope) -> None:
        match envelope.body:
            case m.WelcomeNode(job=job):
                self._welcome(job)
            case m.IntroduceNode():
                if self._ending is None:
                    self._join()
            case m.OrderRanks() as orders:
                self._relay.order(envelope, orders)
            case m.StartProcesses() as order:
                self._start(order)
            case m.StopProcess() as order:
                self._ranks.stop(order)
            case m.BuildAhead() as order:
                self._ranks.build_ahead(order)
            case m.ProbeProgress(probe=probe):
                self._ranks.probe(probe)
            case m.CheckNode() as order:
                self._checker.start(order, self._settings, self._environment)
            case m.ArmFault(fault=fault):
                self._inject(fault)
            case m.EndJob() as order:
                self._exit_code = order.exit_code if self._options.endpoints else self._exit_code
                self._begin_end(f"the job has ended: {order.reason}")
            case other:
                _log.warning("an agent cannot carry out a %s", type(other).__name__)

    def _acknowledged(self, number: int) -> None:
        self._relay.acknowledged(number)

    def _start(self, order: m.StartProcesses) -> None:
        for start in order.starts:
            self._heartbeat.forget(start.rank)
            if not start.early:  # the rank has another process for now, which may be ordered something
                self._relay.forget(start.rank)
            self._scheduler.look(start)
            self._ranks.start(start)

    def _inject(self, fault: ArmedFault) -> None:
        if fault.action is FaultAction.KILL_NODE:
            self._kill_node()
        self._ranks.inject(fault)

    def _say(self, body: m.Message) -> None:
        """Report something of the ranks, behind what they have said themselves."""
        if isinstance(body, m.ProcessStarted):
            self._relay.started(body)
            return
        self._relay.leave()
        self._link.post(body)

    def _follow(self) -> None:
        self._relay.follow(self._link.mailbox.term)
        if self._has_met_one:  # the first one gets what was posted at the start
            self._join()
        self._has_met_one = True

    def _welcome(self, job: JobSpec) -> None:
        self._settings = job.settings
        self._link.expect_ranks(job.world_size)
        self._relay.expect_ranks(job.world_size)
        if self._absence is not None:
            self._absence.leave_s = job.settings.leave_s
            self._departure.spare_s = job.settings.spare_s
        job = job if self._options.program is None else self._options.program.of(job)
        if self._options.log_directory is not None:
            job = msgspec.structs.replace(job, job_directory=self._options.log_directory)
        directory = job.working_directory if job.is_module else str(Path(job.command[0]).parent)
        self._environment = {**os.environ, **job.environment}
        self._pool.configure(
            self._environment,
            job.settings.preload,
            tuple(dict.fromkeys((str(Path(job.working_directory) / directory), job.working_directory))),
            warm=job.settings.warm_standby,
        )
        self._ranks.welcome(job)
        self._scheduler.welcome(job)
        self._heartbeat.start(job.settings, job.world_size)

    def _join(self) -> None:
        """Report what runs here to a controller that is new, or that had counted this node as lost."""
        self._words.repeat()
        self._link.post(self._joined())
        self._ranks.introduce()

    def _joined(self) -> m.NodeJoined:
        return m.NodeJoined(
            node=self._options.node,
            failure_domain=self._options.failure_domain or self._options.node,
            store=self._store.endpoint,
            processes=self._ranks.running(),
            devices=visible_devices(os.environ),
        )

    def _store_moved(self) -> None:
        self._link.post(m.StoreMoved(node=self._options.node, store=self._store.endpoint))
        self._scheduler.announce_again()

    def _service_failed(self, reason: str) -> None:
        _log.error("%s", reason)
        self._exit_code = 1
        self._begin_end(reason)

    def _misunderstand(self, error: ForeignVersion) -> None:
        """End: without the same release here and there this node can do nothing for the job."""
        self._exit_code = NOT_ADMITTED
        self._begin_end(f"the controller at {self._link.endpoint} cannot be understood: {error}")

    def _give_up(self) -> None:
        self._exit_code = RESTART_HERE
        self._begin_end(f"no controller has been there for {self._settings.leave_s:.0f} s (agent.leave_s)")

    def _leave(self, reason: str) -> None:
        self._say_lost(reason)
        self._begin_end(reason)

    # --- shutdown ------------------------------------------------------------------------------------------------

    def _watch_for_end(self) -> None:
        loop = asyncio.get_running_loop()
        for number in heard(signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self._signalled, number)
        loop.add_signal_handler(signal.SIGUSR1, self._ask_to_leave, signal.SIGUSR1)
        if self._options.life_fd is not None:
            os.set_blocking(self._options.life_fd, False)
            os.set_inheritable(self._options.life_fd, False)
            loop.add_reader(self._options.life_fd, self._read_pipe)

    def _read_pipe(self) -> None:
        fd = self._options.life_fd
        assert fd is not None
        try:
            if os.read(fd, 64):
                return
        except BlockingIOError:
            return
        except OSError as error:
            _log.warning("cannot read the launcher's pipe, so it counts as closed: %s", error)
        asyncio.get_running_loop().remove_reader(fd)
        if self._options.outlived and self._ending is None:
            self._say_lost("its launcher has exited")
        self._begin_end("the launcher has exited")

    def _signalled(self, number: signal.Signals) -> None:
        """Leave the job in order; at once when a second signal comes, or where the launcher ends the whole job."""
        if self._ending is not None:
            self._ranks.kill_all()  # no more grace
        elif not self._options.endpoints:
            self._begin_end(f"signal {number.name}")
        elif self._exit_code:  # of the first signal
            self._leave(f"its agent received {number.name} again")
        else:
            self._exit_code = 128 + number
            self._ask_to_leave(number, max(0.0, self._options.grace_s - self._settings.stop_grace_s - CLEAR_UP_S))

    def _ask_to_leave(self, number: signal.Signals, within_s: float = math.inf) -> None:
        """The machine is to go, and there is time: the controller moves the ranks to another one first."""
        if self._options.endpoints:
            self._departure.ask(number.name, within_s)
            finite_s = None if math.isinf(within_s) else within_s
            self._link.post(m.NodeGoing(self._options.node, f"its agent received {number.name}", finite_s))

    def _say_lost(self, reason: str) -> None:
        """Say so before the ranks end: their ends would be answered by starting them here again."""
        self._link.post(m.NodeLost(self._options.node, reason, time.time()))

    def _begin_end(self, reason: str) -> None:
        if self._ending is None:
            self._ending = reason
            self._end.set()

    async def _shut_down(self) -> None:
        self._heartbeat.close()
        self._words.close()
        self._departure.close()
        self._checker.close()
        if self._absence is not None:
            self._absence.close()
        await self._ranks.end_all(self._settings.stop_grace_s)
        self._pool.close()
        self._scheduler.close()
        self._store.close()
        await self._flush()
        self._link.close()
        self._relay.close()
        self._context.term()
        self._ranks.close()
        await kill_leftovers()
        self._reaper.close()
        with contextlib.suppress(OSError):  # not empty, or removed with the run directory
            self._folder.rmdir()
        if self._options.life_fd is not None and os.getppid() != self._launcher:
            remove_run_directory(self._folder.parent)

    async def _flush(self) -> None:
        self._relay.leave()
        await self._link.flush(FLUSH_S)
        await asyncio.sleep(0.01)  # the last acknowledgement leaves through zmq's own thread, unannounced

    def _kill_node(self) -> None:
        """Kill this process and everything below it at once, as a power cut would. An injected fault."""
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        os.kill(os.getpid(), signal.SIGKILL)
        os._exit(128 + signal.SIGKILL)  # the first process of a container cannot kill itself


class Departure:
    """Watches one node in the running loop, and calls `leave` once, with the reason."""

    def __init__(self, hosts_ranks: Callable[[], bool], leave: Callable[[str], None]) -> None:
        """Set no limit yet."""
        self.spare_s: float | None = None  # how long the node stays without a rank; None: for ever
        self._asked = ""  # by what the node was asked to leave
        self._allowed_s = math.inf
        self._asked_at_s = 0.0
        self._hosts_ranks = hosts_ranks
        self._leave = leave
        self._loop = asyncio.get_running_loop()
        self._spare_since_s = self._loop.time()
        self._timer = self._loop.call_later(LOOK_S, self._look)

    def ask(self, by: str, within_s: float = math.inf) -> None:
        """Leave as soon as the ranks have moved, and after `within_s` in any case."""
        self._asked, self._allowed_s, self._asked_at_s = by, within_s, self._loop.time()

    def close(self) -> None:
        """Stop watching. Idempotent."""
        self._timer.cancel()

    def _look(self) -> None:
        reason = self._reason(self._loop.time())
        if reason:
            self._leave(reason)
        else:
            self._timer = self._loop.call_later(LOOK_S, self._look)

    def _reason(self, now: float) -> str:
        if self._hosts_ranks():
            self._spare_since_s = now
        spare_for_s = now - self._spare_since_s
        if self._asked and spare_for_s > SOON_S:
            return f"it was asked to leave ({self._asked}), and has no rank any more"
        if self._asked and now - self._asked_at_s >= self._allowed_s:
            left = f"its ranks found no other place within {self._allowed_s:.0f} s"
            return f"it was asked to leave ({self._asked}), and {left}"
        if self.spare_s is not None and spare_for_s > self.spare_s:
            return (
                f"it has waited as a spare for {self.spare_s:g} s (agent.spare_s), and was not needed. Start it again "
                "to wait again; `--spares`, or `agent.spare_s: null` in the policy, keeps such machines"
            )
        return ""


async def serve(options: AgentOptions) -> int:
    """Run an agent in the running loop and return its exit status. Raises MidstepError when it cannot start."""
    return await Agent(options).run()


def remove_run_directory(run_directory: Path) -> None:
    """Remove keys and sockets, if this is the last agent to exit after the launcher and the controller were killed."""
    if not any(run_directory.glob("*/agent.sock")):
        fate = remove_abandoned(run_directory)
        if fate is not Fate.REMOVED:
            _log.info("%s is not removed: %s", run_directory, fate)


async def kill_leftovers() -> None:
    """Kill what is still below this process: what the ranks have started and not ended."""
    deadline = time.monotonic() + LEFTOVERS_S
    while children := psutil.Process().children(recursive=True):
        if time.monotonic() > deadline:
            _log.error("processes that do not exit after SIGKILL: %s", [child.pid for child in children])
            return
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        await asyncio.sleep(0.01)  # orphans of those that were killed become children of this process a little later


def write_program(path: Path, program: OwnProgram) -> None:
    """Write it down for the agent; the environment may hold secrets. Raises ConfigurationError."""
    try:
        replace_file(path, msgspec.json.encode(program))
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror}.") from error


def read_program(path: Path) -> OwnProgram:
    """Read what `write_program` wrote. Raises ConfigurationError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=OwnProgram)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}. `midstep run` writes it.") from error
