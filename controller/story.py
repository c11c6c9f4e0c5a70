"""The chain of causes of a job: each event of its journal, with what the machine did about it.

An event's number is its place in the journal; what ranks of a node have reported together has one place. An action has
no other cause than the event that the machine was given when it asked for it, so that playing the journal tells what
every command, decision and change of phase came from.
"""

from collections.abc import Iterable, Iterator

import msgspec

from .journaled import Journaled, NoticeEvent, decided, each_event
from .recovery.events import Action, Event
from .recovery.machine import RecoveryMachine
from .recovery.state import Phase


class StoryEntry(msgspec.Struct, frozen=True):
    """The outcome of one event. `at_s`: wall-clock seconds. `incidents`: the numbers of those that it is a part of."""

    number: int
    at_s: float
    event: Event | NoticeEvent
    before: Phase
    after: Phase
    incidents: frozenset[int]
    actions: tuple[Action, ...]
    ignored: str = ""  # why it changed nothing


def turns(machine: RecoveryMachine, events: Iterable[tuple[Journaled, float]], first: int = 1) -> Iterator[StoryEntry]:
    """Yield what each event led to, in order. `machine`: one that stands in front of event number `first`."""
    for number, (journaled, at_s) in enumerate(events, start=first):
        for event in each_event(journaled):
            yield _turn(machine, number, event, at_s)


def _turn(machine: RecoveryMachine, number: int, event: Event | NoticeEvent, at_s: float) -> StoryEntry:
    before, opened, counted = machine.phase, _open(machine), dict(machine.state.history.ignored)
    actions = tuple(decided(machine, event, at_s))
    ignored = (why for why, count in machine.state.history.ignored.items() if count > counted.get(why, 0))
    incidents = frozenset({*opened, *_open(machine)})
    return StoryEntry(number, at_s, event, before, machine.phase, incidents, actions, next(ignored, ""))


def _open(machine: RecoveryMachine) -> tuple[int, ...]:
    incident = machine.state.history.open
    return () if incident is None else (incident.number,)
