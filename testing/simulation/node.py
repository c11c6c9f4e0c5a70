"""Nodes of a simulated job, and the platform that makes, ends and kills them.

A node is a played agent behind a bad network, with detectors, a stall clock and a rendezvous store. The platform may be
slow, run out of machines, or not answer at all.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from ...protocol import messages as m
from ...protocol.mailbox import Mailbox
from ...protocol.messages import (
    CreateNode,
    DeleteNode,
    EndJob,
    Envelope,
    KillNode,
    NodeGoing,
    NodeLost,
    NodeRefused,
    NodeStaying,
    PlatformJoined,
)
from ...protocol.rank_relay import GATHER_MAX_S, RankRelay
from ...protocol.reports import PreparedProcesses
from ...protocol.types import (
    CONTROLLER,
    PLATFORM,
    WATCHED,
    Assertion,
    FaultKind,
    FaultLevel,
    FaultReport,
    RunningProcess,
    StandbyDepth,
    StoreEndpoint,
    node_address,
    rank_of,
)
from ..invariants import Invariant
from ..played_agent import SIGKILL, FakeAgent, HostedRank
from .network import Endpoint, forged
from .process import INSIDE_S, Process
from .process_faults import OneShot

if TYPE_CHECKING:
    from .world import SimulatedWorld


SKEWS_S = (0.0, 3600.0, -3600.0)  # of the nodes' wall clocks
STALL_S = 2.0  # a step that takes longer is reported
SUSPENDED_S = 3.0  # a process that is stopped for longer is reported
START_S, EXIT_SEEN_S, END_S = 0.01, 0.002, 0.01
IMPORTS_S = 0.5  # of a fork server
REFUSAL_S = (0.0, 0.0, 2.0, 30.0)  # how long it takes to find out that there are no more machines


class SimulatedAgent(FakeAgent[Process]):
    """One node."""

    def __init__(self, world: "SimulatedWorld", name: str) -> None:
        super().__init__(name)
        if world.racks:
            self.failure_domain = f"rack{len(world.agents) % world.racks}"
        self.world = world
        self.alive = True
        self.deaf_until_s = self.mute_until_s = 0.0
        self.silent_since_s = 0.0  # the last time that it got mute, or died
        self.isolated_until_s = 0.0  # it is the controller that is cut off: no process may be replaced for that
        self.reported: set[int] = set()  # devices that are reported to be broken, whichever process is on them
        self.faulty = False  # something of it is reported to be broken, so any process on it may be replaced
        self.broken = False  # it is reported as a whole, so all processes on it are at fault
        self.wrong_ranks: set[int] = set()  # whose device here gets each update wrong, with nothing reported
        self.wrong_gradients: set[int] = set()  # whose device here computes each gradient wrong, likewise
        self.cable_s = 0.0  # how much longer data of a step is on its way, to it and from it
        self.leaving = False
        self.store_frozen = False
        self._skew_s = SKEWS_S[len(world.agents) % len(SKEWS_S)]
        self._welcome = False
        self._early: list[m.StartProcesses] = []
        mailbox = Mailbox(job=world.job.job, address=node_address(name), session=world.next_session())
        self.endpoint = Endpoint(
            mailbox, world.timeline, transmit=self._transmit, take=self._take, complain=world.fail,
            new_session=lambda _: self._introduce(), acknowledged=self._acknowledged,
        )  # fmt: skip
        self._words = RankRelay(job=world.job.job, node=name, session=mailbox.session)
        self._gathering = self._repeating = False
        self.say(self.introduction())

    @property
    def wall_s(self) -> float:
        """The time by the node's wall clock."""
        return self.world.timeline.now + self._skew_s

    @property
    def hears(self) -> bool:
        """Return whether the network leads here."""
        return self.alive and self.world.timeline.now >= max(self.deaf_until_s, self.isolated_until_s)

    @property
    def is_heard(self) -> bool:
        """Return whether the network leads from here to the controller."""
        return self.alive and self.world.timeline.now >= max(self.mute_until_s, self.isolated_until_s)

    def say(self, report: m.Report) -> None:
        """Report to the controller, behind what ranks have said."""
        self._leave()
        self.endpoint.post(report, CONTROLLER)

    def die(self) -> None:
        """End at once, with everything on the node."""
        if self.is_heard:
            self.silent_since_s = self.world.timeline.now
        if self.alive:
            self.world.node_dies(self)
            self.alive = self.endpoint.open = False
            for process in self.processes():
                process.end(SIGKILL)

    def leave(self, grace_s: float) -> None:
        """Say that the node leaves, as its agent was asked to end, and end everything on it."""
        self.leaving = True
        self.say(m.NodeLost(self.name, "it leaves: SIGTERM", self.wall_s))
        for process in self.processes():
            process.faulty = True
            process.end(SIGKILL)
        self.world.timeline.after(grace_s, self.die)

    def freeze_store(self, seconds: float) -> None:
        """The rendezvous store does not answer; the agent notices after `seconds`, and starts the next one."""
        self.store_frozen = True
        self.world.timeline.after(seconds, self.move_store)

    def move_store(self) -> None:
        """The rendezvous store dies; the next one listens elsewhere."""
        self.store_frozen = False
        self.store = StoreEndpoint(self.name, self.store.port + 1)
        self.say(m.StoreMoved(self.name, self.store))

    def report_device(
        self, kind: FaultKind, level: FaultLevel, rank: int | None, assertion: Assertion = Assertion.ONCE
    ) -> None:
        """A detector on this node has found something wrong with a device, or with the machine."""
        process = self.hosts(rank) if rank is not None else None
        report = FaultReport(
            kind, self.wall_s, node_address(self.name), "seen by a detector", rank, self.name,
            incarnation=process.incarnation if process is not None else 0,
            level=level, code="80E01801", assertion=assertion,
        )  # fmt: skip
        self.say(m.FaultReported(report))

    def relay(self, process: Process, envelope: m.Envelope) -> None:
        """Take in what a rank says; words of an earlier incarnation are refused.

        The agent of another node forges a message of that rank first.
        """
        if not self.alive:
            return
        forger = next((each for each in self.world.agents.values() if each is not self and each.is_heard), None)
        if forger is not None:
            session = forger.endpoint.mailbox.session
            message = forged(envelope, process.rank, node=forger.name, session=session)
            if self.world.controller.receive(message, forger.name):
                self.world.fail(Invariant.OWN_VOICE, f"{forger.name} is believed to speak for rank {process.rank}")
        if process.incarnation < self.places[process.rank].oldest:
            return
        answer = self._words.hear(envelope, 1, self.world.timeline.now)
        if answer is not None:
            self._hand_on([answer])
        if self._words.is_due([each.rank for each in self.processes()]):
            self._leave()
        elif self._words.has_gathered and not self._gathering:
            self._gathering = True
            self.world.timeline.after(GATHER_MAX_S, self._leave)

    def report_exit(self, process: Process, status: int) -> None:
        """Report soon that a process has ended."""
        exited = self.exited(process, status)
        self.world.timeline.after(EXIT_SEEN_S, lambda: self.say(exited) if self.alive else None)

    def watch_step(self, process: Process, *, first: bool) -> None:
        """Report a step that takes too long, and again when its age doubles; the first after a resume is not judged."""
        generation, step = process.session.generation, process.standing.count

        def lasts() -> bool:
            same = process.standing.count == step and process.session.generation == generation
            return same and process.activity in WATCHED

        if not first:
            self._report_while(lasts, process, FaultKind.STALL, "slow", STALL_S)

    def watch_suspended(self, process: Process) -> None:
        """Report a process that is stopped, in whatever it was doing, and again when that has lasted twice as long."""
        self._report_while(lambda: True, process, FaultKind.UNRESPONSIVE, "stopped", SUSPENDED_S)

    # --- inside -------------------------------------------------------------------------------------------------

    def _leave(self) -> None:
        self._gathering = False
        if self.alive:
            self._words.leave(lambda body: self.endpoint.post(body, CONTROLLER), self.world.timeline.now)

    def _acknowledged(self, number: int) -> None:
        self._hand_on(self._words.acknowledged(number))

    def _hand_on(self, envelopes: Iterable[m.Envelope]) -> None:
        for envelope in envelopes:
            self.world.timeline.after(INSIDE_S, partial(self._arrive, envelope))
        due_s = self._words.next_due()
        if due_s is not None and not self._repeating:
            self._repeating = True
            self.world.timeline.after(max(0.0, due_s - self.world.timeline.now), self._repeat)

    def _arrive(self, envelope: m.Envelope) -> None:
        rank = rank_of(envelope.receiver)
        process = self.hosts(rank) if self.alive and rank is not None else None
        if process is not None and not process.suspended:
            process.endpoint.receive(envelope)

    def _repeat(self) -> None:
        self._repeating = False
        if self.alive:
            self._hand_on(self._words.due(self.world.timeline.now))

    def _introduce(self) -> None:
        self._words.follow(self.endpoint.mailbox.term)
        if not self.leaving:
            self.say(self.introduction())

    def _report_while(
        self, lasts: Callable[[], bool], process: Process, kind: FaultKind, detail: str, first_s: float
    ) -> None:
        def look(age_s: float) -> None:
            if self.alive and process.alive and lasts():
                self.say(self.fault(kind, detail, process.running))
                self.world.timeline.after(age_s, lambda: look(2 * age_s))

        self.world.timeline.after(first_s, lambda: look(first_s))

    def _transmit(self, envelope: m.Envelope) -> None:
        def arrive(each: m.Envelope) -> None:
            if self.is_heard:
                self.world.controller.receive(each, self.name)

        self.world.network.carry(envelope, arrive)

    def _take(self, envelope: m.Envelope) -> bool:
        order = envelope.body
        match order:
            case m.WelcomeNode():
                self._welcome = True
                if self.world.setting.builds_ahead:
                    self.world.timeline.after(IMPORTS_S, self._tell_imports)
                early, self._early = self._early, []
                for each in early:
                    self.obey(each)
            case m.IntroduceNode() | m.StartProcesses() if self.leaving:
                pass
            case m.OrderRanks():
                self._hand_on(self._words.order(order, envelope.term, self.world.timeline.now))
            case m.StartProcesses() if not self._welcome:
                self._early.append(order)
            case m.ArmFault(fault=fault):
                process = self.hosts(fault.rank)
                if process is not None:
                    process.inject(fault.action)
            case m.EndJob():
                self.world.timeline.after(END_S, self.die)
            case _ if not self.obey(order):  # type: ignore[arg-type]
                self.world.fail(Invariant.UNDERSTOOD, f"an agent cannot carry out a {type(order).__name__}")
        return True

    def _tell_imports(self) -> None:
        if self.alive and not self.leaving:
            self.say(m.ProcessesPrepared(self.name, PreparedProcesses(StandbyDepth.IMPORTED, took_s=IMPORTS_S)))

    def start(self, place: HostedRank[Process], order: m.StartProcess) -> None:
        """Start what was ordered after a while, if the node is still there."""
        if not order.early:
            self._words.forget(order.rank)
        start = super().start
        self.world.timeline.after(START_S, lambda: start(place, order) if self.alive and not self.leaving else None)

    def started(self, report: m.ProcessStarted) -> None:
        """Report it with others that were started at about this time, behind what ranks have said before."""
        if self._gathering:
            self._leave()
        self._words.started(report)
        self._gathering = True
        self.world.timeline.after(GATHER_MAX_S, self._leave)

    def new_process(self, place: HostedRank[Process], order: m.StartProcess) -> Process | None:
        """Return the process that an order has started; None where it cannot be started, which has been reported."""
        if self.world.fires(OneShot.START):
            running = RunningProcess(order.rank, 0, order.incarnation, order.generation)
            self.say(self.fault(FaultKind.START_FAILED, "fork failed", running))
            return None
        return Process(self.world, self, order, self.world.next_pid())


class SimulatedPlatform:
    """Makes, ends and kills nodes; says so when one goes that was not to go."""

    def __init__(self, world: "SimulatedWorld", capacity: int, begun: tuple[str, ...]) -> None:
        """`begun`: the nodes that are on their way when the job begins."""
        self._world = world
        self._begun = begun
        self.capacity = capacity
        self.silent = False  # takes orders, and brings nothing
        self.deleted: set[str] = set()  # those that it was asked to end
        self._asked: set[str] = set()
        self.ending = False
        mailbox = Mailbox(job=world.job.job, address=PLATFORM, session=world.next_session())
        self.endpoint = Endpoint(
            mailbox,
            world.timeline,
            transmit=self._transmit,
            take=self._take,
            complain=world.fail,
            new_session=lambda _: self.introduce(),
        )

    def introduce(self) -> None:
        """Say what it can do and which nodes it has: at the start of the job, and to each new controller."""
        if self.silent or self.ending:
            return
        world = self._world
        known = [*self._begun, *sorted(self._asked), *world.agents]
        lost = {name for name, agent in world.agents.items() if not agent.alive} | self.deleted
        nodes = tuple(dict.fromkeys(name for name in known if name not in lost))
        self.endpoint.post(PlatformJoined(world.setting.can_create_nodes, can_kill=True, nodes=nodes), CONTROLLER)

    def take_away(self, name: str, within_s: float | None) -> None:
        """Say that a node will go."""
        self.endpoint.post(NodeGoing(name, "it is being drained", within_s), CONTROLLER)

    def leave_be(self, name: str) -> None:
        """Say that a node will not go after all, or was not to go at all."""
        self.endpoint.post(NodeStaying(name), CONTROLLER)

    def lost(self, name: str) -> None:
        """An agent is gone."""
        if name not in self.deleted and not self.ending:
            self.endpoint.post(NodeLost(name, "its agent ended with signal 9", self._world.timeline.now), CONTROLLER)

    def refuse(self, name: str) -> None:
        """Say that a node cannot be had."""
        self.endpoint.post(NodeRefused(name, "no more machines"), CONTROLLER)

    def _transmit(self, envelope: Envelope) -> None:
        def arrive(each: Envelope) -> None:
            self._world.controller.receive(each, PLATFORM)

        self._world.network.carry(envelope, arrive)

    def _take(self, envelope: Envelope) -> bool:
        world = self._world
        match envelope.body:
            case CreateNode() if self.silent:
                pass
            case CreateNode(node=name) if name in self._asked:
                pass
            case CreateNode(node=name) if self.capacity > 0:
                self._asked.add(name)
                self.capacity -= 1
                world.timeline.after(world.chance.uniform(0.1, 20.0), lambda: world.add_agent(name))
            case CreateNode(node=name):
                world.timeline.after(world.chance.choice(REFUSAL_S), lambda: self.refuse(name))
            case DeleteNode(node=name) if name in self.deleted:
                pass
            case DeleteNode(node=name):
                self.deleted.add(name)
                self.capacity += 1
                if name in world.agents:  # else it is still on its way, and comes for nothing
                    world.timeline.after(world.chance.uniform(0.01, 5.0), world.agents[name].die)
            case KillNode(node=name):
                world.kill_node(name)
            case EndJob():
                self.ending = True
                for agent in world.agents.values():
                    world.timeline.after(10.0, agent.die)
            case other:
                world.fail(Invariant.UNDERSTOOD, f"a platform cannot carry out a {type(other).__name__}")
        return True
