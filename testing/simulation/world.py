"""A whole job from a seed: real machine, mailboxes, repair plans and rank loops; played nodes, threads and faults.

What happens is kept as a transcript, line by line, to understand a failing seed. Lines are put together when they are
read: most jobs go well, and theirs are not.
"""

import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from ...controller.recovery.events import Action, Event, Send
from ...controller.recovery.machine import RecoveryMachine
from ...controller.recovery.state import Phase
from ...protocol.messages import Envelope
from ...protocol.types import Rendezvous
from ..invariants import Invariant, InvariantBroken
from . import faults
from .audits import WrongGradients
from .controller import Controller
from .controller_watch import AllowedDeviations, ControllerWatch
from .corruption import Corruption
from .host_copies import LostNode, note_loss
from .network import Group, Network, Timeline
from .node import SimulatedAgent, SimulatedPlatform
from .process import Disk, Process
from .process_faults import OneShot
from .rank_watch import RankWatch
from .setting import (
    draw_ahead,
    draw_saving,
    draw_setting,
    with_audits,
    with_copies,
    with_growth,
    with_slow_ranks,
    with_votes,
)

LONGEST_S = 6 * 3600.0
MOST_EVENTS = 20_000
AFTERMATH_S = 60.0  # for all to hear that the job is over
SHOWN = 400  # lines that are kept, unless all are
LONGEST_LINE = 260


class SimulatedWorld:
    """One simulated job. What is drawn from `seed` is the same every time.

    With a `focus` most faults wait for that phase of the job. `plan` draws them, if not as usual. The nodes are in so
    many `racks` that fail together; 0: each is its own failure domain. With `host_copies` ranks take some. With
    `slow_ranks` heartbeats carry their times and links, those that are slow are drained, and there are `least_nodes`.
    With `integrity` ranks vote, with `audits` they repeat each other's steps.
    """

    def __init__(
        self,
        seed: int,
        *,
        focus: Phase | None = None,
        whole_transcript: bool = False,
        plan: Callable[["SimulatedWorld", random.Random, Phase | None], None] | None = None,
        racks: int = 0,
        host_copies: bool = False,
        slow_ranks: bool = False,
        least_nodes: int = 2,
        integrity: bool = False,
        audits: bool = False,
        grows: bool = False,
    ) -> None:
        self.seed, self.racks = seed, racks
        self.chance = chance = random.Random(seed)
        # By a generator of its own, so that the faults of a seed are the same with it and without.
        setting = draw_saving(draw_setting(chance, focus), random.Random(f"{seed} saving"))
        if host_copies:
            setting = with_copies(setting, random.Random(f"{seed} copies"))
        self.plays_times = slow_ranks
        if slow_ranks:
            setting = with_slow_ranks(setting, least_nodes)
        if integrity:
            setting = with_votes(setting, random.Random(f"{seed} votes"))
        if audits:
            setting = with_audits(setting, random.Random(f"{seed} audits"))
        if grows:
            setting = with_growth(setting, random.Random(f"{seed} growth"))
        self.setting = setting = draw_ahead(setting, random.Random(f"{seed} ahead"))
        self.ranks_per_node = setting.ranks_per_node
        self.policy, self.job = setting.policy, setting.job()
        self.timeline = Timeline()
        self.network = Network(self.timeline, chance, delay_s=setting.delay_s, loss=setting.loss, twice=setting.twice)
        if focus is Phase.FINISHING:  # so that what was said at the start of a short job may arrive at its end
            self.network.worsen(self.timeline.now + 60.0, loss=0.3, delay_s=setting.delay_s)
        self.transcript = Transcript(whole=whole_transcript)
        self._pids = 100
        self._sessions = 0
        self.disk = Disk()
        self.corruption = Corruption(self)
        self.wrong_gradients = WrongGradients()
        self.lost_node: LostNode | None = None  # the only node that was lost since all ranks had two copies each
        self.one_shots: Counter[OneShot] = Counter()  # what fails the next times that it is tried
        self._groups: dict[int, Group] = {}
        self.events = 0
        self.injector = faults.Injector(self, chance)
        self.allowed = AllowedDeviations(self)
        self.rank_watch, self.controller_watch = RankWatch(self), ControllerWatch(self)
        self.controller = Controller(self)
        self.agents: dict[str, SimulatedAgent] = {}
        names = tuple(f"node{number}" for number in range(setting.nodes + setting.spares))
        self.platform = SimulatedPlatform(self, setting.capacity, names)
        (plan or faults.plan)(self, chance, focus)
        for name in names:
            self.timeline.after(chance.uniform(0.0, 1.0), partial(self.add_agent, name))
        self.controller.start()
        self.platform.introduce()

    def run(self) -> None:
        """Play the job to its end, and a little further. Raises InvariantBroken."""
        end_s = self.timeline.now + LONGEST_S
        while self.busy and self.timeline.now < end_s and self.timeline.step():
            if self.events > MOST_EVENTS:
                self.fail(Invariant.ALWAYS_ENDS, "the controller is flooded with events")
        end_s = self.timeline.now + AFTERMATH_S
        while self.timeline.now < end_s and self.timeline.step():
            pass
        self.controller_watch.at_the_end()

    @property
    def busy(self) -> bool:
        """Return whether the job is not over, as far as a living controller knows."""
        return self.controller.finish is None or not self.controller.up

    @property
    def machine(self) -> RecoveryMachine:
        """The recovery machine of the present controller."""
        return self.controller.machine

    @property
    def size(self) -> int:
        """How many ranks the world has now, to the present controller."""
        return self.machine.state.world.size

    # --- what all of them share ----------------------------------------------------------------------------------

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

    def node_dies(self, agent: SimulatedAgent) -> None:
        """Take note of a node that is about to be lost, and of what has to be left of the copies on it."""
        self.lost_node = note_loss(self, agent)

    def shards(self, rank: int, size: int) -> tuple[str, ...]:
        """Return what a rank of a world of `size` holds: fewer replicas than ranks have the shards spread over them."""
        different = max(1, size // self.setting.replicas)
        return ("parameters",) if different == 1 else (f"shard{rank % different}",)

    def group(self, generation: int, size: int) -> Group:
        """Return the communicators of a generation."""
        if generation not in self._groups:
            fails = self.fires(OneShot.LINK_UP)
            self._groups[generation] = Group(self.timeline, self.chance, size, fails=fails, serves=self._serves)
        return self._groups[generation]

    def _serves(self, store: Rendezvous) -> bool:
        agent = self.agents.get(store.host)
        return agent is not None and agent.alive and not agent.store_frozen and agent.store.port == store.port

    def add_agent(self, name: str) -> None:
        """A node comes up."""
        if not self.platform.ending and name not in self.agents:
            self.agents[name] = SimulatedAgent(self, name)

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
        agent = self.agents.get(connection.removeprefix("node/"))
        if agent is None or not agent.hears:
            return
        agent.endpoint.receive(envelope)

    # --- faults -------------------------------------------------------------------------------------------------

    def fires(self, what: OneShot) -> bool:
        """Say whether what is tried now is to fail."""
        fails = self.one_shots[what] > 0
        self.one_shots[what] -= fails
        return fails

    def reached(self, place: str) -> None:
        """A process has reached a place in its way: a fault may wait there."""
        self.injector.reached(place)

    def handled(self, event: Event, before: Phase, actions: Sequence[Action]) -> None:
        """The controller has handled an event."""
        self.events += 1
        machine = self.controller.machine
        self.transcript.handled(
            self.timeline.now, event, actions, generation=machine.generation, before=before, after=machine.phase
        )
        self.injector.handled(self.events)
        if machine.phase is not before:
            self.injector.entered(machine.phase)

    # --- the transcript -----------------------------------------------------------------------------------------

    def log(self, line: str) -> None:
        """Add a line to the transcript."""
        self.transcript.say(self.timeline.now, line)

    def tell(self) -> str:
        """Return the transcript, with what the seed made of the world at its head."""
        return "\n".join([f"seed {self.seed}: {self.setting.describe()}", *self.transcript.lines()])

    def fail(self, invariant: Invariant, what: str) -> None:
        """An invariant is broken."""
        raise InvariantBroken(self.seed, invariant, what, self.tell())


def simulate(seed: int, *, focus: Phase | None = None, whole_transcript: bool = False) -> SimulatedWorld:
    """Run one seed. Raises InvariantBroken with the transcript."""
    world = SimulatedWorld(seed, focus=focus, whole_transcript=whole_transcript)
    world.run()
    return world


class Transcript:
    """The last lines of a job, or all of them."""

    def __init__(self, *, whole: bool = False) -> None:
        self._lines: deque[tuple[float, str | Callable[[], str]]] = deque(maxlen=None if whole else SHOWN)

    def say(self, at_s: float, line: str) -> None:
        """Add a line."""
        self._lines.append((at_s, line))

    def handled(
        self, at_s: float, event: Event, actions: Iterable[Action], *, generation: int, before: Phase, after: Phase
    ) -> None:
        """Add an event of the controller, and what followed from it."""

        def line() -> str:
            sent = [f"{type(each.body).__name__}->{each.receiver}" for each in actions if isinstance(each, Send)]
            phase = f"{before}" if before is after else f"{before} -> {after}"
            return f"g{generation} [{phase}] {_short(event)}  => {', '.join(sent) or '-'}"

        self._lines.append((at_s, line))

    def lines(self) -> list[str]:
        """Return it in the order of time."""
        return [f"{at_s:10.4f}  {line if isinstance(line, str) else line()}" for at_s, line in self._lines]


def _short(event: Event) -> str:
    text = str(event)
    return text if len(text) < LONGEST_LINE else f"{text[:LONGEST_LINE]}..."
