"""Starts a job on a Ray cluster, waits for its end, and leaves nothing of it there."""

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from ...controller.endpoints.discovery_files import JobResult
from ...platforms.ray.cluster import NAMESPACE, actor_resources, controller_name
from ...platforms.ray.library import library
from ...policies.schema import DeviceName
from ...protocol.errors import ConfigurationError, PlatformError
from ..jobs.directories import checked_name
from ..jobs.founding import found_in_directory
from ..jobs.start import Start, new_name, policy_of, require_script, spec_of
from .controller_actor import METHODS_AT_ONCE, ControllerActor, RayJob

PLATFORM_NAME = "ray"
ASK_S = 5.0  # between two questions for the end of the job
GONE_S = 60.0  # for the controller's actor to be gone after it
GRACE_MARGIN_S = 10.0
SENT_S = 1.0  # for a last word to leave this process
_LOOK_S = 0.2

_log = logging.getLogger(__name__)


class RayResult(msgspec.Struct, frozen=True):
    """How a job ended: its exit code as of `midstep run`, the reason in words, and where journal and logs are."""

    job: str
    exit_code: int
    reason: str
    job_directory: Path


class Reserved(msgspec.Struct, frozen=True):
    """What Ray is to reserve: for each node, by default a CPU for each rank (and an NPU); and for the controller."""

    node: Mapping[str, float] | None = None
    controller: Mapping[str, float] = {}


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
    device: str | None = None,
    resources_per_node: Mapping[str, float] | None = None,
    controller_resources: Mapping[str, float] | None = None,
    max_restarts: int = 0,
) -> RayResult:
    """Run a script on NNODES x RANKS_PER_NODE ranks in actors of this Ray cluster, and keep it running.

    `storage_path`: a directory that all machines see under this name; journal, logs and checkpoints are in
    `storage_path/job`. The script has to be there, too, under its absolute name. `resources_per_node`: what Ray
    reserves for each node, on a machine of its own; by default a CPU for each rank, with `device="npu"` also an NPU.
    `controller_resources`: what the controller's actor takes, to have it on machines that are not preempted.

    Connects to the cluster of `RAY_ADDRESS`, or of this machine, unless the program has called `ray.init`. Returns when
    the job has ended, however it ended: look at `exit_code`. Raises ConfigurationError; nothing has run then.
    """
    name = checked_name(job) if job is not None else new_name()
    start = Start(
        command=(str(Path(script).absolute()), *arguments),
        nodes=nnodes,
        ranks_per_node=ranks_per_node,
        spare_nodes=spares,
        max_restarts=max_restarts,
        policy_file=None if policy is None else Path(policy),
        job=name,
        job_directory=Path(storage_path).absolute() / name,
        environment=dict(env or {}),
        device=None if device is None else DeviceName(device),
    )
    with RunningJob(start, Reserved(resources_per_node, controller_resources or {})) as running:
        result = running.result()
    return RayResult(name, result.exit_code, result.reason, running.directory)


class RunningJob:
    """A job that has been started on the cluster. When it is left it has ended, or is about to."""

    def __init__(self, start: Start, reserved: Reserved, *, again: bool = False) -> None:
        """Found the job, and have Ray start its controller. Raises ConfigurationError; nothing runs then.

        `again`: it was founded before, and the process that waited for its end was lost; its controller may still run.
        """
        self._ray = ray = library()
        require_script(start)
        if not ray.is_initialized():
            try:
                ray.init(address="auto", namespace=NAMESPACE, log_to_driver=False, logging_level=logging.WARNING)
            except ConnectionError as error:
                raise ConfigurationError(f"there is no Ray cluster here (RAY_ADDRESS, `ray start`): {error}") from error
        founded = _found(start, reserved, again=again)
        self.directory = Path(founded.job_directory)
        self._name = controller_name(founded.job)
        options: dict[str, Any] = {"name": self._name, "namespace": NAMESPACE, "lifetime": "detached"}
        options |= {"max_restarts": -1, "max_task_retries": -1, "max_concurrency": METHODS_AT_ONCE}
        options |= {"get_if_exists": again}
        options |= actor_resources(dict(reserved.controller))
        self._controller = ray.remote(ControllerActor).options(**options).remote(founded)

    def __enter__(self) -> "RunningJob":
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the controller's actor, and wait until Ray has forgotten it; after an error have it stop the job."""
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


def _found(start: Start, reserved: Reserved, *, again: bool) -> RayJob:
    """Make the directory and the journal of a new job; both are there, if `again`. Raises ConfigurationError."""
    assert start.job is not None
    assert start.job_directory is not None
    name, directory = start.job, start.job_directory
    policy = policy_of(start)
    spec = spec_of(start, name, policy, directory)
    if not again:
        found_in_directory(directory, spec, policy, platform=PLATFORM_NAME)
    resources = dict(reserved.node or {"CPU": float(start.ranks_per_node)})
    if reserved.node is None and policy.device is DeviceName.NPU:
        resources["NPU"] = float(start.ranks_per_node)
    grace_s = spec.settings.stop_grace_s + GRACE_MARGIN_S
    return RayJob(name, str(directory), start.nodes + start.spare_nodes, resources, spec.environment, grace_s)
