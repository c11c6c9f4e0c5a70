"""The choice whether the next process of a rank is built ahead, where `standby.depth: auto` leaves it to the node.

A built process takes its rank's memory once more and the time to build it, and all that stands before the train
function is done by two processes at a time. So one is built for a rank that has trained long against what its start
took, where much memory is left without it, and where the rank's process holds nothing that only one can have. When
memory gets short, what is built is given back. Pure, but for the functions that read /proc.
"""

import os
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import psutil

from ..protocol.wording import LONGEST_WORDS, one_line
from .channel import RunProgram

TRAINED = 10.0  # times as long as its start took: what building takes is then a tenth of that, once
LEFT_FREE = 0.25  # of the node's memory, beside what is built
SHORT = 0.1  # of it: what is built is given back
LOOK_AGAIN_S = 60.0  # at what spoke against it
MEMORY_S = 1.0  # between two looks at the memory
CGROUPS = Path("/sys/fs/cgroup")
PROC = Path("/proc")
_LISTENS = "0A"  # a state in /proc/net/tcp
_NOT_ON_DISK = ("/memfd:", "/dev/", "/proc/", "/sys/")


class TrainingProcess(NamedTuple):
    """The process of a rank that trains. `started_s`: on this machine's monotonic clock."""

    program: RunProgram
    pid: int
    started_s: float


class Memory(NamedTuple):
    """The memory of a node, or what a container may take of it."""

    total_bytes: int
    free_bytes: int

    @property
    def left(self) -> float:
        """Return the share that is free."""
        return self.free_bytes / max(1, self.total_bytes)


class _Known(NamedTuple):
    """A rank's process: since when it trains, and what speaks against building the next one (empty: nothing).

    `looked_s`: when that was found out; None: not yet.
    """

    pid: int
    trains_s: float
    against: str = ""
    looked_s: float | None = None


class BuildChoice:
    """Chooses the ranks of a node whose next processes are built. `why`: what spoke against it last."""

    def __init__(
        self,
        ours: Collection[str] = (),
        *,
        memory: Callable[[], Memory] | None = None,
        holds: Callable[[int, Collection[str]], str] | None = None,
        own_bytes: Callable[[int], int] | None = None,
    ) -> None:
        """`ours`: folders in which midstep writes. The functions read the node and its processes, see below."""
        self.why = ""
        self._ours = ours
        self._memory = memory or node_memory
        self._holds = holds or what_it_holds
        self._own_bytes = own_bytes or own_bytes_of
        self._known: dict[int, _Known] = {}
        self._start_s: dict[int, float] = {}  # the longest start of each rank
        self._memory_s = 0.0
        self._short_until = 0.0

    @property
    def gives_back(self) -> bool:
        """Return whether what is built is to be ended, as memory was short when `chosen` was asked last."""
        return self._memory_s < self._short_until

    def chosen(
        self, training: Mapping[int, TrainingProcess], built: Collection[int], now: float
    ) -> dict[int, RunProgram]:
        """Return the programs of the ranks that are to have a built process. `built`: those that have one.

        `training`: the ranks that have a usual step. `now`: seconds, on the clock of their starts.
        """
        if self._is_short(now):
            return {}
        programs = {}
        for rank, each in training.items():
            known = self._known.get(rank)
            if known is None or known.pid != each.pid:
                known = self._known[rank] = _Known(each.pid, now)
                self._start_s[rank] = max(self._start_s.get(rank, 0.0), now - each.started_s)
            if rank not in built:
                known = self._known[rank] = self._look(rank, known, now)
                if known.looked_s is None or known.against:
                    continue
            programs[rank] = each.program
        return programs

    def _look(self, rank: int, known: _Known, now: float) -> _Known:
        if now - known.trains_s < TRAINED * self._start_s[rank]:
            return known
        if known.looked_s is not None and now - known.looked_s < (LOOK_AGAIN_S if known.against else MEMORY_S):
            return known
        against = self._holds(known.pid, self._ours)
        memory, own_bytes = self._memory(), self._own_bytes(known.pid)
        if not against and memory.free_bytes - own_bytes < LEFT_FREE * memory.total_bytes:
            against = (
                f"its {own_bytes / 1e6:.0f} MB would leave less than {LEFT_FREE:.0%} of the memory free "
                f"({memory.free_bytes / 1e6:.0f} MB of {memory.total_bytes / 1e6:.0f} are)"
            )
        if against:
            self.why = one_line(f"rank {rank}: {against}", LONGEST_WORDS)
        return known._replace(against=against, looked_s=now)

    def _is_short(self, now: float) -> bool:
        """Return whether memory is needed for something else, and was so within the last minute."""
        if now - self._memory_s >= MEMORY_S:
            self._memory_s = now
            memory = self._memory()
            if memory.left < SHORT:
                self.why = f"less than {SHORT:.0%} of the memory is free"
                self._short_until = now + LOOK_AGAIN_S
        return now < self._short_until


# --- readings ---------------------------------------------------------------------------------------------------------


def own_bytes_of(pid: int) -> int:
    """Return the memory that would be free without a process; 0 if it has ended."""
    try:
        return int(psutil.Process(pid).memory_full_info().uss)
    except psutil.Error:
        return 0


def node_memory(*, cgroups: Path = CGROUPS, proc: Path = PROC) -> Memory:
    """Return the memory of this machine, or of the closest cgroup (version 2 or 1) that leaves less."""
    host = psutil.virtual_memory()
    known = [Memory(host.total, host.available), *_groups(cgroups, proc)]
    return min(known, key=lambda each: each.free_bytes)


def _groups(cgroups: Path, proc: Path) -> Iterator[Memory]:
    """Yield what each group of this process allows, from its own one up. In a container the mount may be its own."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            place, most, used, idle = cgroups, "memory.max", "memory.current", "inactive_file "
        elif "memory" in controllers.split(","):
            place, most = cgroups / "memory", "memory.limit_in_bytes"
            used, idle = "memory.usage_in_bytes", "total_inactive_file "
        else:
            continue
        own = place / path.lstrip("/")
        for folder in (own, *own.parents):
            if folder.is_relative_to(place) and (memory := _group(folder, most, used, idle)) is not None:
                yield memory


def _group(folder: Path, most: str, used: str, idle: str) -> Memory | None:
    try:
        limit, taken = (folder / most).read_text().strip(), int((folder / used).read_text())
        lines = (folder / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):
        return None
    if not limit.isdecimal():  # "max"
        return None
    cached = sum(int(line.removeprefix(idle)) for line in lines if line.startswith(idle))
    return Memory(int(limit), max(0, int(limit) - taken + cached))


def what_it_holds(pid: int, ours: Collection[str] = (), *, proc: Path = PROC) -> str:
    """Return what a process holds that a second one of the same script could not have as well; empty: nothing is seen.

    That is a file that is open for writing, outside of the folders `ours`, a port that was not chosen by the system,
    and a program that it has started. Its output does not count, nor does what has no name on a disk.
    """
    here = proc / str(pid)
    try:
        sockets, output = set[str](), {os.readlink(here / "fd" / number) for number in ("1", "2")}
        for number in os.listdir(here / "fd"):
            target = os.readlink(here / "fd" / number)
            if target.startswith("socket:["):
                sockets.add(target[len("socket:[") : -1])
            elif target.startswith("/") and target not in output and _is_written(here, number, target, ours):
                return f"the script writes {target}, which two processes would do"
        for port in _own_ports(here, sockets, proc):
            return f"the script listens on port {port}, which two processes cannot"
        program = os.readlink(here / "exe")
        for child in psutil.Process(pid).children():
            other = os.readlink(proc / str(child.pid) / "exe")
            if other != program:
                return f"the script has started {other}, which would run twice"
    except (OSError, psutil.Error) as error:
        return f"it cannot be seen what its process holds: {error}"
    return ""


def _is_written(here: Path, number: str, target: str, ours: Collection[str]) -> bool:
    if target.endswith(" (deleted)") or target.startswith(_NOT_ON_DISK):
        return False
    if any(Path(target).is_relative_to(folder) for folder in ours):
        return False
    lines = (here / "fdinfo" / number).read_text().splitlines()
    flags = next((int(line.split()[1], 8) for line in lines if line.startswith("flags:")), 0)
    if flags & os.O_ACCMODE == os.O_RDONLY:
        return False
    return stat.S_ISREG((here / "fd" / number).stat().st_mode)


def _own_ports(here: Path, sockets: Collection[str], proc: Path) -> Iterator[int]:
    """Yield the TCP ports on which a process listens, but for those of the range from which the system chooses."""
    least, most = map(int, (proc / "sys/net/ipv4/ip_local_port_range").read_text().split())
    for name in ("tcp", "tcp6"):
        path = here / "net" / name
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            _, local, _, state, _, _, _, _, _, inode, *_ = line.split()
            port = int(local.rpartition(":")[2], 16)
            if state == _LISTENS and inode in sockets and not least <= port <= most:
                yield port
