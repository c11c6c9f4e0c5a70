"""A whole job from a seed: real machine, sessions, mailboxes and repair plans; played nodes, processes and faults."""

import random
from collections import deque
from collections.abc import Sequence

from ..controller.actions import Action, Send
from ..controller.events import Event
from ..controller.machine import RecoveryMachine
from ..controller.state import Phase
from ..policies.schema import Budget, CheckpointPolicy, Policy, RungPolicy, default_policy
from ..protocol.messages import Envelope
from ..protocol.types import JobSettings, JobSpec, RestoreSource, Rung
from . import faults
from .communicators import Group
from .controller import Controller
from .invariants import Watch
from .network import Network
from .node import Agent, Platform
from .process import Process
from .timeline import Timeline

LONGEST_S = 6 * 3600.0
MOST_EVENTS = 400_000
AFTERMATH_S = 60.0  # for everybody to hear that the job is over
SHOWN = 400  # lines of a transcript

POLICIES: tuple[Policy, ...] = (
    default_policy(),
    default_policy(),
    Policy(ladder=(RungPolicy(Rung.RECOVER_IN_PLACE, budget=Budget(per_rank=1, per_job=2)), RungPolicy(Rung.STOP))),
    Policy(
        ladder=(
            RungPolicy(Rung.RETRY_STEP, attempts=1, budget=Budget(per_job=1, window_s=0.0)),
            RungPolicy(Rung.RECOVER_IN_PLACE, attempts=1, budget=Budget(per_rank=1, per_job=3, window_s=10.0)),
            RungPolicy(Rung.RECOVER, attempts=1, budget=Budget(per_job=1)),
            RungPolicy(Rung.RESCHEDULE_POD, attempts=1, budget=Budget(per_job=2)),
            RungPolicy(Rung.RESCHEDULE_JOB, attempts=1, budget=Budget(per_job=1)),
            RungPolicy(Rung.STOP),
        )
    ),
    Policy(restore=(RestoreSource.CHECKPOINT,)),
    Policy(ladder=(RungPolicy(Rung.RESCHEDULE_POD), RungPolicy(Rung.STOP)), checkpoint=CheckpointPolicy(every_steps=5)),
)


class InvariantBroken(AssertionError):
    """An invariant does not hold. Carries the seed and the transcript."""


class World:
    """One simulated job."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.chance = chance = random.Random(seed)
        self.timeline = Timeline()
        self.network = Network(self.timeline, chance)
        self._log: deque[str] = deque(maxlen=SHOWN)
        self._pids = 100
        self._sessions = 0
        nodes, spares = chance.choice((1, 2, 2, 3)), chance.choice((0, 1, 2))
        self.ranks_per_node = chance.choice((1, 2))
        self.size = nodes * self.ranks_per_node
        self.total_steps = chance.choice((5, 20, 60))
        self.every = chance.choice((0, 5, 7))
        self.policy = chance.choice(POLICIES)
        self.can_create_nodes = chance.random() < 0.5
        self._replicas = chance.choice((1, 2, self.size, self.size))  # ranks that hold the same shard
        self.job = JobSpec(
            job="simulated", command=("train.py",), is_module=False, no_python=False, environment={},
            working_directory="/", job_directory="/", world_size=self.size, ranks_per_node=self.ranks_per_node,
            nodes=nodes, spare_nodes=spares, max_restarts=0, settings=JobSettings(),
        )  # fmt: skip
        self.disk: set[int] = set()
        self.flaky_links = self.corruptions = self.refused_starts = 0
        self._groups: dict[int, Group] = {}
        self._strikes: list[tuple[int, faults.Deed]] = []
        self._ambushes: list[tuple[str, faults.Deed]] = []
        self.events = 0
        self.watch = Watch(self)
        self.controller = Controller(self)
        self.agents: dict[str, Agent] = {}
        self.platform = Platform(self, chance.choice((0, 1, 3)) if self.can_create_nodes else 0)
        faults.plan(self, chance)
        for number in range(nodes + spares):
            self.timeline.after(chance.uniform(0.0, 1.0), lambda name=f"node{number}": self.add_agent(name))  # type: ignore[misc]
        self.controller.start()

    def run(self) -> None:
        """Play the job to its end, and a little further. Raises InvariantBroken."""
        end_s = self.timeline.now + LONGEST_S
        while self.busy and self.timeline.now < end_s and self.timeline.step():
            if self.events > MOST_EVENTS:
                self.fail("the controller is flooded with events")
        end_s = self.timeline.now + AFTERMATH_S
        while self.timeline.now < end_s and self.timeline.step():
            pass
        self.watch.at_the_end()

    @property
    def busy(self) -> bool:
        """Whether the job is not over, as far as a living controller knows."""
        return self.controller.finish is None or not self.controller.up

    # --- what everybody shares ----------------------------------------------------------------------------------

    def next_pid(self) -> int:
        """Return a process id that no process has had."""
        self._pids += 1
        return self._pids

    def next_session(self) -> int:
        """Return a number for a new sender, higher than all before."""
        self._sessions += 1
        return self._sessions

    def living(self) -> list[Process]:
        """Return all processes, strays included."""
        return [process for agent in self.agents.values() if agent.alive for process in agent.processes()]

    def shards(self, rank: int) -> tuple[str, ...]:
        """Return what a rank holds: with fewer replicas than ranks, shards are spread over them."""
        different = max(1, self.size // self._replicas)
        return ("parameters",) if different == 1 else (f"shard{rank % different}",)

    def ward(self, rank: int) -> int:
        """Return whose own state a rank keeps a copy of."""
        shift = self.ranks_per_node % self.size or 1
        return (rank - shift) % self.size

    def group(self, generation: int) -> Group:
        """Return the communicators of a generation."""
        if generation not in self._groups:
            flaky = self.flaky_links > 0
            self.flaky_links -= flaky
            self._groups[generation] = Group(self.timeline, self.chance, self.size, flaky=flaky)
        return self._groups[generation]

    def add_agent(self, name: str) -> None:
        """A node comes up."""
        if not self.platform.ending and name not in self.agents:
            self.agents[name] = Agent(self, name)

    def kill_node(self, name: str) -> None:
        """A node dies; the platform sees it."""
        agent = self.agents.get(name)
        if agent is not None and agent.alive:
            agent.die()
            self.timeline.after(self.chance.choice((0.01, 0.3)), lambda: self.platform.lost(name))

    def deliver(self, connection: str, envelope: Envelope) -> None:
        """Something from the controller arrives at the connection's other end."""
        if connection == "platform":
            self.platform.endpoint.receive(envelope)
            return
        agent = self.agents[connection.removeprefix("node/")]
        if not agent.reachable:
            return
        if envelope.receiver.startswith("node/"):
            agent.endpoint.receive(envelope)
        else:
            process = agent.hosts(int(envelope.receiver.removeprefix("rank/")))
            if process is not None and not process.suspended:
                process.endpoint.receive(envelope)

    def corrupt(self, process: Process) -> bool:
        """Say whether what a process has just received is wrong."""
        wrong = self.corruptions > 0
        self.corruptions -= wrong
        return wrong

    def refuse_start(self) -> bool:
        """Say whether a process cannot be started."""
        refused = self.refused_starts > 0
        self.refused_starts -= refused
        return refused

    # --- faults -------------------------------------------------------------------------------------------------

    def strike(self, deed: faults.Deed) -> None:
        """Do something bad, unless the job is over."""
        if self.controller.finish is None:
            self.log(f"--- {deed(self, self.chance)}")

    def strike_after(self, events: int, deed: faults.Deed) -> None:
        """Do something bad when the controller has seen so many events."""
        self._strikes.append((events, deed))

    def strike_at(self, place: str, deed: faults.Deed) -> None:
        """Do something bad when some process has reached a place."""
        self._ambushes.append((place, deed))

    def handled(self) -> None:
        """The controller has handled an event."""
        self.events += 1
        for events, deed in self._strikes:
            if events == self.events:
                self.timeline.after(self.chance.random() * 0.01, lambda deed=deed: self.strike(deed))  # type: ignore[misc]

    def reached(self, place: str) -> None:
        """A process has reached a place in its way: a fault may wait there."""
        waiting = next((ambush for ambush in self._ambushes if ambush[0] == place), None)
        if waiting is not None and self.chance.random() < 0.1:
            self._ambushes.remove(waiting)
            self.timeline.after(self.chance.choice((0.0, 0.003)), lambda: self.strike(waiting[1]))

    # --- the transcript -----------------------------------------------------------------------------------------

    def log(self, line: str) -> None:
        """Add a line to the transcript."""
        self._log.append(f"{self.timeline.now:10.4f}  {line}")

    def log_event(self, event: Event, before: Phase, machine: RecoveryMachine, actions: Sequence[Action]) -> None:
        """Add an event and what followed from it."""
        sent = [f"{type(action.body).__name__}->{action.receiver}" for action in actions if isinstance(action, Send)]
        phase = f"{before}" if before is machine.phase else f"{before} -> {machine.phase}"
        self.log(f"g{machine.generation} [{phase}] {_short(event)}  => {', '.join(sent) or '-'}")

    def transcript(self) -> str:
        """Return the last lines, with what the seed made of the world."""
        head = f"seed {self.seed}: {self.size} ranks, {self.ranks_per_node} per node, {self.job.spare_nodes} spares, "
        head += f"{self._replicas} replicas, {self.total_steps} steps, checkpoint every {self.every}, "
        head += f"creates nodes: {self.can_create_nodes}, loss {self.network.loss}, ladder "
        head += ", ".join(entry.rung for entry in self.policy.ladder)
        return "\n".join([head, *self._log])

    def fail(self, what: str) -> None:
        """An invariant is broken."""
        raise InvariantBroken(f"{what}\n{self.transcript()}\nseed {self.seed}: {what}")


def _short(event: Event) -> str:
    text = str(event)
    return text if len(text) < 260 else f"{text[:260]}..."


def simulate(seed: int) -> World:
    """Run one seed. Raises InvariantBroken with the transcript."""
    world = World(seed)
    world.run()
    return world
