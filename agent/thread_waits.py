"""The waits of a process's threads, by the system calls that they are in: for nothing at all, or for an answer.

A train thread that sleeps or waits for a lock may do so with good reason: another thread computes for it, or waits for
a service; a process that it has started works. Then it is not at rest. Threads of libraries wait all their lives for
whatever comes, in epoll or for several descriptors at once, or for their next job, by a lock; they are no reason.

A process may read this of itself, and a parent of its children, unless the system forbids it. Where it is not known
the process is not at rest.
"""

import os
import platform
import time
from collections.abc import Iterator
from enum import Enum, auto

_PROC = "/proc"
_MOST_BYTES = 4096  # of a file here
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_RUNNING = "running"
_INT_BITS = 0xFFFF_FFFF  # of a register that carries an int
_AFTER_NAME = 3  # the first field behind the name in /proc/PID/stat, as its manual counts
_PARENT, _BEGAN = 4 - _AFTER_NAME, 22 - _AFTER_NAME


class Wait(Enum):
    """The kinds of things that a thread waits for."""

    CORE = auto()  # it runs, or would if it had one
    LOCK = auto()
    CLOCK = auto()
    ANY = auto()  # whatever comes, over several descriptors
    ONE = auto()  # an answer: a file or a socket, a process, the disk, or what is not known here


_IDLE = frozenset({Wait.LOCK, Wait.CLOCK})
_PLAIN: dict[str, dict[int, Wait]] = {
    # futex, futex_waitv, futex_wait; nanosleep, clock_nanosleep; epoll_wait, epoll_pwait, epoll_pwait2, accept,
    # accept4, rt_sigtimedwait
    "x86_64": {
        **dict.fromkeys((202, 449, 455), Wait.LOCK),
        **dict.fromkeys((35, 230), Wait.CLOCK),
        **dict.fromkeys((232, 281, 441, 43, 288, 128), Wait.ANY),
    },
    "aarch64": {
        **dict.fromkeys((98, 449, 455), Wait.LOCK),
        **dict.fromkeys((101, 115), Wait.CLOCK),
        **dict.fromkeys((22, 441, 202, 242, 137), Wait.ANY),
    },
}
_SELECT = {"x86_64": (23, 270), "aarch64": (72,)}  # select, pselect6
_POLL = {"x86_64": (7,), "aarch64": ()}
_PPOLL = {"x86_64": (271,), "aarch64": (73,)}


def wait_of(text: str, machine: str = platform.machine()) -> Wait:
    """Return what a thread waits for, by its /proc/PID/task/TID/syscall."""
    words = text.split()
    if words[:1] == [_RUNNING]:
        return Wait.CORE
    if len(words) < 7 or machine not in _PLAIN:
        return Wait.ONE
    number, (first, second, third) = int(words[0]), (int(word, 16) for word in words[1:4])
    if number in _SELECT[machine]:
        return Wait.ANY if first & _INT_BITS else Wait.CLOCK
    if number in _POLL[machine] or number in _PPOLL[machine]:
        endless = third & _INT_BITS == _INT_BITS if number in _POLL[machine] else third == 0
        return Wait.ANY if second != 1 or endless else Wait.ONE
    return _PLAIN[machine].get(number, Wait.ONE)


def waits_for_nothing(pid: int, step_age_s: float) -> bool:
    """Say whether the main thread of a process waits for a lock or the clock, and nothing works or waits for it.

    `step_age_s`: a child that is younger does something for the step. One that is older may do so for a lock, as the
    workers of a pool do; for the clock only if it runs.
    """
    try:
        main = _wait_of_thread(pid, pid)
        if main not in _IDLE:
            return False
        for thread in map(int, os.listdir(f"{_PROC}/{pid}/task")):
            if thread != pid and _wait_of_thread(pid, thread) not in _IDLE | {Wait.ANY}:
                return False
    except (OSError, ValueError):
        return False
    now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    idle = (main is Wait.CLOCK and state == "S" and age_s > step_age_s for state, age_s in _children(pid, now_s))
    return all(idle)


def _wait_of_thread(pid: int, thread: int) -> Wait:
    return wait_of(_read(f"{pid}/task/{thread}/syscall"))


def _children(pid: int, now_s: float) -> Iterator[tuple[str, float]]:
    """Yield state and age of each child. Not every kernel lists them, so all processes are asked."""
    for name in os.listdir(_PROC):
        if name.isdecimal():
            try:
                fields = _read(f"{name}/stat").rpartition(")")[2].split()
            except OSError:  # it has ended
                continue
            if len(fields) > _BEGAN and int(fields[_PARENT]) == pid and fields[0] != "Z":
                yield fields[0], now_s - int(fields[_BEGAN]) / _TICKS_PER_S


def _read(path: str) -> str:
    """Read a file of /proc, without all that a Path does: there may be hundreds of them."""
    descriptor = os.open(f"{_PROC}/{path}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, _MOST_BYTES).decode(errors="replace")
    finally:
        os.close(descriptor)
