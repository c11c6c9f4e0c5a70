"""The election on one host: a lock that the kernel frees when its holder ends, and beats that stop when it freezes.

The leader holds an flock on a file and counts up in it. A standby that may depose watches the count by its own
monotonic clock. When it has not moved for a lease, the standby begins the next term in the journal, which is where two
of them would find out that only one can, and puts a file of its own in the place of the old one.
"""

import contextlib
import fcntl
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from ...protocol.errors import ElectionLost, JournalError, JournalSuperseded
from ...protocol.private_files import FILE_MODE
from .election import Silence, WatchedElection

LEASE_S = 2.0
BEAT_S = 0.25
POLL_S = 0.05
ENDED_S = 5.0  # for a killed process to be gone
_OWN_PAUSE_S = 1.0  # after a longer time between two looks this process itself stood still
_SIZE_BYTES = 512  # within one page, so that a reader sees one state or the next
_LOCKS = Path("/proc/locks")

_log = logging.getLogger(__name__)


class LockHolder(msgspec.Struct, frozen=True):
    """The leader, as it says itself in its file. `beats` 0: it does not count, so that its silence says nothing."""

    pid: int
    host: str
    term: int = 0
    beats: int = 0


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(LockHolder).decode


class FileElection(WatchedElection):
    """Stands for the lead with a file beside the journal. `lease_s`: None never deposes, and waits for the kernel."""

    def __init__(
        self, path: Path, *, lease_s: float | None = None, admitted: Callable[[], bool] = lambda: True
    ) -> None:
        super().__init__(lambda: _LockFile(path, lease_s), admitted)


class _LockFile:
    """The file, as one controller that stands for the lead sees it."""

    def __init__(self, path: Path, lease_s: float | None) -> None:
        self._path = path
        self._lease_s = lease_s
        self._holder: LockHolder | None = None
        self._silence = Silence(_OWN_PAUSE_S)

    def take(self, admitted: Callable[[], bool]) -> "FileLeadership | None":
        """Take the lead; see `LeadStore`."""
        descriptor, may = _open(self._path), admitted()
        while may and _locked(descriptor):
            if _identity(os.fstat(descriptor)) == _identity_of(self._path):
                return FileLeadership(self._path, descriptor, last_sign_s=_last_sign_s(descriptor))
            os.close(descriptor)  # it was put aside by a new leader just now
            descriptor = _open(self._path)
        self._holder, file = _read(descriptor), _identity(os.fstat(descriptor))
        last_sign_s = _last_sign_s(descriptor)
        os.close(descriptor)
        silent_s = self._silence.lasts_s(self._holder, time.monotonic())
        counts = self._holder is not None and self._holder.beats  # the silence of one that does not says nothing
        if not may or self._lease_s is None or not counts or silent_s < self._lease_s:
            return None
        assert self._holder is not None
        _log.warning("the leader (%s) has shown no sign of life for %.1f s", _named(self._holder), self._lease_s)
        return FileLeadership.instead_of(self._path, self._holder, file, last_sign_s)

    def forget(self) -> None:
        """A file of this host is always there to look at."""

    def rival(self) -> str:
        """Say who leads; see `LeadStore`."""
        return (
            f"{self._path}: another controller is active on this journal ({_named(self._holder)}). "
            "It has to end first; one job has one active controller."
        )

    def look_s(self) -> float:
        """Return how long to wait. The kernel has no wait for a lock with a deadline, nor for a count in a file."""
        return POLL_S

    def close(self) -> None:
        """Nothing is open between two looks."""


class FileLeadership:
    """The lead, or, with `deposed`, the right to take it from a leader that is silent.

    `last_sign_s`: when the leader before this one last showed a sign of life, on this machine's monotonic clock.
    """

    def __init__(
        self,
        path: Path,
        descriptor: int,
        deposed: LockHolder | None = None,
        deposed_file: tuple[int, int] | None = None,
        draft: Path | None = None,
        *,
        last_sign_s: float | None = None,
    ) -> None:
        """Not for callers: `FileElection.stand`."""
        self._path = path
        self._descriptor = descriptor
        self._draft = draft
        self._holder = LockHolder(os.getpid(), socket.gethostname())
        self._next_s = self._looked_s = time.monotonic()
        self._told = False
        self._deposed_file = deposed_file
        self.deposed = deposed
        self.last_sign_s = last_sign_s
        if draft is None:
            self._write()

    @classmethod
    def instead_of(
        cls, path: Path, deposed: LockHolder, deposed_file: tuple[int, int], last_sign_s: float | None
    ) -> "FileLeadership":
        """Prepare a file that will take the place of the silent leader's."""
        draft = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        descriptor = _open(draft)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return cls(path, descriptor, deposed, deposed_file, draft, last_sign_s=last_sign_s)

    def begin(self, term: int) -> None:
        """Be found as the leader of a term, in the file whose name all others look at.

        Raises ElectionLost when it is not the deposed leader's any more, JournalError when it cannot be written.
        """
        if self._draft is not None and _identity_of(self._path) != self._deposed_file:
            raise ElectionLost(f"{self._path}: another controller has deposed the leader before.")
        self._holder = msgspec.structs.replace(self._holder, term=term, beats=1)
        self._write()
        if self._draft is not None:
            try:
                self._draft.replace(self._path)
            except OSError as error:
                raise JournalError(f"{self._path}: cannot be replaced: {error.strerror}.") from error
            self._draft = None

    def beat(self) -> None:
        """Count up, at most every BEAT_S."""
        now = time.monotonic()
        if now >= self._next_s and self._descriptor >= 0 and self._holder.beats:
            self._next_s = now + BEAT_S
            self._holder = msgspec.structs.replace(self._holder, beats=self._holder.beats + 1)
            self._write()

    def require(self) -> None:
        """Look, at most every BEAT_S, whether the file still has its name. A name without a file is no lead."""
        now = time.monotonic()
        if now < self._looked_s + BEAT_S or self._descriptor < 0:
            return
        self._looked_s = now
        if _identity_of(self._path) not in {None, _identity(os.fstat(self._descriptor))}:
            raise JournalSuperseded(
                f"{self._path}: another controller leads the job by now. This one, of term {self._holder.term}, is not "
                "in service any more, and must leave."
            )

    def overthrow(self) -> bool:
        """Kill the deposed leader, if the kernel says that it is what holds the file's lock; wait for its end."""
        if self.deposed is None or self.deposed.host != socket.gethostname() or not self._is_holder(self.deposed.pid):
            return False
        _log.warning("the frozen leader (%s) holds up the journal and is killed", _named(self.deposed))
        try:
            os.kill(self.deposed.pid, signal.SIGKILL)
        except OSError as error:
            _log.warning("it cannot be: %s", error)
            return False
        give_up_s = time.monotonic() + ENDED_S
        while self._is_holder(self.deposed.pid):
            if time.monotonic() >= give_up_s:
                return False
            time.sleep(POLL_S)
        return True

    def close(self) -> None:
        """Free the lock. The file stays: to remove it would let two hold two files of one name. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        if self._draft is not None:
            self._draft.unlink(missing_ok=True)
            self._draft = None

    def _is_holder(self, pid: int) -> bool:
        inode = _identity_of(self._path)
        with contextlib.suppress(OSError):
            for line in _LOCKS.read_text().splitlines():
                words = line.split()
                if "FLOCK" in words and "->" not in words and inode is not None:
                    place = words.index("FLOCK")
                    if words[place + 3 : place + 4] == [str(pid)] and words[place + 4].endswith(f":{inode[1]}"):
                        return True
        return False

    def _write(self) -> None:
        try:
            os.pwrite(self._descriptor, _encode(self._holder).ljust(_SIZE_BYTES), 0)
        except OSError as error:
            if not self._told:
                self._told = True
                _log.warning("%s cannot be written: %s; a standby may take this one for frozen", self._path, error)


def _last_sign_s(descriptor: int) -> float | None:
    """Return when a leader last wrote its file, on the monotonic clock; None: none has."""
    status = os.fstat(descriptor)
    return None if not status.st_size else time.monotonic() - max(0.0, time.time() - status.st_mtime)


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    except OSError as error:
        raise JournalError(
            f"{path}: cannot open the lock file: {error.strerror}. Check space and permissions of that directory."
        ) from error


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read(descriptor: int) -> LockHolder | None:
    try:
        return _decode(os.pread(descriptor, 4096, 0))
    except (OSError, msgspec.MsgspecError):
        return None


def _named(holder: LockHolder | None) -> str:
    return "it has not written its name yet" if holder is None else f"pid {holder.pid} on {holder.host}"


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _identity_of(path: Path) -> tuple[int, int] | None:
    try:
        return _identity(os.stat(path))
    except OSError:
        return None
