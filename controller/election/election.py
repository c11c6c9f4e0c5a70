"""An election: one controller leads, others stand by, and a leader can lose its lead.

Who leads is one question, and what is durable is another (the journal). A leader that does not know yet that it was
deposed can do no harm: the journal takes nothing of an earlier term, and agents refuse its orders.

Standing by is the same everywhere, and is here. Where the lead is kept is a `LeadStore`: a locked file on one host, a
Lease of Kubernetes, or a key in etcd.
"""

import contextlib
import logging
import math
import time
from collections.abc import Callable
from typing import Protocol

from ...protocol.errors import JournalError, StoreUnreachable

BEATS_SPACING_S = 0.1
_NOTHING = object()

_log = logging.getLogger(__name__)


class Leadership(Protocol):
    """The lead, as a controller holds it."""

    def begin(self, term: int) -> None:
        """Be found as the leader of a term. Called while the journal begins it, and lets no other controller write.

        Raises ElectionLost: another one has deposed the same leader before.
        """

    def beat(self) -> None:
        """Show that this process lives. Called often, and cheap; never raises."""

    def require(self) -> None:
        """Raise JournalSuperseded when another controller leads by now."""

    def overthrow(self) -> bool:
        """End the process of the leader that was deposed, which holds up the journal; False where that cannot be."""

    def close(self) -> None:
        """Let the next one lead. Idempotent."""


class Election(Protocol):
    """Where a controller stands for the lead."""

    def stand(self, wait_s: float | None, beat: Callable[[], None]) -> Leadership:
        """Wait until this controller may lead: at most `wait_s`; None: for as long as it takes.

        `beat` is called again and again meanwhile. Raises JournalError: another one leads after `wait_s`.
        """


class LeadStore(Protocol):
    """Where the lead is kept, as one controller that stands for it sees it. For one thread."""

    def take(self, admitted: Callable[[], bool]) -> Leadership | None:
        """Take the lead if it is free, or if its holder has shown no sign of life for a lease; None: not yet.

        `admitted` says whether this controller may take a lead that is free. Raises JournalError, and StoreUnreachable
        for what may succeed later.
        """

    def forget(self) -> None:
        """Give the holder a lease's time to show that it still lives: what happened meanwhile is not known."""

    def rival(self) -> str:
        """Say who leads, and what to do about it."""

    def look_s(self) -> float:
        """Return how long to wait until the next look."""

    def close(self) -> None:
        """Close what is open, unless a leadership has it. Idempotent."""


class WatchedElection:
    """Stands for the lead by looking at a store again and again. `admitted`: as in `LeadStore.take`."""

    def __init__(self, connect: Callable[[], LeadStore], admitted: Callable[[], bool] = lambda: True) -> None:
        self._connect = connect
        self._admitted = admitted

    def stand(self, wait_s: float | None, beat: Callable[[], None]) -> Leadership:
        """Wait for the lead; see `Election`. The error names the one that has it."""
        give_up_s = math.inf if wait_s is None else time.monotonic() + wait_s
        told = False
        with contextlib.closing(self._connect()) as store:
            while True:
                failure: JournalError | None = None
                try:
                    won = store.take(self._admitted)
                except StoreUnreachable as error:
                    won, failure = None, error
                    store.forget()
                    if not told:
                        told = True
                        _log.warning("%s", error)
                if won is not None:
                    return won
                if time.monotonic() >= give_up_s:
                    raise failure or JournalError(store.rival())
                _pause(store.look_s(), beat)


class Silence:
    """How long a leader has shown no sign of life, by the monotonic clock of the one that watches it. Pure."""

    def __init__(self, own_pause_s: float = math.inf) -> None:
        """`own_pause_s`: after a longer time between two looks this process itself stood still."""
        self._own_pause_s = own_pause_s
        self._sign: object = _NOTHING
        self._since_s = self._looked_s = -math.inf

    def lasts_s(self, sign: object, now: float) -> float:
        """Return for how long `sign` has been as it is."""
        if sign != self._sign or now - self._looked_s > self._own_pause_s:
            self._sign, self._since_s = sign, now
        self._looked_s = now
        return now - self._since_s

    def forget(self) -> None:
        """Begin again."""
        self._sign = _NOTHING


def _pause(wait_s: float, beat: Callable[[], None]) -> None:
    """Wait until the next look, and beat often. No store has a wait for a change with a deadline."""
    until_s = time.monotonic() + wait_s
    while True:
        beat()
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            return
        time.sleep(min(left_s, BEATS_SPACING_S))
