"""The launcher of a job of roles in its pod: it continues from where the last one was, and writes down the end."""

import asyncio
from pathlib import Path

from ...cli.display.plain import echo
from ...controller.endpoints.discovery_files import JobResult, read_result
from ...platforms.kubernetes import names
from ...platforms.kubernetes.api import Api
from ...platforms.kubernetes.deployment import OwnDeployment
from ...platforms.kubernetes.objects import FILES, SETTINGS_FILE
from ...platforms.kubernetes.settings import read_settings
from ...protocol.errors import ConfigurationError
from ...protocol.messages import EndJob
from ..roles.group_files import read_group, role_job
from ..roles.opening import reopened_group
from ..roles.running import launch_roles
from .following import remove


def run_in_pod(directory: Path, *, quiet: bool) -> int:
    """Run a job of roles to its end, and return its exit code. Raises MidstepError.

    A pod that finds that the job has ended only writes that down: the one before could not any more.
    """
    settings_file = Path(FILES) / SETTINGS_FILE
    if not settings_file.is_file():
        raise ConfigurationError(f"{directory}: a job in Kubernetes is continued by its Deployment, in a pod of that.")
    job = read_settings(settings_file).job
    result = read_result(directory)
    code = launch_roles(reopened_group(directory), quiet=quiet) if result is None else result.exit_code
    result = read_result(directory)
    if result is not None:
        asyncio.run(_write_down(directory, job, result))
    return code


async def _write_down(directory: Path, job: str, result: JobResult) -> None:
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
