"""A process beside a controller that may stand by: it serves while that one leads, and is started again afterwards."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Coroutine, Sequence
from typing import Any

from ..controller.endpoints.control_requests import StatusRequest
from ..controller.endpoints.local_sockets import NoController
from ..controller.endpoints.operator_client import ask_from_elsewhere
from ..protocol.errors import NotAdmitted
from ..protocol.token import RoleToken

LEFT = 75  # the job has not ended: start it again
LEAVE_S = 10.0  # how long the controller may be away before another one is taken to lead
_LOOK_S = 0.25
ASK_S = 2.0

_log = logging.getLogger(__name__)


async def until_one_leads(controllers: Sequence[str], token: RoleToken) -> None:
    """Wait until the controller at one of these endpoints leads, whichever others there are.

    A token that is not taken is no reason to wait: what is asked next says why, or has keys of its own.
    """
    _log.info("waits until a controller leads at %s", ", ".join(controllers))
    while True:
        with contextlib.suppress(NoController):
            try:
                await asyncio.to_thread(ask_from_elsewhere, controllers, token, StatusRequest(), ASK_S, follows=False)
            except NotAdmitted as error:
                _log.warning("%s", error)
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


__all__ = ["LEAVE_S", "LEFT", "unless_told_to_leave", "until_one_leads"]
