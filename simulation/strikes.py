"""Faults that wait for their moment."""

import random
from collections import defaultdict, deque
from typing import TYPE_CHECKING

from ..controller.recovery.state import Phase

if TYPE_CHECKING:
    from .faults import Deed
    from .world import World

PATIENCE_S = (0.0, 0.0, 0.003, 0.1, 0.6)  # from entering a phase to the fault
TRAINING_S = 0.4  # at most, from one fault to the next where the job runs meanwhile
OVERLAPPING = 0.1  # probability that the next fault does not wait until the job runs again


class Strikes:
    """Holds what is going to happen, and lets it happen. Nothing is done to a job that is over."""

    def __init__(self, world: "World", chance: random.Random) -> None:
        self._world, self._chance = world, chance
        self._by_events: dict[int, list[Deed]] = defaultdict(list)
        self._by_place: dict[str, deque[Deed]] = defaultdict(deque)
        self._by_phase: dict[Phase, deque[Deed]] = defaultdict(deque)
        self._well: deque[Deed] = deque()
        self._next_is_due = False

    def after(self, delay_s: float, deed: "Deed") -> None:
        """Do it after a while."""
        self._world.timeline.after(delay_s, lambda: self._strike(deed))

    def after_events(self, events: int, deed: "Deed") -> None:
        """Do it when the controller has handled so many events."""
        self._by_events[events].append(deed)

    def at_place(self, place: str, deed: "Deed") -> None:
        """Do it when some process has reached a place on its way."""
        self._by_place[place].append(deed)

    def in_phase(self, phase: Phase, deed: "Deed") -> None:
        """Do it when the job has entered a phase."""
        self._by_phase[phase].append(deed)

    def when_well(self, deed: "Deed") -> None:
        """Do it while the job runs, one after the other; sometimes in the recovery from the one before."""
        self._well.append(deed)

    # --- moments ------------------------------------------------------------------------------------------------

    def handled(self, events: int) -> None:
        """The controller has handled its so-and-so-many-th event."""
        for deed in self._by_events.pop(events, ()):
            self.after(self._chance.random() * 0.01, deed)

    def reached(self, place: str) -> None:
        """A process has reached a place on its way."""
        waiting = self._by_place.get(place)
        if waiting and self._chance.random() < 0.1:
            self.after(self._chance.choice((0.0, 0.003)), waiting.popleft())

    def entered(self, phase: Phase) -> None:
        """The job has entered a phase."""
        if phase is Phase.RUNNING and not self._next_is_due:
            self._plan_next()
        waiting = self._by_phase.get(phase)
        while waiting and self._chance.random() < 0.7:
            self.after(self._chance.choice(PATIENCE_S), waiting.popleft())

    def _plan_next(self) -> None:
        if self._well:
            self._next_is_due = True
            self._world.timeline.after(self._chance.random() * TRAINING_S, self._next)

    def _next(self) -> None:
        self._next_is_due = False
        self._strike(self._well.popleft())
        if self._world.machine.phase is Phase.RUNNING or self._chance.random() < OVERLAPPING:
            self._plan_next()

    def _strike(self, deed: "Deed") -> None:
        world = self._world
        if world.controller.finish is None:
            world.log(f"--- {deed(world, self._chance)}")
