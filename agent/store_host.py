"""The agent's side of the rendezvous store, which runs in a process of its own: no training process takes it along.

The agent holds the listening socket. When the store's process ends, the next one serves the same port, and a connection
made in between waits instead of being refused. What the store held is lost, which is reported to the controller.
"""

import asyncio
import logging
import socket
from collections.abc import Callable

from ..platforms.processes import WatchedProcess
from ..protocol.errors import AgentError
from ..protocol.types import StoreEndpoint
from . import channel
from .fork_server_host import ANSWER_S, Watchdog, receive
from .kept_process import KeptProcess
from .warm_pool import UP_S, IdleProcess, WarmPool

BACKLOG = 1024

_log = logging.getLogger(__name__)


class StoreHost:
    """The store of one node. `on_moved` is called when a new process serves; `on_failed` when it is given up."""

    def __init__(
        self,
        host: str,
        pool: WarmPool,
        *,
        on_moved: Callable[[], None],
        on_failed: Callable[[str], None],
    ) -> None:
        self._pool = pool
        self._on_moved = on_moved
        self._watching: asyncio.Task[None] | None = None
        self._served_before = False
        self._kept = KeptProcess(
            "the rendezvous store",
            self._begin,
            on_failed=on_failed,
            check="Check that torch can be imported on this node",
        )
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host, 0), family=family, backlog=BACKLOG)
        except OSError as error:
            raise AgentError(f"the rendezvous store cannot listen on {host}: {error}; see --host") from error
        self.endpoint = StoreEndpoint(host=host, port=self._listener.getsockname()[1])

    def start(self) -> None:
        """Begin to start the store's process."""
        self._kept.start()

    @property
    def pid(self) -> int | None:
        """The pid of the store's process; None while there is none."""
        return self._kept.pid

    def close(self) -> None:
        """End the store. Idempotent."""
        if self._watching is not None:
            self._watching.cancel()
        self._kept.close()
        self._listener.close()

    async def _begin(self) -> WatchedProcess:
        process = self._assign(await self._pool.take(early=True))
        if self._served_before:
            self._on_moved()
        self._served_before = True
        return process

    def _assign(self, idle: IdleProcess) -> WatchedProcess:
        """Have an idle process serve the store, and watch it. Raises AgentError when it has exited."""
        assignment = channel.ServeStore(host=self.endpoint.host, port=self.endpoint.port)
        end, theirs = channel.pair()
        try:
            process = idle.assign(assignment, (self._listener.fileno(), theirs.fileno()), self._kept.exited)
        except AgentError:
            end.close()
            raise
        finally:
            theirs.close()
        if self._watching is not None:
            self._watching.cancel()
        self._watching = asyncio.get_running_loop().create_task(_watch(process, end))
        return process


async def _watch(process: WatchedProcess, end: socket.socket) -> None:
    """Ping a store's process until it exits, and kill it when it does not answer."""
    end.setblocking(False)
    ping = channel.Ping()
    watchdog = Watchdog("the rendezvous store", process, lambda: channel.send(end, ping), answer_s=UP_S)
    try:
        while await receive(end) is not None:
            watchdog.answered()
            watchdog.answer_s = ANSWER_S  # torch is imported
    except (AgentError, OSError) as error:
        _log.warning("the channel of the rendezvous store's process cannot be read: %s", error)
    finally:
        watchdog.close()
        end.close()
