"""Reaches a job for those who look at it or give it orders, wherever its controller and its journal are.

A job is on this machine, or one that a controller elsewhere leads. What its controller does not answer, its journal
does: in the job directory, in etcd, or on a volume of several machines. A job of several roles is a job for each role.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from ..controller.election.presence import (
    controllers_in_etcd,
    controllers_of_host,
    controllers_on_volume,
    server_clock,
)
from ..controller.election.succession import EtcdSuccession, FileSuccession
from ..controller.endpoints.control_requests import Refused, Reply, Request, StatusReply, StatusRequest
from ..controller.endpoints.discovery_files import read_result
from ..controller.endpoints.local_sockets import NoController, ask
from ..controller.endpoints.operator_client import ask_from_elsewhere
from ..controller.etcd.place import EtcdPlace, access_of, parse_place
from ..controller.journal import reading
from ..controller.journal.records import Founding
from ..controller.journal.volume_place import folder_in, holds_journal, is_volume, parse_volume_place
from ..controller.role_group import GroupPhase, GroupRestart, RoleStanding
from ..controller.story import StoryEntry
from ..controller.time_account import TimeAccount
from ..protocol.discovery import endpoints
from ..protocol.errors import ConfigurationError, MidstepError
from ..protocol.incidents import ControllerStatus, JobStatus
from ..protocol.run_directories import is_held
from ..protocol.slow_records import SlowTold
from ..protocol.token import CONTROLLER_VARIABLE, TOKEN_FILE_VARIABLE, RoleToken, job_of, operating, read_token
from . import directories
from .supervisor import why_no_answer

ELSEWHERE_S = 10.0  # a way between machines, and a controller that comes up meanwhile
ASK_S = 2.0
NOT_BEGUN = "not begun"


class HereJob(msgspec.Struct, frozen=True):
    """A job whose directory is on this machine."""

    directory: Path

    @property
    def name(self) -> str:
        """The name in messages."""
        return self.directory.name

    def ask(self, request: Request, timeout_s: float) -> Reply:
        """Ask its controller. Raises NoController, MidstepError."""
        return ask(live_directory(self.directory), request, timeout_s)


class JobElsewhere(msgspec.Struct, frozen=True):
    """A job that is known by where its controllers listen, and a token."""

    endpoints: tuple[str, ...]
    token: RoleToken

    @property
    def name(self) -> str:
        """The name in messages."""
        return self.token.job

    def ask(self, request: Request, timeout_s: float) -> Reply:
        """Ask its controller. Raises NotAdmitted, NoController, MidstepError."""
        return ask_from_elsewhere(self.endpoints, self.token, request, max(timeout_s, ELSEWHERE_S))


ReachedJob = HereJob | JobElsewhere


def reached(job: str | None, controller: str | None, token_file: Path | None) -> ReachedJob:
    """Return the job that is meant. `controller`, `token_file`: as given; else the environment has them.

    Raises ConfigurationError.
    """
    return reached_from_elsewhere(job, controller, token_file) or HereJob(directories.find_job(job))


def reached_from_elsewhere(job: str | None, controller: str | None, token_file: Path | None) -> JobElsewhere | None:
    """Return a job that a controller elsewhere leads; None if none is named. `job`: its whole name.

    Raises ConfigurationError.
    """
    where = controller or os.environ.get(CONTROLLER_VARIABLE)
    if where:
        return _elsewhere(job, where, token_file)
    if token_file is not None:
        raise ConfigurationError(f"--token-file goes with --controller HOST:PORT, or {CONTROLLER_VARIABLE}.")
    return None


def _elsewhere(job: str | None, controller: str, token_file: Path | None) -> JobElsewhere:
    in_environment = os.environ.get(TOKEN_FILE_VARIABLE)
    file = token_file or (Path(in_environment) if in_environment else None)
    token = read_token(file, os.environ)
    if token is None:
        raise ConfigurationError(
            f"a controller on another machine asks for a token: --token-file FILE, {TOKEN_FILE_VARIABLE}, or its text "
            "in MIDSTEP_TOKEN. Whoever has the job's token makes one: `midstep token --role viewer`."
        )
    if job is None and not token.job:
        raise ConfigurationError("this token is for any job that was started with it: write the job's whole name.")
    return JobElsewhere(endpoints(controller), operating(token, directories.checked_name(job_of(token, job))))


def live_directory(job_directory: Path) -> Path:
    """Return the run directory of a job. Raises NoController if it never had one."""
    run_directory = directories.run_directory_of(job_directory)
    if run_directory is None:
        raise NoController(f"{job_directory}: the job has not been started. Start it with `midstep run`.")
    return run_directory


def look(job: ReachedJob) -> tuple[JobStatus, str]:
    """Return a job's status, and why it is not live (empty if it is). Raises MidstepError if nothing can be read."""
    try:
        reply = job.ask(StatusRequest(), ASK_S)
        if isinstance(reply, StatusReply):
            return reply.status, ""
        why = reply.reason if isinstance(reply, Refused) else "its controller gave no status"
    except NoController as error:
        if not isinstance(job, HereJob):
            raise
        why = what_became_of_it(job.directory) or str(error)
    if not isinstance(job, HereJob):
        raise MidstepError(f"{job.name}: {why}.")
    return in_journal(job.directory, why)


def in_journal(job_directory: Path, why: str) -> tuple[JobStatus, str]:
    """Return what a job's journal says, and why it is asked. Raises MidstepError if it cannot be read."""
    status = msgspec.structs.replace(
        read_status(job_directory),
        controllers=living_controllers(job_directory),
        failover_paused_until_s=paused_until_s(job_directory),
    )
    if status.exit_code is not None:
        return status, "the job has ended; this is the end of its journal"
    result = read_result(job_directory)
    if result is not None:
        note = f"the job has ended without a controller that could record it: {result.reason}"
        return msgspec.structs.replace(status, exit_code=result.exit_code, reason=result.reason), note
    age_s = max(0.0, time.time() - status.at_s)
    return status, (
        f"no controller answers; this is the journal as of {_date_text(status.at_s)}, {age_s:.0f} s ago, and steps "
        f"since then are not in it ({why})"
    )


def what_became_of_it(job_directory: Path) -> str | None:
    """Return what the launcher and the system say about a controller that does not answer; None if nothing is known."""
    run_directory = directories.run_directory_of(job_directory)
    return None if run_directory is None else why_no_answer(run_directory, directories.launcher_of(run_directory))


def _date_text(at_s: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at_s))
    except (OverflowError, OSError, ValueError):  # a clock that is off by millennia
        return "an unknown time"


def read_status(job_directory: Path) -> JobStatus:
    """Return a job's status as of its last event, from its journal alone. Raises JournalError."""
    return reading.read_status(_journal_of(job_directory))


def read_history(job_directory: Path) -> tuple[JobStatus, SlowTold]:
    """Return a job's status, and which nodes were named slow, from its journal alone. Raises JournalError."""
    return reading.read_history(_journal_of(job_directory))


def read_times(job_directory: Path) -> TimeAccount:
    """Return the account of a job's time as of its last event. Raises JournalError."""
    return reading.read_times(_journal_of(job_directory))


def founding_of(job_directory: Path) -> Founding:
    """Return what the journal of a job was founded with. Raises JournalError."""
    return reading.read_founding(_journal_of(job_directory))


def read_story(job_directory: Path) -> Iterator[StoryEntry]:
    """Yield each event that the journal of a job still has, with what followed from it. Raises JournalError."""
    return reading.read_story(_journal_of(job_directory))


def paused_until_s(job_directory: Path) -> float:
    """Return until when no standby of a job takes over, in wall-clock seconds, or 0. Raises JournalError."""
    folder, place = _volume_of(job_directory), _etcd_of(job_directory)
    if folder is not None:
        return FileSuccession(folder, server_clock(folder)).paused_until_s()
    if place is None:
        run_directory = directories.run_directory_of(job_directory)
        return 0.0 if run_directory is None else FileSuccession(run_directory).paused_until_s()
    with contextlib.closing(EtcdSuccession(place)) as succession:
        return succession.paused_until_s()


def living_controllers(job_directory: Path) -> tuple[ControllerStatus, ...]:
    """Return the controllers of a job that live, also those that stand by. Raises JournalError."""
    folder, place = _volume_of(job_directory), _etcd_of(job_directory)
    if folder is not None:
        return controllers_on_volume(folder)
    if place is not None:
        return controllers_in_etcd(place)
    run_directory = directories.run_directory_of(job_directory)
    return () if run_directory is None else controllers_of_host(run_directory)


def _journal_of(job_directory: Path) -> reading.Where:
    return _volume_of(job_directory) or _etcd_of(job_directory) or job_directory


def _volume_of(job_directory: Path) -> Path | None:
    """Return the folder with the journal: the one that the job's store names, or the one in its own directory."""
    own = folder_in(job_directory)
    if holds_journal(own):
        return own
    known = directories.read_job_file(job_directory)
    return parse_volume_place(known.store).folder if known is not None and is_volume(known.store) else None


def _etcd_of(job_directory: Path) -> EtcdPlace | None:
    known = directories.read_job_file(job_directory)
    if known is None or not known.store or is_volume(known.store):
        return None
    return parse_place(known.store, known.job, access_of(os.environ))


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
    found = directories.find_job_or_group(job)
    return found if directories.is_group(found) else None


def look_at_group(directory: Path) -> GroupLook:
    """Return how a job of roles stands. Raises ConfigurationError."""
    founding, record = directories.read_founding(directory), directories.read_group(directory)
    if record is None:
        return GroupLook(founding.job, False, NOT_BEGUN, None, "", founding.plan.until, (), ())
    group = record.group
    roles = []
    for standing in group.standings:
        place = directories.role_directory(directory, standing.role, standing.attempt)
        status, note = (
            _role_status(place) if founding.platform != "kubernetes" else (None, _ask_in_pod(founding, standing))
        )
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
    founding, record = directories.read_founding(directory), directories.read_group(directory)
    run_directory = None if record is None else Path(record.run_directory)
    launcher = None if run_directory is None or not is_held(run_directory) else directories.launcher_of(run_directory)
    if launcher is None:
        raise ConfigurationError(f"{founding.job}: `midstep run` is not running it. `midstep resume` continues a job.")
    with contextlib.suppress(ProcessLookupError):
        os.kill(launcher, signal.SIGTERM)
    return f"{founding.job}: all roles are being stopped, with checkpoints where that is possible"


def _ask_in_pod(founding: directories.GroupFounding, standing: RoleStanding) -> str:
    job = directories.role_job(founding.platform, founding.job, standing.role, standing.attempt)
    return f"ask its controller: `kubectl exec deploy/midstep-{job} -c controller -- midstep status`"


def _role_status(place: Path) -> tuple[JobStatus | None, str]:
    if not directories.is_job(place):
        return None, "its job has not begun"
    try:
        return look(HereJob(place))
    except MidstepError as error:
        return None, str(error)
