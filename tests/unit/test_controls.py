"""Controls of operators: what the machine orders, what it refuses, and what outlives a takeover."""

from functools import partial
from typing import Any

import msgspec
import pytest

from midstep.cli.inject import report_of
from midstep.cli.views.report_text import summary_line
from midstep.controller.endpoints.control_requests import (
    Accepted,
    ControlRequest,
    InjectRequest,
    KillNodeRequest,
    LeaveNodeRequest,
    PauseFailoverRequest,
    PromoteRequest,
    Refused,
    ReportFaultRequest,
    refusal_of,
)
from midstep.controller.endpoints.request_handler import NO_INJECTION, RequestHandler
from midstep.controller.recovery.events import ControlAnswered, ControllerStarted, ControlRequested, StopRequested
from midstep.controller.recovery.state import Phase
from midstep.controller.recovery.world import NodeState
from midstep.controller.switchover import Switchover
from midstep.policies.schema import Policy, changes, obstacle
from midstep.protocol import controls as c
from midstep.protocol.identities import Role
from midstep.protocol.incidents import Outcome
from midstep.protocol.messages import ArmFault, FaultReported, Quiesce, Rejoin, SaveCheckpoint, StartProcess
from midstep.protocol.types import ArmedFault, FaultAction, RestoreSource, Rung, detector_address
from midstep.testing.fake_cluster import FakeCluster, job, only

from .test_draining import BOUNDARY, stopped

ASKED = c.Asked("ann", "operator", "the storage is slow")
RANKS = range(4)


def ask(cluster: FakeCluster, control: c.Control) -> list[Any]:
    """Have an operator ask for something."""
    return cluster.feed(ControlRequested(control, ASKED))


def answered(cluster: FakeCluster) -> tuple[str, bool]:
    """What the operator was answered last, and whether that was a refusal."""
    told = [action for action in cluster.log if isinstance(action, ControlAnswered)]
    return told[-1].text, told[-1].refused


def reach(cluster: FakeCluster, *, sharded: bool = False) -> list[Any]:
    """The clocks are read, and all ranks stop at the boundary."""
    cluster.feed(*(cluster.clocks(name) for name in ("node0", "node1")))
    cluster.expect(Phase.PAUSING)
    return cluster.feed(*(stopped(cluster, rank, sharded=sharded) for rank in RANKS))


def paused(cluster: FakeCluster, for_s: float = 600.0) -> None:
    """Hold all ranks at a boundary."""
    ask(cluster, c.PauseTraining(for_s))
    reach(cluster)
    assert cluster.machine.status(cluster.now).held


# --- pause ------------------------------------------------------------------------------------------------------------


def test_a_pause_stops_all_ranks_at_one_step_and_its_end_has_them_train_on_from_there(cluster: FakeCluster) -> None:
    paused(cluster)
    before = {rank: cluster.holder(rank).incarnation for rank in RANKS}
    assert cluster.machine.status(cluster.now).controls.pause is not None
    rejoins = only(ask(cluster, c.EndPause()), Rejoin)
    assert {rejoin.part.target_step for rejoin in rejoins} == {BOUNDARY}
    cluster.pass_barrier_two(BOUNDARY)
    (incident,) = cluster.machine.incidents
    assert incident.is_requested
    assert "spent recovering" not in summary_line(cluster.machine.status(cluster.now)).plain
    assert (incident.outcome, incident.steps_lost, incident.replaced) == (Outcome.RESUMED, 0, ())
    assert "ann (operator): the storage is slow" in incident.decisions[0].reason
    assert {rank: cluster.holder(rank).incarnation for rank in RANKS} == before
    assert not cluster.machine.status(cluster.now).held
    assert all(use.used == 0 for use in cluster.machine.status(cluster.now).budgets)


def test_held_ranks_are_told_so_before_they_would_leave(cluster: FakeCluster) -> None:
    """A process that hears no controller for `deadlines.orders_s` ends by itself."""
    paused(cluster, 3000.0)
    began_s, orders_s = cluster.now, cluster.policy.deadlines.orders_s
    while cluster.now < began_s + 2 * orders_s:
        last_s = cluster.now
        assert only(cluster.overdue(), Quiesce) == [Quiesce(rank, cluster.machine.generation) for rank in RANKS]
        assert cluster.now - last_s < orders_s / 2


def test_a_pause_that_is_forgotten_ends_by_itself(cluster: FakeCluster) -> None:
    paused(cluster, 60.0)
    began_s = cluster.now
    assert only(cluster.overdue(), Rejoin)
    assert cluster.now - began_s <= 60.0
    cluster.pass_barrier_two(BOUNDARY)
    assert cluster.machine.status(cluster.now).controls.pause is None


def test_the_next_controller_holds_the_ranks_on(cluster: FakeCluster) -> None:
    """It reads the pause in the journal, or in a snapshot; and neither forgets who wanted it."""
    paused(cluster)
    memory = cluster.machine.memory()
    cluster.machine = cluster.new_machine()
    cluster.machine.restore(memory)
    cluster.feed(ControllerStarted(2))
    status = cluster.machine.status(cluster.now)
    assert status.held
    assert status.controls.pause is not None
    assert status.controls.pause.asked == ASKED
    assert only(ask(cluster, c.EndPause()), Rejoin)


def test_a_rank_that_dies_while_the_job_is_paused_is_replaced_and_the_pause_goes_on(cluster: FakeCluster) -> None:
    paused(cluster)
    assert [start.rank for start in only(cluster.feed(cluster.exited(1)), StartProcess)] == [1]
    cluster.recover(BOUNDARY)
    cluster.feed(*(cluster.clocks(name, step=BOUNDARY) for name in ("node0", "node1")))
    cluster.expect(Phase.PAUSING)


def test_a_pause_can_be_ended_before_the_boundary(cluster: FakeCluster) -> None:
    ask(cluster, c.PauseTraining(600.0))
    ask(cluster, c.EndPause())
    cluster.feed(*(cluster.clocks(name) for name in ("node0", "node1")))
    cluster.expect(Phase.RUNNING)
    ask(cluster, c.PauseTraining(600.0))
    cluster.feed(*(cluster.clocks(name) for name in ("node0", "node1")))
    ask(cluster, c.EndPause())
    assert only(cluster.feed(*(stopped(cluster, rank) for rank in RANKS)), Rejoin)


def test_a_job_that_is_stopped_while_it_is_paused_writes_its_checkpoint(cluster: FakeCluster) -> None:
    paused(cluster)
    bodies = cluster.feed(StopRequested("enough"))
    assert only(bodies, SaveCheckpoint)
    cluster.expect(Phase.SAVING)
    while cluster.machine.phase is Phase.SAVING:
        waiting = cluster.machine.state.saving.outstanding
        assert waiting
        cluster.feed(cluster.saved(max(waiting) if len(waiting) > 1 else next(iter(waiting)), BOUNDARY))
    assert cluster.finish is not None
    assert "an emergency checkpoint of step" in cluster.finish.reason


@pytest.mark.parametrize("control", [c.PauseTraining(600.0), c.SaveNow(), c.RestartRank(1)])
def test_a_script_that_cannot_stop_between_steps_is_refused(control: c.Control) -> None:
    cluster = FakeCluster()
    for name in ("node0", "node1", "node2"):
        cluster.feed(cluster.node(name))
    assert ask(cluster, control) == []
    text, refused = answered(cluster)
    assert refused
    assert "resilient train function" in text
    assert cluster.machine.status(cluster.now).controls == c.Controls()


def test_a_pause_that_is_none_cannot_be_ended(cluster: FakeCluster) -> None:
    ask(cluster, c.EndPause())
    assert answered(cluster) == ("the job is not paused", True)


# --- save, restart ----------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_written_between_two_steps_and_training_goes_on(cluster: FakeCluster) -> None:
    ask(cluster, c.SaveNow())
    orders = only(reach(cluster), SaveCheckpoint)
    assert orders
    for _ in range(8):
        waiting = cluster.machine.state.saving.outstanding
        if not waiting:
            break
        cluster.feed(cluster.saved(max(waiting), BOUNDARY))
    cluster.pass_barrier_two(BOUNDARY)
    controls = cluster.machine.status(cluster.now).controls
    assert controls.wishes == ()
    assert controls.records[0].outcome == f"a checkpoint of step {BOUNDARY} was written"
    assert controls.records[0].asked == ASKED


def test_a_rank_is_restarted_between_two_steps_and_nothing_is_repeated(cluster: FakeCluster) -> None:
    ask(cluster, c.RestartRank(2))
    bodies = reach(cluster)
    assert [(start.rank, start.incarnation) for start in only(bodies, StartProcess)] == [(2, 2)]
    cluster.recover(BOUNDARY)
    (incident,) = cluster.machine.incidents
    assert (incident.replaced, incident.steps_lost, incident.rung) == ((2,), 0, Rung.RECOVER_IN_PLACE)
    assert cluster.machine.status(cluster.now).controls.records[0].outcome == "done"
    assert all(use.used == 0 for use in cluster.machine.status(cluster.now).budgets)


def test_a_rank_that_alone_holds_its_state_is_restarted_after_a_checkpoint() -> None:
    cluster = FakeCluster().start()
    ask(cluster, c.RestartRank(2))
    assert only(reach(cluster, sharded=True), SaveCheckpoint)


def test_a_rank_that_alone_holds_its_state_stays_where_no_checkpoint_can_be_written() -> None:
    cluster = FakeCluster(job(), Policy(restore=(RestoreSource.REPLICA,))).start()
    ask(cluster, c.RestartRank(2))
    assert only(reach(cluster, sharded=True), StartProcess) == []
    assert cluster.machine.status(cluster.now).controls.records[0].outcome.startswith("not done: ")


def test_an_incident_comes_before_what_is_wished_for_and_does_not_forget_it(cluster: FakeCluster) -> None:
    ask(cluster, c.RestartRank(2))
    cluster.feed(cluster.exited(1))
    cluster.recover(9)
    cluster.feed(*(cluster.clocks(name) for name in ("node0", "node1")))
    cluster.expect(Phase.PAUSING)


def test_a_rank_that_there_is_not_cannot_be_restarted(cluster: FakeCluster) -> None:
    ask(cluster, c.RestartRank(4))
    assert answered(cluster) == ("there is no rank 4: the world has ranks 0 to 3", True)


# --- rungs ------------------------------------------------------------------------------------------------------------


def test_a_rung_that_is_forbidden_is_passed_over_with_who_and_why(cluster: FakeCluster) -> None:
    ask(cluster, c.ForbidRung(Rung.RECOVER_IN_PLACE, 60.0))
    cluster.feed(cluster.exited(3))
    (decision,) = cluster.machine.incidents[0].decisions
    assert decision.rung is Rung.RECOVER
    assert any(
        "an operator forbids it, ann (operator): the storage is slow" in each.reason for each in decision.skipped
    )


def test_what_was_forbidden_for_a_time_is_taken_after_it(cluster: FakeCluster) -> None:
    ask(cluster, c.ForbidRung(Rung.RECOVER_IN_PLACE, 60.0))
    cluster.now += 61.0
    cluster.feed(cluster.exited(3))
    assert cluster.machine.incidents[0].rung is Rung.RECOVER_IN_PLACE


def test_an_incident_begins_at_the_rung_that_is_forced_until_all_are_allowed(cluster: FakeCluster) -> None:
    ask(cluster, c.ForceRung(Rung.RECOVER, 60.0))
    assert {order.rung for order in cluster.machine.state.controls.rungs} == {Rung.RETRY_STEP, Rung.RECOVER_IN_PLACE}
    ask(cluster, c.AllowRungs())
    cluster.feed(cluster.exited(3))
    assert cluster.machine.incidents[0].rung is Rung.RECOVER_IN_PLACE


@pytest.mark.parametrize("control", [c.ForbidRung(Rung.STOP, 60.0), c.ForceRung(Rung.STOP, 60.0), c.AllowRungs()])
def test_the_end_of_the_ladder_is_neither_forbidden_nor_forced(cluster: FakeCluster, control: c.Control) -> None:
    ask(cluster, control)
    assert answered(cluster)[1]


# --- nodes, and what was seen -----------------------------------------------------------------------------------------


def leaving(cluster: FakeCluster, node: str, *, at_once: bool) -> Any:
    """What becomes of a request to drain or isolate a node."""
    replies: list[Any] = []
    handler = RequestHandler(cluster.job, Switchover())
    request = LeaveNodeRequest(node, "ann", "its fan is loud", at_once)
    event = handler.begin(request, "operator", lambda: cluster.machine.status(cluster.now), replies.append)
    return replies[0] if event is None else event


def state_of(cluster: FakeCluster, node: str) -> NodeState:
    """How the job uses a node."""
    return cluster.machine.state.world.nodes[node].state


@pytest.mark.parametrize("at_once", [False, True])
def test_a_node_is_left_in_the_name_of_an_operator_and_used_again_when_it_is_released(
    cluster: FakeCluster, at_once: bool
) -> None:
    event = leaving(cluster, "node2", at_once=at_once)
    assert isinstance(event, FaultReported)
    cluster.feed(event)
    assert state_of(cluster, "node2") is NodeState.UNFIT
    (fault,) = cluster.machine.status(cluster.now).faults
    assert fault.report.detail == "ann (operator): its fan is loud"
    ask(cluster, c.ReleaseNode("node2"))
    assert answered(cluster) == ("node node2 may be used again", False)
    assert state_of(cluster, "node2") is NodeState.SPARE


def test_an_isolated_node_is_left_at_once_and_a_spare_after_its_release(cluster: FakeCluster) -> None:
    event = leaving(cluster, "node1", at_once=True)
    assert isinstance(event, FaultReported)
    cluster.feed(event)
    assert cluster.machine.incidents[0].rung is Rung.RECOVER
    cluster.recover(9)
    ask(cluster, c.ReleaseNode("node1"))
    assert state_of(cluster, "node1") is NodeState.SPARE


def test_what_a_detector_has_said_of_a_node_is_not_an_operators_to_take_back(cluster: FakeCluster) -> None:
    cluster.feed(cluster.unwell("node2"))
    ask(cluster, c.ReleaseNode("node2"))
    text, refused = answered(cluster)
    assert refused
    assert "slow fan" in text


def test_a_node_that_the_job_does_not_have_is_not_left(cluster: FakeCluster) -> None:
    assert isinstance(leaving(cluster, "elsewhere", at_once=False), Refused)


def test_what_is_acknowledged_names_who_has_seen_it(cluster: FakeCluster) -> None:
    ask(cluster, c.Acknowledge())
    acknowledged = cluster.machine.status(cluster.now).controls.acknowledged
    assert acknowledged is not None
    assert acknowledged.asked == ASKED


def test_the_latest_controls_are_kept(cluster: FakeCluster) -> None:
    for number in range(c.MOST_RECORDS + 5):
        cluster.feed(ControlRequested(c.Acknowledge(), msgspec.structs.replace(ASKED, why=f"{number}")))
    controls = cluster.machine.status(cluster.now).controls
    assert controls.counted == c.MOST_RECORDS + 5
    assert [each.asked.why for each in controls.records[:1]] == ["5"]


def test_an_operator_is_answered_with_what_follows(cluster: FakeCluster) -> None:
    event = ControlRequested(c.Acknowledge(), ASKED)
    actions = cluster.machine.handle(event, cluster.now)
    handler = RequestHandler(job(), Switchover())
    assert handler.answer(event, actions) == Accepted("noted")
    assert isinstance(handler.answer(event, []), Refused)


def test_a_fault_that_an_operator_wants_is_caused_and_written_down(cluster: FakeCluster) -> None:
    sent = only(ask(cluster, c.InjectFault(ArmedFault(1, FaultAction.KILL))), ArmFault)
    assert sent == [ArmFault(ArmedFault(1, FaultAction.KILL))]
    (record,) = cluster.machine.status(cluster.now).controls.records
    assert (record.asked, record.what) == (ASKED, "cause a fault: kill rank 1")
    assert ask(cluster, c.InjectFault(ArmedFault(99, FaultAction.KILL))) == []
    assert answered(cluster) == ("rank 99 has no process: see `midstep status`", True)


@pytest.mark.parametrize("control", [c.PromoteController("m1"), c.PauseFailover(60)])
def test_what_is_for_the_controllers_to_do_is_written_down_and_left_to_them(
    cluster: FakeCluster, control: c.LeadControl
) -> None:
    """It takes an admin, and the machine does nothing about it; a replay asks nobody a second time."""
    asked = list[object]()

    class Lead:
        def answer(self, request: object) -> Accepted:
            asked.append(request)
            return Accepted("done")

    actions = cluster.machine.handle(event := ControlRequested(control, ASKED), cluster.now)
    assert asked == []
    assert RequestHandler(job(), Lead()).answer(event, actions) == Accepted("done")
    assert asked == [PromoteRequest("m1") if isinstance(control, c.PromoteController) else PauseFailoverRequest(60)]
    assert cluster.machine.status(cluster.now).controls.records[0].what == c.words_of(control)
    request = ControlRequest(control, "ann", "her machine is serviced")
    assert refusal_of(Role.OPERATOR, request) is not None
    assert refusal_of(Role.ADMIN, request) is None


# --- faults on purpose ------------------------------------------------------------------------------------------------

KILL = ArmedFault(1, FaultAction.KILL)
MADE_UP = report_of("RestartNPU", 1, None, None)
SEEN = ReportFaultRequest(msgspec.structs.replace(MADE_UP.report, seen_by=detector_address("other")))


@pytest.mark.parametrize(
    ("request_", "refused"),
    [
        (InjectRequest(KILL), True),
        (KillNodeRequest("node1"), True),
        (ControlRequest(c.InjectFault(KILL), "ann", "to see it"), True),
        (MADE_UP, True),
        (SEEN, False),
        (ControlRequest(c.RestartRank(1), "ann", "it is slow"), False),
    ],
)
def test_a_policy_that_allows_no_faults_on_purpose_has_each_way_refused(
    cluster: FakeCluster, request_: Any, refused: bool
) -> None:
    """What a detector has seen is taken in as ever, and so are other controls. The default policy allows it."""
    for allowed in (True, False):
        replies: list[Any] = []
        handler = RequestHandler(cluster.job, Switchover(), policy=partial(Policy, allow_inject=allowed))
        event = handler.begin(request_, "operator", lambda: cluster.machine.status(cluster.now), replies.append)
        assert (event is None) == (refused and not allowed)
        assert [reply.reason for reply in replies] == ([NO_INJECTION] if event is None else [])
    assert Policy().allow_inject


def test_no_operator_may_lift_that_limit_while_the_job_runs() -> None:
    why = obstacle(changes(Policy(allow_inject=False), Policy()))
    assert why is not None
    assert why.startswith("allow_inject cannot change while the job runs, since it holds from the start of a job")
