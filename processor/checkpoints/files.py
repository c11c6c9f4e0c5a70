"""How files in a checkpoint directory are made, opened and removed.

The directory lies on a file system that others can write to as well. Nothing is read, written or removed through a
symbolic link there, nothing is waited for that is no regular file, and nothing is removed that midstep has not
written. What midstep makes is never writable for the group or for others, whatever the umask; a stricter umask makes
it stricter.
"""

import contextlib
import errno
import functools
import logging
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from ...protocol.errors import CheckpointError

FILE_MODE = 0o640
DIRECTORY_MODE = 0o750
MANIFEST = "manifest.json"
DAMAGED = "manifest.damaged.json"
RECORD = ".part.json"
_DRAFT = ".part.new"
SHARD = ".safetensors"
MOST_MANIFEST_BYTES = 64 << 20  # a hundred thousand ranks take a tenth of it
_PART = rf"(?:own-\d{{1,9}}\.bin|[A-Za-z0-9._-]+{re.escape(SHARD)})"
_BESIDE = r"(?:\.part\.json|\.[0-9a-f]{8}\.part\.new)"  # its record, or a draft
_OWN_FILE = re.compile(rf"{re.escape(MANIFEST)}|{re.escape(DAMAGED)}|{_PART}{_BESIDE}?")
_ONLY_OURS = re.compile(rf"{re.escape(MANIFEST)}|{re.escape(DAMAGED)}|own-\d{{1,9}}\.bin(?:\.part\.json)?")
_PART_NAME = re.compile(_PART)

_log = logging.getLogger("midstep")


@functools.lru_cache(maxsize=1024)
def warn_once(text: str) -> None:
    """Log a warning that would otherwise be repeated with each look at the directory."""
    _log.warning("%s", text)


@contextlib.contextmanager
def told(doing: str) -> Iterator[None]:
    """Turn an OSError into a CheckpointError that says what could not be done."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot {doing}: {error}. Look at free space and permissions there") from error


def is_part(name: str) -> bool:
    """Return whether a file of a checkpoint can have this name: that of a shard or of a rank-local state."""
    return _PART_NAME.fullmatch(name) is not None


def draft_of(path: Path) -> Path:
    """Return a name beside a part that no other process has, under which it is written first."""
    return path.with_name(f"{path.name}.{secrets.token_hex(4)}{_DRAFT}")


def make_directory(path: Path) -> None:
    """Make a directory and those above it that are missing. Raises OSError."""
    missing: list[Path] = []
    place = path
    while not place.exists():
        missing.append(place)
        place = place.parent
    for each in reversed(missing):
        with contextlib.suppress(FileExistsError):  # another rank has made it
            each.mkdir(mode=DIRECTORY_MODE)


def warn_if_open(directory: str | Path) -> None:
    """Say so where others can write to a directory that the user has named. Raises OSError."""
    mode = Path(directory).stat().st_mode
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        warn_once(
            f"{directory} has mode {stat.S_IMODE(mode):o}: every user that can write there can replace checkpoints"
        )


def make_own_directory(path: Path) -> None:
    """Make a directory that nothing but midstep writes to. Raises OSError, also where it is a link or a file."""
    make_directory(path.parent)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=DIRECTORY_MODE)
    if not stat.S_ISDIR(path.lstat().st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "something else has its name", str(path))


def create(path: Path) -> BinaryIO:
    """Open a file that is not there yet, for writing. Raises OSError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, FILE_MODE), "wb", buffering=0)


def write_whole(path: Path, data: bytes, *, partial: Path) -> None:
    """Write a small file whole or not at all, in the place of what has its name. Raises OSError."""
    partial.unlink(missing_ok=True)
    with create(partial) as file:
        left = memoryview(data)
        while left:
            left = left[file.write(left) :]
    partial.replace(path)


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading, without waiting. Raises OSError, CheckpointError where it is no regular file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path} is damaged: it is no regular file")
    return os.fdopen(descriptor, "rb", buffering=0)


def read_small(path: Path, most_bytes: int) -> bytes:
    """Read a whole file. Raises OSError, CheckpointError where it is too large or no regular file."""
    with open_regular(path) as file:
        pieces, left = [], most_bytes + 1
        while left and (piece := file.read(left)):
            pieces.append(piece)
            left -= len(piece)
    if not left:
        raise CheckpointError(f"{path} is damaged: it has more than {most_bytes} bytes")
    return b"".join(pieces)


def holds_own_files(place: Path) -> bool:
    """Return whether a directory has a file that only midstep writes. Raises OSError."""
    return any(_ONLY_OURS.fullmatch(name) for name in os.listdir(place))


def remove_checkpoint(place: Path) -> None:
    """Remove what midstep has written into a directory, and the directory when it is empty then.

    The manifest goes first: what is half removed must not look complete. Raises OSError.
    """
    descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        names = sorted(os.listdir(descriptor), key=lambda name: name != MANIFEST)
        for name in filter(_OWN_FILE.fullmatch, names):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=descriptor)
    finally:
        os.close(descriptor)
    place.rmdir()
