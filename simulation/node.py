"""Agents with their seats, and the platform that makes and ends nodes."""

from typing import TYPE_CHECKING

from ..protocol.mailbox import Mailbox
from ..protocol.messages import (
    CreateNode,
    DeleteNode,
    EndJob,
    Envelope,
    FaultReported,
    KillNode,
    NodeJoined,
    NodeLost,
    NodeRefused,
    ProbeProgress,
    ProcessExited,
    ProcessStarted,
    ProgressReported,
    StartProcess,
    StopProcess,
    WelcomeNode,
)
from ..protocol.types import (
    CONTROLLER,
    PLATFORM,
    Activity,
    FaultKind,
    FaultReport,
    OwnStateCopy,
    RunningProcess,
    StoreEndpoint,
    node_address,
)
from .network import Endpoint
from .process import Process

if TYPE_CHECKING:
    from .world import World

SIGKILL = -9
STALL_S = 2.0  # a step that takes longer is reported
WATCHED = frozenset({Activity.COMPUTING, Activity.COLLECTIVE, Activity.COMMITTING, Activity.UPDATING})


class Seat:
    """A rank's place on a node, with its black box: what outlives its processes."""

    def __init__(self, agent: "Agent", rank: int) -> None:
        self.agent, self.rank = agent, rank
        self.process: Process | None = None
        self.ordered = self.oldest = -1  # latest incarnation asked for, and started
        self._own: list[tuple[int, int, int]] = []  # (rank, step, blob), two at most, in order of writing
        self._wards: list[tuple[int, int, int]] = []

    def keep_own(self, step: int, blob: int) -> None:
        """Write the own state."""
        self._own = _written(self._own, self.rank, step, blob)

    def keep_ward(self, rank: int, step: int, blob: int) -> None:
        """Write a copy of the ward's own state."""
        self._wards = _written(self._wards, rank, step, blob)

    @property
    def own_is_empty(self) -> bool:
        """Whether no life of the rank has written here."""
        return not self._own

    def own(self, step: int) -> int | None:
        """Read the own state as of a step."""
        return self.copy_of(self.rank, step)

    def copy_of(self, rank: int, step: int) -> int | None:
        """Read any own state that is here."""
        return next((blob for who, at, blob in self._own + self._wards if (who, at) == (rank, step)), None)

    def copies(self) -> tuple[OwnStateCopy, ...]:
        """Name what is here."""
        return tuple(OwnStateCopy(rank, step) for rank, step, _ in sorted(self._own + self._wards))

    def ended(self, process: Process, status: int) -> None:
        """The seat's process has ended."""
        if self.process is process:
            self.process = None
        expected = self.ordered > process.incarnation
        self.agent.post_soon(
            ProcessExited(self.agent.name, _running(process), status, self.agent.world.timeline.now, expected)
        )


def _written(slots: list[tuple[int, int, int]], rank: int, step: int, blob: int) -> list[tuple[int, int, int]]:
    """As the black box does: the same step is replaced, later steps are dropped, the two last writes stay."""
    kept = [slot for slot in slots if slot[0] == rank and slot[1] < step]
    return [*kept[-1:], (rank, step, blob)]


def _running(process: Process) -> RunningProcess:
    return RunningProcess(process.rank, process.pid, process.incarnation, process.session.generation)


class Agent:
    """One node."""

    def __init__(self, world: "World", name: str) -> None:
        self.world, self.name = world, name
        self.alive = True
        self.cut_off_until_s = 0.0
        self.seats: dict[int, Seat] = {}
        self._welcome = False
        self._early: list[StartProcess] = []
        mailbox = Mailbox(job=world.job.job, address=node_address(name), session=world.next_session())
        self.endpoint = Endpoint(
            mailbox, world.timeline, transmit=self._transmit, take=self._take, new_session=self._new_session
        )
        self.endpoint.post(self._joined(), CONTROLLER)

    @property
    def reachable(self) -> bool:
        """Whether the network leads here."""
        return self.alive and self.world.timeline.now >= self.cut_off_until_s

    def processes(self) -> list[Process]:
        """Return the processes that live here."""
        return [seat.process for seat in self.seats.values() if seat.process is not None]

    def hosts(self, rank: int) -> Process | None:
        """Return the process that holds a rank here."""
        seat = self.seats.get(rank)
        return seat.process if seat is not None else None

    def die(self) -> None:
        """End at once, with everything on the node."""
        if self.alive:
            self.alive = self.endpoint.open = False
            for process in self.processes():
                process.end(SIGKILL)

    def relay(self, process: Process, envelope: Envelope) -> None:
        """Pass on what a rank says; an earlier life's words are refused."""
        if self.reachable and process.incarnation >= self.seats[process.rank].oldest:
            self.world.controller.receive(envelope, self.name)

    def post_soon(self, body: ProcessExited) -> None:
        """Report what the kernel says."""
        self.world.timeline.after(0.002, lambda: self.endpoint.post(body, CONTROLLER) if self.alive else None)

    def watch_step(self, process: Process, *, first: bool) -> None:
        """Report a step that takes too long, and again when its age doubles; the first after a resume is not judged."""
        generation, step = process.session.generation, process.loop.count

        def look(age_s: float = STALL_S) -> None:
            if not (self.alive and process.alive) or process.loop.count != step:
                return
            if process.session.generation != generation or process.activity not in WATCHED:
                return
            now, kind = self.world.timeline.now, FaultKind.STALL
            name = node_address(self.name)
            report = FaultReport(
                kind, now, name, "slow", process.rank, self.name, generation, process.incarnation
            )  # fmt: skip
            self.endpoint.post(FaultReported(report), CONTROLLER)
            self.world.timeline.after(age_s, lambda: look(2 * age_s))

        if not first:
            self.world.timeline.after(STALL_S, look)

    # --- inside -------------------------------------------------------------------------------------------------

    def _transmit(self, envelope: Envelope) -> None:
        def arrive(each: Envelope) -> None:
            if self.reachable:
                self.world.controller.receive(each, self.name)

        self.world.network.carry(envelope, arrive)

    def _joined(self) -> NodeJoined:
        running = tuple(_running(process) for process in self.processes())
        return NodeJoined(self.name, self.name, StoreEndpoint(self.name, 1), running)

    def _new_session(self, envelope: Envelope) -> None:
        self.endpoint.post(self._joined(), CONTROLLER)

    def _take(self, envelope: Envelope) -> bool:
        match envelope.body:
            case WelcomeNode():
                self._welcome = True
                early, self._early = self._early, []
                for order in early:
                    self._start(order)
            case StartProcess() as order if self._welcome:
                self._start(order)
            case StartProcess() as order:
                self._early.append(order)
            case StopProcess(rank=rank, incarnation=incarnation):
                seat = self.seats.get(rank)
                if seat is not None:
                    seat.ordered = max(seat.ordered, incarnation)
                    if seat.process is not None and seat.process.incarnation <= incarnation:
                        seat.process.end(SIGKILL)
            case ProbeProgress(probe=probe):
                clocks = tuple(process.progress() for process in self.processes())
                self.endpoint.post(ProgressReported(self.name, probe, self.world.timeline.now, clocks), CONTROLLER)
            case EndJob():
                self.world.timeline.after(0.01, self.die)
            case other:
                self.world.fail(f"an agent cannot carry out a {type(other).__name__}")
        return True

    def _start(self, order: StartProcess) -> None:
        seat = self.seats.setdefault(order.rank, Seat(self, order.rank))
        if order.incarnation <= seat.ordered:
            return
        seat.ordered = order.incarnation
        if seat.process is not None:
            seat.process.end(SIGKILL)
        self.world.timeline.after(0.01, lambda: self._fork(seat, order))

    def _fork(self, seat: Seat, order: StartProcess) -> None:
        if not self.alive or seat.ordered != order.incarnation:
            return
        if self.world.refuse_start():
            now, name = self.world.timeline.now, node_address(self.name)
            report = FaultReport(
                FaultKind.START_FAILED, now, name, "fork failed", order.rank, self.name, order.generation,
                order.incarnation,
            )  # fmt: skip
            self.endpoint.post(FaultReported(report), CONTROLLER)
            return
        seat.oldest = order.incarnation
        seat.process = Process(self.world, seat, order, self.world.next_pid())
        self.endpoint.post(ProcessStarted(self.name, _running(seat.process), warm=True), CONTROLLER)


class Platform:
    """Makes, ends and kills nodes; says so when one goes that nobody wanted gone."""

    def __init__(self, world: "World", capacity: int) -> None:
        self._world = world
        self._capacity = capacity
        self._deleted: set[str] = set()
        self.ending = False
        mailbox = Mailbox(job=world.job.job, address=PLATFORM, session=world.next_session())
        self.endpoint = Endpoint(mailbox, world.timeline, transmit=self._transmit, take=self._take)

    def lost(self, name: str) -> None:
        """An agent is gone."""
        if name not in self._deleted and not self.ending:
            self.endpoint.post(NodeLost(name, "its agent ended with signal 9", self._world.timeline.now), CONTROLLER)

    def _transmit(self, envelope: Envelope) -> None:
        self._world.network.carry(envelope, lambda each: self._world.controller.receive(each, PLATFORM))

    def _take(self, envelope: Envelope) -> bool:
        world = self._world
        match envelope.body:
            case CreateNode(node=name) if self._capacity > 0:
                self._capacity -= 1
                world.timeline.after(world.chance.uniform(0.1, 20.0), lambda: world.add_agent(name))
            case CreateNode(node=name):
                self.endpoint.post(NodeRefused(name, "no more machines"), CONTROLLER)
            case DeleteNode(node=name):
                self._deleted.add(name)
                self._capacity += 1
                world.timeline.after(world.chance.uniform(0.01, 5.0), world.agents[name].die)
            case KillNode(node=name):
                world.kill_node(name)
            case EndJob():
                self.ending = True
                for agent in world.agents.values():
                    world.timeline.after(10.0, agent.die)
            case other:
                world.fail(f"a platform cannot carry out a {type(other).__name__}")
        return True
