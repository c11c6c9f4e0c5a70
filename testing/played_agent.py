"""The agent and the processes of a played cluster, without a clock: what they do with orders, and what outlives them.

The session, rank state, step order and loop of a process are the product's own. How long things take is up to what
drives the loop: the simulation in virtual time (`simulation/process.py`), the fake cluster of the tests at once
(`testing/answering_cluster.py`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from typing import Any, Generic, Protocol, TypeVar

from ..processor.rank_loop import Action, Actions, RankLoop
from ..processor.session import Session
from ..processor.step_order import StepOrder, StepState
from ..protocol import messages as m
from ..protocol.messages import StartProcess
from ..protocol.reports import PreparedProcesses
from ..protocol.types import (
    FaultKind,
    FaultReport,
    LocalStateCopy,
    RankProgress,
    RunningProcess,
    StandbyDepth,
    StoreEndpoint,
    node_address,
)

SIGKILL = -9
Slots = list[tuple[int, int, int]]  # (rank, step, blob), two at most, in order of writing
Process = TypeVar("Process", bound="Hosted")
Returned = TypeVar("Returned")
Wait = TypeVar("Wait")


class Hosted(Protocol):
    """A process, as its agent knows it."""

    @property
    def running(self) -> RunningProcess:
        """Its numbers."""
        ...

    def end(self, status: int) -> None:
        """End at once."""
        ...

    def progress(self) -> RankProgress:
        """Read the step clock."""
        ...


class HostedRank(Generic[Process]):
    """The place of a rank on a node, with its black box."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.process: Process | None = None
        self.ordered = self.oldest = -1  # latest incarnation asked for, and started
        self.host_copies = [(0, 0), (0, 0)]  # of each file: the step of the copy in it (0: none), and the world's size
        self.guest_copies = [(0, 0, 0), (0, 0, 0)]  # of each file for another rank's: rank, step, and size
        self.damaged: set[int] = set()  # steps of which the copy is
        self._own: Slots = []
        self._peers: Slots = []

    def keep_local(self, step: int, blob: int) -> None:
        """Write the rank-local state."""
        self._own = _written(self._own, self.rank, step, blob)

    def keep_peer(self, rank: int, step: int, blob: int) -> None:
        """Write the peer copy of another rank's state."""
        self._peers = _written(self._peers, rank, step, blob)

    @property
    def local_is_empty(self) -> bool:
        """Return whether no incarnation of the rank has written here."""
        return not self._own

    def copy_of(self, rank: int, step: int) -> int | None:
        """Read a rank-local state or a peer copy."""
        return next((blob for whose, at, blob in self._own + self._peers if (whose, at) == (rank, step)), None)

    def copies(self) -> tuple[LocalStateCopy, ...]:
        """Name what is here."""
        return tuple(LocalStateCopy(rank, step) for rank, step, _ in sorted(self._own + self._peers))


def _written(slots: Slots, rank: int, step: int, blob: int) -> Slots:
    """As the black box does: the same step is replaced, later steps are dropped, the two last writes stay."""
    others = [slot for slot in slots if slot[:2] != (rank, step)]
    if len(others) > 1:  # another rank's is given up first, then the older one
        others.remove(next((slot for slot in others if slot[0] != rank), others[0]))
    return [*(slot for slot in others if slot[1] <= step), (rank, step, blob)]


class FakeAgent(ABC, Generic[Process]):
    """One node. A subclass says how its reports travel, and when and as what processes start."""

    def __init__(self, name: str) -> None:
        self.name = self.failure_domain = name
        self.store = StoreEndpoint(name, 1)
        self.places: dict[int, HostedRank[Process]] = {}

    @abstractmethod
    def say(self, report: m.Report) -> None:
        """Report to the controller."""

    @abstractmethod
    def new_process(self, place: HostedRank[Process], order: m.StartProcess) -> Process | None:
        """Return the process that an order has started; None where it cannot be started, which has been reported."""

    @property
    @abstractmethod
    def wall_s(self) -> float:
        """The time by the node's wall clock."""

    def processes(self) -> list[Process]:
        """Return the processes that live here."""
        return [place.process for place in self.places.values() if place.process is not None]

    def hosts(self, rank: int) -> Process | None:
        """Return the process that holds a rank here."""
        place = self.places.get(rank)
        return place.process if place is not None else None

    def introduction(self) -> m.NodeJoined:
        """Return what the agent says to a controller that does not know it."""
        running = tuple(process.running for process in self.processes())
        return m.NodeJoined(self.name, self.failure_domain, self.store, running)

    def obey(self, order: m.Command) -> bool:
        """Carry out an order to an agent; say whether it is one."""
        match order:
            case m.IntroduceNode():
                self.say(self.introduction())
            case m.StartProcess():
                self._begin(order)
            case m.StartProcesses(starts=starts):
                for start in starts:
                    self._begin(start)
            case m.BuildAhead(starts=starts):
                ranks = tuple(start.rank for start in starts)
                self.say(m.ProcessesPrepared(self.name, PreparedProcesses(StandbyDepth.BUILT, ranks, took_s=1.0)))
            case m.StopProcess(rank=rank, incarnation=incarnation):
                place = self.places.get(rank)
                if place is not None:
                    place.ordered = max(place.ordered, incarnation)
                    if place.process is not None and place.process.running.incarnation <= incarnation:
                        place.process.end(SIGKILL)
            case m.ProbeProgress(probe=probe):
                clocks = tuple(process.progress() for process in self.processes())
                self.say(m.ProgressReported(self.name, probe, self.wall_s, clocks))
            case _:
                return False
        return True

    def _begin(self, order: m.StartProcess) -> None:
        place = self.places.setdefault(order.rank, HostedRank(order.rank))
        if order.incarnation <= place.ordered:
            return
        place.ordered = order.incarnation
        if place.process is not None:
            place.process.end(SIGKILL)
        self.start(place, order)

    def start(self, place: HostedRank[Process], order: m.StartProcess) -> None:
        """Start a process, unless another order has come meanwhile. A subclass may do so later."""
        if place.ordered != order.incarnation:
            return
        process = self.new_process(place, order)
        if process is not None:
            place.oldest, place.process = order.incarnation, process
            self.started(m.ProcessStarted(self.name, process.running, warm=True))

    def started(self, report: m.ProcessStarted) -> None:
        """Report that a process was started. A subclass may do so with others."""
        self.say(report)

    def exited(self, process: Process, status: int) -> m.ProcessExited:
        """Take a process that has ended off its place; return what is to be reported."""
        running = process.running
        place = self.places[running.rank]
        if place.process is process:
            place.process = None
        expected = place.ordered > running.incarnation
        return m.ProcessExited(self.name, running, status, self.wall_s, expected)

    def fault(self, kind: FaultKind, detail: str, process: RunningProcess) -> m.FaultReported:
        """Return the report that something is wrong with a process."""
        rank, generation, incarnation = process.rank, process.generation, process.incarnation
        seen_by = node_address(self.name)
        report = FaultReport(kind, self.wall_s, seen_by, detail, rank, self.name, generation, incarnation)
        return m.FaultReported(report)


class FakeProcess:
    """One incarnation of a rank."""

    def __init__(self, order: StartProcess, pid: int) -> None:
        self.rank, self.pid, self.incarnation = order.rank, pid, order.incarnation
        self.world_size = self.former_size = order.world_size
        self.session = Session(order.rank, order.incarnation, order.generation)
        self.standing = StepState(clean=order.connected)
        self.steps = StepOrder(self.standing, self)
        self.loop = RankLoop(self.session, self.standing, self.steps, early=order.early)

    @property
    def running(self) -> RunningProcess:
        """Its numbers, as its agent reports them."""
        return RunningProcess(self.rank, self.pid, self.incarnation, self.session.generation)

    def interrupted(self) -> bool:
        """Return whether the controller wants the train thread to stop."""
        return self.session.quiescing

    def begins(self, step: int) -> bool:
        """Return whether a step may be begun; False at a boundary at which all ranks stop."""
        return self.session.begins(step)


def drive(
    actions: Actions[Returned],
    at_once: Mapping[type[Action], Callable[[Any], object]],
    in_time: Mapping[type[Action], Callable[[Any], Generator[Wait, Any, Any]]],
    fails: type[Exception],
) -> Generator[Wait, Any, Returned]:
    """Carry out what the loop asks for, one action after the other, and return what it returns.

    `at_once`: what takes no time. `in_time`: what yields until it is done. What `fails` an action is thrown into the
    loop, as the product's train thread does.
    """
    try:
        action = next(actions)
        while True:
            try:
                if type(action) in at_once:
                    outcome = at_once[type(action)](action)
                else:
                    outcome = yield from in_time[type(action)](action)
            except fails as error:
                action = actions.throw(error)
            else:
                action = actions.send(outcome)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
