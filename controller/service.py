"""One controller process: opens what it needs, runs the driver, closes everything.

What it needs to know lies in the journal, which `midstep run` or `midstep submit` founded. So the same command line
starts the first controller of a job and the one that takes over from it.
"""

import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from ..policies.code_files import fault_codes
from ..protocol.discovery import read_endpoint
from ..protocol.errors import ConfigurationError, JournalSuperseded, MidstepError, SteppedDown
from ..protocol.exits import heard
from ..protocol.incidents import ControllerPhase
from ..protocol.keys import JobKeys, ServerKeys
from ..protocol.mailbox import Mailbox
from ..protocol.transport import RouterSocket
from ..protocol.types import CONTROLLER, JobSpec
from .driver import Driver
from .election.file_election import LEASE_S
from .endpoints.discovery_files import JobResult, read_result, write_endpoint, write_result
from .endpoints.local_sockets import DETECTORS_SOCKET, ControlServer, LineServer, socket_path
from .endpoints.metrics_server import MetricsPlace, open_metrics
from .endpoints.notifier import Notifier
from .endpoints.standing_by import StandingBy
from .endpoints.story import Storyteller
from .endpoints.trainjob import progress_reporter
from .enroller import HostsWire, open_wire
from .isolation import IsolationAcrossJobs, IsolationFolder, IsolationStore, names_of
from .journal.journal import Journal
from .journal.records import Founding
from .keepalive import KeepAlive
from .liveness import Liveness, ProgressBoard
from .opening import ControllerPlace, Term, open_job
from .relaunch_hook import HookCommand, NodeBringer, RelaunchHook
from .routes import Routes
from .shared_machines import SharedMachines, place_among_roles
from .switchover import ControllerEntry
from .wire import Wire

KEYS_NAME = "keys"
OUTSTANDING_LEAST = 10_000
OUTSTANDING_PER_RANK = 4
COLLECT_AFTER = 100_000  # objects more than before
_ANY_PORT = ":0"

_log = logging.getLogger(__name__)


def serve(
    place: ControllerPlace,
    *,
    term: Term,
    alive: KeepAlive,
    story_program: Sequence[str] = (),
    metrics: MetricsPlace | None = None,
) -> int:
    """Be the active controller of a job until it is over, and return the job's exit code.

    `story_program`: reads the job's story where operators elsewhere ask for it; none: it is not told.
    `metrics`: where the job's numbers are served while it leads; None: nowhere.
    SIGINT and SIGTERM ask the machine to stop the job. When another controller is promoted, this one stands by until
    the lead is free again. Raises JournalError, JournalSuperseded or ConfigurationError; then the job is not over, and
    another controller may continue it.
    """
    _allow_many_connections()
    collect_rarely()
    while True:
        try:
            return _serve_term(place, term, alive, story_program, metrics)
        except SteppedDown as promoted:
            _log.warning("%s", promoted)
            term = msgspec.structs.replace(term, wait_s=None, lease_s=term.lease_s or LEASE_S, stop=None)


def _serve_term(
    place: ControllerPlace, term: Term, alive: KeepAlive, story_program: Sequence[str], metrics: MetricsPlace | None
) -> int:
    run_directory = place.run_directory
    with contextlib.ExitStack() as stack:
        standing_by = _stand_by(stack, place)
        opened = open_job(stack, place, term, alive, standing_by)
        entry, journal = opened.entry, opened.journal
        alive.start()
        entry.enter(ControllerPhase.LOADING, journal.term)
        stack.push(lambda kind, *_: _leave(entry) if kind is not None and issubclass(kind, JournalSuperseded) else None)
        discard_sockets(run_directory)
        job, policy = journal.founding.job, journal.founding.policy
        router = _listen(stack, place, standing_by)
        control = stack.enter_context(contextlib.closing(ControlServer(run_directory)))
        write_endpoint(run_directory, router.endpoint)
        _log.info("term %d listens at %s", journal.term, router.endpoint)
        mailbox = _mailbox(job, journal)
        routes = Routes()
        liveness = Liveness(policy.heartbeat)
        wire, enroller = open_wire(
            router,
            mailbox,
            routes,
            liveness=liveness,
            world_size=job.world_size,
            keys=place.keys_directory,
            platform=journal.founding.platform,
            proxies=policy.controller.proxies,
        )
        storyteller = Storyteller(story_program, place) if story_program else None
        driver = Driver(
            machine=journal.founding.machine(),
            journal=journal,
            wire=wire,
            routes=routes,
            board=ProgressBoard(world_size=job.world_size),
            liveness=liveness,
            enroller=enroller,
            control=control,
            job_directory=place.job_directory,
            codes=fault_codes(policy.faults),
            alive=alive,
            stop=term.stop,
            switchover=opened.switchover,
            stories=storyteller,
        )
        others = _beside(stack, journal.founding, (driver, wire), metrics, place)
        exit_code = asyncio.run(_drive(driver, run_directory, {**others, "no story was told": storyteller}))
        if term.in_memory and read_result(place.job_directory) is None:
            # The disk of the job directory may be why there is no better controller, and this is its end's only record.
            result = JobResult(job.job, exit_code, driver.status().reason, journal.term, time.time())
            write_result(run_directory, result)
        return exit_code


def _mailbox(job: JobSpec, journal: Journal) -> Mailbox:
    """Return the controller's end of all messages in this term."""
    capacity = max(OUTSTANDING_LEAST, OUTSTANDING_PER_RANK * (job.world_size + job.nodes + job.spare_nodes))
    mailbox = Mailbox(job=job.job, address=CONTROLLER, session=journal.session, capacity=capacity)
    mailbox.term = journal.term
    mailbox.expect_ranks(job.world_size)
    return mailbox


def _stand_by(stack: contextlib.ExitStack, place: ControllerPlace) -> StandingBy:
    """Listen already, where others know this controller. Else it takes the last leader's place, once that has gone."""
    keys = JobKeys.load_server(place.keys_directory)
    standing_by = StandingBy(place.listen if place.endpoint else None, keys, place.job)
    stack.callback(standing_by.close)
    return standing_by


def _listen(stack: contextlib.ExitStack, place: ControllerPlace, standing_by: StandingBy) -> RouterSocket:
    """Return the socket to lead with."""
    router = standing_by.hand_over()
    if router is None:
        router = bind(place.listen, place.run_directory, JobKeys.load_server(place.keys_directory))
    stack.callback(router.close)
    return router


def _leave(entry: ControllerEntry) -> None:
    """Say that this controller was deposed, and does not serve any more."""
    entry.enter(ControllerPhase.OUT_OF_SERVICE)


def discard_sockets(run_directory: Path) -> None:
    """Remove the unix sockets of the last leader: it may be frozen, and still be taken for one that listens."""
    for path in (socket_path(run_directory), run_directory.resolve() / DETECTORS_SOCKET):
        path.unlink(missing_ok=True)


def bind(listen: str, run_directory: Path, keys: ServerKeys) -> RouterSocket:
    """Listen where the last controller of this job listened, if `listen` leaves the port open, else at `listen`.

    So agents that were connected are connected again at once. At another port they look it up (`protocol.discovery`).
    """
    last = _last_endpoint(run_directory)
    host = listen.removesuffix(_ANY_PORT)
    if last is not None and listen.endswith(_ANY_PORT) and last.rpartition(":")[0] == host:
        try:
            return RouterSocket(last, curve=keys)
        except ConfigurationError as error:
            _log.warning("another port has to do, agents look it up in the run directory: %s", error)
    return RouterSocket(listen, curve=keys)


def _last_endpoint(run_directory: Path) -> str | None:
    try:
        return read_endpoint(run_directory)
    except MidstepError as error:
        _log.warning("where the last controller listened is not known: %s", error)
        return None


def _relaunching(founding: Founding, driver: Driver, wire: Wire) -> dict[str, "Beside"]:
    """Return what calls `on_node_relaunch`, if the policy has it."""
    job, policy = founding.job, founding.policy
    if policy.on_node_relaunch is None:
        return {}
    command = HookCommand(policy.on_node_relaunch, job.job, policy.node.relaunch_s)
    if policy.node.relaunch_brings and isinstance(wire, HostsWire):
        bringer = NodeBringer(command, job.job, driver.status, driver.tell)
        wire.bring = bringer.bring
        return {"on_node_relaunch brings no nodes": bringer}
    if policy.node.relaunch_brings:
        _log.warning("on_node_relaunch is asked for no node, as this job's platform makes its nodes")
    return {"on_node_relaunch was not called": RelaunchHook(command, job.job, driver.status)}


def _beside(
    stack: contextlib.ExitStack,
    founding: Founding,
    driven: tuple[Driver, Wire],
    metrics: MetricsPlace | None,
    place: ControllerPlace,
) -> dict[str, "Beside | None"]:
    """Return what runs beside the driver, by what is said when it has failed."""
    job, policy = founding.job, founding.policy
    driver, wire = driven
    among = place_among_roles(job.environment) if policy.node.with_roles else None
    notifier = None
    if policy.notify.webhooks:
        notifier = Notifier(
            job, policy, observe=driver.observation, book=driver.notices, tell=driver.tell, now=driver.now
        )
        driver.webhooks = notifier.webhooks
    return {
        **_relaunching(founding, driver, wire),
        "nobody was notified": notifier,
        "no progress was reported": progress_reporter(policy.trainjob, os.environ, driver.observation, job.world_size),
        "machines that other roles leave were not left": None
        if among is None
        else SharedMachines(among, driver.status, driver.tell),
        "no numbers were published": None
        if metrics is None
        else open_metrics(stack, metrics, driver.observation, job.world_size, place.run_directory),
        "nothing was isolated across jobs": _isolating(place, founding, driver, wire),
    }


def _isolating(place: ControllerPlace, founding: Founding, driver: Driver, wire: Wire) -> IsolationAcrossJobs | None:
    """Return what keeps devices out of the next jobs on which something came too often, if the policy has it."""
    isolate_s = founding.policy.faults.isolate_s
    if place.isolated is None or not isolate_s:
        return None
    on_one_machine = not founding.platform and not isinstance(wire, HostsWire)
    names = names_of(founding.job, place.machine if on_one_machine else "", founding.platform)
    folder = IsolationFolder(IsolationStore(place.isolated))
    return IsolationAcrossJobs(folder, names, isolate_s, driver.observation, driver.report)


class Beside(Protocol):
    """A task that runs beside the driver for as long as that does."""

    async def run(self) -> None:
        """Run until cancelled."""


async def _drive(driver: Driver, run_directory: Path, beside: Mapping[str, Beside | None]) -> int:
    """Drive the job to its end. `beside`: what is said when it failed, and what fails then."""
    lines = LineServer(run_directory, driver.report)
    await lines.open()
    tasks = {what: asyncio.create_task(each.run()) for what, each in beside.items() if each is not None}
    try:
        with _signals(asyncio.get_running_loop(), driver):
            return await driver.run()
    finally:
        for what, task in tasks.items():
            await _end(task, what)
        await lines.close()


async def _end(task: asyncio.Task[None], what: str) -> None:
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("%s any more: %s", what, error)


@contextlib.contextmanager
def _signals(loop: asyncio.AbstractEventLoop, driver: Driver) -> Iterator[None]:
    numbers = heard(signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, driver.stop, f"the controller received {number.name}")
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def collect_rarely() -> None:
    """Have the garbage collector look for cycles after many objects.

    What a turn decodes is a tree, and goes when the last one lets go of it. In a job of ten thousand ranks each look at
    all that is kept would take tens of milliseconds, in the midst of a recovery.
    """
    gc.freeze()  # modules
    gc.set_threshold(COLLECT_AFTER, *gc.get_threshold()[1:])


def _allow_many_connections() -> None:
    """Raise the limit of descriptors as far as allowed: a router at its limit spins without an error."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
