"""Remove directories name by name, so that no link and no mount leads the removal out of them.

`shutil.rmtree` goes into whatever is mounted below. Here everything is relative to open directories of one mount, and a
name that is replaced by a link while it is being looked at is unlinked, never followed.
"""

import contextlib
import os
import stat
from pathlib import Path

MAX_DEPTH = 16  # directories inside each other; midstep itself makes three

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_Mount = tuple[int, str]


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
