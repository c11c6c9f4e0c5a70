"""Keeps the node's rendezvous store: a process of its own, so that no training process takes it along when it
dies.

The agent holds the listening socket. When the store's process dies, the next one serves the same port, and
who connects in between waits for it instead of being refused; what the store held is gone, which the
controller is told.
"""

import asyncio
import logging
import socket
import time
from collections.abc import Callable

from ..platforms.processes import WatchedProcess
from ..protocol.errors import AgentError
from ..protocol.types import StoreEndpoint
from . import orders
from .nursery import UP_S, Nursery
from .standbys import Standby, receive
from .watchdog import ANSWER_S, Watchdog

BACKLOG = 1024
YOUNG_S = 5.0
RETRY_S = 0.5  # times the losses in a row, less one
MAX_LOST_YOUNG = 5  # in a row; then something is wrong with the node

_log = logging.getLogger(__name__)


class StoreHost:
    """The store of one node. `on_moved` is called when a new process serves; `on_failed` when it is given up."""

    def __init__(
        self,
        host: str,
        nursery: Nursery,
        *,
        on_moved: Callable[[], None],
        on_failed: Callable[[str], None],
    ) -> None:
        self._nursery = nursery
        self._on_moved = on_moved
        self._on_failed = on_failed
        self._process: WatchedProcess | None = None
        self._starting: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._started_s = 0.0
        self._served_before = False
        self._lost_young = 0
        self._closed = False
        try:
            self._listener = socket.create_server((host, 0), backlog=BACKLOG)
        except OSError as error:
            raise AgentError(f"the rendezvous store cannot listen on {host}: {error}; see --host") from error
        self.endpoint = StoreEndpoint(host=host, port=self._listener.getsockname()[1])

    def start(self) -> None:
        """Start the store's process, soon."""
        self._starting = asyncio.get_running_loop().create_task(self._start())

    @property
    def pid(self) -> int | None:
        """The store's process; None while there is none."""
        return self._process.pid if self._process is not None and self._process.alive else None

    def close(self) -> None:
        """End the store. Idempotent."""
        self._closed = True
        if self._starting is not None:
            self._starting.cancel()
        if self._watching is not None:
            self._watching.cancel()
        if self._process is not None:
            self._process.kill()
        self._listener.close()

    async def _start(self) -> None:
        try:
            # One that ends at once must not take a core.
            await asyncio.sleep(RETRY_S * max(0, self._lost_young - 1))
            standby = await self._nursery.take(early=True)
            self._process = self._give(standby)
        except AgentError as error:
            self._lost(f"could not be started: {error}")
            return
        self._started_s = time.monotonic()
        if self._served_before:
            self._on_moved()
        self._served_before = True

    def _give(self, standby: Standby) -> WatchedProcess:
        """Have a standby serve the store, and watch it."""
        order = orders.StoreOrder(host=self.endpoint.host, port=self.endpoint.port)
        end, theirs = orders.channel()
        try:
            process = standby.order(order, (self._listener.fileno(), theirs.fileno()), self._ended)
        except AgentError:
            end.close()
            raise
        finally:
            theirs.close()
        if self._watching is not None:
            self._watching.cancel()
        self._watching = asyncio.get_running_loop().create_task(_watch(process, end))
        return process

    def _ended(self, status: int) -> None:
        if not self._closed:
            if time.monotonic() - self._started_s > YOUNG_S:
                self._lost_young = 0
            self._lost(f"ended with status {status}")

    def _lost(self, how: str) -> None:
        if self._closed:
            return
        self._lost_young += 1
        if self._lost_young >= MAX_LOST_YOUNG:
            self._on_failed(f"the rendezvous store {how}, {MAX_LOST_YOUNG} times in a row; is torch installed?")
            return
        _log.warning("the rendezvous store %s; starting it anew", how)
        self.start()


async def _watch(process: WatchedProcess, end: socket.socket) -> None:
    """Watch a store's process until it ends. It answers when the store has answered it."""
    end.setblocking(False)
    ping = orders.Ping()
    watchdog = Watchdog("the rendezvous store", process, lambda: orders.send(end, ping), answer_s=UP_S)
    try:
        while await receive(end) is not None:
            watchdog.answered()
            watchdog.answer_s = ANSWER_S  # torch is imported
    except (AgentError, OSError) as error:
        _log.warning("the rendezvous store cannot be heard: %s", error)
    finally:
        watchdog.close()
        end.close()
