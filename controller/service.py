"""One controller process: opens what it needs, runs the driver, closes everything.

What it needs to know lies in the journal, which `midstep run` founded; so the same command line starts the first
controller of a job and the one that takes over from it.
"""

import asyncio
import contextlib
import logging
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

from ..policies.code_files import fault_codes
from ..protocol.errors import ConfigurationError, MidstepError
from ..protocol.keys import JobKeys, ServerKeys
from ..protocol.mailbox import Mailbox
from ..protocol.transport import RouterSocket
from ..protocol.types import CONTROLLER
from .doors.control_socket import ControlServer
from .doors.line_socket import LineServer
from .doors.notices import read_endpoint, write_endpoint
from .driver import Driver
from .journal import Journal, journal_path
from .progress import ProgressBoard
from .routes import Routes
from .wire import Wire

KEYS_NAME = "keys"
OUTSTANDING_LEAST = 10_000
OUTSTANDING_PER_RANK = 4
_ANY_PORT = ":0"

_log = logging.getLogger(__name__)


def serve(job_directory: Path, run_directory: Path, listen: str, *, keys_directory: Path, wait_s: float) -> int:
    """Be the active controller of a job until it is over, and return the job's exit code.

    `wait_s`: how long to stand by for the present controller to end. SIGINT and SIGTERM ask the machine to stop the
    job. Raises JournalError, JournalSuperseded or ConfigurationError; then the job is not over, and another
    controller may go on with it.
    """
    _allow_many_connections()
    with contextlib.ExitStack() as stack:
        journal = stack.enter_context(Journal.open(journal_path(job_directory), wait_s=wait_s))
        job, policy = journal.founding.job, journal.founding.policy
        router = bind(listen, run_directory, JobKeys.load_server(keys_directory))
        stack.callback(router.close)
        control = ControlServer(run_directory)
        stack.callback(control.close)
        if router.endpoint != _last_endpoint(run_directory):
            write_endpoint(run_directory, router.endpoint)
        _log.info("term %d listens at %s", journal.term, router.endpoint)
        mailbox = Mailbox(
            job=job.job,
            address=CONTROLLER,
            session=journal.session,
            capacity=max(OUTSTANDING_LEAST, OUTSTANDING_PER_RANK * (job.world_size + job.nodes + job.spare_nodes)),
        )
        mailbox.term = journal.term
        routes = Routes()
        driver = Driver(
            machine=journal.founding.machine(),
            journal=journal,
            wire=Wire(router, mailbox, routes, job.world_size),
            routes=routes,
            board=ProgressBoard(
                world_size=job.world_size,
                interval_s=policy.heartbeat.interval_s,
                missed=policy.heartbeat.missed,
            ),
            control=control,
            job_directory=job_directory,
            codes=fault_codes(policy.faults),
        )
        return asyncio.run(_drive(driver, run_directory))


def bind(listen: str, run_directory: Path, keys: ServerKeys) -> RouterSocket:
    """Listen where the last controller of this job listened, if `listen` leaves the port open, else at `listen`.

    So agents that were connected find the new controller without being told.
    """
    last = _last_endpoint(run_directory)
    host = listen.removesuffix(_ANY_PORT)
    if last is not None and listen.endswith(_ANY_PORT) and last.rpartition(":")[0] == host:
        try:
            return RouterSocket(last, curve=keys)
        except ConfigurationError as error:
            _log.warning("another port has to do, agents will find it in the run directory: %s", error)
    return RouterSocket(listen, curve=keys)


def _last_endpoint(run_directory: Path) -> str | None:
    try:
        return read_endpoint(run_directory)
    except MidstepError as error:
        _log.warning("where the last controller listened is not known: %s", error)
        return None


async def _drive(driver: Driver, run_directory: Path) -> int:
    lines = LineServer(run_directory, driver.report)
    await lines.open()
    try:
        with _signals(asyncio.get_running_loop(), driver):
            return await driver.run()
    finally:
        await lines.close()


@contextlib.contextmanager
def _signals(loop: asyncio.AbstractEventLoop, driver: Driver) -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, driver.stop, f"the controller received {number.name}")
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _allow_many_connections() -> None:
    """A router at its limit of descriptors spins without an error, so take all that the system grants."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
