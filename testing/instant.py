"""Agents and processes of a fake cluster for which everything takes no time.

The agents are those of the simulation, the processes run the product's own loop of a rank.
"""

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

import msgspec

from ..processor import rank_loop as act
from ..processor.rank_loop import Action, Ended
from ..processor.session import Order
from ..protocol import messages as m
from ..protocol.errors import Interrupted, MidstepError
from ..protocol.types import Activity, CheckpointTrace, RankProgress, StepReport
from .fake_cluster import HOLDS, STEP_S
from .played_agent import FakeAgent, FakeProcess, HostedRank, drive

if TYPE_CHECKING:
    from .answering_cluster import AnsweringCluster

PHASE_S = 0.01
WITHOUT_OUTCOME = (
    act.IgnoreOrder, act.FindFailure, act.StopInFlight, act.ReportFault, act.BeginPhase, act.Rebuild,
    act.RecallLocalState, act.Halt, act.PublishCheckpoint, act.ClaimCheckpoints, act.Flush,
)  # fmt: skip


class Process(FakeProcess):
    """A process whose train thread takes no time; it trains when the cluster has it train."""

    def __init__(self, cluster: "AnsweringCluster", agent: "Agent", order: m.StartProcess, pid: int) -> None:
        super().__init__(order, pid)
        self.cluster, self.agent, self.place = cluster, agent, agent.places[order.rank]
        self.alive, self.suspended, self.finished = True, False, False
        self.activity = Activity.STARTING
        self.copied_rank: int | None = None  # the rank whose buddy this one is
        self._thread: Generator[None, Any, None] | None = None

    @property
    def node(self) -> str:
        """The node that it runs on."""
        return self.agent.name

    @property
    def committed(self) -> int:
        """How many updates it has applied."""
        return self.standing.count

    def join(self) -> None:
        """Reach the train function."""
        if self.place.local_is_empty:
            self.place.keep_local(0, 0)
        at_once: dict[type[Action], Callable[[Any], object]] = dict.fromkeys(WITHOUT_OUTCOME, lambda _: None) | {
            act.Inspect: lambda _: [],
            act.Clean: lambda _: [],
            act.Survey: lambda _: self._survey(),
            act.Join: self._report_joined,
            act.Post: lambda each: self.cluster.feed(each.body),
            act.SetActivity: lambda each: setattr(self, "activity", each.activity),
            act.EndPhase: lambda _: PHASE_S,
            act.Repair: self._repair,
            act.RollBack: lambda each: self._keep(each.order.part.target_step),
            act.Save: lambda _: ("/checkpoints/emergency", ""),
        }
        in_time = {act.AwaitOrder: lambda _: self._await_order(), act.Train: self._train}
        self._thread = drive(self.loop.run(), at_once, in_time, fails=MidstepError)
        self.go_on()

    def obey(self, order: Order) -> None:
        """Take in an order to a process."""
        self.session.hear(order)
        if isinstance(order, m.Quiesce) and order.after_step is not None:
            self.cluster.train(max(0, order.after_step - self.committed))  # all go on to the boundary together
        self.go_on()

    def go_on(self) -> None:
        """Do what can be done without another order."""
        if self._thread is not None and next(self._thread, self) is self:
            self.end(0)

    def train(self, steps: int) -> None:
        """Commit some steps."""
        self.standing.count += steps
        self._keep(self.committed)

    def end(self, status: int) -> None:
        """End, and have it reported."""
        if self.alive:
            self.alive = False
            self.cluster.feed(self.agent.exited(self, status))

    def progress(self) -> RankProgress:
        """Read the step clock: a rank that is not stuck waits for the others in a collective."""
        stuck = self.suspended or self.rank in self.cluster.deaf
        activity, collectives = (Activity.COMPUTING, 4) if stuck else (Activity.COLLECTIVE, 5)
        numbers = (self.rank, self.incarnation, self.session.generation, self.committed)
        clock = RankProgress(*numbers, activity, collectives, 30.0, 30.0, STEP_S, self.suspended)
        return msgspec.structs.replace(clock, **self.cluster.clock_changes)

    # --- what the loop asks for -----------------------------------------------------------------------------------

    def _await_order(self) -> Generator[None, None, Order]:
        while (order := self.session.take_order()) is None:
            yield
        return order

    def _train(self, action: act.Train) -> Generator[None, None, Ended]:
        self.activity = Activity.COMPUTING
        self.train(1)
        if self.loop.commits_first_step():
            numbers = (self.rank, self.session.generation, self.incarnation)
            self.cluster.feed(m.StepCommitted(*numbers, self.committed, self.cluster.now, STEP_S))
        try:
            while not self.finished:
                self.steps.begin()
                yield
        except Interrupted:
            return Ended.INTERRUPTED
        return Ended.RETURNED

    def _survey(self) -> StepReport:
        return self.standing.report(HOLDS, self.place.copies(), self.cluster.checkpoints, CheckpointTrace())

    def _report_joined(self, action: act.Join) -> None:
        numbers = (self.rank, self.session.generation, self.incarnation, self.pid)
        self.cluster.feed(m.RankJoined(*numbers, action.report, 0.1))

    def _repair(self, action: act.Repair) -> act.ReceivedBytes:
        self.copied_rank = action.order.part.copied_rank
        transfers = action.order.part.transfers
        return act.ReceivedBytes(sum(each.length_bytes for each in transfers if each.destination == self.rank))

    def _keep(self, step: int) -> None:
        """Keep the rank-local state, and a copy of that of the rank whose buddy this one is."""
        self.place.keep_local(step, step)
        if self.copied_rank is not None:
            self.place.keep_peer(self.copied_rank, step, step)


class Agent(FakeAgent[Process]):
    """An agent that does everything at once."""

    def __init__(self, cluster: "AnsweringCluster", name: str) -> None:
        super().__init__(name)
        self.cluster = cluster
        self.store = cluster.store(name)

    @property
    def wall_s(self) -> float:
        """Return what the node's wall clock says."""
        return self.cluster.now

    def say(self, report: m.Report) -> None:
        """Report to the controller."""
        self.cluster.feed(report)

    def new_process(self, place: HostedRank[Process], order: m.StartProcess) -> Process:
        """Return the process that an order has started."""
        self.cluster.deaf.discard(order.rank)
        self.cluster.pids += 1
        return Process(self.cluster, self, order, self.cluster.pids)

    def start(self, place: HostedRank[Process], order: m.StartProcess) -> None:
        """Start a process, and let it get to its train function."""
        super().start(place, order)
        process = place.process
        if process is None or not self.cluster.resilient or order.rank in self.cluster.never_joins:
            return
        process.join()
        if order.early:
            self.say(m.NewcomerWaiting(self.name, process.running))
