"""Many seeds at once, on all cores: how many incidents they held, what of the machine they reached, what they broke."""

import gc
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field, fields
from itertools import islice, pairwise

from ...controller.recovery.state import Phase
from ...protocol.incidents import Outcome
from ..invariants import Invariant, InvariantBroken
from .world import SimulatedWorld

CHUNK = 20  # seeds that a worker does in one go
SEEDS_PER_COLLECTION = 20

Reached = tuple[Phase, str, Phase]  # in this phase, an event of this type led to that phase


@dataclass
class Tally:
    """The results of some seeds.

    `incidents` are those in which a rung was taken; `dismissed` were suspicions that were dropped. `broken` holds
    one entry for each seed that broke an invariant. `shrunk` and `grown` are jobs whose world got smaller, and larger.
    """

    seeds: int = 0
    incidents: int = 0
    dismissed: int = 0
    shrunk: int = 0
    grown: int = 0
    reached: Counter[Reached] = field(default_factory=Counter)
    broken: list[tuple[int, Invariant, str]] = field(default_factory=list)

    def add(self, other: "Tally") -> None:
        """Take in what other seeds came to."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))

    def count(self, world: SimulatedWorld) -> None:
        """Take in one job, over or broken off."""
        self.seeds += 1
        steps = list(pairwise(world.controller_watch.scaling.sizes))
        self.shrunk += any(before > after for before, after in steps)
        self.grown += any(before < after for before, after in steps)
        self.reached += world.controller_watch.seen
        for incident in world.machine.incidents:
            self.incidents += bool(incident.decisions)
            self.dismissed += incident.outcome is Outcome.DISMISSED


def run_seeds(seeds: Iterable[int], focus: Phase | None = None) -> Tally:
    """Run seeds one after the other, here. What one of them breaks does not keep the others from running.

    With a `focus` most faults wait for that phase of the job.
    """
    tally = Tally()
    gc.disable()  # a job is full of cycles, and short: what it leaves is collected between two of them
    for number, seed in enumerate(seeds):
        if number % SEEDS_PER_COLLECTION == 0:
            gc.collect()
        world = SimulatedWorld(seed, focus=focus)
        try:
            world.run()
        except InvariantBroken as broken:
            tally.broken.append((seed, broken.invariant, broken.what))
        tally.count(world)
    gc.enable()
    return tally


def run_campaign(
    seeds: Iterable[int],
    *,
    workers: int | None = None,
    incidents: int | None = None,
    heard: Callable[[Tally], None] = lambda tally: None,
) -> Tally:
    """Run seeds on `workers` cores (None: all), up to `incidents` of them, or until the seeds are used up.

    Stops at the first chunk that breaks something. `heard` is called with what has been reached so far.
    """
    tally, waiting = Tally(), iter(seeds)
    workers = workers or os.cpu_count() or 1
    with ProcessPoolExecutor(workers, initializer=gc.freeze) as pool:
        running = {pool.submit(run_seeds, chunk) for chunk in islice(_chunks(waiting), 2 * workers)}
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            _add_all(tally, done)
            heard(tally)
            enough = incidents is not None and tally.incidents >= incidents
            if not (tally.broken or enough):
                running |= {pool.submit(run_seeds, chunk) for chunk in islice(_chunks(waiting), len(done))}
    return tally


def _add_all(tally: Tally, done: Iterable[Future[Tally]]) -> None:
    for each in done:
        tally.add(each.result())


def _chunks(seeds: Iterator[int]) -> Iterator[list[int]]:
    while chunk := list(islice(seeds, CHUNK)):
        yield chunk
