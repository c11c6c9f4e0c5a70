"""What a job of roles keeps on disk: its file as it was read, how its roles stand, and where their jobs are.

`roles.json` is written once. `group.json` is replaced before anything is done about what it says, so that a launcher
that is started again knows what has been spent, and which roles have ended.
"""

from pathlib import Path
from typing import TypeVar

import msgspec

from ...controller.endpoints.discovery_files import read_result
from ...controller.role_group import GroupRules, RoleGroup
from ...policies.scripted_roles import JobOfRoles
from ...protocol.errors import ConfigurationError
from ...protocol.private_files import make_private_directory, replace_file
from ...protocol.role_store import ROLE_STORE_NAME

ROLES_NAME, GROUP_NAME = "roles.json", "group.json"
HIGHEST_ATTEMPT = 9999  # names of jobs have to have room for it
_FOLDER = "roles"  # of the roles' job directories
_Form = TypeVar("_Form", bound=msgspec.Struct)


class GroupFounding(msgspec.Struct, frozen=True):
    """What was asked for. `environment`: for the ranks of all roles. `platform`: as of `midstep run`."""

    job: str
    plan: JobOfRoles
    environment: dict[str, str]
    working_directory: str
    platform: str
    fixed_nodes: bool
    secret: str  # of the store

    @property
    def roles_outlive_launcher(self) -> bool:
        """Whether the roles' jobs are kept alive by an engine; else they die with the launcher of the whole job."""
        return self.platform != "local"

    @property
    def rules(self) -> GroupRules:
        """What decides about all roles."""
        plan = self.plan
        failover = {role.name: role.failover for role in plan.roles if role.failover is not None}
        return GroupRules(plan.names, failover, frozenset(plan.until), plan.restarts)


class GroupRecord(msgspec.Struct, frozen=True):
    """How the roles stand, and where the launcher of the whole job has its lock."""

    run_directory: str
    group: RoleGroup


def is_group(directory: Path) -> bool:
    """Tell whether a directory is that of a job of roles."""
    return (directory / ROLES_NAME).is_file()


def found_group(directory: Path, founding: GroupFounding) -> None:
    """Make the directory of a new job of roles. Raises ConfigurationError."""
    if is_group(directory):
        raise ConfigurationError(f"{directory} holds a job already. Choose another --job or --job-dir, or remove it.")
    try:
        make_private_directory(directory / "logs")
        make_private_directory(directory / _FOLDER)
        replace_file(directory / ROLES_NAME, msgspec.json.encode(founding) + b"\n")
    except OSError as error:
        raise ConfigurationError(f"{directory} cannot be written: {error}. Choose another --job-dir.") from error


def read_founding(directory: Path) -> GroupFounding:
    """Return what was asked for. Raises ConfigurationError."""
    return _read(directory / ROLES_NAME, GroupFounding)


def write_group(directory: Path, record: GroupRecord) -> None:
    """Make durable how the roles stand. Raises OSError."""
    replace_file(directory / GROUP_NAME, msgspec.json.encode(record) + b"\n")


def read_group(directory: Path) -> GroupRecord | None:
    """Return how the roles stand; None where the job has not begun. Raises ConfigurationError."""
    return _read(directory / GROUP_NAME, GroupRecord) if (directory / GROUP_NAME).is_file() else None


def role_directory(directory: Path, role: str, attempt: int) -> Path:
    """Return the job directory of a role in one attempt."""
    return directory / _FOLDER / f"{role}.{attempt}"


def role_job(platform: str, job: str, role: str, attempt: int) -> str:
    """Return the name of the job that a role is in one attempt. On Kubernetes it names objects."""
    if platform == "kubernetes":
        return f"{job}-{role.replace('_', '-').lower()}-{attempt}"
    return f"{job}.{role}.{attempt}"


def present_role_directory(directory: Path, role: str) -> Path:
    """Return the job directory of a role as it stands. Raises ConfigurationError when there is no such role."""
    names = read_founding(directory).plan.names
    if role not in names:
        raise ConfigurationError(f"{directory.name} has no role {role[:64]!r}; its roles: {', '.join(names)}")
    record = read_group(directory)
    return role_directory(directory, role, 1 if record is None else record.group.of(role).attempt)


def store_file(directory: Path) -> Path:
    """Return the file that says where the store of the roles is."""
    return directory / ROLE_STORE_NAME


def has_ended(directory: Path) -> bool:
    """Tell whether a job of roles has ended. Raises MidstepError."""
    return read_result(directory) is not None


def _read(path: Path, form: type[_Form]) -> _Form:
    try:
        return msgspec.json.decode(path.read_bytes(), type=form)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigurationError(f"{path}: cannot be read: {error}. `midstep run --roles` writes it.") from error
