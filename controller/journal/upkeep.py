"""Look after the journal of a running job: keep it short between two turns, and wait while it cannot be written."""

import logging

from ...protocol.errors import JournalDamaged, JournalError, JournalSuperseded
from ..learned import Learned
from .journal import Journal

AGAIN_S = 60.0  # after it has failed

_log = logging.getLogger(__name__)


class Upkeep:
    """Has the journal compacted. That it cannot be done at present is no reason not to continue."""

    def __init__(self, journal: Journal, learned: Learned) -> None:
        self._journal = journal
        self._learned = learned
        self._not_before_s = 0.0

    def step(self, now: float) -> None:
        """Do a little, if something is to be done. Only when all that was learned is in the journal.

        Raises JournalDamaged, JournalSuperseded.
        """
        if now < self._not_before_s:
            return
        try:
            self._journal.compact(self._learned.snapshot, quiet=self._learned.machine.is_quiet)
        except (JournalDamaged, JournalSuperseded):
            raise
        except JournalError as error:
            self._not_before_s = now + AGAIN_S
            _log.warning("the journal grows, and the next controller has more to read: %s", error)

    def conclude(self) -> None:
        """The job is over: nothing is appended any more. A failure is logged, and leaves more than reports need."""
        try:
            self._journal.conclude(self._learned.snapshot)
        except JournalError as error:
            _log.warning("the journal stays as it is: %s", error)


RETRY_FIRST_S = 0.25
RETRY_LONGEST_S = 5.0
REMIND_S = 30.0


class JournalTrouble:
    """Knows whether the journal could be written last time, and when to try again. Times are the controller's."""

    def __init__(self, patience_s: float) -> None:
        """After `patience_s` of trouble, `suffer` raises."""
        self._patience_s = patience_s
        self._since_s = 0.0
        self._delay_s = 0.0
        self._reminded_s = 0.0
        self.error: JournalError | None = None
        self.retry_s = 0.0

    @property
    def next_try_s(self) -> float | None:
        """When to try again; None while there is no trouble."""
        return None if self.error is None else self.retry_s

    def blocks(self, now: float) -> bool:
        """Return whether it is too early to try again."""
        return self.error is not None and now < self.retry_s

    def suffer(self, error: JournalError, now: float, waiting: int) -> None:
        """Writing has failed, and `waiting` events wait. Raises the error when that has gone on for too long."""
        if self.error is None:
            self._since_s, self._delay_s, self._reminded_s = now, RETRY_FIRST_S, now - 2 * REMIND_S
        elif now - self._since_s > self._patience_s:
            raise error
        self.error = error
        self.retry_s = now + self._delay_s
        self._delay_s = min(2 * self._delay_s, RETRY_LONGEST_S)
        if now - self._reminded_s > REMIND_S:
            self._reminded_s = now
            _log.error("%d events wait, nothing is decided meanwhile: %s", waiting, error)

    def end(self, now: float) -> None:
        """Writing has succeeded."""
        if self.error is not None:
            _log.warning("the journal can be written again, after %.1f s", now - self._since_s)
            self.error = None
