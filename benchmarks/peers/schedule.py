"""All faults of a trial, by step and rank, so that each tool meets the same ones however quick it is. Pure."""

import random

import msgspec

from .kinds import FAULT_STEP, TOTAL_STEPS, VICTIM, WARM_UP_STEPS, Draw, Fault, Trial

HANGS = (Fault.STOP, Fault.SLEEP)
EDGE_STEPS = WARM_UP_STEPS  # without a fault, at both ends
APART_STEPS = 3  # at least, from one fault to the next one


class Planned(msgspec.Struct, frozen=True):
    """A fault of the rank at `place`, when it comes to this step for the first time."""

    step: int
    place: int
    fault: Fault


class Schedule(msgspec.Struct, frozen=True):
    """The length of a run, and the faults in it."""

    steps: int
    faults: tuple[Planned, ...] = ()

    @property
    def places_that_hang(self) -> int:
        """Return how many ranks stop or sleep in it, sooner or later."""
        return len({planned.place for planned in self.faults if planned.fault in HANGS})


def of(trial: Trial) -> Schedule:
    """Return what a trial has to go through: one fault, those that are drawn, or none."""
    if trial.drawn is not None:
        return draw(trial.drawn, trial.ranks)
    once = () if trial.fault is Fault.NONE else (Planned(FAULT_STEP, VICTIM, trial.fault),)
    return Schedule(TOTAL_STEPS, once)


def draw(drawn: Draw, ranks: int) -> Schedule:
    """Draw steps, ranks and sorts; each sort is there as often as the others, or once more.

    Raises ValueError when so many faults have no room in so few steps, or are of no sort.
    """
    if drawn.faults and not drawn.sorts:
        raise ValueError("there is no sort of faults to draw from: give --faults")
    chance = random.Random(drawn.seed)
    room = drawn.steps - 2 * EDGE_STEPS - max(0, drawn.faults - 1) * (APART_STEPS - 1)
    if room < drawn.faults:
        raise ValueError(f"{drawn.steps} steps have no room for {drawn.faults} faults: give more --steps")
    gaps = sorted(chance.sample(range(room), drawn.faults))
    sorts = [drawn.sorts[number % len(drawn.sorts)] for number in range(drawn.faults)]
    chance.shuffle(sorts)
    return Schedule(
        drawn.steps,
        tuple(
            Planned(EDGE_STEPS + gap + number * (APART_STEPS - 1), chance.randrange(ranks), sort)
            for number, (gap, sort) in enumerate(zip(gaps, sorts, strict=True))
        ),
    )
