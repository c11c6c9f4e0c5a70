"""The variables by which the processes of a trial, and those of a node in it, are found whatever started them."""

import os
import signal
from collections.abc import Iterable

import psutil

TRIAL = "MIDSTEP_PEERS_TRIAL"  # in the environment of every process of a trial
NODE = "MIDSTEP_PEERS_NODE"  # in that of every process on a node, where a launcher on each node is what a peer has


def marked(name: str, value: str) -> list[psutil.Process]:
    """Return all processes that have this in their environment."""
    return [process for process in psutil.process_iter() if _has(process, name, value)]


def lose_own_node() -> None:
    """Kill all on the node of this process, itself last: what carries its mark, or else its agent."""
    own = os.environ.get(NODE)
    others: Iterable[int] = [os.getppid()] if own is None else [each.pid for each in marked(NODE, own)]
    for pid in (*(each for each in others if each != os.getpid()), os.getpid()):
        os.kill(pid, signal.SIGKILL)


def _has(process: psutil.Process, name: str, value: str) -> bool:
    try:
        return bool(process.environ().get(name) == value)
    except (psutil.Error, OSError):
        return False
