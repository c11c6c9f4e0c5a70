"""Kills what a node leaves on this machine: everything below its agent, or everything that carries its mark."""

import contextlib
from collections.abc import Iterable

import psutil


def kill_tree(pid: int) -> None:
    """Kill a process and everything below it, the root first, so that it starts nothing more."""
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        below = root.children(recursive=True)
        root.kill()
        _kill(below)


def kill_marked(name: str, value: str) -> None:
    """Kill every process of this user that was started with the environment variable `name` set to `value`."""
    marked = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(name) == value:
                marked.append(process)
    _kill(marked)


def _kill(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
