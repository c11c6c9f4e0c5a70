"""Jobs of several roles, for the commands of an operator: which is meant, how it stands, and how it is ended."""

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import msgspec

from ...cli.reaching import CONTROLLER_VARIABLE, HereJob
from ...cli.status import look
from ...controller.role_group import GroupPhase, GroupRestart, RoleStanding
from ...protocol.errors import ConfigurationError, MidstepError
from ...protocol.incidents import JobStatus
from ...protocol.run_directories import is_held
from ..jobs.directories import find_job_or_group, is_job
from ..jobs.run_directory import launcher_of
from .group_files import GroupFounding, is_group, read_founding, read_group, role_directory, role_job

NOT_BEGUN = "not begun"


class RoleLook(msgspec.Struct, frozen=True):
    """One role: how it stands in the job, and the status of its own job. `note`: why that is not live, or not there."""

    role: str
    attempt: int
    state: str
    exit_code: int | None
    reason: str
    job_directory: str
    status: JobStatus | None
    note: str


class GroupLook(msgspec.Struct, frozen=True):
    """A job of roles. `live`: its launcher runs. `ladder`: of each role, whether it has one of its own."""

    job: str
    live: bool
    phase: str
    exit_code: int | None
    reason: str
    until: tuple[str, ...]
    restarts: tuple[GroupRestart, ...]
    roles: tuple[RoleLook, ...]


def group_meant(job: str | None, controller: str | None) -> Path | None:
    """Return the directory of the job of roles that is meant; None if it is another job.

    Raises ConfigurationError when there is no job of that name here.
    """
    if controller or os.environ.get(CONTROLLER_VARIABLE):
        return None
    found = find_job_or_group(job)
    return found if is_group(found) else None


def look_at_group(directory: Path) -> GroupLook:
    """Return how a job of roles stands. Raises ConfigurationError."""
    founding, record = read_founding(directory), read_group(directory)
    if record is None:
        return GroupLook(founding.job, False, NOT_BEGUN, None, "", founding.plan.until, (), ())
    group = record.group
    roles = []
    for standing in group.standings:
        place = role_directory(directory, standing.role, standing.attempt)
        status, note = _look_at(place) if founding.platform != "kubernetes" else (None, _elsewhere(founding, standing))
        roles.append(
            RoleLook(
                standing.role,
                standing.attempt,
                standing.state.value,
                standing.exit_code,
                standing.reason,
                str(place),
                status,
                note,
            )
        )
    return GroupLook(
        founding.job,
        is_held(Path(record.run_directory)),
        group.phase.value,
        group.exit_code if group.phase is GroupPhase.ENDED else None,
        group.reason,
        founding.plan.until,
        group.restarts,
        tuple(roles),
    )


def group_data(group: GroupLook) -> dict[str, Any]:
    """Return the data of `midstep status --json`."""
    data: dict[str, Any] = msgspec.to_builtins(group)
    return data


def stop_group(directory: Path) -> str:
    """Have a job of roles stopped by its launcher, and say so. Raises ConfigurationError when it does not run."""
    founding, record = read_founding(directory), read_group(directory)
    run_directory = None if record is None else Path(record.run_directory)
    launcher = None if run_directory is None or not is_held(run_directory) else launcher_of(run_directory)
    if launcher is None:
        raise ConfigurationError(f"{founding.job}: `midstep run` is not running it. `midstep resume` continues a job.")
    with contextlib.suppress(ProcessLookupError):
        os.kill(launcher, signal.SIGTERM)
    return f"{founding.job}: all roles are being stopped, with checkpoints where that is possible"


def _elsewhere(founding: GroupFounding, standing: RoleStanding) -> str:
    job = role_job(founding.platform, founding.job, standing.role, standing.attempt)
    return f"ask its controller: `kubectl exec deploy/midstep-{job} -c controller -- midstep status`"


def _look_at(place: Path) -> tuple[JobStatus | None, str]:
    if not is_job(place):
        return None, "its job has not begun"
    try:
        return look(HereJob(place))
    except MidstepError as error:
        return None, str(error)
