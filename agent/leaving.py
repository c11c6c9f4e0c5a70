"""How a training process ends: as a plain Python would, but never without end.

Communication libraries leave threads and C++ statics behind on which a normal interpreter exit can hang or
crash. So what the user can see of an exit is done, each part with a bound, and then the process is gone.
"""

import atexit
import contextlib
import os
import sys
import threading
import time
from typing import NoReturn

THREADS_S = 2.0
EXIT_HOOKS_S = 10.0


def leave(status: int) -> NoReturn:
    """Wait a little for the user's threads, run exit hooks, flush, and end with `status`."""
    _await_threads()
    bound = threading.Timer(EXIT_HOOKS_S, _give_up, (status,))
    bound.daemon = True
    bound.start()
    # Python's own exit does the same under this name; there is no public one for it.
    atexit._run_exitfuncs()
    _flush()
    os._exit(status)


def _await_threads() -> None:
    deadline = time.monotonic() + THREADS_S
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))
    left = [thread.name for thread in threading.enumerate() if _is_in_the_way(thread)]
    if left:
        print(f"midstep: not waiting for the threads {', '.join(left)}", file=sys.stderr)  # noqa: T201


def _is_in_the_way(thread: threading.Thread) -> bool:
    return not thread.daemon and thread is not threading.current_thread()


def _give_up(status: int) -> None:
    print(f"midstep: exit hooks took longer than {EXIT_HOOKS_S} s; leaving", file=sys.stderr)  # noqa: T201
    _flush()
    os._exit(status)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed by the user, or its file system is full
            stream.flush()
