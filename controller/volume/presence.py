"""The controllers of a job on all machines: a file for each on the volume, which it writes again each second.

The clock of the file system's server says how old a file is, which all machines share.
"""

import contextlib
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from ...protocol.errors import ConfigurationError, StoreUnreachable
from ...protocol.incidents import ControllerPhase, ControllerStatus
from ...protocol.private_files import FILE_MODE, make_private_directory
from ..clock import Clock, HeardClock

TELL_S = 1.0
LIVING_S = 5.0  # a file that is older is that of a controller that has gone
ENDED_S = 3.0  # for the thread to end
_FOLDER = "controllers"
_TOUCHED = "now"
_SIZE_BYTES = 1024
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")

_log = logging.getLogger(__name__)


class _Told(msgspec.Struct, frozen=True):
    """What a controller says of itself; `clock_s`: its job's time, while it leads."""

    status: ControllerStatus
    clock_s: float | None = None


_decode = msgspec.json.Decoder(_Told).decode


def server_time_s(folder: Path) -> float:
    """Return the wall-clock time of the server that keeps a folder; this machine's where that cannot be had."""
    path = folder / _TOUCHED
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, FILE_MODE))
        os.utime(path)
        return path.stat().st_mtime
    except OSError:
        return time.time()


def controllers_in(folder: Path) -> tuple[ControllerStatus, ...]:
    """Return the controllers of the job in a folder that lived a moment ago, by name."""
    return tuple(each.status for each in sorted(_living(folder / _FOLDER), key=lambda each: each.status.name))


class VolumePresence:
    """The entry of this process, written by a thread while it lives."""

    def __init__(self, folder: Path, name: str) -> None:
        """Enter it as cold. Raises ConfigurationError: a controller on another machine has this name.

        Raises StoreUnreachable when the volume cannot be written.
        """
        if _NAME.fullmatch(name) is None:
            raise ConfigurationError(f"{name!r} is no name for a controller: use letters, digits, `.`, `_` and `-`.")
        self._folder = folder / _FOLDER
        self._path = self._folder / f"{name}.json"
        host = socket.gethostname()
        self._status = ControllerStatus(name, os.getpid(), host, ControllerPhase.COLD, 0, time.time())
        self._clock: Clock | None = None
        self._all: tuple[ControllerStatus, ...] = ()
        self._leader_s: float | None = None
        self._looked_s: float | None = None
        self._troubled = False
        self.heard: HeardClock | None = None
        self._wake = threading.Condition()
        self._closed = False
        try:
            make_private_directory(self._folder)
            others = [each for each in _living(self._folder) if each.status.name == name and each.status.host != host]
            if others:
                raise ConfigurationError(
                    f"{folder}: another controller is called {name}, on {others[0].status.host}: choose another --name."
                )
            self._look_after()
        except OSError as error:
            raise StoreUnreachable(
                f"{self._folder}: cannot be written: {error.strerror}. Check that the volume is mounted and has room."
            ) from error
        self._thread = threading.Thread(target=self._keep, name="volume-presence", daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        """What this controller is called."""
        return self._status.name

    def enter(self, phase: ControllerPhase, term: int = 0) -> None:
        """Say where this controller stands from now on; soon, or when the volume can be written again."""
        _log.info("controller %s is %s", self._status.name, phase)
        with self._wake:
            self._status = msgspec.structs.replace(self._status, phase=phase, term=term, since_s=time.time())
            self._wake.notify()

    def lead(self, clock: Clock) -> None:
        """Tell this clock from now on, for the next leader to continue."""
        self._clock = clock

    def controllers(self) -> tuple[ControllerStatus, ...]:
        """Return the controllers that lived a moment ago, by name."""
        return self._all

    def close(self) -> None:
        """Strike the entry out. Idempotent."""
        with self._wake:
            if self._closed:
                return
            self._closed = True
            self._wake.notify()
        self._thread.join(ENDED_S)
        with contextlib.suppress(OSError):  # it is old in a moment
            self._path.unlink(missing_ok=True)

    def _keep(self) -> None:
        while True:
            with self._wake:
                said = self._status
                self._wake.wait_for(lambda said=said: self._closed or self._status is not said, TELL_S)  # type: ignore[misc]
                if self._closed:
                    return
            try:
                self._look_after()
            except OSError as error:
                if not self._troubled:
                    _log.warning("%s cannot be written: %s", self._path, error)
                self._troubled = True
            else:
                self._troubled = False

    def _look_after(self) -> None:
        told = _Told(self._status, None if self._clock is None else self._clock.now())
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        try:
            os.pwrite(descriptor, msgspec.json.encode(told).ljust(_SIZE_BYTES), 0)
        finally:
            os.close(descriptor)
        living = sorted(_living(self._folder), key=lambda each: each.status.name)
        self._all = tuple(each.status for each in living)
        if self._clock is None:
            self._hear([each.clock_s for each in living if each.clock_s is not None])

    def _hear(self, told_s: list[float]) -> None:
        now = time.monotonic()
        if told_s and max(told_s) != self._leader_s:
            self._leader_s = max(told_s)
            # It was told after the last look; before the first one, a file that counts is not older than this.
            slack_s = LIVING_S if self._looked_s is None else now - self._looked_s
            self.heard = HeardClock(self._leader_s, now, slack_s)
        self._looked_s = now


def succession_clock(folder: Path) -> Callable[[], float]:
    """Return the clock by which admins' wishes of the lead begin and end on all machines."""
    return lambda: server_time_s(folder)


def _living(folder: Path) -> Iterator[_Told]:
    if not folder.is_dir():
        return
    now = server_time_s(folder)
    for path in folder.glob("*.json"):
        with contextlib.suppress(OSError, msgspec.MsgspecError), path.open("rb") as file:
            if now - os.fstat(file.fileno()).st_mtime < LIVING_S:
                yield _decode(file.read())
