"""The election by a Lease: a record that one process at a time is named in, and names itself in again and again.

The Lease is of another system (`LeaseStore`), which takes a change only from one that has seen the last one. How long
the leader was silent is measured by those that wait, each with its own monotonic clock. Nothing rests on that: the
journal takes nothing of an earlier term. So a leader that cannot reach the Lease continues, for as long as no other
controller has begun a term.
"""

import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Protocol

from ...protocol.errors import JournalError, JournalSuperseded
from ...protocol.types import HeldLease
from .election import Silence, WatchedElection

RENEWALS = 4  # in the time of a lease
LOOP_ALIVE_S = 1.0  # after its last beat the loop counts as running for so long
ENDED_S = 5.0  # for the thread to end: some requests

_log = logging.getLogger(__name__)


class LeaseStore(Protocol):
    """Where the Lease is. For one thread at a time; methods raise StoreUnreachable, each within a second or two."""

    def read(self) -> HeldLease:
        """Return the Lease. Raises JournalError when there is none, or this process may not read it."""

    def write(self, holder: str, duration_s: int, before: HeldLease) -> HeldLease | None:
        """Name a holder in it, if it is as it was `before`, and return it; None: it was changed meanwhile.

        Raises JournalError when this process may not.
        """

    def close(self) -> None:
        """Close the connections. Idempotent."""


class LeaseElection(WatchedElection):
    """Stands for the lead with a Lease. `name`: of this controller, which no other one has at the same time.

    The leadership closes the store.
    """

    def __init__(
        self,
        connect: Callable[[], LeaseStore],
        name: str,
        *,
        lease_s: float,
        admitted: Callable[[], bool] = lambda: True,
    ) -> None:
        super().__init__(lambda: _Lease(connect(), name, math.ceil(lease_s)), admitted)


class _Lease:
    """The Lease, as one controller that stands for the lead sees it."""

    def __init__(self, store: LeaseStore, name: str, duration_s: int) -> None:
        self._store: LeaseStore | None = store
        self._named = str(store)
        self._name = name
        self._duration_s = duration_s
        self._held: HeldLease | None = None
        self._silence = Silence()

    def take(self, admitted: Callable[[], bool]) -> "LeaseLeadership | None":
        """Take the lead; see `LeadStore`."""
        assert self._store is not None
        self._held = None
        held = self._held = self._store.read()
        silent = self._silence.lasts_s(held.version, time.monotonic()) >= max(held.duration_s, 1)
        free = held.holder in {"", self._name}
        if not (free or silent) or not admitted():
            return None
        if not free:
            _log.warning("the leader (%s) has shown no sign of life for %d s", held.holder, held.duration_s)
        won = self._store.write(self._name, self._duration_s, held)
        if won is None:
            return None
        store, self._store = self._store, None
        return LeaseLeadership(store, self._name, self._duration_s, won)

    def forget(self) -> None:
        """Measure the silence of the leader from now on; see `LeadStore`."""
        self._silence.forget()

    def rival(self) -> str:
        """Say who leads; see `LeadStore`."""
        holder = self._held.holder if self._held is not None and self._held.holder else "until just now"
        return (
            f"{self._named}: another controller is active ({holder}). One job has one active controller: "
            "end that one, or start this one with --standby."
        )

    def look_s(self) -> float:
        """Return how long to wait until the next look."""
        return self._duration_s / RENEWALS

    def close(self) -> None:
        """Close the store, unless the leadership has it. Idempotent."""
        if self._store is not None:
            self._store.close()


class LeaseLeadership:
    """The lead, for as long as a thread renews the Lease; and that only while the controller's loop beats."""

    def __init__(self, store: LeaseStore, name: str, duration_s: int, held: HeldLease) -> None:
        """Not for callers: `LeaseElection.stand`."""
        self._store = store
        self._name = name
        self._duration_s = duration_s
        self._held = held
        self._lost_to = ""
        self._troubled = False
        self._beat_s = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)
        self._thread.start()

    def begin(self, term: int) -> None:
        """Nothing is to be done: agents find the leader by asking each controller."""

    def beat(self) -> None:
        """Show that the loop runs."""
        self._beat_s = time.monotonic()

    def require(self) -> None:
        """Raise JournalSuperseded when another controller is named in the Lease."""
        if self._lost_to:
            raise JournalSuperseded(
                f"{self._store}: {self._lost_to} leads the job by now. This controller is not in service any more, and "
                "must leave."
            )

    def overthrow(self) -> bool:
        """The journal needs no end of the last leader."""
        return False

    def close(self) -> None:
        """Let the next one lead at once. Idempotent."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._thread.join(ENDED_S)
        if self._thread.is_alive():
            return  # it waits for the API, and the lease ends by itself
        try:
            if not self._lost_to:
                self._store.write("", self._duration_s, self._held)
        except JournalError as error:
            _log.warning("this controller's lease ends by itself within %d s: %s", self._duration_s, error)
        self._store.close()

    def _keep(self) -> None:
        while not self._ended.wait(self._duration_s / RENEWALS):
            if time.monotonic() - self._beat_s > LOOP_ALIVE_S or self._lost_to:
                continue
            try:
                self._renew()
            except JournalError as error:
                if not self._troubled:
                    _log.warning(
                        "the lease is not renewed, and this controller leads until another one does: %s", error
                    )
                self._troubled = True
            else:
                if self._troubled:
                    _log.warning("the lease can be renewed again")
                self._troubled = False

    def _renew(self) -> None:
        renewed = self._store.write(self._name, self._duration_s, self._held)
        if renewed is None:
            known = self._store.read()
            if known.holder == self._name:  # a request that seemed to have failed, or somebody has labelled it
                renewed = self._store.write(self._name, self._duration_s, known) or known
            elif known.holder:
                self._lost_to = known.holder
                return
            else:
                renewed = self._store.write(self._name, self._duration_s, known)
        self._held = renewed or self._held
