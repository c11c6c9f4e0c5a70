"""Where jobs keep what outlives them, and how a command finds the one that is meant.

A job directory holds the journal; everything that reads a job after the fact starts from here.
"""

import contextlib
import logging
import os
import pwd
import re
import stat
from pathlib import Path
from typing import TypeVar

import msgspec

from ..controller.journal.volume_place import ENTRIES, FOLDER, folder_in, holds_journal
from ..controller.role_group import GroupRules, RoleGroup
from ..platforms.processes import NodeMark
from ..policies.scripted_roles import JobOfRoles
from ..protocol.discovery import ROLE_STORE_NAME
from ..protocol.errors import ConfigurationError
from ..protocol.private_files import make_private_directory, read_own_file, replace_file
from ..protocol.run_directories import Fate, RunDirectory, RunDirectoryTaken, claim, clear_abandoned
from ..protocol.transport import MAX_IPC_PATH_BYTES

HOME_VARIABLE = "MIDSTEP_HOME"
DEFAULT_BASE = Path("~/.midstep/jobs")
JOURNAL_FILE = "journal.sqlite"
LISTED_JOBS = 10
MAX_NAME = 64
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_NAME - 1}}}")
JOB_FILE_NAME = "job.json"
XDG_VARIABLE = "XDG_RUNTIME_DIR"
SYSTEMD_PLACE = Path("/run/user")
LINGERING = Path("/var/lib/systemd/linger")
MOST_OF_A_JOB = 64
PID_FILE = "launcher.pid"
_LONGEST_BELOW = "/node9999/agent.sock"
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_NAMED = 5
_log = logging.getLogger(__name__)
ROLES_NAME, GROUP_NAME = "roles.json", "group.json"
HIGHEST_ATTEMPT = 9999  # names of jobs have to have room for it
_FOLDER = "roles"  # of the roles' job directories
_Form = TypeVar("_Form", bound=msgspec.Struct)


def base_directory() -> Path:
    """Return the directory that job directories are in: `$MIDSTEP_HOME`, else `~/.midstep/jobs`."""
    named = os.environ.get(HOME_VARIABLE)
    return (Path(named) if named else DEFAULT_BASE).expanduser()


def isolation_folder() -> Path:
    """Return the folder about devices that are isolated across jobs; no job can have its name."""
    return (base_directory() / ".isolated").absolute()


def checked_name(name: str) -> str:
    """Return the name of a new job, if it can be one: it becomes the name of directories, and part of socket paths.

    Raises ConfigurationError for one that is too long for that, or would lead elsewhere.
    """
    if _NAME.fullmatch(name) is None:
        raise ConfigurationError(
            f"--job {name[:80]!r} is not a valid job name; allowed: up to {MAX_NAME} letters, digits, dots, "
            "underscores and dashes, with a letter or digit first. --job-dir says where the job's files go."
        )
    return name


def is_job(directory: Path) -> bool:
    """Tell whether a directory holds a job's journal, or says where it is."""
    known = (directory / JOURNAL_FILE).is_file() or (directory / JOB_FILE_NAME).is_file()
    return known or holds_journal(folder_in(directory))


def jobs(base: Path | None = None) -> list[Path]:
    """Return the job directories below `base`, the one that was written to last first.

    Raises ConfigurationError if `base` cannot be read.
    """
    base = base_directory() if base is None else base
    try:
        found = [entry for entry in base.iterdir() if is_job(entry) or is_group(entry)] if base.is_dir() else []
    except OSError as error:
        raise ConfigurationError(f"cannot list the jobs in {base}: {error.strerror}") from error
    return sorted(found, key=lambda directory: (-_written_s(directory), directory.name))


def latest_job(base: Path | None = None) -> Path:
    """Return the directory of the job that was written to last. Raises ConfigurationError if there is none."""
    base = base_directory() if base is None else base
    found = jobs(base)
    if not found:
        raise ConfigurationError(
            f"there are no jobs in {base}; start one with `midstep run`, name a job directory, "
            f"or set {HOME_VARIABLE} to where your jobs are"
        )
    return found[0]


def find_job(name_or_path: str | None, base: Path | None = None) -> Path:
    """Return the job directory that is meant: a path, a job's name, or its beginning if only one job has it.

    `JOB/ROLE` is a role of a job of several roles, as it stands. None means the latest job. Raises ConfigurationError
    that lists the jobs that are there, or the roles of one that has several.
    """
    found = find_job_or_group(name_or_path, base)
    if is_group(found):
        named = name_or_path or found.name
        roles = ", ".join(f"{named}/{role}" for role in read_founding(found).plan.names)
        raise ConfigurationError(f"{found.name} is a job of several roles: name one of them: {roles}")
    return found


def find_job_or_group(name_or_path: str | None, base: Path | None = None) -> Path:
    """As `find_job`, and return the directory of a job of several roles if that is meant."""
    base = base_directory() if base is None else base
    if name_or_path is None:
        return latest_job(base)
    path = Path(name_or_path).expanduser()
    if path.name == JOURNAL_FILE and path.is_file():
        return path.parent
    for place in (path, base / path):
        if place.parent != base and not place.exists() and is_group(place.parent):
            return present_role_directory(place.parent, place.name)
    if is_job(path) or is_group(path):
        return path
    is_name = path.name == name_or_path  # no separators: "../x" names no job
    if is_name and (is_job(base / name_or_path) or is_group(base / name_or_path)):
        return base / name_or_path
    beginning = [job for job in jobs(base) if is_name and name_or_path and job.name.startswith(name_or_path)]
    if len(beginning) == 1:
        return beginning[0]
    raise ConfigurationError(f"{_what_is_wrong(path, name_or_path, beginning)}; {_listing(base)}")


def _what_is_wrong(path: Path, name: str, beginning: list[Path]) -> str:
    if beginning:
        return f"{len(beginning)} jobs begin with {name!r}"
    if path.is_dir():
        return f"{path} is not a job directory: it has no {JOURNAL_FILE}"
    return f"there is no job {name!r} (of one that was started with --job-dir, name that directory)"


def _listing(base: Path) -> str:
    found = jobs(base)
    if not found:
        return f"there are no jobs in {base} (set {HOME_VARIABLE} to look elsewhere)"
    names = ", ".join(job.name for job in found[:LISTED_JOBS])
    more = f" and {len(found) - LISTED_JOBS} more" if len(found) > LISTED_JOBS else ""
    return f"jobs in {base}, latest first: {names}{more}"


def _written_s(directory: Path) -> float:
    """Return when the journal was last written: while a job runs, only the write-ahead log beside it shows that."""
    times = []
    written = (JOURNAL_FILE, f"{JOURNAL_FILE}-wal", JOB_FILE_NAME, f"{FOLDER}/{ENTRIES}", GROUP_NAME)
    for name in written:
        try:
            times.append((directory / name).stat().st_mtime)
        except OSError:  # no log beside it, or gone between listing and looking
            continue
    return max(times, default=0.0)


class JobFile(msgspec.Struct, frozen=True):
    """The content of `job.json`. Unknown keys are left to later versions.

    `store`: the address of what keeps the journal, under the name `job`; empty: it lies in the job directory.
    """

    run_dir: str
    store: str = ""
    job: str = ""


def write_job_file(job_directory: Path, job_file: JobFile) -> None:
    """Write `job.json`. Raises ConfigurationError."""
    path = job_directory / JOB_FILE_NAME
    try:
        replace_file(path, msgspec.json.encode(job_file) + b"\n")
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror}. Choose another --job-dir.") from error


def run_directory_of(job_directory: Path) -> Path | None:
    """Return the run directory of a job; None if the job was never started.

    Raises ConfigurationError if the file is not what it should be.
    """
    known = read_job_file(job_directory)
    return None if known is None else Path(known.run_dir)


def read_job_file(job_directory: Path) -> JobFile | None:
    """Return `job.json`; None if the job was never started.

    Raises ConfigurationError if it cannot be read, or if another user could have written it (ForeignFile).
    """
    path = job_directory / JOB_FILE_NAME
    try:
        return msgspec.json.decode(read_own_file(path), type=JobFile)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigurationError(
            f"{path}: cannot be read: {error}. It is written when a job is started and names the job's run directory."
        ) from error


def claim_run_directory(name: str) -> RunDirectory:
    """Make and hold the run directory of a new job, and remove those of launchers that have ended.

    Raises ConfigurationError when the place for it cannot be trusted, when its path is too long, or when the job runs
    already.
    """
    base = place_for(name)
    _say_what_is_left(base)
    directory = claim(base, name)
    try:
        replace_file(directory.path / PID_FILE, str(os.getpid()).encode())  # for people; it is the lock that counts
    except OSError as error:
        directory.remove()
        raise ConfigurationError(f"{directory.path} cannot be written: {error.strerror}. Make room there.") from error
    return directory


def claim_free_run_directory(name: str) -> RunDirectory:
    """As `claim_run_directory`, under a name with a number where several of a job are on this machine."""
    for number in range(1, MOST_OF_A_JOB + 1):
        with contextlib.suppress(RunDirectoryTaken):
            return claim_run_directory(name if number == 1 else f"{name}.{number}")
    raise ConfigurationError(f"there are {MOST_OF_A_JOB} run directories of {name} on this machine.")


def launcher_of(run_directory: Path) -> int | None:
    """Return the process id of the `midstep run` that holds a run directory; None if it does not say."""
    try:
        return int((run_directory / PID_FILE).read_text())
    except (OSError, ValueError):
        return None


def place_for(name: str) -> Path:
    """Return the first place in which the paths of the job's sockets are short enough; nothing is made.

    Raises ConfigurationError when there is none.
    """
    places = [Path(os.path.realpath("/tmp")) / f"midstep-{os.getuid()}"]
    runtime = _runtime_directory()
    if runtime is not None:
        places.insert(0, runtime / "midstep")
    for place in places:
        if _longest_bytes(place, name) <= MAX_IPC_PATH_BYTES:
            return place
    most = len(os.fsencode(name)) - (_longest_bytes(places[-1], name) - MAX_IPC_PATH_BYTES)
    raise ConfigurationError(
        f"--job {name}: the sockets of its nodes would have paths of {_longest_bytes(places[-1], name)} bytes in "
        f"{places[-1]}, and {MAX_IPC_PATH_BYTES} fit. Choose a name of at most {most} characters; --job-dir is free."
    )


def _runtime_directory() -> Path | None:
    """Return the directory that the system has for this user's sockets, if it is the user's alone."""
    named = os.environ.get(XDG_VARIABLE, "")
    if not named.startswith("/"):
        return None
    path = Path(named)
    try:
        status = path.lstat()
        path = path.resolve()
    except OSError:
        return None
    alone = status.st_uid == os.getuid() and not status.st_mode & _OTHERS
    if not alone or not stat.S_ISDIR(status.st_mode):  # sudo, for one, leaves that of another user
        return None
    return path if outlives_the_login(path, LINGERING) else None


def outlives_the_login(runtime_directory: Path, lingering: Path) -> bool:
    """Return whether a job under `nohup` keeps its sockets when its user has logged out.

    systemd removes a directory of its own then, unless the user has been allowed to linger. `lingering`: where it has a
    file for each such user.
    """
    if runtime_directory.parent != SYSTEMD_PLACE:
        return True
    try:
        return (lingering / pwd.getpwuid(os.getuid()).pw_name).exists()
    except (KeyError, OSError):
        return False


def _longest_bytes(place: Path, name: str) -> int:
    return len(os.fsencode(f"{place}/{name}{_LONGEST_BELOW}"))


def _end_leftovers(run_directory: Path) -> None:
    """End what is left of nodes whose agents were killed together with their launcher."""
    for folder in run_directory.iterdir():
        if not folder.is_symlink() and folder.is_dir():
            NodeMark(run_directory, folder.name).kill_all()


def _say_what_is_left(base: Path) -> None:
    left = [each for each in clear_abandoned(base, _end_leftovers) if each.fate is not Fate.IN_USE]
    for fate, why in ((Fate.NOT_OURS, "has no mark of midstep"), (Fate.STUCK, "cannot be removed whole")):
        names = [ascii(each.name) for each in left if each.fate is fate]
        if names:
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            _log.warning("in %s this %s, and is left: %s%s", base, why, ", ".join(names[:_NAMED]), more)


class GroupFounding(msgspec.Struct, frozen=True):
    """A request for a job of roles. `environment`: for the ranks of all roles. `platform`: as of `midstep run`."""

    job: str
    plan: JobOfRoles
    environment: dict[str, str]
    working_directory: str
    platform: str
    fixed_nodes: bool
    secret: str  # of the store

    @property
    def roles_outlive_launcher(self) -> bool:
        """Return whether an engine keeps the roles' jobs alive; else they end with the launcher of the whole job."""
        return self.platform != "local"

    @property
    def rules(self) -> GroupRules:
        """The rules about all roles."""
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
    return _read(directory / GROUP_NAME, GroupRecord) if (directory / GROUP_NAME).exists() else None


def role_directory(directory: Path, role: str, attempt: int) -> Path:
    """Return the job directory of a role in one attempt."""
    return directory / _FOLDER / f"{role}.{attempt}"


def group_of(job_directory: Path) -> Path | None:
    """Return the directory of the job of several roles that a role's job directory lies in; None: it is no role's."""
    folder = job_directory.parent
    return folder.parent if folder.name == _FOLDER and is_group(folder.parent) else None


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


def store_folder(directory: Path) -> Path:
    """Return the folder with what the store of the roles holds, a folder for each attempt."""
    return directory / "store"


def _read(path: Path, form: type[_Form]) -> _Form:
    try:
        return msgspec.json.decode(read_own_file(path), type=form)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigurationError(f"{path}: cannot be read: {error}. `midstep run --roles` writes it.") from error


MOUNTS = Path("/proc/self/mountinfo")
NETWORK = frozenset(
    {
        *("9p", "afs", "beegfs", "ceph", "cifs", "coda", "fuse", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs"),
        *("nfs4", "ocfs2", "orangefs", "pvfs2", "smb2", "smb3", "smbfs"),
    }
)
LOCAL_FUSE = frozenset({"fuse.fuse-overlayfs"})  # what containers without root have in place of overlayfs
_ESCAPED = re.compile(r"\\([0-7]{3})")


def require_local(directory: Path) -> None:
    """Raise ConfigurationError when a job directory would lie on a network file system."""
    try:
        mounts = MOUNTS.read_text(errors="surrogateescape")
    except OSError:  # not Linux, or a sandbox: what cannot be known is not refused
        return
    kind = file_system_type(Path(os.path.realpath(directory)), mounts)
    if is_network(kind):
        raise ConfigurationError(
            f"{directory} lies on a network file system ({kind}), on which the journal's locks do not hold. Choose a "
            "--job-dir (or MIDSTEP_HOME) on a disk of this machine. Checkpoints may be shared: set "
            "checkpoint.directory in the policy."
        )


def is_network(kind: str) -> bool:
    """Say whether a type of file system is one that several machines can share."""
    family, _, program = kind.partition(".")
    return family in NETWORK and not (program and kind in LOCAL_FUSE)


def file_system_type(path: Path, mounts: str) -> str:
    """Return the type of the file system that holds an absolute path, by the text of /proc/self/mountinfo; or "".

    Of several mounts at one place the last one counts.
    """
    best, found = -1, ""
    for line in mounts.splitlines():
        head, separator, tail = line.partition(" - ")
        fields, kinds = head.split(" "), tail.split(" ")
        if not separator or len(fields) < 5:
            continue
        place = Path(_ESCAPED.sub(lambda match: chr(int(match[1], 8)), fields[4]))
        if path.is_relative_to(place) and len(place.parts) >= best:
            best, found = len(place.parts), kinds[0]
    return found
