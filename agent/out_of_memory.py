"""OOM kills: tell a rank that the kernel killed for lack of memory from one that something else killed.

Both exit by SIGKILL. The kernel counts its own kills for each memory cgroup, so a count that went up shortly before
names the cause. A process with much memory takes seconds to exit, which is why kills are remembered for a while.
"""

from collections import deque
from collections.abc import Iterator
from pathlib import Path

REMEMBERED_S = 30.0  # from the kernel's decision to the exit of a process with hundreds of GB
MOST_KILLS = 1000
CGROUPS = Path("/sys/fs/cgroup")
PROC = Path("/proc")
_FIELD = "oom_kill"


class KillCounter:
    """The kernel's count of OOM kills: of this process's memory cgroup (version 2 or 1), else of the machine."""

    def __init__(self, *, cgroups: Path = CGROUPS, proc: Path = PROC) -> None:
        """Find the file that has the count. Without one `read` returns None, and no exit is called an OOM kill."""
        self._path = next((path for path in _candidates(cgroups, proc) if _read(path) is not None), None)

    def read(self) -> int | None:
        """Return the present count; None where it is not known."""
        return None if self._path is None else _read(self._path)


class MemoryKills:
    """Remembers OOM kills until the exits that they explain. Pure: counts and times are arguments."""

    def __init__(self) -> None:
        self._count: int | None = None
        self._kills: deque[float] = deque(maxlen=MOST_KILLS)

    def observe(self, count: int | None, now: float) -> None:
        """Take in the kernel's count at `now`. Counting begins at the first one."""
        if count is None:
            return
        if self._count is not None:
            self._kills.extend([now] * min(count - self._count, MOST_KILLS))
        self._count = count

    def claim(self, now: float) -> bool:
        """Say whether a process that has just exited by SIGKILL was an OOM kill. Each kill explains one exit."""
        while self._kills and now - self._kills[0] > REMEMBERED_S:
            self._kills.popleft()
        if not self._kills:
            return False
        self._kills.popleft()
        return True


def parse_count(text: str) -> int | None:
    """Return the `oom_kill` count of `memory.events`, `memory.oom_control` or `vmstat`; None if it has none."""
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name == _FIELD and value.strip().isdecimal():
            return int(value)
    return None


def _candidates(cgroups: Path, proc: Path) -> Iterator[Path]:
    """Yield the files that may have the count, the closest first. In a container the mount may be the group itself."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            place, name = cgroups, "memory.events"
        elif "memory" in controllers.split(","):
            place, name = cgroups / "memory", "memory.oom_control"
        else:
            continue
        yield place / path.lstrip("/") / name
        yield place / name
    yield proc / "vmstat"


def _read(path: Path) -> int | None:
    try:
        return parse_count(path.read_text())
    except (OSError, UnicodeDecodeError):
        return None
