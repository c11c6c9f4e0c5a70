"""The agent's side of a standby: its process, its channel, and the one order that it gets."""

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Callable

from ..platforms.processes import WatchedProcess
from ..protocol.errors import AgentError
from . import orders
from .kernel import is_stopped

_log = logging.getLogger(__name__)


class Standby:
    """A process that is up and waits for its order. Give it one with `order`, or `close` it: then it ends."""

    def __init__(self, end: socket.socket, process: WatchedProcess, *, warm: bool) -> None:
        self.process = process
        self.warm = warm
        self._end = end

    def order(
        self,
        order: orders.TrainingOrder | orders.StoreOrder,
        fds: tuple[int, ...],
        on_exit: Callable[[int], None],
    ) -> WatchedProcess:
        """Hand over the order; the process is the caller's from then on. Raises AgentError when it is gone."""
        try:
            if not self.process.alive:
                raise AgentError(f"standby {self.process.pid} ended with status {self.process.status}")
            orders.send(self._end, order, fds)
        finally:
            self.close()
        self.process.on_exit = on_exit
        return self.process

    async def answers(self, timeout_s: float) -> bool:
        """Say whether the process is still there and does something; if not, it is killed and the channel closed."""
        try:
            if self.process.alive and not is_stopped(self.process.pid):
                orders.send(self._end, orders.Ping())
                if await asyncio.wait_for(receive(self._end), timeout_s) is not None:
                    return True
        except (AgentError, TimeoutError, OSError) as error:
            _log.warning("standby %d does not answer: %s", self.process.pid, error)
        self.process.kill()
        self.close()
        return False

    def close(self) -> None:
        """Close the channel. A standby without an order ends by that. Idempotent."""
        self._end.close()


async def await_standby(
    end: socket.socket, watch: Callable[[int], WatchedProcess], timeout_s: float, *, warm: bool
) -> Standby:
    """Wait for the process at the other end of a channel to be up; `watch` is called with its pid.

    Raises AgentError, and closes the channel, when it does not come up.
    """
    end.setblocking(False)
    try:
        message = await asyncio.wait_for(receive(end), timeout_s)
        if message is None or not isinstance(message[0], orders.StandbyUp):
            raise AgentError("a standby ended before it was up; the agent's own output may say why")
        return Standby(end, watch(message[0].pid), warm=warm)
    except TimeoutError:
        end.close()
        raise AgentError(f"a standby was not up within {timeout_s:.0f} s; the node is overloaded") from None
    except BaseException:
        end.close()
        raise


async def receive(end: socket.socket) -> tuple[orders.Order, list[int]] | None:
    """Wait for the next message on a channel; None: the other end is gone."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            return orders.receive(end)
        except BlockingIOError:
            readable = loop.create_future()
            number = end.fileno()
            loop.add_reader(number, _set, readable)
            try:
                await readable
            finally:
                loop.remove_reader(number)


def spawn(module: str, environment: dict[str, str]) -> tuple[int, socket.socket]:
    """Start `python -m midstep.agent.<module> AGENT_PID` with one end of a channel.

    Returns its pid and the other end. Raises AgentError.
    """
    end, theirs = orders.channel()
    command = [sys.executable, "-m", f"{__package__}.{module}", str(os.getpid())]
    files = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, theirs.fileno(), orders.CHANNEL_FD),
    ]
    try:
        pid = os.posix_spawn(sys.executable, command, environment, file_actions=files)
    except OSError as error:
        end.close()
        raise AgentError(f"{' '.join(command)} cannot be started: {error}") from error
    finally:
        theirs.close()
    return pid, end


def _set(readable: "asyncio.Future[None]") -> None:
    if not readable.done():
        readable.set_result(None)
