"""Carry out the wishes of admins for the lead: another controller takes it, or none does for a while.

Neither is an event of the job: the journal has nothing of it, and the machine decides as if the leader had ended.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from ..protocol.errors import JournalError, SteppedDown
from ..protocol.incidents import ControllerPhase, ControllerStatus
from .election.succession import Succession
from .endpoints.control_requests import Accepted, PauseFailoverRequest, PromoteRequest, Refused, Reply

SETTLE_S = 0.2  # for the answer to be on its way before this controller's sockets close

_log = logging.getLogger(__name__)


class ControllerEntry(Protocol):
    """This controller in the list of all that a job has."""

    @property
    def name(self) -> str:
        """The name of this controller."""

    def enter(self, phase: ControllerPhase, term: int = 0) -> None:
        """Say where it stands from now on."""

    def close(self) -> None:
        """Strike it out. Idempotent."""


class Switchover:
    """Answers requests about the lead. Without a `succession` there is no other controller that could have it."""

    def __init__(
        self,
        entry: ControllerEntry | None = None,
        controllers: Callable[[], Sequence[ControllerStatus]] = tuple,
        succession: Succession | None = None,
    ) -> None:
        """`entry`: of this controller. `controllers` says which there are."""
        self._entry = entry
        self._name = "" if entry is None else entry.name
        self._controllers = controllers
        self._succession = succession
        self._successor = ""
        self._leaves_s = 0.0
        self._paused_until_s = 0.0 if succession is None else _paused_until_s(succession)

    @property
    def name(self) -> str:
        """The name of this controller, for people."""
        return self._name or "of this job"

    def serve(self, term: int) -> None:
        """Enter this controller as the one that leads: the journal has been read."""
        if self._entry is not None:
            self._entry.enter(ControllerPhase.HOT, term)

    def standing(self) -> tuple[tuple[ControllerStatus, ...], float]:
        """Return the controllers there are, and when a pause of the failover ends, in wall-clock seconds; 0: none."""
        return tuple(self._controllers()), self._paused_until_s if time.time() < self._paused_until_s else 0.0

    def answer(self, request: PromoteRequest | PauseFailoverRequest) -> Reply:
        """Do what is asked, or say why not. Blocks for as long as the election's store takes."""
        if self._succession is None:
            return Refused("this controller works on a copy of the journal, to end the job, and no other one can lead")
        try:
            if isinstance(request, PromoteRequest):
                return self._promote(self._succession, request.controller)
            return self._pause(self._succession, request.for_s)
        except JournalError as error:
            return Refused(str(error))

    def require_unpromoted(self) -> None:
        """Raise SteppedDown when another controller was promoted, and its admin has been answered."""
        if self._successor and time.monotonic() >= self._leaves_s:
            raise SteppedDown(f"controller {self._successor} was promoted: {self._name} stands by from now on.")

    def _promote(self, succession: Succession, name: str) -> Reply:
        known = {each.name: each for each in self._controllers()}
        if name == self._name:
            return Refused(f"controller {name} leads already")
        if name not in known:
            others = ", ".join(sorted(set(known) - {self._name}))
            return Refused(f"there is no controller {name!r}; those that stand by: {others or 'none'}")
        if known[name].phase is not ControllerPhase.COLD:
            return Refused(f"controller {name} does not stand by: it is {known[name].phase}")
        succession.prefer(name)
        _log.warning("an admin promotes controller %s", name)
        self._successor, self._leaves_s = name, time.monotonic() + SETTLE_S
        return Accepted(f"{self._name} hands the lead over to {name}")

    def _pause(self, succession: Succession, for_s: int) -> Reply:
        succession.pause(self._name, for_s)
        self._paused_until_s = succession.paused_until_s() if for_s else 0.0
        _log.warning("an admin %s", f"pauses the failover for {for_s} s" if for_s else "ends the pause of the failover")
        if not for_s:
            return Accepted("a standby takes over again when the leader ends or shows no sign of life")
        return Accepted(f"for {for_s} s no standby takes over from {self._name}; recovery continues as ever")


def _paused_until_s(succession: Succession) -> float:
    try:
        return succession.paused_until_s()
    except JournalError as error:
        _log.warning("whether the failover is paused is not known: %s", error)
        return 0.0
