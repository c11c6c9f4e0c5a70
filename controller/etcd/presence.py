"""That a controller lives, as etcd sees it: a lease that is kept alive while its loop beats, and its entry under it.

The lease is kept alive by a thread, so that an etcd that hangs does not hold up the controller; but only for as long as
the controller's loop shows that it runs, so that one that hangs is replaced.
"""

import logging
import math
import os
import socket
import threading
import time
from functools import partial

import msgspec

from ...protocol.errors import ConfigurationError, StoreUnreachable
from ...protocol.incidents import ControllerPhase, ControllerStatus
from .client import Etcd, absent, put
from .leaders_clock import LeadersClock
from .place import EtcdPlace

RENEWALS = 4  # in the time of a lease
LOOP_ALIVE_S = 1.0  # after its last beat the loop counts as running for so long
ENTRIES_S = 1.0  # between two looks at the entries of all controllers
ENDED_S = 3.0  # for the thread to end: one request

_decode = msgspec.json.Decoder(ControllerStatus).decode
_log = logging.getLogger(__name__)


class Presence:
    """The lease and the entry of this controller. `lease` changes when etcd has let the last one end."""

    def __init__(self, place: EtcdPlace, name: str, lease_s: float) -> None:
        """Enter the controller as cold, and keep its lease. Raises ConfigurationError: its name is in use.

        Raises StoreUnreachable when etcd cannot be reached.
        """
        self._place = place
        self._key = f"{place.controllers}{name}"
        self._ttl_s = math.ceil(lease_s)
        self._etcd = Etcd(place)
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._closed = False
        self._entry = self._said = ControllerStatus(
            name, os.getpid(), socket.gethostname(), ControllerPhase.COLD, 0, time.time()
        )
        self._all: tuple[ControllerStatus, ...] = ()
        self._listed_s = -math.inf
        self._troubled = False
        self._beat_s = time.monotonic()
        self.lease = 0
        self.leaders_clock = LeadersClock(place)
        self._begin()
        self._thread = threading.Thread(target=self._keep, name="etcd-lease", daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        """What this controller is called."""
        return self._entry.name

    @property
    def host(self) -> str:
        """The machine that it runs on."""
        return self._entry.host

    @property
    def pid(self) -> int:
        """Its process."""
        return self._entry.pid

    def beat(self) -> None:
        """Show that the loop runs. Called often, and cheap."""
        self._beat_s = time.monotonic()

    def enter(self, phase: ControllerPhase, term: int = 0) -> None:
        """Say where this controller stands from now on; soon, or when etcd can be reached again."""
        _log.info("controller %s is %s", self._entry.name, phase)
        with self._wake:
            self._entry = msgspec.structs.replace(self._entry, phase=phase, term=term, since_s=time.time())
            self._wake.notify()

    def controllers(self) -> tuple[ControllerStatus, ...]:
        """Return the controllers that lived a moment ago, by name."""
        return self._all

    def close(self) -> None:
        """Leave, with everything that is kept under the lease. Idempotent."""
        with self._wake:
            if self._closed:
                return
            self._closed = True
            self._wake.notify()
        self._thread.join(ENDED_S)
        if self._thread.is_alive():
            return  # it waits for etcd, which ends the lease by itself
        try:
            self._etcd.revoke(self.lease)
        except StoreUnreachable as error:
            _log.warning("this controller's lease ends by itself within %d s: %s", self._ttl_s, error)
        self._etcd.close()

    def _begin(self) -> None:
        """Begin a lease, with the entry under it."""
        lease = self._etcd.grant(self._ttl_s)
        if self._etcd.change([absent(self._key)], [put(self._key, msgspec.json.encode(self._entry), lease)]) is None:
            known = self._etcd.get(self._key)
            if known is None or not self._is_mine(known.value):
                self._etcd.revoke(lease)
                raise ConfigurationError(
                    f"{self._place}: another controller is called {self._entry.name}: choose another --name."
                )
            self._etcd.change([], [put(self._key, msgspec.json.encode(self._entry), lease)])
        self.lease = lease

    def _is_mine(self, value: bytes) -> bool:
        """Say whether this is what an earlier request has left that seemed to have failed."""
        return value in {msgspec.json.encode(entry) for entry in (self._entry, self._said)}

    def _keep(self) -> None:
        tried = self._said  # an entry is written at once, and one that cannot be written is tried in turn
        while True:
            with self._wake:
                self._wake.wait_for(partial(self._is_due, tried), self._ttl_s / RENEWALS)
                if self._closed:
                    return
                tried = self._entry
            try:
                self._look_after(tried)
            except StoreUnreachable as error:
                if not self._troubled:
                    _log.warning("%s", error)
                self._troubled = True
            except ConfigurationError as error:  # only after the lease had ended
                _log.warning("%s", error)
            except msgspec.MsgspecError as error:  # the lease is kept alive before the entries are read
                _log.warning("%s: what another controller says cannot be read: %s", self._place, error)

    def _is_due(self, tried: ControllerStatus) -> bool:
        return self._closed or self._entry is not tried

    def _look_after(self, entry: ControllerStatus) -> None:
        if time.monotonic() - self._beat_s > LOOP_ALIVE_S:
            return
        if not self._etcd.keep_alive(self.lease):
            _log.warning("etcd has let this controller's lease end; it begins another one")
            self._begin()
        if entry is not self._said:
            self._etcd.change([], [put(self._key, msgspec.json.encode(entry), self.lease)])
            self._said = entry
        self.leaders_clock.look_after(self._etcd, self.lease, self._ttl_s)
        if time.monotonic() - self._listed_s >= ENTRIES_S:
            self._all = tuple(_decode(each.value) for each in self._etcd.list(self._place.controllers))
            self._listed_s = time.monotonic()
        if self._troubled:
            _log.warning("etcd can be reached again")
        self._troubled = False
