"""The user's program in a training process: its environment and output, its run, and its exit.

The exit is that of a plain Python, with a bound. Communication libraries leave threads and C++ statics behind on which
an interpreter's exit can hang or crash, so what a user can see of an exit is done, each part with its limit, and then
the process ends.
"""

import atexit
import contextlib
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from ..adapters.mindio.package import mindspore_numbers, path_with_package, put_on_path
from ..processor import built_ahead
from ..protocol.environment import BLACK_BOX_FD, GENERATION, INCARNATION, JOB, JOB_DIRECTORY, MINDIO, STORE_SECRET
from ..protocol.private_files import make_private_directory, open_for_appending
from ..protocol.rank_logs import debug_log, show_once
from ..protocol.shared_signals import heard
from . import channel
from .linux import name_process
from .output import reopen_output
from .rendezvous import separate_generations, separate_worlds

STDERR = 2
THREADS_S = 2.0
EXIT_HOOKS_S = 10.0
RESTARTS = "TORCHELASTIC_RESTART_COUNT"
_OWN_FILES = frozenset({__file__, runpy.__file__, "<frozen runpy>"})


def run_program(assignment: channel.RunProgram, *, black_box: int, log: int) -> NoReturn:
    """Take over the program's environment, directory, arguments and output, run it, and exit."""
    _reset_signals()
    _take_over(assignment.environment, black_box=black_box, log=log)
    reopen_output()
    time.tzset()
    mindio = assignment.environment.get(MINDIO) == "1"
    if mindio:
        os.environ.update(mindspore_numbers(assignment.environment))
    program, directory = assignment.command[0], assignment.working_directory
    try:
        os.chdir(directory)
        if assignment.no_python:
            if mindio:
                os.environ["PYTHONPATH"] = path_with_package(os.environ.get("PYTHONPATH", ""))
            os.set_inheritable(black_box, True)
            os.execvp(program, assignment.command)
    except OSError as error:
        print(f"midstep: {program} cannot be started in {directory}: {error}")  # noqa: T201
        end_process(1)
    _reseed()
    environment = assignment.environment
    if mindio:
        put_on_path(_folder_of(assignment))
        separate_worlds(environment[JOB], int(environment[RESTARTS]))
    else:
        separate_generations(int(environment.get(GENERATION, 0)), environment.get(STORE_SECRET, ""))
    end_process(_run_python(assignment))


def hold_rank(environment: Mapping[str, str], *, black_box: int, log: int) -> None:
    """Become the process of a rank. In one that was built ahead, at its train function."""
    _take_over(environment, black_box=black_box, log=log)
    separate_generations(int(environment.get(GENERATION, 0)), environment.get(STORE_SECRET, ""))
    _dump_crashes(environment)


def _take_over(environment: Mapping[str, str], *, black_box: int, log: int) -> None:
    """Take an environment, an output and a black box in place of those before."""
    name_process(f"midstep-{'b' if built_ahead.is_waiting() else 'r'}{environment['RANK']}")
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.environ.clear()
    os.environ.update(environment)
    os.environ[BLACK_BOX_FD] = str(black_box)


def _run_python(assignment: channel.RunProgram) -> int:
    """Run the script or module as `__main__`, and return the exit status of a plain Python."""
    _dump_crashes(assignment.environment)
    name = assignment.command[0]
    sys.argv = list(assignment.command)
    sys.path.insert(0, str(_folder_of(assignment)))
    try:
        if assignment.is_module:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(name, run_name="__main__")
    except SystemExit as request:
        return _exit_status(request)
    except BaseException as error:
        error.__traceback__ = _users_part(error.__traceback__)
        show_once(error)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _folder_of(assignment: channel.RunProgram) -> Path:
    """Return the folder from which the program imports first, as with a plain Python."""
    return Path.cwd() if assignment.is_module else Path(assignment.command[0]).resolve().parent


def _dump_crashes(environment: Mapping[str, str]) -> None:
    import faulthandler

    faulthandler.enable(_crash_log(environment))


def _crash_log(environment: Mapping[str, str]) -> int:
    """Return the descriptor for the interpreter's dump after a crash. It stays open until the process exits.

    It is not the rank's output, which operators read: the incident describes a crash to them in one line.
    """
    try:
        path = debug_log(environment[JOB_DIRECTORY], int(environment["RANK"]), int(environment[INCARNATION]))
        make_private_directory(path.parent)
        return open_for_appending(path)
    except OSError:
        return STDERR


def _exit_status(request: SystemExit) -> int:
    if request.code is None:
        return 0
    if isinstance(request.code, int):
        return request.code & 0xFF
    print(request.code, file=sys.stderr)  # noqa: T201 - what Python does with `sys.exit("text")`
    return 1


def _users_part(trace: TracebackType | None) -> TracebackType | None:
    """Leave out the frames through which the script was started."""
    first = trace
    while trace is not None and trace.tb_frame.f_code.co_filename in _OWN_FILES:
        trace = trace.tb_next
    return trace or first


def _reset_signals() -> None:
    for number in heard(signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _reseed() -> None:
    """Seed numpy's global generator, as a fresh process does. Python's `random` does so by itself after a fork."""
    numpy = sys.modules.get("numpy")
    with contextlib.suppress(AttributeError):
        if numpy is not None and "numpy.random" in sys.modules:
            numpy.random.seed(None)


# --- the exit -----------------------------------------------------------------------------------------------------


def end_process(status: int) -> NoReturn:
    """Wait up to THREADS_S for the user's threads, run exit hooks, flush output, and exit with `status`."""
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
