"""A training process from its start to its exit: waits for its assignment, runs the user's program, ends with it.

Until it is assigned something it is an idle process, which can also become the process that serves the rendezvous
store. A warm one was forked by the fork server; a cold one is a new interpreter, started while there is no fork server
(`python -m midstep.agent.training_process AGENT_PID`). Both end when the agent ends.

The exit is that of a plain Python, with a bound. Communication libraries leave threads and C++ statics behind on which
an interpreter's exit can hang or crash, so what a user can see of an exit is done, each part with its limit, and then
the process ends.
"""

import atexit
import contextlib
import os
import runpy
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from ..adapters.mindio.package import path_with_package, put_on_path
from ..protocol.environment import BLACK_BOX_FD, GENERATION, INCARNATION, JOB, JOB_DIRECTORY, MINDIO, STORE_SECRET
from ..protocol.private_files import make_private_directory, open_for_appending
from ..protocol.rank_logs import debug_log, show_once
from . import channel
from .linux import await_adoption, die_with_parent, name_process
from .output import reopen_output
from .rendezvous import separate_generations, separate_worlds, serve_store

STDERR = 2
ADOPTION_S = 10.0
THREADS_S = 2.0
EXIT_HOOKS_S = 10.0
RESTARTS = "TORCHELASTIC_RESTART_COUNT"
_OWN_FILES = frozenset({__file__, runpy.__file__, "<frozen runpy>"})


def main() -> None:
    """Start as a cold idle process."""
    agent = int(sys.argv[1])
    if not getattr(sys.flags, "safe_path", False):  # Python 3.10 has no such mode
        sys.path.pop(0)
    end = socket.socket(fileno=channel.CHANNEL_FD)
    end.set_inheritable(False)
    wait_for_assignment(end, agent)


def wait_for_assignment(end: socket.socket, agent: int, prepare: Callable[[], None] = lambda: None) -> NoReturn:
    """Wait for an assignment, and carry it out. End when the agent closes the channel instead.

    `prepare` does what is worth doing ahead, before this process says that it is idle.
    """
    if not await_adoption(agent, ADOPTION_S):
        os._exit(os.EX_UNAVAILABLE)
    die_with_parent(agent)
    name_process("midstep-idle")
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    prepare()
    channel.send(end, channel.ProcessIdle(pid=os.getpid()))
    while (received := channel.receive(end)) is not None and isinstance(received[0], channel.Ping):
        channel.send(end, channel.Pong())
    end.close()
    if received is None:
        os._exit(os.EX_OK)
    assignment, fds = received
    match assignment:
        case channel.RunProgram() if len(fds) == 2:
            run_program(assignment, black_box=fds[0], log=fds[1])
        case channel.ServeStore() if len(fds) == 2:
            serve_store(assignment, fds[0], socket.socket(fileno=fds[1]))
        case _:
            os._exit(os.EX_USAGE)


def run_program(assignment: channel.RunProgram, *, black_box: int, log: int) -> NoReturn:
    """Take over the program's environment, directory, arguments and output, run it, and exit."""
    _reset_signals()
    name_process(f"midstep-r{assignment.environment['RANK']}")
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    reopen_output()
    os.environ.clear()
    os.environ.update(assignment.environment)
    os.environ[BLACK_BOX_FD] = str(black_box)
    time.tzset()
    program, directory = assignment.command[0], assignment.working_directory
    try:
        os.chdir(directory)
        if assignment.no_python:
            if assignment.environment.get(MINDIO) == "1":
                os.environ["PYTHONPATH"] = path_with_package(os.environ.get("PYTHONPATH", ""))
            os.set_inheritable(black_box, True)
            os.execvp(program, assignment.command)
    except OSError as error:
        print(f"midstep: {program} cannot be started in {directory}: {error}")  # noqa: T201
        end_process(1)
    _reseed()
    environment = assignment.environment
    if environment.get(MINDIO) == "1":
        put_on_path()
        separate_worlds(environment[JOB], int(environment[RESTARTS]))
    else:
        separate_generations(int(environment.get(GENERATION, 0)), environment.get(STORE_SECRET, ""))
    end_process(_run_python(assignment))


def _run_python(assignment: channel.RunProgram) -> int:
    """Run the script or module as `__main__`, and return the exit status of a plain Python."""
    import faulthandler

    faulthandler.enable(_crash_log(assignment.environment))
    name = assignment.command[0]
    sys.argv = list(assignment.command)
    sys.path.insert(0, os.getcwd() if assignment.is_module else str(Path(name).resolve().parent))
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
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD):
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


if __name__ == "__main__":
    main()
