"""The agents of a launcher on this machine: processes of their own, or forks, which show the command of another one."""

import contextlib
from pathlib import Path

import psutil

AGENT_LOG = "agent-"


def agents_of(launcher: int) -> dict[str, psutil.Process]:
    """Return the agents below a launcher, by node; those that have just ended are left out."""
    found = {}
    for process in psutil.Process(launcher).children(recursive=True):
        with contextlib.suppress(psutil.Error, OSError):
            log = Path(f"/proc/{process.pid}/fd/1").readlink()
            if log.name.startswith(AGENT_LOG) and is_agent(process):
                found[log.stem.removeprefix(AGENT_LOG)] = process
    return found


def is_agent(process: psutil.Process) -> bool:
    """Tell an agent from what it has started, which writes to its log, too."""
    return process.name() == "midstep-agent" or "midstep.cli.agent" in process.cmdline()
