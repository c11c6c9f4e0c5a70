"""A world with fewer nodes than it asked for: when, what is saved before, and how it grows again."""

from typing import Any

import msgspec
import pytest

from midstep.controller.recovery.events import ControllerStarted, Finish, StopRequested
from midstep.controller.recovery.state import Phase
from midstep.controller.recovery.world import RankState
from midstep.policies.budgets import Facts
from midstep.policies.ladder import Ladder
from midstep.policies.rules import broken_rules
from midstep.policies.schema import Budget, Policy, RolePolicy, RungPolicy, ScalePolicy
from midstep.protocol.incidents import Outcome
from midstep.protocol.messages import (
    CreateNode,
    DeleteNode,
    FaultReported,
    NodeJoined,
    NodeLost,
    NodeRefused,
    ProcessExited,
    Quiesce,
    SaveCheckpoint,
    StartProcess,
    StopProcess,
)
from midstep.protocol.types import (
    FaultKind,
    FaultLevel,
    FaultReport,
    RestoreSource,
    Rung,
    RunningProcess,
    StoreEndpoint,
)
from midstep.testing.fake_cluster import FakeCluster, job, only

from .test_draining import BOUNDARY

INTERVAL_S = 600.0
SCALES = Policy(scale=ScalePolicy(min_nodes=1, min_interval_s=INTERVAL_S))


def scaling(policy: Policy = SCALES, *, creates: bool = False) -> FakeCluster:
    """A running job on two nodes without a spare, under a policy that lets it shrink.

    Where the platform `creates` nodes the ladder is without recover, which would wait for one.
    """
    if creates:
        policy = msgspec.structs.replace(policy, ladder=(RungPolicy(Rung.RESCHEDULE_POD), RungPolicy(Rung.STOP)))
    return FakeCluster(job(spares=0), policy, creates=creates).start()


def lose(cluster: FakeCluster, node: str = "node1") -> list[Any]:
    """A node is gone."""
    return cluster.feed(NodeLost(node, "its agent ended", cluster.now))


def shrink(cluster: FakeCluster) -> list[Any]:
    """Node1 is lost, what ranks 0 and 1 hold at step 5 is saved, and a world of two ranks is started."""
    lose(cluster)
    cluster.feed(cluster.quiesced(0, 5, peers=[2]), cluster.quiesced(1, 5, peers=[3]))
    cluster.feed(cluster.saved(1))
    return cluster.feed(cluster.saved(0))


def resume(cluster: FakeCluster, ranks: int, step: int) -> None:
    """All processes are new, load the checkpoint of a step, and train."""
    for rank in range(ranks):
        event = cluster.joined(rank, fresh=True, own=0)
        report = msgspec.structs.replace(event.report, checkpoints=(step,))
        cluster.feed(msgspec.structs.replace(event, report=report))
    cluster.expect(Phase.REJOINING)
    cluster.feed(*(cluster.ready(rank, step) for rank in range(ranks)))
    cluster.feed(*(cluster.committed(rank, step + 1) for rank in range(ranks)))
    cluster.expect(Phase.RUNNING)


def small(cluster: FakeCluster) -> None:
    """Everything up to a small world that runs."""
    shrink(cluster)
    resume(cluster, 2, 5)


def test_the_very_first_step_is_saved_too_though_nobody_has_told_of_it() -> None:
    """A node is lost right after the first resume: others may have committed a step that is still to be reported."""
    cluster = FakeCluster(job(spares=0), SCALES)
    cluster.join()
    cluster.feed(*(cluster.ready(rank, 0) for rank in range(4)))
    cluster.expect(Phase.RESUMING)
    bodies = cluster.feed(NodeLost("node1", "its agent ended", cluster.now))
    assert [body.rank for body in only(bodies, Quiesce)] == [0, 1]
    cluster.expect(Phase.SAVING)
    bodies = cluster.feed(cluster.quiesced(0, 1, peers=[2]), cluster.quiesced(1, 1, peers=[3]))
    assert [(body.rank, body.step) for body in only(bodies, SaveCheckpoint)] == [(1, 1)]  # rank 0 comes last


def test_survivors_save_before_the_world_gets_smaller() -> None:
    """Nobody is started before what they hold is on the disk; then the world has the ranks of the nodes left."""
    cluster = scaling()
    bodies = lose(cluster)
    assert [body.rank for body in only(bodies, Quiesce)] == [0, 1]
    assert cluster.machine.phase is Phase.SAVING
    bodies = cluster.feed(cluster.quiesced(0, 5, peers=[2]), cluster.quiesced(1, 5, peers=[3]))
    assert [(save.rank, save.publish) for save in only(bodies, SaveCheckpoint)] == [(1, False)]
    bodies = cluster.feed(cluster.saved(1))
    assert [(save.rank, save.publish, save.step) for save in only(bodies, SaveCheckpoint)] == [(0, True, 5)]
    starts = only(cluster.feed(cluster.saved(0)), StartProcess)
    assert [(start.rank, start.world_size, start.nodes, start.connected) for start in starts] == [
        (0, 2, 1, True),
        (1, 2, 1, True),
    ]


def test_no_committed_step_is_lost_and_the_record_says_what_happened() -> None:
    """The incident resumes at the step that was saved, by a rung whose reason names the smaller world."""
    cluster = scaling()
    small(cluster)
    (incident,) = cluster.machine.incidents
    assert (incident.outcome, incident.rung, incident.steps_lost) == (Outcome.RESUMED, Rung.RESCHEDULE_POD, 0)
    assert "with 1 of 2 nodes, as none takes the place of node node1" in incident.decisions[0].reason
    assert "an emergency checkpoint of step 5 is at /ck" in incident.repair_reasons[0]
    assert "2 ranks on 1 of the 2 nodes" in incident.repair_reasons[0]
    assert incident.replaced == (0, 1, 2, 3)
    status = cluster.machine.status(cluster.now)
    assert [rank.rank for rank in status.ranks] == [0, 1]
    assert status.ranks_asked == 4


def test_late_words_of_ranks_that_are_no_more_change_nothing() -> None:
    """Their processes end after the world has got smaller."""
    cluster = scaling()
    small(cluster)
    for rank in (2, 3):
        gone = RunningProcess(rank, 100 + rank, 1, 1)
        assert cluster.feed(ProcessExited("node1", gone, -9, cluster.now, expected=True)) == []


def test_a_checkpoint_that_cannot_be_written_does_not_keep_the_world_from_going_on() -> None:
    """It starts from the one before; the record says why."""
    cluster = scaling()
    lose(cluster)
    cluster.feed(cluster.quiesced(0, 5), cluster.quiesced(1, 5))
    starts = only(cluster.feed(cluster.saved(1, error="disk full")), StartProcess)
    assert [start.rank for start in starts] == [0, 1]
    resume(cluster, 2, 3)
    incident = cluster.machine.incidents[0]
    assert incident.steps_lost == 2
    assert "disk full" in incident.repair_reasons[0]


def test_a_world_below_the_least_size_stops() -> None:
    """The stop names the number of nodes that are left and the policy's."""
    cluster = scaling(Policy(scale=ScalePolicy(min_nodes=2)))
    lose(cluster)
    cluster.feed(cluster.quiesced(0, 5), cluster.quiesced(1, 5), cluster.saved(1), cluster.saved(0))
    finish = cluster.log[-1]
    assert isinstance(finish, Finish)
    assert "1 node would be left, scale.min_nodes is 2" in finish.reason


def test_a_world_does_not_shrink_unless_the_policy_says_so() -> None:
    """Off by default."""
    facts = Facts(
        now=0.0,
        faults=(FaultReport(FaultKind.NODE_LOST, 0.0, "controller", "gone", node="b"),),
        culprits=(1,),
        nodes={0: "a", 1: "b"},
        healthy=frozenset({0}),
        nodes_lost=frozenset({"b"}),
    )
    decision = Ladder(Policy()).decide(facts)
    assert decision.rung is Rung.STOP
    (skipped,) = [each for each in decision.skipped if each.rung is Rung.RESCHEDULE_POD]
    assert "scale.min_nodes allows no smaller world" in skipped.reason
    assert Ladder(SCALES).decide(msgspec.structs.replace(facts, min_nodes=1)).rung is Rung.RESCHEDULE_POD


def test_a_node_that_comes_is_not_used_before_the_interval_is_over() -> None:
    """The world does not change its size to and fro."""
    cluster = scaling()
    small(cluster)
    cluster.feed(cluster.node("node9"))
    assert cluster.machine.state.planned.current is None
    due_s = cluster.machine.next_deadline()
    assert due_s == pytest.approx(cluster.machine.state.planned.scaled_s + INTERVAL_S)
    cluster.overdue()
    plan = cluster.machine.state.planned.current
    assert plan is not None
    assert plan.nodes == 2


def grow(cluster: FakeCluster) -> list[Any]:
    """A node has come and the time is right: all stop at a boundary and save; return what is started then."""
    small(cluster)
    cluster.feed(cluster.node("node9"))
    cluster.overdue()
    cluster.feed(cluster.clocks("node0"))
    cluster.expect(Phase.PAUSING)
    saves = only(cluster.feed(cluster.quiesced(0, BOUNDARY), cluster.quiesced(1, BOUNDARY)), SaveCheckpoint)
    assert [save.step for save in saves] == [BOUNDARY]
    return cluster.feed(cluster.saved(1, BOUNDARY), cluster.saved(0, BOUNDARY))


def test_the_world_grows_at_a_step_boundary() -> None:
    """What was saved at the boundary is loaded by the whole world; nothing is repeated."""
    cluster = scaling()
    starts = only(grow(cluster), StartProcess)
    assert [(start.rank, start.world_size, start.nodes) for start in starts] == [(rank, 4, 2) for rank in range(4)]
    assert [cluster.holder(rank).node for rank in range(4)] == ["node0", "node0", "node9", "node9"]
    resume(cluster, 4, BOUNDARY)
    incident = cluster.machine.incidents[-1]
    assert (incident.outcome, incident.rung, incident.steps_lost) == (Outcome.RESUMED, Rung.RESCHEDULE_POD, 0)
    assert "the world grows from 1 to 2 nodes of the 2" in incident.decisions[0].reason


def test_ranks_that_come_back_go_on_with_the_numbers_of_their_processes() -> None:
    """Agents and mailboxes take each number once."""
    cluster = scaling()
    starts = only(grow(cluster), StartProcess)
    assert [start.incarnation for start in starts] == [3, 3, 2, 2]


def test_growth_takes_no_budget_of_the_rung() -> None:
    """A change of membership is no fault: a world grows with nothing left, and faults find the budget as it was."""
    ladder = (RungPolicy(Rung.RESCHEDULE_POD, budget=Budget(per_job=1)), RungPolicy(Rung.STOP))
    cluster = scaling(Policy(ladder=ladder, scale=ScalePolicy(min_nodes=1, min_interval_s=0.0)))
    small(cluster)
    spent = cluster.machine.state.spent
    cluster.feed(cluster.node("node9"))
    change = cluster.machine.state.planned.current
    assert change is not None
    assert change.nodes == 2
    assert change.charges == ()
    assert cluster.machine.state.spent == spent


def test_a_stop_while_the_world_is_being_saved_ends_the_job_with_that_checkpoint() -> None:
    """It is saved once, and the job does not start again."""
    cluster = scaling()
    lose(cluster)
    cluster.feed(cluster.quiesced(0, 5, peers=[2]), cluster.quiesced(1, 5, peers=[3]))
    assert only(cluster.feed(StopRequested("Ctrl-C")), StopProcess) == []
    cluster.feed(cluster.saved(1))
    cluster.feed(cluster.saved(0))
    finish = cluster.log[-1]
    assert isinstance(finish, Finish)
    assert finish.exit_code == 130
    assert "Ctrl-C; an emergency checkpoint of step 5" in finish.reason


def test_a_restarted_controller_goes_on_saving_and_starts_the_smaller_world() -> None:
    """Who has not answered is asked again."""
    cluster = scaling()
    lose(cluster)
    cluster.feed(cluster.quiesced(0, 5, peers=[2]), cluster.quiesced(1, 5, peers=[3]))
    saves = only(cluster.feed(ControllerStarted(term=2)), SaveCheckpoint)
    assert [save.rank for save in saves] == [1]
    cluster.feed(cluster.saved(1))
    starts = only(cluster.feed(cluster.saved(0)), StartProcess)
    assert [start.world_size for start in starts] == [2, 2]


def test_a_node_that_the_platform_refuses_makes_the_world_smaller() -> None:
    """What the survivors held was saved before the node was waited for."""
    cluster = scaling(creates=True)
    (created,) = only(lose(cluster), CreateNode)
    cluster.feed(cluster.quiesced(0, 5, peers=[2]), cluster.quiesced(1, 5, peers=[3]))
    cluster.feed(cluster.saved(1))
    assert only(cluster.feed(cluster.saved(0)), StartProcess) == []
    cluster.expect(Phase.WAITING)
    starts = only(cluster.feed(NodeRefused(created.node, "no more machines")), StartProcess)
    assert [(start.rank, start.world_size) for start in starts] == [(0, 2), (1, 2)]


def test_a_node_that_is_lost_before_it_joins_is_asked_for_again() -> None:
    """Its successor takes its place at once, and not when the time for nodes is over."""
    cluster = scaling(creates=True)
    (created,) = only(lose(cluster), CreateNode)
    cluster.feed(cluster.quiesced(0, 5, peers=[2]), cluster.quiesced(1, 5, peers=[3]))
    cluster.feed(cluster.saved(1))
    cluster.feed(cluster.saved(0))
    cluster.expect(Phase.WAITING)
    (again,) = only(cluster.feed(NodeLost(created.node, "its agent ended with signal 9", cluster.now)), CreateNode)
    assert again.node != created.node
    starts = only(cluster.feed(NodeJoined(again.node, again.node, StoreEndpoint("h", 1))), StartProcess)
    assert [start.world_size for start in starts] == [4, 4, 4, 4]


def test_a_platform_whose_nodes_end_again_and_again_is_not_asked_for_ever() -> None:
    """The time for nodes ends the wait."""
    cluster = scaling(creates=True)
    asked = only(lose(cluster), CreateNode)
    cluster.feed(cluster.quiesced(0, 5, peers=[2]), cluster.quiesced(1, 5, peers=[3]))
    cluster.feed(cluster.saved(1))
    cluster.feed(cluster.saved(0))
    for _ in range(100):
        asked += only(cluster.feed(NodeLost(asked[-1].node, "its agent ended", cluster.now)), CreateNode)
    assert 2 < len(asked) < 20
    cluster.expect(Phase.WAITING)


def break_device(cluster: FakeCluster) -> list[Any]:
    """Device 0 of node1, where rank 2 is, is not to be used any more: rank 3 beside it is well, and has to leave."""
    level = FaultLevel.SEPARATE_NPU
    report = FaultReport(FaultKind.DEVICE, cluster.now, "detector/files", "", node="node1", device=0, level=level)
    return cluster.feed(FaultReported(report))


def save_with_rank_3(cluster: FakeCluster) -> list[Any]:
    """The three healthy ranks park and write what they hold."""
    others = (cluster.quiesced(0, 5), cluster.quiesced(1, 5), cluster.quiesced(3, 5, peers=[2]))
    saves = only(cluster.feed(*others), SaveCheckpoint)
    assert [save.rank for save in saves] == [1, 3]
    return cluster.feed(cluster.saved(1), cluster.saved(3), cluster.saved(0))


def test_a_node_that_has_to_be_left_saves_before_it_goes() -> None:
    """A healthy rank may hold the only copy of a lost one: it writes that, and its node is given back afterwards."""
    cluster = scaling()
    bodies = break_device(cluster)
    assert [body.rank for body in only(bodies, Quiesce)] == [0, 1, 3]
    assert only(bodies, StopProcess) == only(bodies, DeleteNode) == []
    bodies = save_with_rank_3(cluster)
    assert {stop.rank for stop in only(bodies, StopProcess)} >= {2, 3}
    assert [gone.node for gone in only(bodies, DeleteNode)] == ["node1"]
    assert [(start.rank, start.world_size) for start in only(bodies, StartProcess)] == [(0, 2), (1, 2)]
    resume(cluster, 2, 5)
    assert cluster.machine.incidents[0].steps_lost == 0


def test_the_replacement_of_a_node_that_saves_is_asked_for_when_it_goes() -> None:
    """A platform may have no room for a node before another is gone."""
    cluster = scaling(creates=True)
    bodies = break_device(cluster)
    assert only(bodies, DeleteNode) == only(bodies, CreateNode) == []
    bodies = save_with_rank_3(cluster)
    (gone,), (created,) = only(bodies, DeleteNode), only(bodies, CreateNode)
    assert bodies.index(gone) < bodies.index(created)
    cluster.expect(Phase.WAITING)
    starts = only(cluster.feed(cluster.node(created.node)), StartProcess)
    assert [(start.rank, start.world_size) for start in starts] == [(rank, 4) for rank in range(4)]


def test_a_node_that_is_lost_while_it_saves_is_replaced_like_any_other() -> None:
    """The others go on with what they hold, and nobody waits for the node that was to go anyway."""
    cluster = scaling()
    break_device(cluster)
    cluster.feed(cluster.quiesced(0, 5, peers=[2]), cluster.quiesced(1, 5, peers=[3]))
    saves = only(cluster.feed(NodeLost("node1", "its agent ended", cluster.now)), SaveCheckpoint)
    assert [save.rank for save in saves] == [1]
    bodies = cluster.feed(cluster.saved(1), cluster.saved(0))
    assert [gone.node for gone in only(bodies, DeleteNode)] == ["node1"]
    assert [start.world_size for start in only(bodies, StartProcess)] == [2, 2]


def test_a_controller_that_was_away_knows_which_node_was_to_go() -> None:
    """It is replaced when the others have saved, under the next controller, too."""
    cluster = scaling()
    break_device(cluster)
    cluster.feed(ControllerStarted(term=2))
    assert [gone.node for gone in only(save_with_rank_3(cluster), DeleteNode)] == ["node1"]


def test_what_does_not_go_with_a_smaller_world_is_said() -> None:
    """A policy that could not carry it out is refused."""
    scale = ScalePolicy(min_nodes=1)
    assert broken_rules(SCALES) == []
    for policy in (
        Policy(scale=scale, restore=(RestoreSource.REPLICA,)),
        Policy(scale=scale, ladder=(RungPolicy(Rung.STOP),)),
        Policy(scale=scale, roles={"trainer": RolePolicy(ranks="0-1")}),
    ):
        assert [problem.key for problem in broken_rules(policy)] == ["scale.min_nodes"]


def test_an_exit_after_which_the_world_is_smaller_leaves_no_trace_of_its_rank() -> None:
    """Rank 3 ends on a node that is to get no new process, and nothing is there to be saved."""
    cluster = FakeCluster(job(spares=0), SCALES)
    cluster.join()
    broken = FaultReport(FaultKind.DEVICE, cluster.now, "detector", "seen", node="node1", device=1)
    cluster.feed(FaultReported(msgspec.structs.replace(broken, level=FaultLevel.PRE_SEPARATE_NPU)))
    cluster.feed(cluster.exited(3))
    world = cluster.machine.state.world
    assert world.size == 2
    assert world.ranks(*RankState) == {0, 1}


# --- a job that begins with fewer nodes than it can use --------------------------------------------------------


CALLS = Policy(scale=ScalePolicy(min_nodes=1, min_interval_s=INTERVAL_S, last_call_s=30.0))


def begin_small(*, plain: bool = False) -> FakeCluster:
    """One node of two has come, and the other not within the last call."""
    cluster = FakeCluster(job(spares=0), CALLS)
    cluster.feed(cluster.node("node0"))
    cluster.overdue()
    if plain:
        cluster.feed(*(cluster.started(rank) for rank in range(2)))
    return cluster


def test_a_job_that_can_do_with_fewer_nodes_waits_for_the_others_for_the_last_call_only() -> None:
    """Counted from the moment at which the fewest are there; then it starts in the size that they hold."""
    cluster = FakeCluster(job(spares=0), CALLS)
    assert only(cluster.feed(cluster.node("node0")), StartProcess) == []
    assert cluster.machine.next_deadline() == pytest.approx(cluster.now + 30.0)
    starts = only(cluster.overdue(), StartProcess)
    assert [(start.rank, start.world_size, start.nodes) for start in starts] == [(0, 2, 1), (1, 2, 1)]


def test_a_node_that_goes_again_takes_the_last_call_with_it() -> None:
    """Fewer than the least are waited for as long as any others."""
    cluster = FakeCluster(job(spares=0), CALLS)
    began_s = cluster.now
    cluster.feed(cluster.node("node0"), NodeLost("node0", "its agent ended", cluster.now))
    assert cluster.machine.next_deadline() == pytest.approx(began_s + CALLS.deadlines.nodes_s, abs=1.0)


def test_a_script_that_is_not_resilient_restarts_as_a_whole_when_a_node_comes() -> None:
    """As torchelastic does; a late node at the start waits for nobody, and no restart of the budget is used."""
    cluster = begin_small(plain=True)
    starts = only(cluster.feed(cluster.node("node1")), StartProcess)
    assert [(start.rank, start.world_size, start.nodes) for start in starts] == [(rank, 4, 2) for rank in range(4)]
    assert cluster.machine.incidents == ()


def test_a_script_that_is_not_resilient_gets_smaller_with_its_restarts() -> None:
    """A lost node is a failure, and --max-restarts counts it."""
    cluster = FakeCluster(job(spares=0, max_restarts=1), CALLS)
    cluster.feed(cluster.node("node0"), cluster.node("node1"))
    cluster.feed(*(cluster.started(rank) for rank in range(4)))
    starts = only(cluster.feed(NodeLost("node1", "its agent ended", cluster.now)), StartProcess)
    assert [(start.rank, start.world_size) for start in starts] == [(0, 2), (1, 2)]
    cluster.feed(*(cluster.started(rank) for rank in range(2)))
    assert only(cluster.feed(cluster.node("node2")), StartProcess) == []  # not within the interval
    starts = only(cluster.overdue(), StartProcess)
    assert [(start.rank, start.world_size) for start in starts] == [(rank, 4) for rank in range(4)]
