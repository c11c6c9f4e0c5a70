"""Files with secrets: read only if no other user could have read or written them.

Kubernetes mounts a Secret in a way of its own: the directory has mode 1777, its files are links into a directory
`..data`, which is a link too, and they belong to root and can be read by all in the pod. Such a mount is taken.
"""

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from .errors import ConfigurationError
from .private_files import DIRECTORY_MODE, FILE_MODE, WRITABLE_BY_OTHERS
from .token import LONGEST_CHARACTERS, TOKEN_VARIABLE, Token, parse_token

_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_DATA_LINK = "..data"
_ROOT = 0


def require_private(path: Path, missing: str) -> None:
    """Refuse a file or directory that is missing, of another owner, or open to others, unless it is a mounted Secret.

    `missing`: what to do where it is missing. Raises ConfigurationError.
    """
    try:
        status = path.stat()
        if _is_mounted_secret(path):
            return
    except FileNotFoundError:
        raise ConfigurationError(f"{path} is missing. {missing}") from None
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be examined: {error}.") from error
    if status.st_uid != os.getuid():
        raise ConfigurationError(f"{path} belongs to user {status.st_uid}, not to {os.getuid()}: chown it.")
    if status.st_mode & _OTHERS:
        wanted = DIRECTORY_MODE if stat.S_ISDIR(status.st_mode) else FILE_MODE
        raise ConfigurationError(
            f"{path} is open to others (mode {stat.S_IMODE(status.st_mode):o}): chmod {wanted:o} it; "
            "if others may have read it, make new keys and restart the job."
        )


def read_token(file: Path | None, environment: Mapping[str, str]) -> Token | None:
    """Return the job's token from a file, else from MIDSTEP_TOKEN; None if there is none. Raises ConfigurationError."""
    if file is None:
        text = environment.get(TOKEN_VARIABLE, "")
        return parse_token(text, TOKEN_VARIABLE) if text else None
    require_private(file, "`midstep token` prints a token: keep it in a file of mode 600.")
    try:
        with file.open("rb") as opened:
            data = opened.read(LONGEST_CHARACTERS + 2)
    except OSError as error:
        raise ConfigurationError(f"{file} cannot be read: {error.strerror}.") from error
    return parse_token(data.decode("ascii", "replace"), str(file))


def without_token(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for programs of the user's, which have no use for the job's token."""
    return {name: value for name, value in environment.items() if name != TOKEN_VARIABLE}


def _is_mounted_secret(path: Path) -> bool:
    """Return whether a path is in a volume of Kubernetes, or is one, in which none but root can change anything."""
    folder = path if stat.S_ISDIR(path.stat().st_mode) else path.parent
    link = folder / _DATA_LINK
    if not link.is_symlink():
        return False
    data = link.resolve()
    within = data.parent == folder.resolve() and (path == folder or path.resolve().parent == data)
    above = folder.stat()
    fixed = not above.st_mode & stat.S_IWOTH or bool(above.st_mode & stat.S_ISVTX)
    owners = {each.st_uid for each in (above, link.lstat(), data.stat(), path.stat())}
    closed = not any(each.stat().st_mode & WRITABLE_BY_OTHERS for each in (data, path) if each != folder)
    return within and fixed and closed and owners <= {_ROOT, os.getuid()}
