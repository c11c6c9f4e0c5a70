"""Makes the directory of a job of roles, or finds it again, so that it is ready to be run; serves the roles' store."""

import contextlib
import hashlib
import os
import secrets
import shutil
import socket
from pathlib import Path
from types import TracebackType

import msgspec

from ..communicators.key_value_store import KeyValueServer
from ..controller.role_group import GroupPhase, RoleGroup
from ..policies.files import load_roles
from ..policies.scripted_roles import PlannedRole
from ..protocol import environment as env
from ..protocol.discovery import write_role_store
from ..protocol.errors import ConfigurationError
from ..protocol.private_files import make_private_directory, replace_file
from ..protocol.run_directories import RunDirectory, RunDirectoryTaken
from ..protocol.types import Rendezvous
from .directories import (
    HIGHEST_ATTEMPT,
    MAX_NAME,
    GroupFounding,
    base_directory,
    checked_name,
    claim_run_directory,
    found_group,
    is_group,
    is_job,
    place_for,
    read_founding,
    read_group,
    role_directory,
    role_job,
    store_file,
    store_folder,
)
from .job import Start, new_name, policy_of, require_script
from .meeting import address_towards

_SECRET_BYTES = 32
STOP = "--stop"  # of a role's launcher
LIMIT_BYTES = 1 << 30  # of all keys and values; what is read has to be deleted
BACKLOG = 1024
LOOPBACK = "127.0.0.1"


class OpenedGroup(msgspec.Struct, frozen=True):
    """A job of roles that can be run. `group`: how its roles stood; None: it is new."""

    directory: Path
    founding: GroupFounding
    held: RunDirectory
    group: RoleGroup | None = None


class NewGroup(msgspec.Struct, frozen=True):
    """A job of roles that has been checked, and where its directory is to be."""

    directory: Path
    founding: GroupFounding


def new_group(
    file: Path,
    *,
    job: str | None,
    job_directory: Path | None,
    environment: dict[str, str],
    platform: str,
    fixed_nodes: bool = False,
) -> NewGroup:
    """Check all that can be checked before anything is made. Raises ConfigurationError."""
    plan = load_roles(file)
    name = checked_name(job) if job is not None else new_name()
    directory = (job_directory or base_directory() / name).absolute()
    if is_job(directory) or is_group(directory):
        raise ConfigurationError(f"{directory} holds a job already. Choose another --job or --job-dir, or remove it.")
    founding = GroupFounding(
        name, plan, environment, os.getcwd(), platform, fixed_nodes, secrets.token_hex(_SECRET_BYTES)
    )
    for role in plan.roles:
        _check(file, founding, directory, role)
    return NewGroup(directory, founding)


def create_group(new: NewGroup) -> OpenedGroup:
    """Make the directory of a new job that this process will run. Raises ConfigurationError; nothing ran."""
    held = claim_run_directory(new.founding.job)
    try:
        found_group(new.directory, new.founding)
    except BaseException:
        held.remove()
        raise
    return OpenedGroup(new.directory, new.founding, held)


def reopened_group(directory: Path) -> OpenedGroup:
    """Return a job of roles whose launcher or machine was lost, ready to continue. Raises ConfigurationError."""
    founding, record = read_founding(directory), read_group(directory)
    group = None if record is None else record.group
    if group is not None and group.phase is GroupPhase.ENDED:
        raise ConfigurationError(
            f"{founding.job} has ended: {group.reason}. Start a new one with `midstep run --roles`."
        )
    try:
        held = claim_run_directory(founding.job)
    except RunDirectoryTaken as error:
        raise ConfigurationError(
            f"{founding.job} is running on this machine, or is just ending: see `midstep status {founding.job}`."
        ) from error
    return OpenedGroup(directory, founding, held, group)


def start_of(founding: GroupFounding, directory: Path, role: PlannedRole, attempt: int) -> Start:
    """Return the job that a role is in one attempt. Its checkpoints lie where those of the other attempts do."""
    given, policy = role.given, role.policy
    checkpoints = directory / (policy.checkpoint.directory or "checkpoints") / role.name
    checkpoint = msgspec.structs.replace(policy.checkpoint, directory=str(checkpoints))
    known = {
        env.ROLE: role.name,
        env.ROLES: msgspec.json.encode({each.name: each.given.ranks for each in founding.plan.roles}).decode(),
        env.ROLE_ATTEMPT: str(attempt),
        env.ROLE_STORE: str(store_file(directory)),
    }
    return Start(
        command=(given.script, *given.arguments),
        is_module=given.module,
        no_python=given.no_python,
        nodes=given.nnodes,
        ranks_per_node=role.ranks_per_node,
        spare_nodes=given.spares,
        fixed_nodes=founding.fixed_nodes,
        max_restarts=given.max_restarts,
        policy=msgspec.structs.replace(policy, checkpoint=checkpoint),
        job_directory=role_directory(directory, role.name, attempt),
        job=role_job(founding.platform, founding.job, role.name, attempt),
        environment={**founding.environment, **given.env, **known},
    )


def _check(file: Path, founding: GroupFounding, directory: Path, role: PlannedRole) -> None:
    start = start_of(founding, directory, role, HIGHEST_ATTEMPT)
    assert start.job is not None
    if len(start.job) > MAX_NAME:
        raise ConfigurationError(
            f"--job {founding.job}: the job of role {role.name} would be {start.job!r}, and names have at most "
            f"{MAX_NAME} characters. Choose a shorter --job, or a shorter name for the role; --job-dir is free."
        )
    try:
        place_for(start.job)
        require_script(start)
        policy_of(start)
    except ConfigurationError as error:
        raise ConfigurationError(f"{file}: roles.{role.name}: {error}") from error


class LaunchedRole(msgspec.Struct, frozen=True):
    """The job of a role in one attempt. `stop`: it may be alive without a launcher, and is only to be ended."""

    start: Start
    role: PlannedRole
    attempt: int
    quiet: bool
    stop: bool


class KeptValues:
    """The values of the store in one attempt, each in a file, so that a launcher that is started again has them."""

    def __init__(self, folder: Path) -> None:
        """`folder`: is made where it is missing. Raises OSError."""
        self._folder = folder
        make_private_directory(folder)

    def load(self) -> dict[str, bytes]:
        """Return all of them by key, and remove what was half written. Raises OSError, ValueError."""
        values = {}
        for path in self._folder.iterdir():
            if path.name.startswith("."):
                path.unlink()
                continue
            try:
                key, value = msgspec.msgpack.decode(path.read_bytes(), type=tuple[str, bytes])
            except msgspec.MsgspecError as error:
                raise ValueError(f"{path.name}: {error}") from error
            values[key] = value
        return values

    def set(self, key: str, value: bytes) -> None:
        """Keep a value, in the place of an earlier one. Raises OSError."""
        replace_file(self._file(key), msgspec.msgpack.encode((key, value)))

    def delete(self, key: str) -> None:
        """Keep a value no longer. Raises OSError."""
        self._file(key).unlink(missing_ok=True)

    def _file(self, key: str) -> Path:
        return self._folder / hashlib.sha256(key.encode()).hexdigest()


class SharedStore:
    """Serves while it is entered. What it holds is in files, too, for a launcher that continues the job."""

    def __init__(self, founding: GroupFounding, directory: Path) -> None:
        """Listen, and say where. Raises ConfigurationError."""
        self._folder = store_folder(directory)
        self._keeps = not founding.roles_outlive_launcher  # those that do begin again after it, with an empty store
        host = _host(founding)
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host, 0), family=family, backlog=BACKLOG)
            place = Rendezvous(host=host, port=self._listener.getsockname()[1], secret=founding.secret)
            write_role_store(store_file(directory), place)
        except OSError as error:
            raise ConfigurationError(f"the store of the roles cannot be opened on {host}: {error}.") from error
        self._server = KeyValueServer(self._listener, LIMIT_BYTES)
        self._attempt = 0

    def begin(self, attempt: int) -> None:
        """Serve what was kept of this attempt: nothing where all roles begin again, as it was for the steps before.

        Raises ConfigurationError.
        """
        if self._attempt == attempt:
            return
        try:
            self._forget(but=attempt)
            kept = KeptValues(self._folder / str(attempt)) if self._keeps else None
            self._server.begin({} if kept is None else kept.load(), kept)
        except (OSError, ValueError) as error:
            raise ConfigurationError(
                f"{self._folder}: what the roles had in their store cannot be read: {error}. Remove that folder to "
                "continue with an empty store."
            ) from error
        self._attempt = attempt

    def end(self) -> None:
        """Remove the files: the job is over, and is not continued."""
        self._forget()

    def _forget(self, but: int | None = None) -> None:
        with contextlib.suppress(FileNotFoundError):
            for folder in self._folder.iterdir():
                if folder.name != str(but):
                    shutil.rmtree(folder, ignore_errors=True)

    def __enter__(self) -> "SharedStore":
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it, and all connections to it."""
        self._server.close()


def _host(founding: GroupFounding) -> str:
    """Return the address of this machine for those of the roles' nodes. Raises ConfigurationError."""
    if founding.platform == "kubernetes":
        from ..platforms.kubernetes.names import POD_IP

        return os.environ[POD_IP]
    if founding.platform != "ray":
        return LOOPBACK
    cluster, _, port = os.environ.get("RAY_ADDRESS", "").rpartition(":")
    if cluster and port.isdigit() and "://" not in cluster:
        return address_towards(cluster, int(port))
    from ..platforms.ray.library import library

    return str(library().util.get_node_ip_address())
