"""The process of which the agents of a machine with several nodes are forked (`platforms/forked_agents.py`).

It imports what every agent and every fork server needs, and stays single-threaded, so that a fork of it is as good as a
fresh interpreter. It is the parent of the agents, and tells the launcher how they have ended.

Runs as `python -m midstep.agent.agent_forker LAUNCHER_PID DESCRIPTOR`, the descriptor being its end of the channel.
"""

import contextlib
import gc
import importlib
import os
import resource
import select
import signal
import socket
import sys
from typing import NamedTuple, NoReturn

from ..platforms.forked_agents import AgentEnded, AgentForked, ForkAgent, Imported, receive_order, send
from ..platforms.processes import RLIMIT_LOCKS
from . import channel, fork_server, fork_server_host
from .linux import die_with_parent, name_process, other_threads

AGENT = "midstep.cli.agent"


class _Fork(NamedTuple):
    """The task of a fork: to become the agent of a node."""

    order: ForkAgent
    log: int
    life: int


def main() -> None:
    """Import, then fork on demand, until the launcher has ended."""
    launcher, end = int(sys.argv[1]), socket.socket(fileno=int(sys.argv[2]))
    die_with_parent(launcher)
    name_process("midstep-nodes")
    os.setpgid(0, 0)  # a Ctrl-C at the terminal is for the launcher to handle
    end.set_inheritable(False)
    given, interrupt = dict(os.environ), signal.signal(signal.SIGINT, signal.SIG_IGN)
    held_back = fork_server.HeldBackBackends()
    failed = fork_server.import_modules()
    importlib.import_module(AGENT)
    threads = other_threads()
    if threads:
        sys.exit(f"midstep: an import has started a thread ({', '.join(threads)}), so no agent is forked")
    gc.freeze()  # shared with all forks for good
    send(end, Imported())
    fork = _serve(end)
    if fork is None:
        return
    # In a fork, the frames of this process are left behind: from here on it is an agent.
    signal.signal(signal.SIGINT, interrupt)
    os.environ.clear()
    os.environ.update({**given, **fork.order.variables})
    _become_agent(fork, held_back, failed)


def _serve(end: socket.socket) -> _Fork | None:
    """Fork, and tell how forks end. Returns, in a fork, its task; None when the launcher has ended."""
    children: dict[int, int] = {}  # pid by pidfd
    poll = select.poll()
    poll.register(end, select.POLLIN)
    while True:
        for ready, _ in poll.poll():
            if ready in children:
                poll.unregister(ready)
                os.close(ready)
                _tell_end(end, children.pop(ready))
                continue
            received = receive_order(end)
            if received is None:
                return None
            order, (log, life) = received
            pid = os.fork()
            if not pid:
                end.close()
                for each in children:
                    os.close(each)
                return _Fork(order, log, life)
            os.close(log)
            os.close(life)
            pidfd = os.pidfd_open(pid)
            children[pidfd] = pid
            poll.register(pidfd, select.POLLIN)
            send(end, AgentForked(order.node, pid), (pidfd,))


def _tell_end(end: socket.socket, pid: int) -> None:
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(OSError):  # the launcher has ended, and this process is about to
        send(end, AgentEnded(pid, os.waitstatus_to_exitcode(status)))


def _become_agent(fork: _Fork, held_back: fork_server.HeldBackBackends, failed: tuple[str, ...]) -> NoReturn:
    """Become the agent of a node, with a fork server that has its imports done."""
    os.setsid()
    resource.setrlimit(RLIMIT_LOCKS, (fork.order.lock_limit, resource.getrlimit(RLIMIT_LOCKS)[1]))
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, place in ((nothing, 0), (fork.log, 1), (fork.log, 2)):
        os.dup2(source, place)
    os.close(nothing)
    os.close(fork.log)
    agent, (ours, theirs) = os.getpid(), channel.pair()
    server = os.fork()
    if not server:
        ours.close()
        os.close(fork.life)
        fork_server.serve(theirs, agent, held_back, failed)
    theirs.close()
    fork_server_host.start_with(server, ours)
    name_process("midstep-agent")
    importlib.import_module(AGENT).command.main([*fork.order.arguments, "--life-fd", str(fork.life)], "midstep agent")
    sys.exit()


if __name__ == "__main__":
    main()
