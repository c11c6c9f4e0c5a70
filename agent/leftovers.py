"""What an agent clears away when it ends: processes of its ranks, and a run directory."""

import asyncio
import contextlib
import logging
import time
from pathlib import Path

import psutil

from ..protocol.run_directories import Fate, remove_abandoned

LEFTOVERS_S = 5.0

_log = logging.getLogger(__name__)


def remove_run_directory(run_directory: Path) -> None:
    """Remove keys and sockets, if this is the last agent to exit after the launcher and the controller were killed."""
    if not any(run_directory.glob("*/agent.sock")):
        fate = remove_abandoned(run_directory)
        if fate is not Fate.REMOVED:
            _log.info("%s is not removed: %s", run_directory, fate)


async def kill_leftovers() -> None:
    """Kill what is still below this process: what the ranks have started and not ended."""
    deadline = time.monotonic() + LEFTOVERS_S
    while children := psutil.Process().children(recursive=True):
        if time.monotonic() > deadline:
            _log.error("processes that do not exit after SIGKILL: %s", [child.pid for child in children])
            return
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        await asyncio.sleep(0.01)  # orphans of those that were killed become children of this process a little later
