"""When a reported event happened, on the controller's clock.

Clocks of machines differ, by hours where one is set wrong, and jump. So no reading of another process's clock is ever
compared or subtracted: a message carries its age, measured by its sender on a clock that does not jump, and the time of
what it tells follows from when the controller took it in. All events in the journal have times of this one clock.
"""

import math

import msgspec

from ..protocol.messages import Envelope, FaultReported, NodeLost, ProcessExited, StepCommitted
from .recovery.events import Event

OLDEST_S = 600.0  # for how long a message is sent again; what says that it is older is not believed


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
