"""Events that come while all ranks stop at a step boundary, played by hand: few simulated jobs get there.

Each way in which some ranks have stopped already, each event, and each of a few ladders.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

import msgspec

from midstep.controller.recovery.events import Event
from midstep.controller.recovery.state import Phase
from midstep.policies.schema import Budget, Policy, RungPolicy, default_policy
from midstep.protocol.messages import CheckpointSaved, NodeLost, RankQuiesced
from midstep.protocol.types import FaultKind, Rung
from midstep.testing.fake_cluster import FakeCluster, job

from ..unit.test_draining import BOUNDARY, prepare, stopped
from .recording import Happened, Led

LAST = 3  # the rank that stops last
_ONCE = RungPolicy(Rung.RECOVER, budget=Budget(per_job=1))  # spent by the planned change itself
_LADDERS = (
    default_policy().ladder,
    (_ONCE, RungPolicy(Rung.STOP)),
    (_ONCE, RungPolicy(Rung.RESCHEDULE_POD), RungPolicy(Rung.STOP)),
    (_ONCE, RungPolicy(Rung.RESCHEDULE_JOB), RungPolicy(Rung.STOP)),
)
_POLICIES = [
    msgspec.structs.replace(default_policy(), ladder=ladder, save_before_reschedule=saves)
    for ladder in _LADDERS
    for saves in (False, True)
]
_HAVE_STOPPED = ("", "clean", "dirty")  # the ranks before the last one: none of them, or all of them
_EVENTS = (
    "exit",
    "fault",
    "loss of the node",
    "deadlines",
    "stop",
    "dirty stop",
    "checkpoint",
    "failed checkpoint",
    "late checkpoint",
)


class Written(FakeCluster):
    """A cluster that writes down which transitions it has seen."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.seen: set[Happened] = set()

    def feed(self, *events: Event) -> list[Any]:
        bodies: list[Any] = []
        for event in events:
            before = self.machine.phase
            bodies += super().feed(event)
            if self.machine.phase is not before:
                self.seen.add(Led(before, type(event).__name__, self.machine.phase))
        return bodies

    def stops(self, rank: int, how: str, *, sharded: bool) -> RankQuiesced:
        """A rank has stopped; a dirty one has lost its state."""
        event = stopped(self, rank, sharded=sharded)
        if how == "dirty":
            event = msgspec.structs.replace(event, report=msgspec.structs.replace(event.report, clean=False, holds=()))
        return event

    def let_happen(self, what: str, *, sharded: bool) -> None:
        """Play one of the events, or those that belong to it, while the boundary is waited for."""
        events: dict[str, Event] = {
            "exit": self.exited(LAST),
            "fault": self.fault(LAST, FaultKind.EXCEPTION),
            "loss of the node": NodeLost("node1", "gone", self.now),
        }
        if what in events:
            self.feed(events[what])
        while what == "deadlines" and self.machine.phase is Phase.PAUSING:
            self.overdue()
        if what in {"stop", "dirty stop", "checkpoint", "failed checkpoint", "late checkpoint"}:
            self.feed(self.stops(LAST, what.partition(" ")[0], sharded=sharded))
        while what == "late checkpoint" and self.machine.phase is Phase.PAUSING:
            self.overdue()
        for rank in range(4):
            if "checkpoint" in what and self.machine.phase is Phase.PAUSING:
                error = "disk full" if what == "failed checkpoint" else ""
                self.feed(CheckpointSaved(rank, self.machine.generation, BOUNDARY, "/checkpoints/18", error))


def transitions() -> set[Happened]:
    """Return all transitions that are seen."""
    ways = product(_POLICIES, (False, True), (False, True), _HAVE_STOPPED, _EVENTS)
    return set().union(*(_played(*way) for way in ways))


def _played(policy: Policy, creates: bool, sharded: bool, have_stopped: str, event: str) -> Iterator[Happened]:
    cluster = Written(job(spares=1), policy, creates=creates)
    cluster.start()
    prepare(cluster)
    for rank in range(LAST):
        if have_stopped and cluster.machine.phase is Phase.PAUSING:
            cluster.feed(cluster.stops(rank, have_stopped, sharded=sharded))
    cluster.let_happen(event, sharded=sharded)
    yield from cluster.seen
