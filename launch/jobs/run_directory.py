"""Where on this machine the sockets and keys of a job lie while it runs.

In `$XDG_RUNTIME_DIR/midstep`, if the system gives the user such a directory for longer than a login, else in
`/tmp/midstep-UID`. The path has to be short, because those of unix sockets in it have to fit into 100 bytes.
"""

import contextlib
import logging
import os
import pwd
import stat
from pathlib import Path

from ...platforms.processes import NodeMark
from ...protocol.endpoints import MAX_IPC_PATH_BYTES
from ...protocol.errors import ConfigurationError
from ...protocol.run_directories import Fate, RunDirectory, RunDirectoryTaken, claim, clear_abandoned

XDG_VARIABLE = "XDG_RUNTIME_DIR"
SYSTEMD_PLACE = Path("/run/user")
LINGERING = Path("/var/lib/systemd/linger")
MOST_OF_A_JOB = 64
PID_FILE = "launcher.pid"
_LONGEST_BELOW = "/node9999/agent.sock"
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_NAMED = 5

_log = logging.getLogger(__name__)


def claim_run_directory(name: str) -> RunDirectory:
    """Make and hold the run directory of a new job, and remove those of launchers that have ended.

    Raises ConfigurationError when the place for it cannot be trusted, when its path is too long, or when the job runs
    already.
    """
    base = place_for(name)
    _say_what_is_left(base)
    directory = claim(base, name)
    try:
        (directory.path / PID_FILE).write_text(str(os.getpid()))  # for people; it is the lock that counts
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
