"""What goes wrong, and when: drawn from the seed.

By the clock, at a place on a process's way, in a phase of the job, by how much the controller has seen, or each time
that all runs well again. New kinds of faults are functions in the modules beside this one, and a line in `FAULTS`.
"""

import random
from collections import defaultdict, deque
from typing import TYPE_CHECKING

from ...controller.recovery.state import Phase
from . import cluster_faults as cluster
from . import process_faults as processes
from .process_faults import Inject, OneShot

if TYPE_CHECKING:
    from .world import SimulatedWorld

FAULTS: tuple[tuple[int, Inject], ...] = (
    (6, processes.kill_rank),
    (3, processes.kill_newcomer),
    (3, processes.stop_rank),
    (2, processes.hang_rank),
    (1, processes.slow_down_rank),
    (3, processes.raise_in_rank),
    (3, processes.fail_mendably),
    (2, processes.lose_memory_and_report),
    (1, processes.tear_update),
    (4, processes.send_byzantine),
    (3, processes.cut_link),
    (1, processes.freeze_collectives),
    (2, processes.fail_link_ups),
    (1, processes.fail_next(OneShot.TRANSFER)),
    (1, processes.fail_next(OneShot.START)),
    (1, processes.fail_next(OneShot.SAVE)),
    (3, cluster.kill_node),
    (2, cluster.leave),
    (3, cluster.cut_off_node),
    (2, cluster.isolate_controller),
    (1, cluster.storm),
    (2, cluster.fail_store),
    (1, cluster.add_node),
    (1, cluster.hear_node),
    (3, cluster.device_fault),
    (1, cluster.node_fault),
    (3, cluster.unwell_node),
    (2, cluster.take_node_away),
    (1, cluster.exhaust_platform),
    (1, cluster.refuse_again),
    (5, cluster.crash_controller),
    (2, cluster.freeze_controller),
    (1, cluster.request_stop),
    (1, cluster.operator_injects),
    (1, cluster.operator_kills_node),
)
_WEIGHTS = [weight for weight, _ in FAULTS]
_FAULTS = [fault for _, fault in FAULTS]

PLACES = ("ready", "updating", "quiesced", "joined", "rebuild", "repair", "rollback")
PHASES = tuple(phase for phase in Phase if phase is not Phase.ENDED)
FOCUSED = 12  # faults of a run that is about one phase
DAMAGED = 0.15  # share of the worlds whose checkpoints are damaged

PATIENCE_S = (0.0, 0.0, 0.003, 0.1, 0.6)  # from entering a phase to the fault
TRAINING_S = 0.4  # at most, from one fault to the next where the job runs meanwhile
OVERLAPPING = 0.1  # probability that the next fault does not wait until the job runs again


class Injector:
    """Holds what is going to happen, and lets it happen. Nothing is done to a job that is over.

    Faults wait for a number of events that the controller has handled, a place that a process reaches on its way, or a
    phase that the job enters; or for the job to run well.
    """

    def __init__(self, world: "SimulatedWorld", chance: random.Random) -> None:
        self._world, self._chance = world, chance
        self._waiting: defaultdict[int | str | Phase, deque[Inject]] = defaultdict(deque)
        self._well: deque[Inject] = deque()
        self._next_is_due = False

    def after(self, delay_s: float, fault: Inject) -> None:
        """Do it after a while."""
        self._world.timeline.after(delay_s, lambda: self._inject(fault))

    def at(self, what: int | str | Phase, fault: Inject) -> None:
        """Do it when so many events have been handled, when a place has been reached, or when a phase is entered."""
        self._waiting[what].append(fault)

    def when_well(self, fault: Inject) -> None:
        """Do it while the job runs, one after the other; sometimes in the recovery from the one before."""
        self._well.append(fault)

    def handled(self, events: int) -> None:
        """The controller has handled its so-and-so-many-th event."""
        for fault in self._waiting.pop(events, ()):
            self.after(self._chance.random() * 0.01, fault)

    def reached(self, place: str) -> None:
        """A process has reached a place on its way."""
        waiting = self._waiting.get(place)
        if waiting and self._chance.random() < 0.1:
            self.after(self._chance.choice((0.0, 0.003)), waiting.popleft())

    def entered(self, phase: Phase) -> None:
        """The job has entered a phase."""
        if phase is Phase.RUNNING and not self._next_is_due:
            self._plan_next()
        waiting = self._waiting.get(phase)
        while waiting and self._chance.random() < 0.7:
            self.after(self._chance.choice(PATIENCE_S), waiting.popleft())

    def _plan_next(self) -> None:
        if self._well:
            self._next_is_due = True
            self._world.timeline.after(self._chance.random() * TRAINING_S, self._next)

    def _next(self) -> None:
        self._next_is_due = False
        self._inject(self._well.popleft())
        if self._world.machine.phase is Phase.RUNNING or self._chance.random() < OVERLAPPING:
            self._plan_next()

    def _inject(self, fault: Inject) -> None:
        world = self._world
        if world.controller.finish is None:
            world.log(f"--- {fault(world, self._chance)}")


def plan(world: "SimulatedWorld", chance: random.Random, focus: Phase | None = None) -> None:
    """Draw the faults of one run: the first somewhere in it, the next at any distance, down to nothing.

    With a `focus` most of them wait for that phase of the job.
    """
    delay_s, injector = chance.uniform(0.0, 6.0), world.injector
    _plan_what_leads_to(world, chance, focus)
    for _ in range(FOCUSED if focus else chance.choice((1, 4, 9, 14, 20, 30, 40))):
        fault = chance.choices(_FAULTS, _WEIGHTS)[0]
        way = chance.random()
        if focus is not None and way < 0.8:
            injector.at(focus, chance.choice(_FAULTS))
        elif way < 0.1:
            injector.at(chance.choice(PLACES), fault)
        elif way < 0.25:
            injector.at(chance.choice(PHASES), fault)
        elif way < 0.75:
            injector.when_well(fault)
        elif way < 0.9:
            injector.after(delay_s, fault)
        else:
            injector.at(chance.randrange(1, 150), fault)
        delay_s += chance.choice((0.0, 0.01, 0.1, 0.5, 2.0, 20.0)) * chance.random()
    if focus is Phase.SAVING and world.policy.scale.min_nodes is None:  # else it never saves
        injector.when_well(cluster.request_stop)
    _plan_damage(world)


def _plan_what_leads_to(world: "SimulatedWorld", chance: random.Random, focus: Phase | None) -> None:
    """Draw the faults without which the job hardly gets into the phase, or to another size."""
    for _ in range(3 if focus in {Phase.PAUSING, Phase.SUSPECTING} else 0):
        world.injector.when_well(cluster.unwell_node)
        if focus is Phase.SUSPECTING:  # in the middle of a drain, too
            world.injector.when_well(processes.cut_link)
    if world.policy.scale.min_nodes is not None:
        for fault in (cluster.kill_node, cluster.add_node) * chance.choice((1, 1, 2)):
            world.injector.when_well(fault)


def _plan_damage(world: "SimulatedWorld") -> None:
    """Draw what becomes of the checkpoints, and a reason to need them soon after.

    By a generator of its own, so that the faults of a seed are the same with it and without.
    """
    chance = random.Random(f"{world.seed} storage")
    if chance.random() >= DAMAGED:
        return
    damage = chance.choice((cluster.damage_newest, cluster.damage_all, cluster.damage_all, cluster.hide_directory))
    for _ in range(chance.choice((2, 5, 9))):  # so that there is something by then
        world.injector.when_well(lambda _world, _chance: "nothing happens")
    for fault in (damage, cluster.kill_node, cluster.kill_node):
        world.injector.when_well(fault)
