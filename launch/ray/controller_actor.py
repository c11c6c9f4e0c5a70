"""The actor that has a job's controller: Ray starts it again, on another machine if it has to.

It runs `midstep controller` on the journal of the job, beside the platform, and starts that again when it ends. Its
name stands for the controller's address: who asks the actor learns where the controller listens now.
"""

import asyncio
import contextlib
import logging
import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from ...controller.endpoints.discovery_files import JobResult, read_result
from ...platforms.processes import open_log
from ...platforms.ray.cluster import NAMESPACE, controller_name
from ...platforms.ray.library import library
from ...platforms.ray.platform import RayOptions, RayPlatform
from ...protocol.discovery import read_endpoint
from ...protocol.errors import MidstepError, PlatformError
from ...protocol.keys import JobKeys
from ...protocol.messages import EndJob
from ...protocol.types import CONTROLLER, PLATFORM
from ..jobs.job_file import JobFile, write_job_file
from ..jobs.run_directory import claim_run_directory
from ..supervision.backoff import Backoff, RestartBackoff
from ..supervision.controller_process import ControllerProcess, Ending

METHODS_AT_ONCE = 16
HANG_S = 10.0
SERVES_S = 120.0  # the first controller of a job comes up, on a busy machine
FETCH_S = 30.0  # for the end of the job to be asked for, before the actor ends itself
_EXIT_FAILED, _EXIT_DAMAGED = 70, 65  # of `midstep controller`: the job is not over

_log = logging.getLogger(__name__)


class RayJob(msgspec.Struct, frozen=True):
    """What the actor has to know of a job that has been founded. `nodes`: with spares."""

    job: str
    job_directory: str
    nodes: int
    resources: dict[str, float]
    controller_resources: dict[str, float]
    environment: dict[str, str]
    grace_s: float


class Interruptible(Protocol):
    """A controller's process, as far as it is stopped."""

    @property
    def leads(self) -> bool:
        """Whether it is the one that leads the job, and hears signals."""

    def interrupt(self) -> None:
        """Ask it to stop the job."""


class StopOnce:
    """Has a controller stop the job, once it is the one that leads it: before that, a signal would end it alone."""

    def __init__(self, controller: Interruptible, wanted: Callable[[], bool]) -> None:
        self._controller, self._wanted = controller, wanted
        self._asked = False

    def __call__(self) -> None:
        """Look whether it is time. Called a few times each second."""
        if self._wanted() and self._controller.leads and not self._asked:
            self._asked = True
            self._controller.interrupt()


class ControllerActor:
    """Runs a job to its end. All of it happens in a thread with a loop; the methods look at what came of it."""

    def __init__(self, job: RayJob) -> None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s ray %(levelname)s %(message)s")
        self._job = job
        self._directory = Path(job.job_directory)
        self._over = threading.Event()
        self._result: JobResult | None = None
        self._controller: ControllerProcess | None = None
        self._stopping = False
        self._run_directory: Path | None = None
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._work, name="midstep-ray", daemon=True).start()

    def where(self) -> str | None:
        """Return where the controller listens, or last listened; None if it has not begun."""
        return None if self._run_directory is None else read_endpoint(self._run_directory)

    def result(self, wait_s: float) -> JobResult | None:
        """Return how the job ended; None if it has not within `wait_s`."""
        return self._result if self._over.wait(wait_s) else None

    def stop(self) -> None:
        """Have the job stopped, with a checkpoint where that is possible; by the next controller if this one ends."""
        self._stopping = True

    # --- inside -----------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._result = self._loop.run_until_complete(self._run())
        except BaseException as error:
            _log.exception("the job cannot be run")
            self._result = self._ended(1, f"{type(error).__name__}: {error}")
        self._over.set()
        time.sleep(FETCH_S)  # whoever has started the job ends this actor before
        ray = library()
        ray.kill(ray.get_actor(controller_name(self._job.job), NAMESPACE), no_restart=True)

    async def _run(self) -> JobResult:
        job = self._job
        async with contextlib.AsyncExitStack() as ending:
            held = claim_run_directory(f"{job.job}.controller")
            ending.callback(held.remove)
            self._run_directory = held.path
            write_job_file(self._directory, JobFile(str(held.path)))
            keys = self._directory / "keys"
            JobKeys.create(keys, [CONTROLLER, PLATFORM])
            ending.push_async_callback(self._close_controller)
            served = asyncio.Event()
            supervising = asyncio.ensure_future(self._supervise(held.path, keys, served))
            ending.callback(supervising.cancel)
            serving = asyncio.ensure_future(served.wait())
            await asyncio.wait({serving, supervising}, timeout=SERVES_S, return_when=asyncio.FIRST_COMPLETED)
            serving.cancel()
            if supervising.done():
                return supervising.result()
            if not served.is_set():
                raise PlatformError(f"the controller does not come up; see {self._log_file}")
            platform = RayPlatform(
                RayOptions(
                    job=job.job,
                    keys=str(keys),
                    run_directory=str(held.path),
                    job_directory=job.job_directory,
                    nodes=job.nodes,
                    resources=job.resources,
                    environment=job.environment,
                    grace_s=job.grace_s,
                ),
                on_end=self._take_end,
            )
            ending.push_async_callback(platform.close)
            await platform.open()
            return await supervising

    async def _supervise(self, run_directory: Path, keys: Path, served: asyncio.Event) -> JobResult:
        """Keep a controller running until the job is over."""
        backoff = RestartBackoff(Backoff())
        address = library().util.get_node_ip_address()
        command = [sys.executable, "-m", "midstep.cli.main", "controller", "--job-dir", str(self._directory)]
        command += ["--run-dir", str(run_directory), "--keys", str(keys), "--listen", f"tcp://{address}:0"]
        command += ["--standby"]  # the one before may be cut off from all but the disk
        while True:
            with open(open_log(self._log_file), "ab", buffering=0) as log:
                self._controller = await ControllerProcess.start(
                    command, log, hang_s=HANG_S, now=time.monotonic, on_serving=served.set
                )
            ended = await self._controller.ended(StopOnce(self._controller, lambda: self._stopping))
            over = self._over_by(ended)
            if over is not None:
                return over
            _log.warning("the controller %s, and is started again", ended.how)
            await asyncio.sleep(backoff.delay_s(ended.lived_s, random.random()))

    def _over_by(self, ended: Ending) -> JobResult | None:
        """Return how the job ended with this controller; None if it has not."""
        with contextlib.suppress(MidstepError):
            said = read_result(self._directory)
            if said is not None:
                return said
        if ended.status == _EXIT_DAMAGED:
            return self._ended(1, f"the journal is damaged, and no controller can continue; see {self._log_file}")
        if ended.status is None or ended.status < 0 or ended.status == _EXIT_FAILED:
            return None
        return self._ended(ended.status, f"the controller ended with status {ended.status}")

    async def _close_controller(self) -> None:
        if self._controller is not None:
            await self._controller.close()

    def _take_end(self, order: EndJob) -> None:
        _log.info("the job has ended: %s", order.reason)

    def _ended(self, exit_code: int, reason: str) -> JobResult:
        return JobResult(self._job.job, exit_code, reason, 0, time.time())

    @property
    def _log_file(self) -> Path:
        return self._directory / "logs" / "controller.log"
