"""Where training processes come from: forks of a zygote when there is one, new interpreters when not.

A restart must cost a fork and not an import. So one standby is kept forked ahead, and the next is forked when
the recovery that took it is over. When the zygote is gone it is started anew, and meanwhile nobody waits for
it.
"""

import asyncio
import contextlib
import enum
import logging
import socket
from collections.abc import Mapping

from ..platforms.processes import WatchedProcess
from ..protocol.errors import AgentError
from . import orders
from .children import Children
from .standbys import Standby, await_standby, receive, spawn
from .watchdog import ANSWER_S, Watchdog

UP_S = 120.0  # the zygote's imports included
REFILL_AFTER_S = 2.0
STANDBY_ANSWER_S = 5.0
IMPORTS_ANSWER_S = 600.0  # a zygote that imports hears nothing; file systems can be slow
MAX_ZYGOTES_LOST_YOUNG = 3  # zygotes that died without ever being up, in a row

_log = logging.getLogger(__name__)


IMPORTS_S = 120.0  # torch and all, on a machine that does other things too


class _Phase(enum.Enum):
    FIRST_IMPORTS = "first imports"  # worth waiting for: a cold process would import the same
    UP = "up"
    IMPORTING_AGAIN = "importing again"
    NONE = "none"  # given up, or not wanted


class Nursery:
    """Keeps the zygote and gives out standbys. `environment` is what a zygote starts with."""

    def __init__(self, environment: Mapping[str, str], children: Children) -> None:
        self._environment = dict(environment)
        self._children = children
        self._phase = _Phase.NONE
        self._imported = asyncio.Event()  # the zygote is up, or there is no use in waiting for it
        self._zygote: WatchedProcess | None = None
        self._end: socket.socket | None = None
        self._listener: asyncio.Task[None] | None = None
        self._watchdog: Watchdog | None = None
        self._importing = 0  # orders to import that the zygote has not answered
        self._ready: Standby | None = None
        self._refill: asyncio.TimerHandle | None = None
        self._filling: asyncio.Task[None] | None = None
        self._preload: orders.Preload | None = None
        self._lost_young = 0
        self._keep = False  # whether to keep a standby ready: not before the job is known
        self._closed = False

    def start(self) -> None:
        """Start the zygote; it imports meanwhile."""
        self._start_zygote(_Phase.FIRST_IMPORTS)

    def configure(
        self, environment: Mapping[str, str], modules: tuple[str, ...], paths: tuple[str, ...], *, warm: bool
    ) -> None:
        """The job is known: import its modules too, in its environment; keep a standby unless `warm` is
        False.

        A zygote that was started in another environment is replaced, since what it imported may have read it.
        """
        self._keep = warm
        self._preload = orders.Preload(modules, paths) if modules and warm else None
        if dict(environment) != self._environment or not warm:
            self._environment = dict(environment)
            self._drop_zygote()
            if warm:
                self._start_zygote(_Phase.FIRST_IMPORTS)
        else:
            self._send_preload()
        self._refill_later(0.0)

    @property
    def pids(self) -> dict[str, int]:
        """The processes that this object has now."""
        found = {}
        if self._zygote is not None and self._zygote.alive:
            found["zygote"] = self._zygote.pid
        if self._ready is not None:
            found["standby"] = self._ready.process.pid
        return found

    async def take(self, *, early: bool = False) -> Standby:
        """Return a standby that is up: the one kept ready, else a fork of the zygote, else a new interpreter.

        A zygote that is starting is waited for: what it imports once each process would import for itself. `early`:
        torch alone is enough, as for the store's process.

        Raises AgentError when not even that can be had.
        """
        ready, self._ready = self._ready, None
        self._refill_later(REFILL_AFTER_S)
        if ready is not None and await ready.answers(STANDBY_ANSWER_S):
            return ready
        if not early and self._phase is _Phase.FIRST_IMPORTS:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._imported.wait(), IMPORTS_S)
        if self._phase in {_Phase.FIRST_IMPORTS, _Phase.UP}:
            try:
                return await self._fork()
            except AgentError as error:
                _log.warning("no warm standby: %s", error)
        return await self._cold()

    def close(self) -> None:
        """End the zygote and the standby that is kept. Idempotent."""
        self._closed = True
        if self._filling is not None:
            self._filling.cancel()
        if self._refill is not None:
            self._refill.cancel()
        self._drop_zygote()

    async def _fork(self) -> Standby:
        end, theirs = orders.channel()
        with self._children.expecting():
            try:
                self._tell(orders.ForkStandby(), (theirs.fileno(),))
            except AgentError:
                end.close()
                raise
            finally:
                theirs.close()
            return await await_standby(end, self._watch, UP_S, warm=True)

    async def _cold(self) -> Standby:
        pid, end = spawn("child", self._environment)
        process = self._watch(pid)
        try:
            return await await_standby(end, lambda _: process, UP_S, warm=False)
        except BaseException:
            process.kill()
            raise

    def _watch(self, pid: int) -> WatchedProcess:
        return self._children.watch(pid, _unowned)

    # --- the standby that is kept -------------------------------------------------------------------------------

    def _refill_later(self, delay_s: float) -> None:
        if self._refill is not None:
            self._refill.cancel()
        if not self._closed:
            self._refill = asyncio.get_running_loop().call_later(delay_s, self._begin_refill)

    def _begin_refill(self) -> None:
        self._refill = None
        wanted = self._keep and self._ready is None and self._phase is _Phase.UP
        if wanted and (self._filling is None or self._filling.done()) and not self._closed:
            self._filling = asyncio.get_running_loop().create_task(self._fill())

    async def _fill(self) -> None:
        try:
            standby = await self._fork()
        except AgentError as error:
            _log.info("no standby is kept ready: %s", error)
            return
        if self._ready is None and not self._closed:
            self._ready = standby
        else:
            standby.close()

    # --- the zygote ---------------------------------------------------------------------------------------------

    def _start_zygote(self, phase: _Phase) -> None:
        try:
            pid, end = spawn("zygote", self._environment)
        except AgentError as error:
            _log.error("processes will be started cold: %s", error)
            self._enter(_Phase.NONE)
            return
        end.setblocking(False)
        self._enter(phase)
        self._end = end
        self._zygote = self._children.watch(pid, self._zygote_ended)
        self._importing = 1
        self._watchdog = Watchdog(
            "the zygote", self._zygote, lambda: self._tell(orders.Ping()), answer_s=IMPORTS_ANSWER_S
        )
        self._listener = asyncio.get_running_loop().create_task(self._listen(end))
        self._send_preload()

    def _drop_zygote(self) -> None:
        """Let the zygote and the kept standby end; nobody will ask why."""
        if self._ready is not None:
            self._ready.close()
            self._ready = None
        if self._zygote is not None:
            zygote, self._zygote = self._zygote, None
            zygote.kill()
        self._hang_up()
        self._enter(_Phase.NONE)

    def _enter(self, phase: _Phase) -> None:
        self._phase = phase
        if phase is _Phase.FIRST_IMPORTS:
            self._imported.clear()
        else:
            self._imported.set()

    def _zygote_ended(self, status: int) -> None:
        if self._zygote is None or self._zygote.alive or self._closed:
            return  # dropped on purpose
        self._lost_young = 0 if self._phase is _Phase.UP else self._lost_young + 1
        self._zygote = None
        self._hang_up()
        if self._lost_young >= MAX_ZYGOTES_LOST_YOUNG:
            _log.error(
                "the zygote ended %d times before it was up (last status %d): processes are started cold from now on",
                self._lost_young,
                status,
            )
            self._enter(_Phase.NONE)
            return
        _log.warning("the zygote ended with status %d; starting it anew", status)
        self._start_zygote(_Phase.IMPORTING_AGAIN)

    def _hang_up(self) -> None:
        if self._watchdog is not None:
            self._watchdog.close()
            self._watchdog = None
        if self._listener is not None:
            self._listener.cancel()
            self._listener = None
        if self._end is not None:
            self._end.close()
            self._end = None

    async def _listen(self, end: socket.socket) -> None:
        while True:
            try:
                message = await receive(end)
            except (AgentError, OSError, ValueError) as error:
                _log.warning("the zygote cannot be heard: %s", error)
                return
            if message is None or end is not self._end:
                return
            self._importing -= isinstance(message[0], orders.ZygoteUp)
            if self._watchdog is not None:
                self._watchdog.answered()
                self._watchdog.answer_s = IMPORTS_ANSWER_S if self._importing else ANSWER_S
            if isinstance(message[0], orders.ZygoteUp):
                self._zygote_up(message[0])

    def _zygote_up(self, message: orders.ZygoteUp) -> None:
        for failed in message.failed:
            _log.info("not imported ahead: %s", failed)
        if message.threads > 1:
            preload, self._preload = self._preload, None
            self._drop_zygote()
            blamed = f"one of the preloaded modules {', '.join(preload.modules)}" if preload else "an import"
            _log.error("%s has started a thread, so the zygote cannot fork safely: doing without", blamed)
            if preload is not None:
                self._start_zygote(_Phase.FIRST_IMPORTS)
            return
        self._enter(_Phase.UP)
        self._lost_young = 0
        if self._refill is None:
            self._refill_later(0.0)

    def _send_preload(self) -> None:
        if self._preload is not None:
            try:
                self._tell(self._preload)
                self._importing += 1
                if self._watchdog is not None:
                    self._watchdog.answer_s = IMPORTS_ANSWER_S
            except AgentError as error:
                _log.warning("the modules of the policy are not imported ahead: %s", error)

    def _tell(self, order: orders.Order, fds: tuple[int, ...] = ()) -> None:
        if self._end is None:
            raise AgentError("there is no zygote")
        orders.send(self._end, order, fds)


def _unowned(status: int) -> None:
    """A standby that nobody has taken has ended; whoever takes it will see that."""
