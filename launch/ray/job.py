"""Starts a job on a Ray cluster, waits for its end, and leaves nothing of it there."""

import logging
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from ...controller.endpoints.discovery_files import JobResult
from ...platforms.ray.cluster import NAMESPACE, OUTSIDE_OF_GROUPS, actor_resources, controller_name
from ...platforms.ray.library import library
from ...protocol.errors import ConfigurationError, PlatformError
from ..jobs.directories import checked_name
from ..jobs.start import Start, new_name
from .controller_actor import METHODS_AT_ONCE, ControllerActor, RayJob
from .founding import Reserved, found

ASK_S = 5.0  # between two questions for the end of the job
GONE_S = 60.0  # for the controller's actor to be gone after it
SENT_S = 1.0  # for a last word to leave this process
_LOOK_S = 0.2

_log = logging.getLogger(__name__)


class RayResult(msgspec.Struct, frozen=True):
    """How a job ended: its exit code as of `midstep run`, the reason in words, and where journal and logs are."""

    job: str
    exit_code: int
    reason: str
    job_directory: Path


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
    name = checked_name(job) if job is not None else new_name()
    directory = Path.cwd() if working_directory is None else Path(working_directory).absolute()
    start = Start(
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
