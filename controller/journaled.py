"""The events that a journal records: those of the recovery machine, and those of which the machine knows nothing.

The machine decides by the first alone. By the others the next controller knows what people were told.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, groupby
from typing import Protocol, TypeVar

import msgspec

from ..protocol.incidents import NoticeKind
from ..protocol.messages import (
    FaultReported,
    NodeReport,
    ProcessesStarted,
    ProcessStarted,
    RankJoined,
    RankQuiesced,
    RankReady,
    RanksReported,
    StepCommitted,
)
from ..protocol.types import FaultKind
from .recovery.events import Action, Event

# Answers that the machine only notes: what follows from many of them follows from how the ranks stand after the last.
_ANSWERS = (ProcessStarted, RankJoined, RankQuiesced, RankReady, StepCommitted)

_Taken = TypeVar("_Taken")


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
Journaled = Event | NodeReport | NoticeEvent


class Decides(Protocol):
    """Decides by events, as the recovery machine does."""

    def handle(self, event: Event, now: float, *more: Event) -> list[Action]:
        """Take in an event, and more of its kind that came with it; return what is to be done."""


def handled_with(event: object) -> type | None:
    """Return the kind of events that an event may be handled with at once; None: it is handled by itself.

    A collective that has failed is only noted as well: whose fault that is, nothing but time or other events say.
    """
    if isinstance(event, FaultReported):
        return FaultReported if event.report.kind is FaultKind.COMMUNICATION else None
    return type(event) if isinstance(event, _ANSWERS) else None


def each_event(journaled: Journaled) -> tuple[Event | NoticeEvent, ...]:
    """Return the events of one that was journaled: a node may have spoken of several of its processes."""
    if isinstance(journaled, RanksReported):
        return tuple(report.word for report in journaled.reports)
    return journaled.started if isinstance(journaled, ProcessesStarted) else (journaled,)


def together(journaled: Iterable[Journaled]) -> Iterator[Sequence[Event | NoticeEvent]]:
    """Yield what is handled at once of what was journaled at one time: reports of one kind, and all else by itself.

    It does not matter who has reported: what a thousand nodes have said by now is handled as what one has said.
    """
    for kind, events in groupby(chain.from_iterable(map(each_event, journaled)), handled_with):
        if kind is not None:
            yield tuple(events)
        else:
            yield from ((event,) for event in events)


def in_runs(taken: Iterable[_Taken], event_of: Callable[[_Taken], Journaled]) -> Iterator[list[_Taken]]:
    """Yield messages of nodes that say no more than what is noted of their ranks as long as they come, all else alone.

    Those of a run are taken in, acknowledged and acted on together.
    """
    for is_run, group in groupby(taken, lambda each: isinstance(event_of(each), NodeReport)):
        if is_run:
            yield list(group)
        else:
            yield from ([each] for each in group)


def handled(machine: Decides, events: Sequence[Event | NoticeEvent], at_s: float) -> list[Action]:
    """Return what a machine wants done for what is handled at once; of what people are told it does not hear."""
    event, *more = [each for each in events if not isinstance(each, NoticeEvent)] or (None,)
    return [] if event is None else machine.handle(event, at_s, *more)


def decided(machine: Decides, journaled: Journaled, at_s: float) -> list[Action]:
    """Return what a machine wants done for all that was journaled at once."""
    return [action for events in together((journaled,)) for action in handled(machine, events, at_s)]
