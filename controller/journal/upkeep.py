"""Keeps the journal of a running job short, between two turns of its controller."""

import logging

from ...protocol.errors import JournalDamaged, JournalError, JournalSuperseded
from ..learned import Learned
from .store import JournalStore

AGAIN_S = 60.0  # after it has failed

_log = logging.getLogger(__name__)


class Upkeep:
    """Has the journal compacted. That it cannot be done at present is no reason not to continue."""

    def __init__(self, journal: JournalStore, learned: Learned) -> None:
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
