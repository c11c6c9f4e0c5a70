"""Files and directories that are for their owner only, whatever the umask.

Who can write a job's policy, result or log can change what the job did, and who can read them may find secrets in them.
A umask of 002 gives both to the user's group. So the mode is named where a file is made, and the umask is left alone:
it is the user's, for the files that training writes.
"""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

FILE_MODE = 0o600
DIRECTORY_MODE = 0o700
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def make_private_directory(path: Path) -> None:
    """Make a directory, and the parents that it lacks, for the owner only; one that is there is left as it is.

    Raises OSError.
    """
    for missing in reversed([each for each in (path, *path.parents) if not each.exists()]):
        missing.mkdir(mode=DIRECTORY_MODE, exist_ok=True)


def open_log(path: Path) -> BinaryIO:
    """Open a log for appending, made for the owner only if it is not there.

    Raises OSError; for anything but a regular file as well, since to open a pipe could take for ever.
    """
    return open(path, "ab", buffering=0, opener=_open_regular)


def _open_regular(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, FILE_MODE)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "is not a regular file", path)
        os.set_blocking(descriptor, True)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


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
        draft.unlink(missing_ok=True)
