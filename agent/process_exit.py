"""The exit of a process that has run a user's program: as in a plain Python, with a limit for each part of it.

Communication libraries leave threads and C++ statics behind on which an interpreter's exit can hang or crash. So what a
user can see of an exit is done, each part with its limit, and then the process ends with the status of the program.

The last limit needs no interpreter. An exit hook that waits in C without giving the GIL away, as MindSpore's does for a
scheduler that is gone, lets no thread of Python run that could end the process: a timer of the C library does.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import os
import sys
import threading
import time
from typing import NoReturn

THREADS_S = 2.0
EXIT_HOOKS_S = 10.0
HELD_S = 3.0  # beyond the two: what holds the GIL by then keeps it
SHOWN_S = 1.0  # before the end, the log gets the line of Python at which each thread is
_STDERR = 2
_SIGEV_THREAD = 2
_TIMERS = "librt.so.1"  # from glibc 2.34 on the functions are in the C library, which it leads to


class _Event(ctypes.Structure):
    """C's `struct sigevent`, for a function that a thread of the C library calls."""

    _fields_ = (
        ("value", ctypes.c_int),  # a union, in the place of a pointer
        ("rest_of_value", ctypes.c_int),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("reserved", ctypes.c_byte * 32),
    )


class _Times(ctypes.Structure):
    """C's `struct itimerspec`."""

    _fields_ = tuple((name, ctypes.c_long) for name in ("every_s", "every_ns", "in_s", "in_ns"))


def end_process(status: int) -> NoReturn:
    """Wait up to THREADS_S for the user's threads, run exit hooks, flush output, and exit with `status`."""
    _end_without_python(THREADS_S + EXIT_HOOKS_S + HELD_S, status)
    _await_threads()
    bound = threading.Timer(EXIT_HOOKS_S, _give_up, (status,))
    bound.daemon = True
    bound.start()
    # Python's own exit does the same under this name; there is no public one for it.
    atexit._run_exitfuncs()
    _flush()
    os._exit(status)


def _end_without_python(after_s: float, status: int) -> None:
    """Have the C library end this process after some time. Where it cannot, the limits of Python hold alone."""
    try:
        library = ctypes.CDLL(_TIMERS)
        function = ctypes.cast(library._exit, ctypes.c_void_p)
        event, timer = _Event(value=status, notify=_SIGEV_THREAD, function=function), ctypes.c_void_p()
        times = _Times(in_s=int(after_s), in_ns=int(after_s % 1 * 1_000_000_000))
        if library.timer_create(time.CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)) == 0:
            library.timer_settime(timer, 0, ctypes.byref(times), None)
    except (OSError, AttributeError):  # another C library
        return
    faulthandler.dump_traceback_later(max(0.1, after_s - SHOWN_S), file=_STDERR)


def _await_threads() -> None:
    deadline = time.monotonic() + THREADS_S
    for thread in filter(_delays_exit, threading.enumerate()):
        thread.join(max(0.0, deadline - time.monotonic()))
    running = [thread.name for thread in filter(_delays_exit, threading.enumerate())]
    if running:
        print(f"midstep: exit does not wait for the threads {', '.join(running)}", file=sys.stderr)  # noqa: T201


def _delays_exit(thread: threading.Thread) -> bool:
    return not thread.daemon and thread is not threading.current_thread()


def _give_up(status: int) -> None:
    print(f"midstep: exit hooks took longer than {EXIT_HOOKS_S} s; exiting without them", file=sys.stderr)  # noqa: T201
    _flush()
    os._exit(status)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed by the user, or its file system is full
            stream.flush()
