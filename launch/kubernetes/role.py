"""The job of one role in Kubernetes: made, followed and ended by the role's launcher, in the pod of the whole job's."""

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from ...controller.endpoints.control_requests import Accepted, StopJobRequest
from ...controller.endpoints.discovery_files import JobResult, read_result, write_result
from ...platforms.kubernetes import names
from ...platforms.kubernetes.api import Api
from ...platforms.kubernetes.deployment import OwnDeployment
from ...platforms.kubernetes.fleet import PodPhase, read_pod
from ...platforms.kubernetes.objects import FILES, SETTINGS_FILE, lease_store, manifests
from ...platforms.kubernetes.pods import TOKEN_FOLDER
from ...platforms.kubernetes.settings import Settings, read_settings
from ...protocol.discovery import endpoints
from ...protocol.errors import ConfigurationError, MidstepError
from ...protocol.messages import EndJob
from ...protocol.token import FullToken, full, operating, read_token
from ..directories import read_group, role_job
from ..reached_job import JobElsewhere
from ..roles import LaunchedRole, OpenedGroup, reopened_group
from . import Echo
from .following import Following, Manifests, answered, make, remove
from .job import submission_of

ASK_S = 10.0
ASK_AGAIN_S = 1.0
NOTHING_RUNS = 2  # as of a command that has changed nothing
_RANK = "[rank "
_log = logging.getLogger(__name__)


def run_role(launched: LaunchedRole, echo: Echo) -> int:
    """Run the job of a role to its end, or find it again, or only stop it. Returns its exit code.

    What is made is owned by the Deployment of the whole job. SIGINT and SIGTERM stop the role's job, with a checkpoint
    where that is possible. Raises MidstepError.
    """
    whole = read_settings(Path(FILES) / SETTINGS_FILE)
    token = read_token(Path(TOKEN_FOLDER) / "token", {})
    assert token is not None, "the pod has the job's token"
    return asyncio.run(_RoleInPods(launched, whole, full(token), echo).run())


def settings_of_role(whole: Settings, launched: LaunchedRole) -> Settings:
    """Return what the pods of a role are like: those of the whole job, with what is the role's own."""
    start = launched.start
    assert start.job is not None
    own = {name: f"{amount:g}" for name, amount in launched.role.given.resources.items()}
    settings = msgspec.structs.replace(
        whole,
        job=start.job,
        environment={**whole.environment, **start.environment},
        resources={**whole.resources, **own},
        group=whole.job,
        has_roles=False,
        launcher={},
    )
    # Claims that all hosts can write are network file systems, on which only this journal holds.
    return msgspec.structs.replace(settings, store=lease_store(settings, str(start.job_directory)))


class _RoleInPods:
    """One try to run a role, in this process: it may have been run before, by another."""

    def __init__(self, launched: LaunchedRole, whole: Settings, token: FullToken, echo: Echo) -> None:
        self._group, self._launched, self._echo = whole.job, launched, echo
        self._name = launched.role.name
        self._settings = settings_of_role(whole, launched)
        self._job = self._settings.job
        assert launched.start.job_directory is not None
        self._directory = launched.start.job_directory
        self._token = msgspec.structs.replace(token, job=self._job)
        self._api = Api()
        self._stopping: asyncio.Task[None] | None = None

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._begin_to_stop)
        try:
            if self._launched.stop:
                if await answered(partial(self._api.deployment, names.of_job(self._job))) is None:
                    return NOTHING_RUNS
                self._begin_to_stop()
            else:
                await self._make()
            end = await Following(self._api, self._job, self._say, self._show).result()
            if end.of_job:
                result = JobResult(self._job, end.exit_code, end.reason, 0, time.time())
                await asyncio.to_thread(write_result, self._directory, result)
            await remove(self._api, self._job, (), self._say)
            return end.exit_code
        finally:
            if self._stopping is not None:
                self._stopping.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await self._stopping
            await self._api.close()

    async def _make(self) -> None:
        """Make the objects of the job. What an attempt before has left, as it did not end in time, is deleted first."""
        attempt = self._launched.attempt
        if attempt > 1:
            await remove(self._api, role_job("kubernetes", self._group, self._name, attempt - 1), (), self._say)
        owner = await answered(OwnDeployment(self._api, names.of_job(self._group)).reference)
        submission = submission_of(self._launched.start, self._settings)
        objects: Manifests = manifests(self._settings, submission, self._token, self._api.namespace)
        await make(self._api, self._job, objects, self._say, owner=owner)

    def _begin_to_stop(self) -> None:
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop())

    async def _stop(self) -> None:
        """Ask the controller until it has agreed; the launcher of all roles limits how long that may take."""
        request = StopJobRequest(f"the roles of {self._group} are stopped")
        token = operating(self._token, self._job)
        while True:
            try:
                pods, _ = await self._api.pods(names.selected(self._job, names.CONTROLLER))
                running = [each for each in map(read_pod, pods) if each.phase is PodPhase.RUNNING and each.address]
                if running:
                    where = endpoints(",".join(f"{pod.address}:{self._settings.port}" for pod in running))
                    reply = await asyncio.to_thread(JobElsewhere(where, token).ask, request, ASK_S)
                    if isinstance(reply, Accepted):
                        return
            except MidstepError as error:
                _log.warning("the controller of role %s cannot be asked to stop yet: %s", self._name, error)
            await asyncio.sleep(ASK_AGAIN_S)

    def _say(self, text: str) -> None:
        self._echo(f"midstep[{self._name}]: {text}", err=True)

    def _show(self, line: str) -> None:
        if not self._launched.quiet:
            self._echo(f"[{self._name} {line[1:]}" if line.startswith(_RANK) else line)


def run_in_pod(directory: Path, run_roles: Callable[[OpenedGroup], int], echo: Echo) -> int:
    """Run a job of roles to its end, and return its exit code. Raises MidstepError.

    A pod that finds that the job has ended only writes that down: the one before could not any more.
    """
    settings_file = Path(FILES) / SETTINGS_FILE
    if not settings_file.is_file():
        raise ConfigurationError(f"{directory}: a job in Kubernetes is continued by its Deployment, in a pod of that.")
    job = read_settings(settings_file).job
    result = read_result(directory)
    code = run_roles(reopened_group(directory)) if result is None else result.exit_code
    result = read_result(directory)
    if result is not None:
        asyncio.run(_write_down(directory, job, result, echo))
    return code


async def _write_down(directory: Path, job: str, result: JobResult, echo: Echo) -> None:
    """Remove what is left of the roles' jobs, say on the Deployment how the job has ended, and run no pod any more."""
    api = Api()
    record = read_group(directory)
    try:
        for standing in () if record is None else record.group.standings:
            name = role_job("kubernetes", job, standing.role, standing.attempt)
            await remove(api, name, (), lambda text: echo(f"midstep: {text}", err=True))
        await OwnDeployment(api, names.of_job(job)).end(EndJob(result.exit_code, result.reason))
    finally:
        await api.close()
