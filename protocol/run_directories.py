"""The directory of a running job's sockets and keys: which launcher holds it, and when it may be removed.

A launcher holds its directory by a lock on a file in it, the mark. The kernel gives the lock up when the launcher ends,
whatever ends it, and knows it in every container that shares the directory, where process ids mean nothing. Only
what has a mark, and whose lock is free, is removed: everything else in the same place is left as it is.
"""

import contextlib
import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from .compat import StrEnum
from .errors import ConfigurationError

MARK_NAME = "launcher.lock"
MARK = b"midstep run directory, version 1\n"
PRIVATE_MODE = 0o700
_MARK_MODE = 0o600
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
MOST_LATE = 10  # times that something was made in a directory while it was removed
MAX_DEPTH = 16  # directories inside each other; midstep itself makes three
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_Mount = tuple[int, str]


class Fate(StrEnum):
    """The fate of a directory that was looked at for removal."""

    REMOVED = "removed"
    IN_USE = "in use"  # its launcher lives
    NOT_OURS = "not ours"  # without a mark of midstep, a link, or another user's
    STUCK = "stuck"  # marked and abandoned, and something in it cannot be removed


class Leftover(msgspec.Struct, frozen=True):
    """An entry that `clear_abandoned` has left, and why."""

    name: str
    fate: Fate


class RunDirectoryTaken(ConfigurationError):
    """There is a run directory of that name already."""


class RunDirectory:
    """A run directory that this process holds, until `remove` or `close` is called, or the process ends."""

    def __init__(self, path: Path, lock: int) -> None:
        """`lock`: the descriptor of the locked mark, owned from here on."""
        self.path = path
        self._lock = lock

    def remove(self) -> list[str]:
        """Remove the directory, if it is still the one that was made, and give it up. Idempotent.

        Returns the paths of what could not be removed.
        """
        if self._lock < 0:
            return []
        try:
            with _opened(self.path.parent) as base, _folder(base, self.path.name) as folder:
                if not _same(self._lock, MARK_NAME, folder):
                    return [str(self.path)]
                return [str(self.path / name) for name in _discard(base, self.path.name, folder)]
        except FileNotFoundError:
            return []
        except OSError:
            return [str(self.path)]
        finally:
            self.close()

    def close(self) -> None:
        """Give the directory up without removing it; the next launcher may. Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def open_base(base: Path) -> int:
    """Make the directory that run directories are in, if it is not there, and return a descriptor of it.

    Raises ConfigurationError when it is a link, another user's, or open to others: then others could have midstep
    make and remove things elsewhere.
    """
    remedy = "Remove it, or set XDG_RUNTIME_DIR to a directory of your own with mode 0700."
    try:
        above = base.parent.stat()
        if above.st_mode & _OTHERS_WRITE and not above.st_mode & stat.S_ISVTX:
            raise ConfigurationError(
                f"{base.parent}: others can replace what is in it (mode {stat.S_IMODE(above.st_mode):o}). chmod +t it, "
                "or set XDG_RUNTIME_DIR to a directory of your own with mode 0700."
            )
        with contextlib.suppress(FileExistsError):
            base.mkdir(mode=PRIVATE_MODE)
        folder = open_folder(base)
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.ENOTDIR}:
            raise ConfigurationError(f"{base} is a link or a file, and not a directory of yours. {remedy}") from error
        raise ConfigurationError(f"{base}: cannot be used for sockets and keys: {error.strerror}. {remedy}") from error
    status = os.fstat(folder)
    if status.st_uid != os.getuid() or status.st_mode & _OTHERS:
        os.close(folder)
        raise ConfigurationError(
            f"{base} belongs to another user or is open to others (owner {status.st_uid}, mode "
            f"{stat.S_IMODE(status.st_mode):o}). {remedy}"
        )
    return folder


def claim(base: Path, name: str) -> RunDirectory:
    """Make the run directory `name` in `base`, and hold it.

    It appears under its name complete, with its mark locked, so that no other launcher takes it for an abandoned one.
    Raises ConfigurationError when there is one already, or it cannot be made.
    """
    folder = open_base(base)
    draft = f".{name}.{secrets.token_hex(4)}"
    lock = -1
    try:
        os.mkdir(draft, PRIVATE_MODE, dir_fd=folder)
        lock = _new_mark(folder, draft)
        os.rename(draft, name, src_dir_fd=folder, dst_dir_fd=folder)  # replaces nothing that has anything in it
        return RunDirectory(base / name, lock)
    except OSError as error:
        if lock >= 0:
            os.close(lock)
        remove_tree(base / draft)
        if error.errno in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}:
            raise RunDirectoryTaken(_why_taken(folder, base, name)) from error
        raise ConfigurationError(f"{base / name} cannot be made: {error.strerror}.") from error
    finally:
        os.close(folder)


def clear_abandoned(base: Path, end_leftovers: Callable[[Path], None] = lambda path: None) -> list[Leftover]:
    """Remove the run directories in `base` whose launchers have ended. Returns what else is there, and is left.

    `end_leftovers` ends what is left of the nodes of a run directory, before that is removed.
    Raises ConfigurationError as `open_base` does.
    """
    folder = open_base(base)
    try:
        found = [Leftover(name, _clear(folder, base / name, end_leftovers)) for name in sorted(os.listdir(folder))]
    finally:
        os.close(folder)
    return [each for each in found if each.fate is not Fate.REMOVED]


def is_held(path: Path) -> bool:
    """Tell whether a launcher that lives holds a run directory. What is not midstep's is held by none."""
    try:
        with _opened(path.parent) as base, _folder(base, path.name) as folder:
            lock = _open_mark(folder)
    except OSError:
        return False
    if lock < 0:
        return False
    try:
        return not _locked(lock)
    finally:
        os.close(lock)


def remove_abandoned(path: Path) -> Fate:
    """Remove one run directory if its launcher has ended. For the last agent of a launcher that was killed."""
    try:
        with _opened(path.parent) as base:
            return _clear(base, path)
    except FileNotFoundError:
        return Fate.REMOVED
    except OSError:
        return Fate.STUCK


def _clear(base: int, path: Path, end_leftovers: Callable[[Path], None] = lambda path: None) -> Fate:
    name = path.name
    try:
        with _folder(base, name) as folder:
            lock = _open_mark(folder) if mount_of(folder) == mount_of(base) else -1
            if lock < 0:
                return Fate.NOT_OURS
            try:
                if not _locked(lock):
                    return Fate.IN_USE
                # The holder of the lock before may have removed it all, and another launcher may have made it again.
                if not _same(folder, name, base) or not _same(lock, MARK_NAME, folder):
                    return Fate.IN_USE
                end_leftovers(path)
                return Fate.STUCK if _discard(base, name, folder) else Fate.REMOVED
            finally:
                os.close(lock)
    except FileNotFoundError:
        return Fate.REMOVED
    except OSError:
        return Fate.NOT_OURS


def _discard(base: int, name: str, folder: int) -> list[str]:
    """Remove a directory whose lock is held; the mark goes last, so that what is cut short can be finished later.

    A process of the job that is just ending may make a socket or a file meanwhile. It is removed as well: without the
    mark nothing would remove the directory any more.
    """
    left = empty_folder(folder, keep=MARK_NAME)
    if left:
        return left
    with contextlib.suppress(FileNotFoundError):
        os.unlink(MARK_NAME, dir_fd=folder)
    for _ in range(MOST_LATE):
        try:
            os.rmdir(name, dir_fd=base)
        except OSError:
            if not _same(folder, name, base):  # gone, or another launcher has put its own in the place of the empty one
                return []
            left = empty_folder(folder)
        else:
            return []
    return left or ["."]


def _new_mark(base: int, name: str) -> int:
    """Make the mark in a new directory, and return its descriptor, locked."""
    with _folder(base, name) as folder:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        lock = os.open(MARK_NAME, flags, _MARK_MODE, dir_fd=folder)
    try:
        # Locked before the text is written: without the text no launcher removes it.
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(lock, MARK)
    except OSError:
        os.close(lock)
        raise
    return lock


def _open_mark(folder: int) -> int:
    """Return a descriptor of the mark; -1 for a directory that midstep has not made."""
    if os.fstat(folder).st_uid != os.getuid():
        return -1
    try:
        mark = os.open(MARK_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError:
        return -1
    status = os.fstat(mark)
    if stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid() and os.read(mark, len(MARK) + 1) == MARK:
        return mark
    os.close(mark)
    return -1


def _locked(mark: int) -> bool:
    try:
        fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _same(opened: int, name: str, within: int) -> bool:
    """Say whether `name` still stands for what was opened."""
    try:
        return os.path.samestat(os.fstat(opened), os.stat(name, dir_fd=within, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _why_taken(base: int, path: Path, name: str) -> str:
    try:
        with _folder(base, name) as folder:
            mark = _open_mark(folder)
    except OSError:
        mark = -1
    if mark < 0:
        return f"{path / name} is in the way, and midstep has not made it. Remove it, or choose another --job."
    os.close(mark)
    return f"a job named {name} is running on this machine, or is just ending. Choose another --job."


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield folder
    finally:
        os.close(folder)


@contextlib.contextmanager
def _folder(base: int, name: str) -> Iterator[int]:
    folder = open_folder(name, within=base)
    try:
        yield folder
    finally:
        os.close(folder)


def open_folder(name: str | Path, *, within: int | None = None) -> int:
    """Open a directory that is no link, relative to an open one, and return the descriptor. Raises OSError."""
    return os.open(name, _FOLDER, dir_fd=within)


def mount_of(folder: int) -> _Mount:
    """Return what tells apart the mounts that open directories are in: a bind mount has the device of its source."""
    try:
        lines = Path(f"/proc/self/fdinfo/{folder}").read_text().splitlines()
    except OSError:  # without /proc, file systems are distinguished all the same
        lines = []
    return os.fstat(folder).st_dev, next((line for line in lines if line.startswith("mnt_id:")), "")


def empty_folder(folder: int, *, keep: str = "", depth: int = 0) -> list[str]:
    """Remove everything in an open directory but the entry `keep`.

    Returns the names, relative to it, of what is left: mounts, and what the system does not let go.
    """
    here = mount_of(folder)
    left: list[str] = []
    for name in os.listdir(folder):
        if name != keep:
            left += _remove(folder, name, here, depth)
    return left


def remove_tree(path: Path) -> list[str]:
    """Remove the directory at `path` with everything in it; if it is not there, do nothing.

    Returns the paths of what is left: mounts, and what the system does not let go. A link at `path` is unlinked.
    """
    try:
        parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return []
    except OSError:
        return [str(path)]
    try:
        return [str(path.parent / name) for name in _remove(parent, path.name, mount_of(parent), 0)]
    finally:
        os.close(parent)


def _remove(folder: int, name: str, here: _Mount, depth: int) -> list[str]:
    try:
        if not stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            os.unlink(name, dir_fd=folder)  # a link goes, what it names stays
            return []
        inner = open_folder(name, within=folder)
    except FileNotFoundError:
        return []
    except OSError:
        return [name]
    try:
        if depth >= MAX_DEPTH or mount_of(inner) != here:
            return [name]
        left = [f"{name}/{each}" for each in empty_folder(inner, depth=depth + 1)]
    finally:
        os.close(inner)
    if not left:
        try:
            with contextlib.suppress(FileNotFoundError):
                os.rmdir(name, dir_fd=folder)
        except OSError:  # something has come in meanwhile, or the parent is not ours
            return [name]
    return left
