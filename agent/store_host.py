"""The agent's side of the rendezvous store, which runs in a process of its own: no training process takes it along.

The agent holds the listening socket. When the store's process ends, the next one serves the same port, and a connection
made in between waits instead of being refused. What the store held is lost, which is reported to the controller.
"""

import asyncio
import logging
import socket
import time
from collections.abc import Callable

from ..platforms.processes import WatchedProcess
from ..protocol.errors import AgentError
from ..protocol.types import StoreEndpoint
from . import channel
from .fork_server_host import ANSWER_S, Watchdog, receive
from .warm_pool import UP_S, IdleProcess, WarmPool

BACKLOG = 1024
EARLY_EXIT_S = 5.0  # a process that has served for longer did not fail at its start
RETRY_S = 0.5  # times the early exits in a row, less one
MAX_EARLY_EXITS = 5  # in a row; then something is wrong with the node

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
        self._on_failed = on_failed
        self._process: WatchedProcess | None = None
        self._starting: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._started_s = 0.0
        self._served_before = False
        self._early_exits = 0
        self._closed = False
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host, 0), family=family, backlog=BACKLOG)
        except OSError as error:
            raise AgentError(f"the rendezvous store cannot listen on {host}: {error}; see --host") from error
        self.endpoint = StoreEndpoint(host=host, port=self._listener.getsockname()[1])

    def start(self) -> None:
        """Begin to start the store's process."""
        self._starting = asyncio.get_running_loop().create_task(self._start())

    @property
    def pid(self) -> int | None:
        """The pid of the store's process; None while there is none."""
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
            # One that fails at its start again and again must not keep a core busy.
            await asyncio.sleep(RETRY_S * max(0, self._early_exits - 1))
            self._process = self._assign(await self._pool.take(early=True))
        except AgentError as error:
            self._restart(f"cannot be started: {error}")
            return
        self._started_s = time.monotonic()
        if self._served_before:
            self._on_moved()
        self._served_before = True

    def _assign(self, idle: IdleProcess) -> WatchedProcess:
        """Have an idle process serve the store, and watch it. Raises AgentError when it has exited."""
        assignment = channel.ServeStore(host=self.endpoint.host, port=self.endpoint.port)
        end, theirs = channel.pair()
        try:
            process = idle.assign(assignment, (self._listener.fileno(), theirs.fileno()), self._exited)
        except AgentError:
            end.close()
            raise
        finally:
            theirs.close()
        if self._watching is not None:
            self._watching.cancel()
        self._watching = asyncio.get_running_loop().create_task(_watch(process, end))
        return process

    def _exited(self, status: int) -> None:
        if not self._closed:
            if time.monotonic() - self._started_s > EARLY_EXIT_S:
                self._early_exits = 0
            self._restart(f"ended with status {status}")

    def _restart(self, how: str) -> None:
        if self._closed:
            return
        self._early_exits += 1
        if self._early_exits >= MAX_EARLY_EXITS:
            self._on_failed(
                f"the rendezvous store {how}, {MAX_EARLY_EXITS} times in a row. Check that torch can be imported on "
                "this node"
            )
            return
        _log.warning("the rendezvous store %s; starting it again at the same port", how)
        self.start()


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
