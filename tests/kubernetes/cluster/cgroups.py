"""Cgroups for what runs on a machine: a node makes its own in them, and all of them are gone with the node.

They are children of this process's own, so limits that hold here hold there. Version 1 only: with version 2 none of
this was tried.
"""

import contextlib
import os
import time
from pathlib import Path

_HIERARCHIES = ("cpu", "cpuacct", "cpuset", "memory", "devices", "freezer", "blkio", "pids", "name=systemd")
_COPIED = ("cpuset.cpus", "cpuset.mems")  # a new group has none, and then takes no process
_EMPTY_S = 10.0
_POLL_S = 0.05


def why_not() -> str:
    """Return why no groups can be made here; the empty string where they can."""
    there = {name for names in _own_groups() for name in names.split(",")}
    missing = [name for name in _HIERARCHIES if name not in there]
    return f"there are no version 1 cgroups of {', '.join(missing)}" if missing else ""


def remove_stale(prefix: str) -> None:
    """Remove what was left by one that was killed: all groups whose names begin so."""
    for own in set(_own_groups().values()):
        for folder in own.glob(f"{prefix}*"):
            _remove(folder)


class Groups:
    """One group of a name in each hierarchy."""

    def __init__(self, name: str) -> None:
        """Make them."""
        self._folders = {hierarchy: own / name for hierarchy, own in _own_groups().items()}
        for folder in set(self._folders.values()):
            folder.mkdir()
            for setting in _COPIED:
                if (folder / setting).exists():
                    (folder / setting).write_text((folder.parent / setting).read_text())

    @property
    def folders(self) -> list[Path]:
        """Where they are; what is to run in them writes itself into the `cgroup.procs` of each."""
        return sorted(set(self._folders.values()))

    @property
    def hierarchies(self) -> list[str]:
        """The names with which they are mounted."""
        return sorted(self._folders)

    def remove(self) -> None:
        """Remove them and all that is in them, once their processes have ended. Idempotent."""
        for folder in self.folders:
            _remove(folder)


def _remove(folder: Path) -> None:
    deadline = time.monotonic() + _EMPTY_S
    while folder.exists():
        for inside, _, _ in os.walk(folder, topdown=False):
            with contextlib.suppress(OSError):
                Path(inside).rmdir()
        assert time.monotonic() < deadline, f"processes are left in {folder}"
        time.sleep(_POLL_S if folder.exists() else 0)


def _own_groups() -> dict[str, Path]:
    """Return the folder of this process's group in each hierarchy, by the controllers with which that is mounted."""
    found = {}
    mounted = _mounted()
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        place = mounted.get(frozenset(names.split(",")))
        if place is not None:
            root, folder = place
            found[names] = folder / os.path.relpath(path, root)
    return found


def _mounted() -> dict[frozenset[str], tuple[str, Path]]:
    """Return, for each hierarchy, which group is mounted, and where."""
    found = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        words = line.split()
        kind, _, options = words[words.index("-") + 1 :]
        if kind == "cgroup":
            found[frozenset(options.split(",")) & frozenset(_HIERARCHIES)] = (words[3], Path(words[4]))
    return found
