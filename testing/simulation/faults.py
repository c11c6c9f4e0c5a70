"""Faults of a simulated job and their times, drawn from the seed.

Faults come by the clock, at a place on a process's way, in a phase of the job, by how much the controller has seen, or
each time that all runs well again. Those of processes are in `process_faults.py`; those of nodes, network, devices,
platform, controller and disk, and what operators do, are here. A new one is a function and a line in `FAULTS`.
"""

import functools
import random
from collections import defaultdict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...controller.recovery.events import InjectRequested, KillNodeRequested, NodeReturned, StopRequested
from ...controller.recovery.state import Phase
from ...controller.recovery.world import NodeState
from ...policies.fault_codes import TREATMENTS, Treatment
from ...protocol.types import ArmedFault, Assertion, FaultAction, FaultKind, FaultLevel
from . import process_faults as processes
from .process_faults import Inject, OneShot, victim

if TYPE_CHECKING:
    from .node import SimulatedAgent
    from .world import SimulatedWorld


PLACES = ("ready", "updating", "quiesced", "joined", "rebuild", "repair", "rollback")
PHASES = tuple(phase for phase in Phase if phase is not Phase.ENDED)
FOCUSED = 12  # faults of a run that is about one phase
DAMAGED = 0.15  # share of the worlds whose checkpoints are damaged
PATIENCE_S = (0.0, 0.0, 0.003, 0.1, 0.6)  # from entering a phase to the fault
TRAINING_S = 0.4  # at most, from one fault to the next where the job runs meanwhile
OVERLAPPING = 0.1  # probability that the next fault does not wait until the job runs again
CUTS_S = (0.5, 2.0, 10.0, 100.0)
LEAVING_S = (0.0, 0.1, 5.0)  # until the agent is gone
ISOLATED_S = (5.0, 10.0, 30.0)  # shorter than silence is held
HARMLESS_S = 2.0  # what is shorter than this must cost no process its life
STANDSTILLS_S = (1.0, 10.0, 600.0)
OUTLIVES_S = (0.6, 3.0, 20.0)  # how long a controller that was taken for dead goes on
LEVELS = tuple(level for level in FaultLevel if level not in {FaultLevel.SOFTWARE})
ACTIONS = (FaultAction.KILL, FaultAction.STOP, FaultAction.RAISE, FaultAction.KILL_NODE)
_OF_THE_NODE = frozenset({Treatment.CLOSE, Treatment.LEAVE})  # then all processes there may be replaced
_OF_THE_RANK = frozenset({Treatment.RESTART, Treatment.LEAVE})  # then the rank gets another process
DEVICE_KINDS = (FaultKind.DEVICE, FaultKind.MEMORY, FaultKind.MEMORY_MULTI_BIT, FaultKind.LINK, FaultKind.OUT_OF_MEMORY)
NODE_KINDS = (FaultKind.NODE, FaultKind.SWITCH, FaultKind.NETWORK, FaultKind.STORAGE)


def _living(world: "SimulatedWorld") -> "list[SimulatedAgent]":
    return [agent for agent in world.agents.values() if agent.alive]


def _into_a_node(inject: Callable[["SimulatedWorld", random.Random, "SimulatedAgent"], str]) -> Inject:
    """Draw the node that a fault is injected into."""

    @functools.wraps(inject)
    def injected(world: "SimulatedWorld", chance: random.Random) -> str:
        living = _living(world)
        return inject(world, chance, chance.choice(living)) if living else "no node to inject a fault into"

    return injected


@_into_a_node
def kill_node(world: "SimulatedWorld", chance: random.Random, agent: "SimulatedAgent") -> str:
    """A node dies."""
    world.kill_node(agent.name)
    return f"{agent.name} is killed"


@_into_a_node
def leave(world: "SimulatedWorld", chance: random.Random, agent: "SimulatedAgent") -> str:
    """An agent is asked to end: it says that its node leaves, and its processes end one by one."""
    agent.leave(chance.choice(LEAVING_S))
    return f"{agent.name} leaves"


@_into_a_node
def cut_off_node(world: "SimulatedWorld", chance: random.Random, agent: "SimulatedAgent") -> str:
    """A node lives and is not heard for a while, or hears nothing, or both."""
    until_s = world.timeline.now + (seconds := chance.choice(CUTS_S))
    deaf, mute = chance.choice(((True, True), (True, True), (True, False), (False, True)))
    agent.deaf_until_s = until_s if deaf else agent.deaf_until_s
    if mute:
        agent.mute_until_s, agent.silent_since_s = until_s, world.timeline.now
    for process in agent.processes():
        process.faulty = process.faulty or seconds > HARMLESS_S
    ways = "cut off" if deaf and mute else "deaf" if deaf else "mute"
    return f"{agent.name} is {ways} for {seconds} s"


def isolate_controller(world: "SimulatedWorld", chance: random.Random) -> str:
    """The controller is cut off from all nodes, or from all but one, while the ranks train on."""
    living = _living(world)
    if not living or any(agent.isolated_until_s > world.timeline.now for agent in living):
        return "no node to be isolated from, or it is"
    spared = chance.choice(living) if len(living) > 2 and chance.random() < 0.3 else None
    seconds = chance.choice(ISOLATED_S)
    for agent in living:
        if agent is not spared:
            agent.isolated_until_s = world.timeline.now + seconds
    return f"the controller is cut off from {len(living) - (spared is not None)} nodes for {seconds} s"


def storm(world: "SimulatedWorld", chance: random.Random) -> str:
    """The network between controller and nodes gets much worse for a while."""
    seconds = chance.choice((0.5, 5.0, 30.0))
    world.network.worsen(world.timeline.now + seconds, loss=chance.choice((0.2, 0.5)), delay_s=chance.choice((0.05, 1)))
    return f"the network is bad for {seconds} s"


@_into_a_node
def fail_store(world: "SimulatedWorld", chance: random.Random, agent: "SimulatedAgent") -> str:
    """A rendezvous store dies and comes back elsewhere, or stands still until its agent sees it."""
    if chance.random() < 0.5:
        agent.move_store()
        return f"the store of {agent.name} moves"
    agent.freeze_store(seconds := chance.choice(STANDSTILLS_S))
    return f"the store of {agent.name} is frozen for {seconds} s"


def add_node(world: "SimulatedWorld", chance: random.Random) -> str:
    """A node comes that was not asked for."""
    world.add_agent(name := f"stranger{chance.randrange(1000)}")
    return f"{name} comes"


def hear_node(world: "SimulatedWorld", chance: random.Random) -> str:
    """A word of a node that was given up for lost comes through; or it was late, and the node is back already."""
    nodes = world.machine.state.world.nodes.values()
    names = [node.name for node in nodes if node.state is NodeState.LOST] or [node.name for node in nodes]
    if not names:
        return "no node to hear"
    world.controller.tell(NodeReturned(name := chance.choice(names)))
    return f"{name} is heard"


def device_fault(world: "SimulatedWorld", chance: random.Random) -> str:
    """A detector reports the device of a rank, at any level."""
    process = victim(world, chance)
    if process is None:
        return "no device to report"
    kind, level, node = chance.choice(DEVICE_KINDS), chance.choice(LEVELS), process.agent
    node.faulty = node.faulty or TREATMENTS[level] in _OF_THE_NODE
    process.faulty = process.faulty or TREATMENTS[level] in _OF_THE_RANK
    if TREATMENTS[level] in _OF_THE_RANK | _OF_THE_NODE:
        node.reported.add(process.rank % world.ranks_per_node)
    node.report_device(kind, level, process.rank)
    return f"a device fault {kind} {level} of rank {process.rank} on {node.name}"


@_into_a_node
def node_fault(world: "SimulatedWorld", chance: random.Random, agent: "SimulatedAgent") -> str:
    """A detector reports a machine, or what connects it."""
    kind, level = chance.choice(NODE_KINDS), chance.choice(LEVELS)
    agent.faulty = agent.faulty or TREATMENTS[level] in _OF_THE_NODE | {Treatment.RESTART}
    agent.broken = agent.broken or TREATMENTS[level] in _OF_THE_RANK
    agent.report_device(kind, level, None)
    return f"a node fault {kind} {level} of {agent.name}"


@_into_a_node
def unwell_node(world: "SimulatedWorld", chance: random.Random, agent: "SimulatedAgent") -> str:
    """A detector says that a node works and is not well, or that it is well again."""
    assertion = chance.choice((Assertion.OCCUR, Assertion.OCCUR, Assertion.RECOVER))
    agent.report_device(FaultKind.NODE, FaultLevel.SUB_HEALTH, None, assertion)
    return f"{agent.name} is not well: {assertion}"


def exhaust_platform(world: "SimulatedWorld", chance: random.Random) -> str:
    """The platform has no more machines, or does not answer any more."""
    world.platform.capacity = 0
    world.platform.silent = chance.random() < 0.5
    return "the platform does not answer" if world.platform.silent else "the platform has no more machines"


@_into_a_node
def take_node_away(world: "SimulatedWorld", chance: random.Random, agent: "SimulatedAgent") -> str:
    """The platform will take a node away, does so in the end, or thinks better of it."""
    within_s = chance.choice((None, 1.0, 30.0))
    world.platform.take_away(agent.name, within_s)
    after_s = chance.choice((0.2, 2.0, 30.0))
    end = chance.choice((world.kill_node, world.platform.leave_be, world.platform.leave_be, None))
    if end is not None:
        world.timeline.after(after_s, lambda: end(agent.name))
    return f"{agent.name} is to be taken away within {within_s} s"


def refuse_again(world: "SimulatedWorld", chance: random.Random) -> str:
    """The platform says of some node that it cannot be had: once more, or without having been asked."""
    world.platform.refuse(name := chance.choice([*world.machine.state.world.nodes, "nowhere"]))
    return f"the platform refuses {name}"


def crash_controller(world: "SimulatedWorld", chance: random.Random) -> str:
    """The controller dies: now, between recording the next event and acting on it, or in the middle of acting."""
    way = chance.random()
    if way < 0.3:
        world.controller.crash()
    else:
        world.controller.crash_next = 0 if way < 0.65 else chance.choice((1, 1, 2, 3))
    return "the controller crashes"


def freeze_controller(world: "SimulatedWorld", chance: random.Random) -> str:
    """The controller is stopped long enough for the next one to take over, and then continues as if nothing were."""
    world.controller.outlives_s = chance.choice(OUTLIVES_S)
    world.controller.crash_next = chance.choice((0, 1, 1, 2))
    return f"the controller will be taken for dead, and go on for {world.controller.outlives_s} s"


def request_stop(world: "SimulatedWorld", chance: random.Random) -> str:
    """An operator stops the job; in a hurry, twice."""
    for _ in range(chance.choice((1, 1, 2))):
        world.controller.tell(StopRequested("the operator asks"))
    return "a stop is requested"


def operator_injects(world: "SimulatedWorld", chance: random.Random) -> str:
    """An operator injects a fault into a rank."""
    rank, action, state = chance.randrange(world.size), chance.choice(ACTIONS), world.machine.state
    agent = world.agents.get(state.world.holders[rank].node)
    process = agent.hosts(rank) if agent is not None else None
    if process is None or (action is FaultAction.STOP and (not state.ever_resilient or process.unwatched)):
        return "no process for an operator to inject a fault into"
    for each in process.agent.processes() if action is FaultAction.KILL_NODE else [process]:
        each.faulty = True
    world.controller.tell(InjectRequested(ArmedFault(rank, action)))
    return f"an operator injects {action} into rank {rank}"


def operator_kills_node(world: "SimulatedWorld", chance: random.Random) -> str:
    """An operator has a node killed; perhaps one that the job does not have."""
    names = [agent.name for agent in _living(world)] + ["nowhere"]
    world.controller.tell(KillNodeRequested(name := chance.choice(names)))
    return f"an operator has {name} killed"


def damage_newest(world: "SimulatedWorld", chance: random.Random) -> str:
    """The newest checkpoint is damaged: an older one has to do."""
    newest = max(world.disk.steps, default=0)
    world.disk.damage({newest})
    return f"the checkpoint of step {newest} is damaged"


def damage_all(world: "SimulatedWorld", chance: random.Random) -> str:
    """All checkpoints are damaged: where one is needed the job has to stop, and must not begin again."""
    world.disk.damage(world.disk.steps)
    return "all checkpoints are damaged"


def hide_directory(world: "SimulatedWorld", chance: random.Random) -> str:
    """The directory cannot be listed any more, by any process, or can be again."""
    world.disk.unlisted = not world.disk.unlisted
    world.disk.damaged = True
    return f"the checkpoint directory can {'not ' * world.disk.unlisted}be listed"


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
    (3, kill_node),
    (2, leave),
    (3, cut_off_node),
    (2, isolate_controller),
    (1, storm),
    (2, fail_store),
    (1, add_node),
    (1, hear_node),
    (3, device_fault),
    (1, node_fault),
    (3, unwell_node),
    (2, take_node_away),
    (1, exhaust_platform),
    (1, refuse_again),
    (5, crash_controller),
    (2, freeze_controller),
    (1, request_stop),
    (1, operator_injects),
    (1, operator_kills_node),
)
_WEIGHTS = [weight for weight, _ in FAULTS]
_FAULTS = [fault for _, fault in FAULTS]


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
        injector.when_well(request_stop)
    _plan_damage(world)


def _plan_what_leads_to(world: "SimulatedWorld", chance: random.Random, focus: Phase | None) -> None:
    """Draw the faults without which the job hardly gets into the phase, or to another size."""
    for _ in range(3 if focus in {Phase.PAUSING, Phase.SUSPECTING} else 0):
        world.injector.when_well(unwell_node)
        if focus is Phase.SUSPECTING:  # in the middle of a drain, too
            world.injector.when_well(processes.cut_link)
    if world.policy.scale.min_nodes is not None:
        for fault in (kill_node, add_node) * chance.choice((1, 1, 2)):
            world.injector.when_well(fault)


def _plan_damage(world: "SimulatedWorld") -> None:
    """Draw what becomes of the checkpoints, and a reason to need them soon after.

    By a generator of its own, so that the faults of a seed are the same with it and without.
    """
    chance = random.Random(f"{world.seed} storage")
    if chance.random() >= DAMAGED:
        return
    damage = chance.choice((damage_newest, damage_all, damage_all, hide_directory))
    for _ in range(chance.choice((2, 5, 9))):  # so that there is something by then
        world.injector.when_well(lambda _world, _chance: "nothing happens")
    for fault in (damage, kill_node, kill_node):
        world.injector.when_well(fault)
