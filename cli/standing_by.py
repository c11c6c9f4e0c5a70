"""A process beside a controller that may stand by: it serves while that one leads, and is started again afterwards."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Coroutine, Sequence
from typing import Any

from ..protocol.compat import within
from ..protocol.discovery import split

LEFT = 75  # the job has not ended: start it again
LEAVE_S = 10.0  # how long the controller may be away before another one is taken to lead
_LOOK_S = 0.25
_CONNECT_S = 5.0

_log = logging.getLogger(__name__)


async def until_one_listens(controllers: Sequence[str]) -> None:
    """Wait until a controller listens at one of these endpoints, so that it leads."""
    _log.info("waits until a controller listens at %s", ", ".join(controllers))
    while True:
        for host, port in map(split, controllers):
            with contextlib.suppress(OSError):
                _, writer = await within(_CONNECT_S, asyncio.open_connection(host, port))
                writer.close()
                return
        await asyncio.sleep(_LOOK_S)


async def unless_told_to_leave(work: Coroutine[Any, Any, int]) -> int:
    """Return the exit code of the work, or LEFT if SIGTERM comes before its end: a container's first process hears none
    that it has not asked for, and an exception raised by a handler may end in code that swallows it.
    """
    leaving = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, leaving.set)
    working, told = asyncio.ensure_future(work), asyncio.ensure_future(leaving.wait())
    try:
        await asyncio.wait({working, told}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else LEFT
    finally:
        working.cancel()
        told.cancel()
        await asyncio.gather(working, told, return_exceptions=True)


__all__ = ["LEAVE_S", "LEFT", "unless_told_to_leave", "until_one_listens"]
