"""Agents with their seats: what lives on a node, and what of a rank outlives its processes."""

from typing import TYPE_CHECKING

from ..protocol.mailbox import Mailbox
from ..protocol.messages import (
    ArmFault,
    EndJob,
    Envelope,
    FaultReported,
    IntroduceNode,
    NewcomerWaiting,
    NodeJoined,
    ProbeProgress,
    ProcessExited,
    ProcessStarted,
    ProgressReported,
    StartProcess,
    StopProcess,
    StoreMoved,
    WelcomeNode,
)
from ..protocol.types import (
    CONTROLLER,
    Activity,
    Assertion,
    FaultKind,
    FaultLevel,
    FaultReport,
    LocalStateCopy,
    RunningProcess,
    StoreEndpoint,
    node_address,
)
from .invariants import Invariant
from .lies import forged
from .network import Endpoint
from .process import Process

if TYPE_CHECKING:
    from .world import World

SIGKILL = -9
SKEWS_S = (0.0, 3600.0, -3600.0)  # of the nodes' wall clocks
STALL_S = 2.0  # a step that takes longer is reported
SUSPENDED_S = 3.0  # a process that is stopped for longer is reported
WATCHED = frozenset({Activity.COMPUTING, Activity.COLLECTIVE, Activity.COMMITTING, Activity.UPDATING})


class Seat:
    """A rank's place on a node, with its black box: what outlives its processes."""

    def __init__(self, agent: "Agent", rank: int) -> None:
        self.agent, self.rank = agent, rank
        self.process: Process | None = None
        self.ordered = self.oldest = -1  # latest incarnation asked for, and started
        self._own: list[tuple[int, int, int]] = []  # (rank, step, blob), two at most, in order of writing
        self._wards: list[tuple[int, int, int]] = []

    def keep_local(self, step: int, blob: int) -> None:
        """Write the rank-local state."""
        self._own = _written(self._own, self.rank, step, blob)

    def keep_ward(self, rank: int, step: int, blob: int) -> None:
        """Write a copy of the ward's local state."""
        self._wards = _written(self._wards, rank, step, blob)

    @property
    def local_is_empty(self) -> bool:
        """Whether no life of the rank has written here."""
        return not self._own

    def own(self, step: int) -> int | None:
        """Read the rank-local state as of a step."""
        return self.copy_of(self.rank, step)

    def copy_of(self, rank: int, step: int) -> int | None:
        """Read any rank-local state that is here."""
        return next((blob for who, at, blob in self._own + self._wards if (who, at) == (rank, step)), None)

    def copies(self) -> tuple[LocalStateCopy, ...]:
        """Name what is here."""
        return tuple(LocalStateCopy(rank, step) for rank, step, _ in sorted(self._own + self._wards))

    def ended(self, process: Process, status: int) -> None:
        """The seat's process has ended."""
        if self.process is process:
            self.process = None
        expected = self.ordered > process.incarnation
        self.agent.post_soon(ProcessExited(self.agent.name, _running(process), status, self.agent.wall_s, expected))


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
        self.deaf_until_s = self.mute_until_s = 0.0
        self.isolated_until_s = 0.0  # it is the controller that is cut off, which must cost no process its life
        self.harmed = False  # something of it is reported to be broken, so whoever is on it may be replaced
        self.broken = False  # it is reported as a whole, so all who are on it are at fault
        self.store = StoreEndpoint(name, 1)
        self.store_frozen = False
        self.seats: dict[int, Seat] = {}
        self._skew_s = SKEWS_S[len(world.agents) % len(SKEWS_S)]
        self._welcome = False
        self._early: list[StartProcess] = []
        mailbox = Mailbox(job=world.job.job, address=node_address(name), session=world.next_session())
        self.endpoint = Endpoint(
            mailbox, world.timeline, transmit=self._transmit, take=self._take, complain=world.fail,
            new_session=self._new_session,
        )  # fmt: skip
        self.endpoint.post(self._joined(), CONTROLLER)

    @property
    def wall_s(self) -> float:
        """What the node's wall clock says."""
        return self.world.timeline.now + self._skew_s

    @property
    def hears(self) -> bool:
        """Whether the network leads here."""
        return self.alive and self.world.timeline.now >= max(self.deaf_until_s, self.isolated_until_s)

    @property
    def is_heard(self) -> bool:
        """Whether the network leads from here to the controller."""
        return self.alive and self.world.timeline.now >= max(self.mute_until_s, self.isolated_until_s)

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

    def freeze_store(self, seconds: float) -> None:
        """The rendezvous store does not answer; the agent notices after `seconds`, and starts the next one."""
        self.store_frozen = True
        self.world.timeline.after(seconds, self.move_store)

    def move_store(self) -> None:
        """The rendezvous store dies; the next one listens elsewhere."""
        self.store_frozen = False
        self.store = StoreEndpoint(self.name, self.store.port + 1)
        self.endpoint.post(StoreMoved(self.name, self.store), CONTROLLER)

    def report_device(
        self, kind: FaultKind, level: FaultLevel, rank: int | None, assertion: Assertion = Assertion.ONCE
    ) -> None:
        """A detector on this node has found something wrong with a device, or with the machine."""
        seat = self.seats.get(rank) if rank is not None else None
        report = FaultReport(
            kind, self.wall_s, node_address(self.name), "seen by a detector", rank, self.name,
            incarnation=seat.process.incarnation if seat is not None and seat.process is not None else 0,
            level=level, code="80E01801", assertion=assertion,
        )  # fmt: skip
        self.endpoint.post(FaultReported(report), CONTROLLER)

    def relay(self, process: Process, envelope: Envelope) -> None:
        """Pass on what a rank says; an earlier life's words are refused. Another node's agent lies about it first."""
        liar = next((each for each in self.world.agents.values() if each is not self and each.is_heard), None)
        if liar is not None and self.world.controller.receive(forged(envelope, process.rank), liar.name):
            self.world.fail(Invariant.OWN_VOICE, f"{liar.name} is believed to speak for rank {process.rank}")
        if self.is_heard and process.incarnation >= self.seats[process.rank].oldest:
            self.world.controller.receive(envelope, self.name)

    def announce(self, process: Process) -> None:
        """A process that was started early has reached its train function."""
        self.endpoint.post(NewcomerWaiting(self.name, _running(process)), CONTROLLER)

    def post_soon(self, body: ProcessExited) -> None:
        """Report what the kernel says."""
        self.world.timeline.after(0.002, lambda: self.endpoint.post(body, CONTROLLER) if self.alive else None)

    def watch_step(self, process: Process, *, first: bool) -> None:
        """Report a step that takes too long, and again when its age doubles; the first after a resume is not judged."""
        generation, step = process.session.generation, process.standing.count

        def look(age_s: float = STALL_S) -> None:
            if not (self.alive and process.alive) or process.standing.count != step:
                return
            if process.session.generation != generation or process.activity not in WATCHED:
                return
            self._report(FaultKind.STALL, "slow", process)
            self.world.timeline.after(age_s, lambda: look(2 * age_s))

        if not first:
            self.world.timeline.after(STALL_S, look)

    def watch_suspended(self, process: Process) -> None:
        """Report a process that is stopped, in whatever it was doing, and again when that has lasted twice as long."""

        def look(stopped_s: float = SUSPENDED_S) -> None:
            if self.alive and process.alive and process.activity is not Activity.FINISHED:
                self._report(FaultKind.UNRESPONSIVE, "stopped", process)
                self.world.timeline.after(stopped_s, lambda: look(2 * stopped_s))

        self.world.timeline.after(SUSPENDED_S, look)

    def _report(self, kind: FaultKind, detail: str, process: Process) -> None:
        now, name, generation = self.wall_s, node_address(self.name), process.session.generation
        report = FaultReport(kind, now, name, detail, process.rank, self.name, generation, process.incarnation)
        self.endpoint.post(FaultReported(report), CONTROLLER)

    # --- inside -------------------------------------------------------------------------------------------------

    def _transmit(self, envelope: Envelope) -> None:
        def arrive(each: Envelope) -> None:
            if self.is_heard:
                self.world.controller.receive(each, self.name)

        self.world.network.carry(envelope, arrive)

    def _joined(self) -> NodeJoined:
        running = tuple(_running(process) for process in self.processes())
        return NodeJoined(self.name, self.name, self.store, running)

    def _new_session(self, envelope: Envelope) -> None:
        self.endpoint.post(self._joined(), CONTROLLER)

    def _take(self, envelope: Envelope) -> bool:
        match envelope.body:
            case WelcomeNode():
                self._welcome = True
                early, self._early = self._early, []
                for order in early:
                    self._start(order)
            case IntroduceNode():
                self.endpoint.post(self._joined(), CONTROLLER)
            case StartProcess() as order:
                self._start(order)
            case StopProcess(rank=rank, incarnation=incarnation):
                seat = self.seats.get(rank)
                if seat is not None:
                    seat.ordered = max(seat.ordered, incarnation)
                    if seat.process is not None and seat.process.incarnation <= incarnation:
                        seat.process.end(SIGKILL)
            case ProbeProgress(probe=probe):
                clocks = tuple(process.progress() for process in self.processes())
                self.endpoint.post(ProgressReported(self.name, probe, self.wall_s, clocks), CONTROLLER)
            case ArmFault(fault=fault):
                process = self.hosts(fault.rank)
                if process is not None:
                    process.inject(fault.action)
            case EndJob():
                self.world.timeline.after(0.01, self.die)
            case other:
                self.world.fail(Invariant.UNDERSTOOD, f"an agent cannot carry out a {type(other).__name__}")
        return True

    def _start(self, order: StartProcess) -> None:
        if not self._welcome:
            self._early.append(order)
            return
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
            now, name = self.wall_s, node_address(self.name)
            report = FaultReport(
                FaultKind.START_FAILED, now, name, "fork failed", order.rank, self.name, order.generation,
                order.incarnation,
            )  # fmt: skip
            self.endpoint.post(FaultReported(report), CONTROLLER)
            return
        seat.oldest = order.incarnation
        seat.process = Process(self.world, seat, order, self.world.next_pid())
        self.endpoint.post(ProcessStarted(self.name, _running(seat.process), warm=True), CONTROLLER)
