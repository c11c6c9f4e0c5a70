"""The process of a detector: what it watches, and how its reports reach the controller."""

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import cycle
from pathlib import Path

import msgspec

from ..launch.reached_job import JobElsewhere
from ..protocol.errors import ConfigurationError
from ..protocol.identities import Role
from ..protocol.keys import ClientKeys
from ..protocol.types import FaultReport, detector_address
from .standing_by import LEAVE_S, LEFT

EXIT_SKIPPED = 3  # everything else was reported
LOOK_S = 1.0
TURN_S = 5.0  # at one endpoint
ASK_S = 10.0


class Way(msgspec.Struct, frozen=True):
    """How the controller of a job is reached. `run_directory`: of a job on this machine.

    `others`: where other controllers of the job may listen. `standby`: leave, to be started again, when the controller
    has been away for a while.
    """

    job: str
    controller: str
    keys: Path | ClientKeys
    run_directory: Path | None = None
    others: tuple[str, ...] = ()
    standby: bool = False


class Watched(msgspec.Struct, frozen=True):
    """What a detector looks at, and the nodes that are named by a serial number or another name there.

    `signs`: it gives signs of life on standard output. `namespaces`: those whose ConfigMaps are watched.
    """

    sources: tuple[Path, ...]
    serials: dict[str, str]
    signs: bool = False
    namespaces: tuple[str, ...] = ()


def way_with_token(job: JobElsewhere, name: str, *, standby: bool) -> Way:
    """Return the way to a job on another machine, after a question that shows whether there is one.

    Raises MidstepError.
    """
    from ..controller.endpoints.control_requests import StatusRequest

    token = job.token
    if token.detector is None:
        raise ConfigurationError(
            f"the role {token.role} may not report faults: that takes the role {Role.OPERATOR}. Whoever has the job's "
            f"token makes a token of that role: `midstep token --role {Role.OPERATOR}`."
        )
    job.ask(StatusRequest(), ASK_S)  # reports wait for a day, without a word of what is wrong
    keys = ClientKeys(detector_address(name), token.detector.public, token.detector.secret, token.server_public)
    return Way(job.name, job.endpoints[0], keys, others=job.endpoints[1:], standby=standby)


async def report_faults(way: Way, name: str, watched: Watched) -> int:
    """Report what a detector sees until it or the job ends, or its controller has gone; return the exit code.

    Raises MidstepError.
    """
    from ..detectors.files import FileDetector
    from ..detectors.lines import MAX_LINE_BYTES, LineDetector
    from ..detectors.reporter import FaultReporter
    from ..protocol.discovery import Lookup, read_endpoint

    here = way.run_directory
    turns = _Turns((way.controller, *way.others))
    lookup: Lookup = turns if here is None else partial(read_endpoint, here)
    async with FaultReporter(way.job, way.controller, name, way.keys, lookup=lookup) as reporter:
        turns.connected = lambda: reporter.connected
        lasts = _Presence(turns.connected).recent if way.standby else _lasts(way)
        if watched.sources:
            if watched.signs:
                os.set_blocking(sys.stdout.fileno(), False)
            state = None if way.run_directory is None else way.run_directory / f"detect-{name}.state"
            alive = _give_sign if watched.signs else _give_none
            detector = FileDetector(name, watched.sources, state, watched.serials, alive)
            watching = asyncio.create_task(detector.watch(reporter.tell))
            return await _while_it_lasts(watching, lasts, LEFT if way.standby else 0)
        if watched.namespaces:
            watching = asyncio.create_task(_watch_config_maps(name, watched, reporter.tell))
            return await _while_it_lasts(watching, lasts, LEFT if way.standby else 0)
        stream = asyncio.StreamReader(limit=MAX_LINE_BYTES)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), sys.stdin)
        lines = LineDetector(name, stream)
        await _while_it_lasts(asyncio.create_task(lines.watch(reporter.tell)), lasts)
        await reporter.flush()
        return EXIT_SKIPPED if lines.refused else 0


async def _watch_config_maps(name: str, watched: Watched, report: Callable[[FaultReport], None]) -> None:
    from ..launch.kubernetes.config_maps import ConfigMapDetector
    from ..platforms.kubernetes.api import Api

    api = Api()
    try:
        await ConfigMapDetector(api, name, watched.namespaces, watched.serials).watch(report)
    finally:
        await api.close()


class _Turns:
    """Names another endpoint whenever there has been no connection for a while."""

    def __init__(self, endpoints: tuple[str, ...]) -> None:
        self._endpoints = cycle(endpoints)
        self._present = next(self._endpoints)
        self._since_s = time.monotonic()
        self.connected: Callable[[], bool] = lambda: False

    def __call__(self) -> str:
        """Return where to connect to."""
        now = time.monotonic()
        if self.connected():
            self._since_s = now
        elif now - self._since_s >= TURN_S:
            self._since_s, self._present = now, next(self._endpoints)
        return self._present


def _give_sign(sign: str) -> None:
    with contextlib.suppress(BlockingIOError):  # the launcher is busy, and has signs enough
        os.write(sys.stdout.fileno(), sign.encode())


def _give_none(sign: str) -> None:
    """Say nothing: a person has started the command."""


def _lasts(way: Way) -> Callable[[], bool]:
    """Return whether the job runs: its run directory goes away with it. Of one elsewhere that is not known."""
    return (lambda: True) if way.run_directory is None else way.run_directory.is_dir


class _Presence:
    """Knows whether there was a connection lately."""

    def __init__(self, connected: Callable[[], bool]) -> None:
        self._connected = connected
        self._since_s = time.monotonic()

    def recent(self) -> bool:
        """Whether there was one within the time after which another controller is taken to lead."""
        now = time.monotonic()
        if self._connected():
            self._since_s = now
        return now - self._since_s < LEAVE_S


async def _while_it_lasts(watching: "asyncio.Task[None]", lasts: Callable[[], bool], code: int = 0) -> int:
    """Wait for the end of a detector, or of what it is for; return `code`."""
    try:
        while not watching.done() and lasts():
            await asyncio.wait([watching], timeout=LOOK_S)
        if watching.done():
            await watching
        return code
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
