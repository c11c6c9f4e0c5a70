"""The controllers of a job, as they show themselves to each other: a living entry for each, with where it stands.

On one host an entry is a file in the run directory, locked for as long as its process lives, so that none is listed
that has gone. Beyond one host a thread says again and again that the controller lives (`KeptPresence`): in etcd under a
lease, on a volume in a file whose age the clock of the file system's server tells. The thread is there so that a store
that hangs does not hold up the controller. The leader tells its clock as well, for the next leader to continue.
"""

import contextlib
import fcntl
import logging
import math
import os
import re
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec

from ...protocol.errors import ConfigurationError, StoreUnreachable
from ...protocol.incidents import ControllerPhase, ControllerStatus
from ...protocol.private_files import FILE_MODE, make_private_directory
from ..clock import Clock, HeardClock
from ..etcd.client import Condition, Etcd, absent, put
from ..etcd.place import EtcdPlace

FOLDER = "controllers"
ENDED_S = 3.0  # for the thread to end: one request
LOOP_ALIVE_S = 1.0  # after its last beat the controller's loop counts as running for so long
ENTRIES_S = 1.0  # between two looks at the entries of all controllers
TELL_S = 10.0  # between two times that the leader tells its clock in etcd
LOOK_S = 1.0  # between two looks at it of those that stand by
RENEWALS = 4  # in the time of a lease
WRITE_S = 1.0  # between two times that an entry on a volume is written
LIVING_S = 5.0  # a file on a volume that is older is that of a controller that has gone
_TOUCHED = "now"
_SIZE_BYTES = 1024
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

_log = logging.getLogger(__name__)


class _Told(msgspec.Struct, frozen=True):
    """The note of a controller about itself on a volume; `clock_s`: its job's time, while it leads."""

    status: ControllerStatus
    clock_s: float | None = None


_encode_clock = msgspec.msgpack.Encoder().encode
_decode_clock = msgspec.msgpack.Decoder(float).decode
_decode = msgspec.json.Decoder(ControllerStatus).decode
_decode_told = msgspec.json.Decoder(_Told).decode


def require_name(name: str) -> None:
    """Raise ConfigurationError for what cannot be a controller's name."""
    if _NAME.fullmatch(name) is None:
        raise ConfigurationError(f"{name!r} is no name for a controller: use letters, digits, `.`, `_` and `-`.")


def in_service(controllers: Iterable[ControllerStatus]) -> tuple[ControllerStatus, ...]:
    """Return controllers by name, those that were deposed as out of service: a frozen one still says that it leads."""
    known = sorted(controllers, key=lambda each: each.name)
    leading = {ControllerPhase.LOADING, ControllerPhase.HOT}
    term = max((each.term for each in known if each.phase in leading), default=0)
    return tuple(
        msgspec.structs.replace(each, phase=ControllerPhase.OUT_OF_SERVICE)
        if each.phase in leading and each.term < term
        else each
        for each in known
    )


def _entry_of(name: str, endpoint: str = "") -> ControllerStatus:
    return ControllerStatus(name, os.getpid(), socket.gethostname(), ControllerPhase.COLD, 0, time.time(), endpoint)


class RosterEntry:
    """The entry of this process on its host, while it lives."""

    def __init__(self, run_directory: Path, name: str | None = None) -> None:
        """Enter it as cold. Raises ConfigurationError: the name is no name, or another living controller has it."""
        self._name = name or f"controller-{os.getpid()}"
        require_name(self._name)
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
        """The name of this controller."""
        return self._name

    def enter(self, phase: ControllerPhase, term: int = 0) -> None:
        """Say where it stands from now on. That it cannot be said is logged, and changes nothing else."""
        entry = msgspec.structs.replace(_entry_of(self._name), phase=phase, term=term)
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


def controllers_of_host(run_directory: Path) -> tuple[ControllerStatus, ...]:
    """Return the living controllers of a job on this host, by name."""
    return in_service(_locked_entries(run_directory / FOLDER))


def _locked_entries(folder: Path) -> Iterator[ControllerStatus]:
    for path in folder.glob("*.json"):
        with contextlib.suppress(OSError, msgspec.MsgspecError), path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                yield _decode(file.read())


class KeptPresence(ABC):
    """The entry of this process in a store of several machines, kept by a thread while the process lives."""

    def __init__(self, name: str, every_s: float, endpoint: str) -> None:
        """Enter nothing before `_start`. `every_s`: between two times that the thread looks after the entry.

        `endpoint`: where others reach this controller.
        """
        self._entry = _entry_of(name, endpoint)
        self._every_s = every_s
        self._wake = threading.Condition()
        self._closed = False
        self._all: tuple[ControllerStatus, ...] = ()
        self._troubled = False
        self._thread = threading.Thread(target=self._keep, name="presence", daemon=True)

    @property
    def name(self) -> str:
        """The name of this controller."""
        return self._entry.name

    @property
    def host(self) -> str:
        """The machine that it runs on."""
        return self._entry.host

    @property
    def pid(self) -> int:
        """Its process."""
        return self._entry.pid

    @property
    @abstractmethod
    def heard(self) -> HeardClock | None:
        """Return the last leader's clock, as far as it is known."""

    def enter(self, phase: ControllerPhase, term: int = 0) -> None:
        """Say where this controller stands from now on; soon, or when the store can be reached again."""
        _log.info("controller %s is %s", self._entry.name, phase)
        with self._wake:
            self._entry = msgspec.structs.replace(self._entry, phase=phase, term=term, since_s=time.time())
            self._wake.notify()

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
        if self._thread.is_alive():
            self._thread.join(ENDED_S)
        if not self._thread.is_alive():  # else it waits for the store, where the entry ends by itself
            self._leave()

    @abstractmethod
    def _look_after(self, entry: ControllerStatus) -> None:
        """Say that this controller lives, and look at the others. Raises StoreUnreachable, ConfigurationError."""

    @abstractmethod
    def _leave(self) -> None:
        """Strike the entry out."""

    def _keep(self) -> None:
        tried = self._entry  # an entry is written at once, and one that cannot be written is tried in turn
        while True:
            with self._wake:
                self._wake.wait_for(partial(self._is_due, tried), self._every_s)
                if self._closed:
                    return
                tried = self._entry
            try:
                self._look_after(tried)
            except (StoreUnreachable, ConfigurationError) as error:
                if not self._troubled:
                    _log.warning("%s", error)
                self._troubled = True
            except msgspec.MsgspecError as error:  # this one is kept before the entries of others are read
                _log.warning("what another controller says cannot be read: %s", error)
            else:
                if self._troubled:
                    _log.warning("where the controllers of the job are listed can be reached again")
                self._troubled = False

    def _is_due(self, tried: ControllerStatus) -> bool:
        return self._closed or self._entry is not tried


class EtcdPresence(KeptPresence):
    """The lease and the entry of this controller in etcd. `lease` changes when etcd has let the last one end.

    The lease is kept alive only for as long as the controller's loop shows that it runs, so that one that hangs is
    replaced.
    """

    def __init__(self, place: EtcdPlace, name: str, lease_s: float, endpoint: str = "") -> None:
        """Enter the controller as cold, and keep its lease. Raises ConfigurationError: its name is in use.

        Raises StoreUnreachable when etcd cannot be reached.
        """
        self._ttl_s = math.ceil(lease_s)
        super().__init__(name, self._ttl_s / RENEWALS, endpoint)
        self._place = place
        self._key = f"{place.controllers}{name}"
        self._etcd = Etcd(place)
        self._said = self._entry
        self._listed_s = -math.inf
        self._beat_s = time.monotonic()
        self._leaders_clock = LeadersClock(place)
        self.lease = 0
        self._begin()
        self._thread.start()

    @property
    def heard(self) -> HeardClock | None:
        """Return the last leader's clock, as far as it is known."""
        return self._leaders_clock.heard

    def lead(self, clock: Clock, holds: Condition) -> None:
        """Tell this clock from now on, for as long as the term `holds`."""
        self._leaders_clock.lead(clock, holds)

    def beat(self) -> None:
        """Show that the loop runs. Called often, and cheap."""
        self._beat_s = time.monotonic()

    def _leave(self) -> None:
        try:
            self._etcd.revoke(self.lease)
        except StoreUnreachable as error:
            _log.warning("this controller's lease ends by itself within %d s: %s", self._ttl_s, error)
        self._etcd.close()

    def _begin(self) -> None:
        """Begin a lease, with the entry under it."""
        lease = self._etcd.grant(self._ttl_s)
        entry = put(self._key, msgspec.json.encode(self._entry), lease)
        if self._etcd.change([absent(self._key)], [entry]) is None:
            known = self._etcd.get(self._key)
            if known is None or not self._is_mine(known.value):
                self._etcd.revoke(lease)
                raise ConfigurationError(
                    f"{self._place}: another controller is called {self._entry.name}: choose another --name."
                )
            self._etcd.change([], [entry])
        self.lease = lease

    def _is_mine(self, value: bytes) -> bool:
        """Say whether this is what an earlier request has left that seemed to have failed."""
        return value in {msgspec.json.encode(entry) for entry in (self._entry, self._said)}

    def _look_after(self, entry: ControllerStatus) -> None:
        if time.monotonic() - self._beat_s > LOOP_ALIVE_S:
            return
        if not self._etcd.keep_alive(self.lease):
            _log.warning("etcd has let this controller's lease end; it begins another one")
            self._begin()
        if entry is not self._said:
            self._etcd.change([], [put(self._key, msgspec.json.encode(entry), self.lease)])
            self._said = entry
        self._leaders_clock.look_after(self._etcd, self.lease, self._ttl_s)
        if time.monotonic() - self._listed_s >= ENTRIES_S:
            self._all = _entries_in(self._etcd, self._place)
            self._listed_s = time.monotonic()


def controllers_in_etcd(place: EtcdPlace) -> tuple[ControllerStatus, ...]:
    """Return the controllers of a job that live, by name. Raises JournalError."""
    with contextlib.closing(Etcd(place)) as etcd:
        return _entries_in(etcd, place)


def _entries_in(etcd: Etcd, place: EtcdPlace) -> tuple[ControllerStatus, ...]:
    return in_service(_decode(each.value) for each in etcd.list(place.controllers))


class LeadersClock:
    """Hears the leader's clock in etcd while this controller stands by, and tells its own one when it leads.

    The next leader continues it, whatever its own wall clock says: one that is an hour ahead would move the job's time
    by an hour, and with it the windows of budgets. `look_after` is for one thread.
    """

    def __init__(self, place: EtcdPlace) -> None:
        self._key = place.clock
        self._own: tuple[Clock, Condition] | None = None
        self._next_s = 0.0
        self._looked_s: float | None = None
        self._revision = 0
        self.heard: HeardClock | None = None

    def lead(self, clock: Clock, holds: Condition) -> None:
        """Tell this clock from now on, for as long as the term `holds`."""
        self._own = clock, holds
        self._next_s = 0.0

    def look_after(self, etcd: Etcd, lease: int, ttl_s: float) -> None:
        """Tell or hear it, when it is time to. `lease`, `ttl_s`: of this controller, and of all.

        Raises StoreUnreachable, and once DecodeError for a value that no controller has written.
        """
        now = time.monotonic()
        if now < self._next_s:
            return
        if self._own is not None:
            clock, holds = self._own
            etcd.change([holds], [put(self._key, _encode_clock(clock.now()), lease)])
            self._next_s = now + TELL_S
            return
        known = etcd.get(self._key)
        if known is not None and known.revision != self._revision:
            # It was told after the last look; before the first one, while its leader's lease was kept.
            slack_s = TELL_S + ttl_s if self._looked_s is None else time.monotonic() - self._looked_s
            self._revision = known.revision
            self.heard = HeardClock(_decode_clock(known.value), time.monotonic(), slack_s)
        self._looked_s = now
        self._next_s = now + LOOK_S


class VolumePresence(KeptPresence):
    """The entry of this process on a volume."""

    def __init__(self, folder: Path, name: str, endpoint: str = "") -> None:
        """Enter it as cold. Raises ConfigurationError: a controller on another machine has this name.

        Raises StoreUnreachable when the volume cannot be written.
        """
        require_name(name)
        super().__init__(name, WRITE_S, endpoint)
        self._folder = folder / FOLDER
        self._path = self._folder / f"{name}.json"
        self._clock: Clock | None = None
        self._leader_s: float | None = None
        self._looked_s: float | None = None
        self._heard: HeardClock | None = None
        try:
            make_private_directory(self._folder)
        except OSError as error:
            raise self._unreachable(error) from error
        others = [each.status for each in _living(self._folder) if each.status.name == name]
        elsewhere = [each.host for each in others if each.host != self.host]
        if elsewhere:
            raise ConfigurationError(
                f"{folder}: another controller is called {name}, on {elsewhere[0]}: choose another --name."
            )
        self._look_after(self._entry)
        self._thread.start()

    @property
    def heard(self) -> HeardClock | None:
        """Return the last leader's clock, as far as it is known."""
        return self._heard

    def lead(self, clock: Clock) -> None:
        """Tell this clock from now on, for the next leader to continue."""
        self._clock = clock

    def _leave(self) -> None:
        with contextlib.suppress(OSError):  # it is old in a moment
            self._path.unlink(missing_ok=True)

    def _look_after(self, entry: ControllerStatus) -> None:
        told = _Told(entry, None if self._clock is None else self._clock.now())
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
            try:
                os.pwrite(descriptor, msgspec.json.encode(told).ljust(_SIZE_BYTES), 0)
            finally:
                os.close(descriptor)
            living = list(_living(self._folder))
        except OSError as error:
            raise self._unreachable(error) from error
        self._all = in_service(each.status for each in living)
        if self._clock is None:
            self._hear([each.clock_s for each in living if each.clock_s is not None])

    def _unreachable(self, error: OSError) -> StoreUnreachable:
        return StoreUnreachable(
            f"{self._folder}: cannot be written: {error.strerror}. Check that the volume is mounted and has room."
        )

    def _hear(self, told_s: Sequence[float]) -> None:
        now = time.monotonic()
        if told_s and max(told_s) != self._leader_s:
            self._leader_s = max(told_s)
            # It was told after the last look; before the first one, a file that counts is not older than this.
            slack_s = LIVING_S if self._looked_s is None else now - self._looked_s
            self._heard = HeardClock(self._leader_s, now, slack_s)
        self._looked_s = now


def controllers_on_volume(folder: Path) -> tuple[ControllerStatus, ...]:
    """Return the controllers of the job in a folder that lived a moment ago, by name."""
    return in_service(each.status for each in _living(folder / FOLDER))


def server_clock(folder: Path) -> Callable[[], float]:
    """Return the clock by which admins' wishes of the lead begin and end on all machines of a volume."""
    return lambda: server_time_s(folder)


def server_time_s(folder: Path) -> float:
    """Return the wall-clock time of the server that keeps a folder; this machine's where that cannot be had."""
    path = folder / _TOUCHED
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, FILE_MODE))
        os.utime(path)
        return path.stat().st_mtime
    except OSError:
        return time.time()


def _living(folder: Path) -> Iterator[_Told]:
    if not folder.is_dir():
        return
    now = server_time_s(folder)
    for path in folder.glob("*.json"):
        with contextlib.suppress(OSError, msgspec.MsgspecError), path.open("rb") as file:
            if now - os.fstat(file.fileno()).st_mtime < LIVING_S:
                yield _decode_told(file.read())
