"""The controller's time: one clock for a whole job, across its controllers.

Clocks of machines differ, by hours where one is set wrong, and jump. So no reading of another process's clock is ever
compared or subtracted: a message carries its age, measured by its sender on a clock that does not jump, and the time of
what it tells follows from when the controller took it in. All events in the journal have times of this one clock.
"""

import math
import os
import time
from pathlib import Path

import msgspec

from ..protocol.messages import Envelope, FaultReported, NodeLost, ProcessExited, StepCommitted
from .recovery.events import Event

OLDEST_S = 600.0  # for how long a message is sent again; what says that it is older is not believed
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_TIME_NAMESPACE = Path("/proc/self/ns/time")  # containers can have a monotonic clock of their own


class ClockReading(msgspec.Struct, frozen=True):
    """One reading of a job's clock, with the machine's monotonic clock then. `boot`: which start of which machine."""

    boot: str
    monotonic_s: float
    at_s: float


class HeardClock(msgspec.Struct, frozen=True):
    """A reading of a distant leader's clock, at most `slack_s` before `monotonic_s` of this machine's clock."""

    at_s: float
    monotonic_s: float
    slack_s: float


class Clock:
    """Seconds since 1970 as the machine had them when the job began, counted on from there by its monotonic clock.

    Nothing that is done to the machine's wall clock afterwards moves it. It never runs backwards, not even behind an
    earlier controller of the job.
    """

    def __init__(self) -> None:
        self._base_s = time.time() - time.monotonic()

    @classmethod
    def continuing(cls, last: ClockReading | None, heard: HeardClock | None = None) -> "Clock":
        """Continue the clock of earlier controllers: exactly on the same machine, and else not behind `last`.

        What this one `heard` of the last leader's clock while it stood by keeps a wrong wall clock from moving it.
        """
        made = cls()
        if heard is not None:
            least_s = heard.at_s - heard.monotonic_s
            made._base_s = min(max(made._base_s, least_s), least_s + heard.slack_s)
        if last is None:
            return made
        if last.boot == _boot() and time.monotonic() >= last.monotonic_s:
            made._base_s = last.at_s - last.monotonic_s
        made.raise_to(last.at_s)
        return made

    def now(self) -> float:
        """Return the time, in seconds since 1970."""
        return self._base_s + time.monotonic()

    def raise_to(self, floor_s: float) -> None:
        """Be at least at `floor_s` from now on."""
        self._base_s = max(self._base_s, floor_s - time.monotonic())

    def reading(self) -> ClockReading:
        """Return what a later controller needs to continue this clock."""
        monotonic_s = time.monotonic()
        return ClockReading(_boot(), monotonic_s, self._base_s + monotonic_s)


def _boot() -> str:
    """Return which monotonic clock this process has; empty where that is not known."""
    try:
        boot = _BOOT.read_text().strip()
        return f"{boot} {os.readlink(_TIME_NAMESPACE)}" if _TIME_NAMESPACE.is_symlink() else boot
    except OSError:  # then each controller begins at the wall clock, and not behind the last one
        return ""


def said_at(envelope: Envelope, now: float) -> float:
    """Return when the sender of a message that is taken in at `now` said it first, as far as it can be believed."""
    age_s = envelope.age_s
    return now - min(age_s, OLDEST_S) if math.isfinite(age_s) and age_s > 0 else now


def stamped(event: Event, at_s: float) -> Event:
    """Return an event as one that was said at `at_s`; those without a time are returned as they are."""
    if isinstance(event, FaultReported):
        return FaultReported(msgspec.structs.replace(event.report, at_s=at_s))
    if isinstance(event, ProcessExited | StepCommitted | NodeLost):
        return msgspec.structs.replace(event, at_s=at_s)
    return event
