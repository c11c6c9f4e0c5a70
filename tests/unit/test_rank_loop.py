"""The loop of a rank: orders and outcomes in, actions out."""

from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import pytest

from midstep.processor import rank_loop as act
from midstep.processor.rank_loop import GIVEN_UP, Action, Actions, Ended, RankLoop
from midstep.processor.session import Order, Session, SessionStage
from midstep.processor.step_order import StepOrder, StepState
from midstep.processor.train_thread import TrainThread
from midstep.protocol.errors import CommunicatorAborted, LinkUpFailed, StateLost
from midstep.protocol.messages import (
    CheckpointSaved,
    Message,
    Quiesce,
    RankFinished,
    RankQuiesced,
    RankReady,
    Rejoin,
    Release,
    Resume,
    SaveCheckpoint,
)
from midstep.protocol.types import (
    Activity,
    CheckpointTrace,
    FaultKind,
    InjectionPoint,
    Rendezvous,
    RepairPart,
    RestoreSource,
    StepReport,
)
from midstep.testing.simulation.rank_thread import RankThread

RANK, STEP, SECONDS = 3, 5, 0.25


def rejoin(generation: int, *, finish_update: bool = False) -> Rejoin:
    """An order to come back at step 5."""
    part = RepairPart(STEP, RestoreSource.REPLICA, finish_update=finish_update)
    return Rejoin(RANK, generation, Rendezvous("h", 1, "s"), connected=False, part=part)


class NoMoreOrders(Exception):
    """The controller has said all that it says in this test."""


class Rank:
    """A rank whose orders come one after the other. What its loop asks for is written down, and goes well."""

    def __init__(self, *orders: Order, early: bool = False) -> None:
        self.session = Session(RANK, incarnation=2, generation=0)
        self.step_state = StepState(clean=True)
        self.steps = StepOrder(self.step_state, self)
        self.loop = RankLoop(self.session, self.step_state, self.steps, early=early)
        self.orders = list(orders)
        self.asked: list[Action] = []
        self.failure: str | None = None
        self.ends: list[Ended] = []
        self.boundary = False
        self.raises: dict[type[Action], Exception] = {}
        self.also: dict[type[Action], Callable[[], object]] = {}
        self.corrupted: list[str] = []

    def interrupted(self) -> bool:
        return self.session.quiescing

    def begins(self, step: int) -> bool:
        return not self.boundary

    def play(self, actions: Actions[Any] | None = None) -> Any:
        """Go on until the loop returns, or there are no more orders; return what it returns."""
        actions = self.loop.run() if actions is None else actions
        outcome: object = None
        try:
            action = next(actions)
            while True:
                self.asked.append(action)
                try:
                    outcome = self._outcome(action)
                except NoMoreOrders:
                    return None
                except Exception as error:
                    action = actions.throw(error)
                else:
                    action = actions.send(outcome)
        except StopIteration as end:
            return end.value

    def _outcome(self, action: Action) -> object:
        if type(action) in self.raises:
            raise self.raises[type(action)]
        if type(action) in self.also:
            self.also.pop(type(action))()
        answers: dict[type[Action], Callable[[], object]] = {
            act.AwaitOrder: self._order,
            act.Train: lambda: self.ends.pop(0),
            act.FindFailure: lambda: self.failure,
            act.Inspect: lambda: self.corrupted,
            act.Clean: lambda: self.corrupted,
            act.Survey: lambda: self.step_state.report((), (), (), CheckpointTrace()),
            act.EndPhase: lambda: SECONDS,
            act.Repair: lambda: act.ReceivedBytes(7, 5),
            act.Save: lambda: ("/checkpoints", "disk full"),
        }
        return answers[type(action)]() if type(action) in answers else None

    def _order(self) -> Order:
        if not self.orders:
            raise NoMoreOrders
        order = self.orders.pop(0)
        assert self.session.hear(order).taken
        taken = self.session.take_order()
        assert taken is not None
        return taken

    @property
    def said(self) -> list[Message]:
        """What was reported to the controller."""
        return [action.body for action in self.asked if isinstance(action, act.Post)]

    def kinds(self, *, since: type[Action] | None = None) -> list[type[Action]]:
        """What was asked for, in order; from the last action of a kind on."""
        kinds = [type(action) for action in self.asked]
        return kinds if since is None else kinds[len(kinds) - kinds[::-1].index(since) :]


def started(*orders: Order, ends: list[Ended] | None = None) -> Rank:
    """A rank that has come back at step 5 of generation 1, and gets these orders."""
    rank = Rank(Quiesce(RANK, 1), rejoin(1), *orders)
    rank.ends = ends or []
    return rank


def test_a_rank_trains_and_is_released() -> None:
    rank = started(Resume(RANK, 1, STEP), Release(RANK, 1), ends=[Ended.RETURNED])
    rank.play()
    assert [type(body) for body in rank.said] == [RankQuiesced, RankReady, RankFinished]
    assert rank.said[-1] == RankFinished(RANK, 1, 2, STEP)
    assert rank.kinds(since=act.AwaitOrder) == [act.PublishCheckpoint, act.SetActivity, act.Flush]
    assert rank.session.stage is SessionStage.RELEASED


def test_the_way_back_has_one_order() -> None:
    rank = started()
    rank.play()
    back = rank.asked[rank.kinds().index(act.ClaimCheckpoints) : -1]
    assert [action.point if isinstance(action, act.BeginPhase) else type(action) for action in back] == [
        act.ClaimCheckpoints, InjectionPoint.REBUILD, act.Inspect, act.Rebuild, act.EndPhase, InjectionPoint.REPAIR,
        act.Repair, act.EndPhase, InjectionPoint.ROLLBACK, act.RecallLocalState, act.RollBack, act.EndPhase, act.Post,
    ]  # fmt: skip
    phases_s = {"rebuild": SECONDS, "repair": SECONDS, "rollback": SECONDS}
    assert rank.said[-1] == RankReady(RANK, 1, 2, STEP, phases_s, 7, 5)


def test_a_process_that_starts_early_says_nothing_before_it_is_asked() -> None:
    rank = Rank(early=True)
    rank.play()
    assert rank.session.stage is SessionStage.WAITING
    assert rank.kinds()[-1] is act.AwaitOrder
    assert act.Join not in rank.kinds()
    rank = Rank(Quiesce(RANK, 1), early=True)
    rank.play()
    assert rank.kinds(since=act.AwaitOrder) == []
    assert rank.kinds()[-3:] == [act.Survey, act.Join, act.AwaitOrder]


def test_a_rank_that_is_interrupted_stops_cleans_and_reports() -> None:
    rank = started(Resume(RANK, 1, STEP), Quiesce(RANK, 2), ends=[Ended.INTERRUPTED])
    rank.play()
    asked = rank.asked[rank.kinds().index(act.Train) + 1 :]
    assert asked[:8] == [
        act.FindFailure(),
        act.BeginPhase(InjectionPoint.STOP),
        act.StopInFlight(GIVEN_UP),
        act.EndPhase(),
        act.SetActivity(Activity.RECOVERING),
        act.BeginPhase(InjectionPoint.CLEAN),
        act.Clean(),
        act.EndPhase(),
    ]
    report = StepReport(STEP, ready=False, clean=True, holds=(), needs=(), local_states=(), checkpoints=())
    assert rank.said[-1] == RankQuiesced(RANK, 2, 2, report, {"stop": SECONDS, "clean": SECONDS})


def test_at_a_boundary_nothing_is_aborted_and_nobody_blamed() -> None:
    rank = started(Resume(RANK, 1, STEP), ends=[Ended.INTERRUPTED])
    rank.failure = "connection closed by peer"
    rank.also[act.Train] = lambda: setattr(rank.steps, "at_boundary", True)
    rank.play()
    assert act.StopInFlight(None) in rank.asked
    assert act.ReportFault not in rank.kinds()
    assert not rank.steps.at_boundary


@pytest.mark.parametrize(("ended", "told"), [(Ended.INTERRUPTED, 1), (Ended.FAILED, 0)])
def test_why_the_communicators_have_failed_is_told_unless_this_process_has_said_what_is_wrong(
    ended: Ended, told: int
) -> None:
    rank = started(Resume(RANK, 1, STEP), ends=[ended])
    rank.failure = "connection closed by peer"
    rank.play()
    assert rank.asked.count(act.ReportFault(FaultKind.COMMUNICATION, rank.failure)) == told
    assert act.StopInFlight(rank.failure) in rank.asked


def test_a_rank_that_has_finished_blames_nobody_when_it_is_stopped() -> None:
    """Its communicators were aborted for the next generation before its train thread hears of it."""
    rank = started(Resume(RANK, 1, STEP), Quiesce(RANK, 2), ends=[Ended.RETURNED])
    rank.failure = "generation 2 is being opened"
    rank.play()
    assert act.ReportFault not in rank.kinds()
    assert [type(body) for body in rank.said[-2:]] == [RankFinished, RankQuiesced]
    assert act.Clean in rank.kinds(since=act.StopInFlight)


@pytest.mark.parametrize("where", [act.Rebuild, act.Repair, act.RecallLocalState, act.RollBack])
def test_a_way_back_that_fails_is_judged_and_nothing_of_it_goes_on(where: type[Action]) -> None:
    rank = started()
    rank.raises[where] = error = LinkUpFailed("not connected")
    rank.play()
    assert rank.kinds(since=where) == [act.JudgeFailure, act.Halt, act.AwaitOrder]
    assert act.JudgeFailure(error) in rank.asked
    assert [type(body) for body in rank.said] == [RankQuiesced]


def test_who_is_aborted_on_the_way_back_blames_nobody() -> None:
    rank = started()
    rank.raises[act.Rebuild] = CommunicatorAborted("generation 2 is being opened")
    rank.play()
    assert rank.kinds(since=act.Rebuild) == [act.Halt, act.AwaitOrder]


def test_what_the_process_cannot_go_on_with_ends_it() -> None:
    rank = started()
    rank.raises[act.Rebuild] = rank.raises[act.JudgeFailure] = MemoryError("no more")
    with pytest.raises(MemoryError):
        rank.play()


def test_memory_that_was_struck_after_the_report_makes_the_plan_void() -> None:
    rank = started()
    rank.corrupted = ["parameters"]
    rank.play()
    judged = [action.error for action in rank.asked if isinstance(action, act.JudgeFailure)]
    assert [type(error) for error in judged] == [StateLost]
    assert act.Rebuild not in rank.kinds()


def test_who_is_stopped_on_the_way_back_does_not_say_that_it_is_ready() -> None:
    rank = started()
    rank.also[act.RollBack] = lambda: rank.session.hear(Quiesce(RANK, 2))
    rank.play()
    assert [type(body) for body in rank.said] == [RankQuiesced]
    assert rank.session.stage is SessionStage.REJOINING


@pytest.mark.parametrize("finish", [True, False])
def test_who_holds_at_the_broken_barrier_follows_the_order_from_there(finish: bool) -> None:
    """First inside the train function, then outside, where the rest of the same order is carried out."""
    rank = started(Resume(RANK, 1, STEP), Quiesce(RANK, 2), rejoin(2, finish_update=finish), ends=[Ended.INTERRUPTED])
    held: list[bool] = []

    def break_barrier() -> None:
        held.append(rank.play(rank.loop.hold()))
        rank.steps.held = True

    rank.also[act.Train] = break_barrier
    rank.play()
    assert held == [finish]
    kinds = rank.kinds()
    assert kinds.count(act.StopInFlight) == 1
    assert kinds.count(act.Inspect) == 3  # held with its gradients, and in both ways back
    assert kinds.count(act.Clean) == 1  # when they are not needed any more
    assert [type(body) for body in rank.said] == [RankQuiesced, RankReady, RankQuiesced, RankReady]


def test_a_rank_that_is_asked_to_stop_once_more_answers_each_order_for_its_own_generation() -> None:
    """What follows from an answer is refused while another order to stop waits, so none must be for that one."""
    rank = Rank(Quiesce(RANK, 1), rejoin(1), Resume(RANK, 1, 5), Quiesce(RANK, 2))
    rank.ends = [Ended.RETURNED]
    rank.also[act.Clean] = lambda: rank.session.hear(Quiesce(RANK, 3))
    rank.play()
    assert [body.generation for body in rank.said if isinstance(body, RankQuiesced)] == [1, 2]


def test_a_parked_rank_saves_and_says_how_that_went() -> None:
    rank = Rank(Quiesce(RANK, 1), SaveCheckpoint(RANK, 1, STEP, publish=True))
    rank.play()
    assert rank.said[-1] == CheckpointSaved(RANK, 1, STEP, "/checkpoints", "disk full")


def test_only_the_first_step_after_a_resume_is_told() -> None:
    rank = started(Resume(RANK, 1, STEP), ends=[Ended.INTERRUPTED])
    told: list[bool] = []
    rank.also[act.Train] = lambda: told.extend(rank.loop.commits_first_step() for _ in range(2))
    rank.play()
    assert told == [True, False]


def test_every_action_is_carried_out_in_a_process_and_in_a_played_one() -> None:
    every = set(Action.__subclasses__())
    played = RankThread(MagicMock())
    assert set(TrainThread._ways_to_carry_out(MagicMock())) == every
    assert {*played._at_once, *played._in_time} == every
