"""A process beside a controller that may stand by: it serves while that one leads, and is started again afterwards."""

import asyncio
import contextlib
import logging
from collections.abc import Sequence

from ..protocol.controller_addresses import split
from ..protocol.time_limit import within

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


__all__ = ["LEAVE_S", "LEFT", "until_one_listens"]
