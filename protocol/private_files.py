"""Files and directories that are for their owner only, whatever the umask.

Write access to a job's policy, result or log can change what the job did, and read access may show secrets in them.
A umask of 002 gives both to the user's group. So the mode is named where a file is made, and the umask is left alone:
it is the user's, for the files that training writes.
"""

import contextlib
import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from .errors import ConfigurationError, ForeignFile

FILE_MODE = 0o600
DIRECTORY_MODE = 0o700
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_MOST_SECRET_BYTES = 4096
_REMEDY = "it names what is connected to. Look at the job as the user who runs it"


def make_private_directory(path: Path) -> None:
    """Make a directory, and the parents that it lacks, for the owner only; one that is there is left as it is.

    Raises OSError.
    """
    for missing in reversed([each for each in (path, *path.parents) if not each.exists()]):
        missing.mkdir(mode=DIRECTORY_MODE, exist_ok=True)


def open_for_appending(path: Path) -> int:
    """Return a descriptor that appends to a file, made for the owner only if it is not there; the caller's to close.

    Raises OSError; for anything but a regular file as well, since to open a pipe could take for ever.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOCTTY | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(path, flags, FILE_MODE)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        os.set_blocking(descriptor, True)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def open_new_file(path: Path) -> BinaryIO:
    """Open a new file for the owner only, to be written; the caller closes it. Raises FileExistsError, OSError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, FILE_MODE), "wb")


def replace_file(path: Path, data: bytes) -> None:
    """Write a file for the owner only. A reader sees the old one or the new one, and never a part. Raises OSError."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.unlink(missing_ok=True)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        with contextlib.suppress(OSError):  # a file system that takes no draft takes no removal of one either
            draft.unlink()


def read_secret(path: Path, *, mounted: bool = False) -> str:
    """Return the text of a file that no other user can read, without blanks around it.

    `mounted`: Kubernetes puts it into a container, readable for all users there are in that.

    Raises ConfigurationError: it cannot be read, others can read or write it, or it is empty. A link is followed, as
    that is how Kubernetes puts a secret into a folder.
    """
    try:
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ConfigurationError(f"{path} is no regular file.")
            if not mounted and status.st_mode & (WRITABLE_BY_OTHERS | stat.S_IRGRP | stat.S_IROTH):
                raise ConfigurationError(f"{path}: others can read or write this file. Make it yours alone: chmod 600.")
            text = file.read(_MOST_SECRET_BYTES).decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = "it is not ASCII text" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise ConfigurationError(f"{path}: nothing can be read from it: {why}.") from error
    if not text:
        raise ConfigurationError(f"{path}: it is empty.")
    return text


def read_own_file(path: Path) -> bytes:
    """Return a file that says where to connect, which only its user or root may have written.

    Raises ForeignFile for another one, and OSError. Nothing is waited for: what is no file, or a link, is refused.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ForeignFile(f"{path} is a link: {_REMEDY}") from error
        raise
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ForeignFile(f"{path} is no regular file: {_REMEDY}")
        own, owner, mode = os.getuid(), status.st_uid, stat.S_IMODE(status.st_mode)
        if owner not in {own, 0}:
            raise ForeignFile(f"{path} belongs to user {owner}, and neither to {own} nor to root: {_REMEDY}")
        if mode & WRITABLE_BY_OTHERS:
            raise ForeignFile(
                f"{path} can be written by others (mode {mode:o}): {_REMEDY}, or chmod 600 it if you know what it says"
            )
        return file.read()
