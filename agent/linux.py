"""Linux calls that Python does not have: parent death signal, subreaper, process names, stopped and deaf processes."""

import contextlib
import ctypes
import os
import select
import signal
import threading
import time
from pathlib import Path

from ..protocol.errors import AgentError

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_NAME_BYTES = 15
_PR_SET_CHILD_SUBREAPER = 36
STOPPED_STATES = frozenset({"T", "t"})
_STAT_BYTES = 4096  # of /proc/PID/stat: a line of some fifty numbers
_OF_PROCESS = 2  # kind of a processor clock: what the scheduler has counted for a whole process

_libc = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent exits. Raises AgentError."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def name_process(name: str) -> None:
    """Set the short name that `ps -o comm` and `top` show; a fork has that of its fork server otherwise."""
    _prctl(_PR_SET_NAME, ctypes.create_string_buffer(name.encode()[:_NAME_BYTES]))


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent` exits. Exits at once if it has exited already."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(os.EX_UNAVAILABLE)


def hear_and_die_with(parent: int) -> None:
    """As `die_with_parent`, and hear SIGINT: below a raylet it is blocked, in what a shell runs with & ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    die_with_parent(parent)


def await_adoption(adopter: int, timeout_s: float) -> bool:
    """Wait until `adopter` is this process's parent, because the process that forked it has exited.

    Returns False after `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while (parent := os.getppid()) != adopter:
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            return False
        with contextlib.suppress(ProcessLookupError):  # it has exited meanwhile: look again
            pidfd = os.pidfd_open(parent)
            try:
                poll = select.poll()
                poll.register(pidfd, select.POLLIN)
                poll.poll(remaining_s * 1000)
            finally:
                os.close(pidfd)
    return True


def is_stopped(pid: int) -> bool:
    """Say whether the process is stopped by a signal or a tracer. False when it has exited."""
    return state_of(pid) in STOPPED_STATES


def state_of(pid: int) -> str:
    """Return the letter for what the main thread of a process does; "" when it has exited."""
    try:
        file = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)  # a third of what a Path takes
    except OSError:
        return ""
    try:
        stat = os.read(file, _STAT_BYTES)
    except OSError:
        return ""
    finally:
        os.close(file)
    return stat.rpartition(b")")[2].strip()[:1].decode("ascii", "replace")


def cpu_s(pid: int) -> float | None:
    """Return how long a process has used processors, to the nanosecond. None when it has exited."""
    try:
        return time.clock_gettime(~pid << 3 | _OF_PROCESS)  # as clock_getcpuclockid(3) makes it
    except OSError:
        return None


def ignores(pid: int, number: signal.Signals) -> bool:
    """Say whether the process ignores a signal. False when it has exited."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return False
    ignored = next((line.split()[1] for line in status.splitlines() if line.startswith("SigIgn:")), "0")
    return bool(int(ignored, 16) >> (number - 1) & 1)


def thread_count() -> int:
    """Count the threads of this process, including those that Python did not start."""
    return len(os.listdir("/proc/self/task"))


def other_threads() -> tuple[str, ...]:
    """Return the names of all threads of this process but the calling one: Python's names, else the system's."""
    found, names = [], {thread.native_id: thread.name for thread in threading.enumerate()}
    for task in sorted(map(int, os.listdir("/proc/self/task"))):
        if task != threading.get_native_id():
            with contextlib.suppress(FileNotFoundError):  # it has ended
                found.append(names.get(task) or Path(f"/proc/self/task/{task}/comm").read_text().strip())
    return tuple(found)


def _prctl(option: int, value: "int | ctypes.Array[ctypes.c_char]") -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise AgentError(f"prctl({option}) failed: {os.strerror(code)}; midstep needs Linux 3.4 or newer")
