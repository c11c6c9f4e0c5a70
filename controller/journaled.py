"""The events that a journal records: those of the recovery machine, and those of which the machine knows nothing.

The machine decides by the first alone. By the others the next controller knows what people were told.
"""

from typing import Protocol

import msgspec

from ..protocol.incidents import NoticeKind
from .recovery.events import Action, Event


class Notice(msgspec.Struct, frozen=True):
    """One thing to be told. `id`: the same in each try. `at_s`: when it was decided, wall-clock seconds.

    `subject` says which of several things of the kind it is about: a budget, a node. `text` is for people.
    """

    id: str
    kind: NoticeKind
    subject: str
    text: str
    at_s: float


class ConditionChanged(msgspec.Struct, frozen=True, tag=True):
    """Something that people are told of has begun, and `notice` is to be told; or it is over, or not so (None)."""

    key: str
    notice: Notice | None = None


class NoticeSettled(msgspec.Struct, frozen=True, tag=True):
    """A webhook has got a notice, or no more tries are made."""

    id: str
    webhook: str
    delivered: bool


NoticeEvent = ConditionChanged | NoticeSettled
Journaled = Event | NoticeEvent


class Decides(Protocol):
    """Decides by events, as the recovery machine does."""

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take in an event and return what is to be done."""


def decided(machine: Decides, event: Journaled, at_s: float) -> list[Action]:
    """Return what a machine wants done for an event; of the others it does not hear."""
    return [] if isinstance(event, NoticeEvent) else machine.handle(event, at_s)
