"""A standby, and what it becomes: the training process of a rank, or the process that serves the rendezvous
store.

A standby is a process of the agent's that waits for an order. A warm one was forked by the zygote; a cold one
is a new interpreter (`python -m midstep.agent.child AGENT_PID`), for the time when there is no zygote. Both
end when the agent does, whatever ends it.
"""

import contextlib
import os
import runpy
import signal
import socket
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from ..protocol.environment import BLACK_BOX_FD, GENERATION, INCARNATION, JOB_DIRECTORY, STORE_SECRET
from ..protocol.private_files import make_private_directory, open_for_appending
from ..protocol.rank_logs import debug_log, show_once
from . import orders
from .kernel import await_adoption, die_with_parent, name_process
from .leaving import leave
from .output import reopen_output
from .rendezvous import separate_generations

STDERR = 2
ADOPTION_S = 10.0
STORE_S = 300.0  # the store's own client inside its process; nobody waits on it
_PINGED = "midstep/ping"
_OWN_FILES = frozenset({__file__, runpy.__file__, "<frozen runpy>"})


def main() -> None:
    """Be a cold standby."""
    agent = int(sys.argv[1])
    if not sys.flags.safe_path:
        sys.path.pop(0)
    end = socket.socket(fileno=orders.CHANNEL_FD)
    end.set_inheritable(False)
    stand_by(end, agent)


def stand_by(end: socket.socket, agent: int) -> NoReturn:
    """Wait for an order, and carry it out. Ends when the agent closes the channel instead."""
    if not await_adoption(agent, ADOPTION_S):
        os._exit(os.EX_UNAVAILABLE)
    die_with_parent(agent)
    name_process("midstep-standby")
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    orders.send(end, orders.StandbyUp(pid=os.getpid()))
    while (message := orders.receive(end)) is not None and isinstance(message[0], orders.Ping):
        orders.send(end, orders.Pong())
    end.close()
    if message is None:
        os._exit(os.EX_OK)
    order, fds = message
    match order:
        case orders.TrainingOrder() if len(fds) == 2:
            train(order, black_box=fds[0], log=fds[1])
        case orders.StoreOrder() if len(fds) == 2:
            serve_store(order, fds[0], socket.socket(fileno=fds[1]))
        case _:
            os._exit(os.EX_USAGE)


def serve_store(order: orders.StoreOrder, listener: int, end: socket.socket) -> NoReturn:
    """Serve a torch TCPStore on a socket that the agent has bound, until the agent ends this process.

    What is pinged is the store: it is asked, by its own client, before the answer is given.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from ..communicators.dns import disable_dns_in_this_process

    name_process("midstep-store")
    disable_dns_in_this_process()
    store = TCPStore(
        order.host,
        order.port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=STORE_S),
        master_listen_fd=listener,
    )
    end.setblocking(True)
    while orders.receive(end) is not None:
        store.check([_PINGED])
        orders.send(end, orders.Pong())
    os._exit(os.EX_OK)


def train(order: orders.TrainingOrder, *, black_box: int, log: int) -> NoReturn:
    """Become the user's program: its environment, its directory, its arguments, its output; then run it."""
    _reset_signals()
    name_process(f"midstep-r{order.environment['RANK']}")
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    reopen_output()
    os.environ.clear()
    os.environ.update(order.environment)
    os.environ[BLACK_BOX_FD] = str(black_box)
    time.tzset()
    try:
        os.chdir(order.working_directory)
        if order.no_python:
            os.set_inheritable(black_box, True)
            os.execvp(order.command[0], order.command)
    except OSError as error:
        print(f"midstep: {order.command[0]} cannot be started in {order.working_directory}: {error}")  # noqa: T201
        leave(1)
    _reseed()
    separate_generations(int(order.environment.get(GENERATION, 0)), order.environment.get(STORE_SECRET, ""))
    leave(_run(order))


def _run(order: orders.TrainingOrder) -> int:
    """Run the user's script or module as `__main__`, and return the exit status that a plain Python would end
    with.
    """
    import faulthandler

    faulthandler.enable(_crash_log(order.environment))
    name = order.command[0]
    sys.argv = list(order.command)
    sys.path.insert(0, os.getcwd() if order.is_module else str(Path(name).resolve().parent))
    try:
        if order.is_module:
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
    """Return the descriptor that the interpreter's dump goes to after a crash. It stays open until the process ends.

    That is not the rank's output, which operators read: what a crash is to them, the incident says in a line.
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
    """Give numpy's global generator a state of its own, as in a fresh process; Python's does so by itself."""
    numpy = sys.modules.get("numpy")
    with contextlib.suppress(AttributeError):
        if numpy is not None and "numpy.random" in sys.modules:
            numpy.random.seed(None)


if __name__ == "__main__":
    main()
