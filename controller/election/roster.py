"""The controllers of a job on this host: a file for each in the run directory, which says where it stands.

A file is locked for as long as its process lives, so that none is listed that has gone.
"""

import contextlib
import fcntl
import logging
import os
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ...protocol.errors import ConfigurationError
from ...protocol.incidents import ControllerPhase, ControllerStatus
from ...protocol.private_files import FILE_MODE, make_private_directory

FOLDER = "controllers"
_SIZE_BYTES = 512
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_decode = msgspec.json.Decoder(ControllerStatus).decode

_log = logging.getLogger(__name__)


class RosterEntry:
    """The entry of this process, while it lives."""

    def __init__(self, run_directory: Path, name: str | None = None) -> None:
        """Enter it as cold. Raises ConfigurationError: the name is no name, or another living controller has it."""
        self._name = name or f"controller-{os.getpid()}"
        if _NAME.fullmatch(self._name) is None:
            raise ConfigurationError(f"{name!r} is no name for a controller: use letters, digits, `.`, `_` and `-`.")
        folder = run_directory / FOLDER
        try:
            make_private_directory(folder)
            self._path = folder / f"{self._name}.json"
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        except OSError as error:
            raise ConfigurationError(f"{folder}: cannot be written: {error.strerror}.") from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._descriptor)
            raise ConfigurationError(f"another controller is called {self._name}: choose another --name.") from None
        self.enter(ControllerPhase.COLD)

    @property
    def name(self) -> str:
        """What this controller is called."""
        return self._name

    def enter(self, phase: ControllerPhase, term: int = 0) -> None:
        """Say where it stands from now on. That it cannot be said is logged, and changes nothing else."""
        entry = ControllerStatus(self._name, os.getpid(), socket.gethostname(), phase, term, time.time())
        _log.info("controller %s is %s", self._name, phase)
        try:
            os.pwrite(self._descriptor, msgspec.json.encode(entry).ljust(_SIZE_BYTES), 0)
        except OSError as error:
            _log.warning("%s cannot be written: %s", self._path, error)

    def close(self) -> None:
        """Strike the entry out. Idempotent."""
        if self._descriptor >= 0:
            self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = -1


def controllers(run_directory: Path) -> tuple[ControllerStatus, ...]:
    """Return the living controllers of a job on this host, by name."""
    return tuple(sorted(_living(run_directory / FOLDER), key=lambda each: each.name))


def _living(folder: Path) -> Iterator[ControllerStatus]:
    for path in folder.glob("*.json"):
        with contextlib.suppress(OSError, msgspec.MsgspecError), path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                yield _decode(file.read())
