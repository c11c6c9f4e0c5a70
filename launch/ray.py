"""A job on Ray: `midstep.ray.run` starts it on a Ray cluster, waits for its end, and leaves nothing of it there.

What the job takes of Ray is kept beside its journal. An actor has the job's controller: it runs `midstep controller` on
the journal, beside the platform, and starts that again when it ends. Ray starts the actor again, on another machine if
it has to. The actor's name stands for the controller's address: who asks the actor learns where the controller listens.
"""

import asyncio
import contextlib
import logging
import random
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import msgspec

from ..controller.endpoints.discovery_files import JobResult, read_result
from ..controller.journal.reading import read_founding, read_status
from ..devices.kinds import device_kind
from ..platforms.processes import open_log
from ..platforms.ray.cluster import NAMESPACE, OUTSIDE_OF_GROUPS, actor_resources, controller_name
from ..platforms.ray.library import library
from ..platforms.ray.platform import RayOptions, RayPlatform
from ..policies.schema import Policy
from ..protocol.discovery import read_endpoint
from ..protocol.errors import ConfigurationError, MidstepError, PlatformError
from ..protocol.exits import CONTROLLER_FAILED, JOURNAL_DAMAGED
from ..protocol.keys import JobKeys
from ..protocol.messages import EndJob
from ..protocol.own_programs import own_program
from ..protocol.private_files import replace_file
from ..protocol.types import CONTROLLER, PLATFORM, JobSpec
from . import job as jobs
from .directories import JobFile, checked_name, claim_run_directory, write_job_file
from .processes import Backoff, ControllerProcess, Ending, RestartBackoff

__all__ = ["RayResult", "run"]

ASK_S = 5.0  # between two questions for the end of the job
GONE_S = 60.0  # for the controller's actor to be gone after it
SENT_S = 1.0  # for a last word to leave this process
_LOOK_S = 0.2
_log = logging.getLogger(__name__)
PLATFORM_NAME = "ray"
RESERVED_NAME = "ray.json"  # in the job directory
GRACE_MARGIN_S = 10.0
METHODS_AT_ONCE = 16
HANG_S = 10.0
SERVES_S = 120.0  # the first controller of a job comes up, on a busy machine
FETCH_S = 30.0  # for the end of the job to be asked for, before the actor ends itself


class RayResult(msgspec.Struct, frozen=True):
    """How a job ended: its exit code as of `midstep run`, the reason in words, and where journal and logs are."""

    job: str
    exit_code: int
    reason: str
    job_directory: Path


class Reserved(msgspec.Struct, frozen=True):
    """Reservations of Ray: for each node, by default a CPU (and an NPU) for each rank; and for the controller."""

    node: Mapping[str, float] = {}
    controller: Mapping[str, float] = {}


class RayJob(msgspec.Struct, frozen=True):
    """The facts of a founded job that the actor has to know. `nodes`: with spares."""

    job: str
    job_directory: str
    nodes: int
    resources: dict[str, float]
    controller_resources: dict[str, float]
    environment: dict[str, str]
    grace_s: float


def run(
    script: str | Path,
    *arguments: str,
    nnodes: int = 1,
    ranks_per_node: int = 1,
    spares: int = 0,
    storage_path: str | Path,
    policy: str | Path | None = None,
    job: str | None = None,
    env: Mapping[str, str] | None = None,
    working_directory: str | Path | None = None,
    device: str | None = None,
    resources_per_node: Mapping[str, float] | None = None,
    controller_resources: Mapping[str, float] | None = None,
    max_restarts: int = 0,
) -> RayResult:
    """Run a script on NNODES x RANKS_PER_NODE ranks in actors of this Ray cluster, and keep it running.

    `storage_path`: a directory that all machines see under this name; journal, logs and checkpoints are in
    `storage_path/job`. `working_directory`: in which the script is looked for and started, by default that of this
    process; all machines have it and the script under the same names. `resources_per_node`: what Ray reserves for each
    node, on a machine of its own; by default a CPU for each rank, with `device="npu"` also an NPU.
    `controller_resources`: what the controller's actor takes, to have it on machines that are not preempted.

    Connects to the cluster of `RAY_ADDRESS`, or of this machine, unless the program has called `ray.init`. Returns when
    the job has ended, however it ended: look at `exit_code`. Raises ConfigurationError; nothing has run then.
    """
    name = checked_name(job) if job is not None else jobs.new_name()
    directory = Path.cwd() if working_directory is None else Path(working_directory).absolute()
    start = jobs.Start(
        command=(str(directory / script), *arguments),
        nodes=nnodes,
        ranks_per_node=ranks_per_node,
        spare_nodes=spares,
        max_restarts=max_restarts,
        policy_file=None if policy is None else Path(policy),
        job=name,
        job_directory=Path(storage_path).absolute() / name,
        environment=dict(env or {}),
        working_directory=directory,
        device=device,
    )
    connect()
    founded = found(start, Reserved(resources_per_node or {}, controller_resources or {}))
    with RunningJob(founded) as running:
        result = running.result()
    return RayResult(name, result.exit_code, result.reason, running.directory)


def connect() -> None:
    """Connect this process to the cluster of `RAY_ADDRESS`, or of this machine, unless it is connected already.

    Raises ConfigurationError where there is none.
    """
    ray = library()
    if ray.is_initialized():
        return
    try:
        ray.init(address="auto", namespace=NAMESPACE, log_to_driver=False, logging_level=logging.WARNING)
    except ConnectionError as error:
        raise ConfigurationError(f"there is no Ray cluster here (RAY_ADDRESS, `ray start`): {error}") from error


class RunningJob:
    """A job that has been started on the cluster. When it is left it has ended, or is about to."""

    def __init__(self, job: RayJob, *, again: bool = False) -> None:
        """Have Ray start the controller of a job that has been founded. This process is connected to the cluster.

        `again`: the process that waited for the job's end was lost, or the whole cluster; the controller may still run.
        """
        self._ray = ray = library()
        self.directory = Path(job.job_directory)
        self._name = controller_name(job.job)
        options: dict[str, Any] = {"name": self._name, "namespace": NAMESPACE, "lifetime": "detached"}
        options |= {"max_restarts": -1, "max_task_retries": -1, "max_concurrency": METHODS_AT_ONCE}
        options |= {"get_if_exists": again, "scheduling_strategy": OUTSIDE_OF_GROUPS}
        options |= actor_resources(job.controller_resources)
        self._controller = ray.remote(ControllerActor).options(**options).remote(job)

    def __enter__(self) -> "RunningJob":
        """Take SIGTERM for Ctrl-C, if this is a main thread: Ray would end the process with no word to the job."""
        self._before = _take_sigterm(signal.default_int_handler)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the controller's actor, and wait until Ray has forgotten it; after an error have it stop the job."""
        _take_sigterm(self._before)
        if error is not None:
            self._controller.stop.remote()  # it ends the nodes, and then itself
            time.sleep(SENT_S)
            return
        self._ray.kill(self._controller, no_restart=True)
        deadline = time.monotonic() + GONE_S
        while {"name": self._name, "namespace": NAMESPACE} in self._ray.util.list_named_actors(all_namespaces=True):
            if time.monotonic() > deadline:
                raise PlatformError(f"the actor {self._name} does not end; `ray list actors` shows it")
            time.sleep(_LOOK_S)

    def stop(self) -> None:
        """Have the job stopped, with a checkpoint where that is possible."""
        self._controller.stop.remote()

    def result(self) -> JobResult:
        """Wait for the end of the job, and return how it ended. Ctrl-C stops it, a second one is raised."""
        stopping = False
        while True:
            try:
                result: JobResult | None = self._ray.get(self._controller.result.remote(ASK_S))
            except KeyboardInterrupt:
                if stopping:
                    raise
                stopping = True
                _log.warning("asking the job to stop; again to wait no longer for that")
                self.stop()
                continue
            if result is not None:
                return result


def _take_sigterm(handler: Any) -> Any:
    """Have SIGTERM handled, where a thread may say so, and return what handled it. None: that was not Python."""
    if threading.current_thread() is not threading.main_thread():
        return None
    return signal.signal(signal.SIGTERM, signal.SIG_DFL if handler is None else handler)


def found(start: jobs.Start, reserved: Reserved) -> RayJob:
    """Make the directory and the journal of a new job. Raises ConfigurationError; nothing has run then."""
    assert start.job is not None
    assert start.job_directory is not None
    jobs.require_script(start)
    directory, policy = start.job_directory, jobs.policy_of(start)
    spec = jobs.spec_of(start, start.job, policy, directory)
    jobs.make_job_directory(directory, policy)
    try:
        replace_file(directory / RESERVED_NAME, msgspec.json.encode(reserved))
    except OSError as error:
        raise jobs.unwritable(directory, error) from error
    jobs.create_journal(directory, spec, policy, platform=PLATFORM_NAME)
    return _job(directory, spec, policy, reserved)


def found_again(directory: Path) -> RayJob:
    """Return a job that was founded before, on this cluster or on one that is gone. Raises MidstepError."""
    founding = read_founding(directory)
    jobs.refuse_if_ended(directory, read_status(directory))
    return _job(directory, founding.job, founding.policy, _read_reserved(directory))


def is_on_ray(directory: Path) -> bool:
    """Tell whether a job's nodes are actors of Ray."""
    return (directory / RESERVED_NAME).is_file()


def _job(directory: Path, spec: JobSpec, policy: Policy, reserved: Reserved) -> RayJob:
    resources = dict(reserved.node or {"CPU": float(spec.ranks_per_node)})
    resource = device_kind(policy.device).ray_resource
    if not reserved.node and resource is not None:
        resources[resource] = float(spec.ranks_per_node)
    return RayJob(
        job=spec.job,
        job_directory=str(directory),
        nodes=spec.nodes + spec.spare_nodes,
        resources=resources,
        controller_resources=dict(reserved.controller),
        environment=spec.environment,
        grace_s=spec.settings.stop_grace_s + GRACE_MARGIN_S,
    )


def _read_reserved(directory: Path) -> Reserved:
    path = directory / RESERVED_NAME
    try:
        return msgspec.json.decode(path.read_bytes(), type=Reserved)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigurationError(
            f"{path} does not say what the job takes of Ray ({error}). Bring it back, or write it again: "
            '{"node": {"CPU": 8}, "controller": {}}.'
        ) from error


class Interruptible(Protocol):
    """A controller's process, as far as it is stopped."""

    @property
    def leads(self) -> bool:
        """Return whether it is the one that leads the job, and hears signals."""

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
        command = [*own_program("midstep.cli.main"), "controller", "--job-dir", str(self._directory)]
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
        if ended.status == JOURNAL_DAMAGED:
            return self._ended(1, f"the journal is damaged, and no controller can continue; see {self._log_file}")
        if ended.status is None or ended.status < 0 or ended.status == CONTROLLER_FAILED:
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
