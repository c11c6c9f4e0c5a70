"""Tells a rank that the kernel killed for lack of memory from one that somebody else killed.

Both end by SIGKILL. The kernel counts its own kills for each memory cgroup, so a count that has gone up shortly before
names the cause. A process with much memory takes seconds to be gone, which is why kills are remembered for a while.
"""

from collections import deque
from collections.abc import Iterator
from pathlib import Path

REMEMBERED_S = 30.0  # from the kernel's decision to the end of a process with hundreds of GB
MOST_KILLS = 1000
CGROUPS = Path("/sys/fs/cgroup")
PROC = Path("/proc")
_FIELD = "oom_kill"


class KillCounter:
    """The kernel's count of processes that it has killed for lack of memory, around this process.

    That of its memory cgroup, where there is one (version 2 or 1), else that of the machine.
    """

    def __init__(self, *, cgroups: Path = CGROUPS, proc: Path = PROC) -> None:
        """Look for the file that has it. Without one `read` returns None, and no kill is ever named."""
        self._path = next((path for path in _candidates(cgroups, proc) if _read(path) is not None), None)

    def read(self) -> int | None:
        """Return the count now; None where it is not known."""
        return None if self._path is None else _read(self._path)


class MemoryKills:
    """Remembers the kernel's kills until the ends of processes that they explain. Pure: counts and times come in."""

    def __init__(self) -> None:
        self._count: int | None = None
        self._kills: deque[float] = deque(maxlen=MOST_KILLS)

    def observe(self, count: int | None, now: float) -> None:
        """Take in the kernel's count as of `now`. The first one is where counting begins."""
        if count is None:
            return
        if self._count is not None:
            self._kills.extend([now] * min(count - self._count, MOST_KILLS))
        self._count = count

    def claim(self, now: float) -> bool:
        """Say whether a process that has just ended by SIGKILL was killed by the kernel. Each kill explains one end."""
        while self._kills and now - self._kills[0] > REMEMBERED_S:
            self._kills.popleft()
        if not self._kills:
            return False
        self._kills.popleft()
        return True


def parse_count(text: str) -> int | None:
    """Return the `oom_kill` line's number of `memory.events`, `memory.oom_control` or `vmstat`; None: there is none."""
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name == _FIELD and value.strip().isdecimal():
            return int(value)
    return None


def _candidates(cgroups: Path, proc: Path) -> Iterator[Path]:
    """Name the files that may have the count, the closest first. In a container the mount may be the group itself."""
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
