"""A training process from its start to its assignment: until it has one it is an idle process.

It can become the process of a rank, one that is built ahead of a fault, or the one that serves the rendezvous store. A
warm one was forked by the fork server; a cold one is a new interpreter, started while there is no fork server
(`python -m midstep.agent.training_process AGENT_PID`). Both end when the agent ends.
"""

import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import NoReturn

from . import channel
from .built_program import build_program
from .linux import await_adoption, die_with_parent, name_process
from .program import run_program
from .rendezvous import serve_store

ADOPTION_S = 10.0


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
    if received is None:
        os._exit(os.EX_OK)
    assignment, fds = received
    if isinstance(assignment, channel.BuildProgram) and len(fds) == 1:
        build_program(assignment.program, end, log=fds[0])
    end.close()
    match assignment:
        case channel.RunProgram() if len(fds) == 2:
            run_program(assignment, black_box=fds[0], log=fds[1])
        case channel.ServeStore() if len(fds) == 2:
            serve_store(assignment, fds[0], socket.socket(fileno=fds[1]))
        case _:
            os._exit(os.EX_USAGE)


if __name__ == "__main__":
    main()
