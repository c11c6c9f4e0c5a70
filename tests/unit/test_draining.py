"""A node that is not well is left between two steps: what the machine orders, and what may come between."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from midstep.controller.recovery.boundary import LEAD_S
from midstep.controller.recovery.events import ControllerStarted, DeadlinePassed
from midstep.controller.recovery.planned_change import FAILURES, READINGS
from midstep.controller.recovery.state import Phase
from midstep.controller.recovery.world import NodeState, RankState
from midstep.controller.routes import Routes
from midstep.policies.schema import Policy, SubHealthAction, default_policy
from midstep.protocol.incidents import Outcome
from midstep.protocol.messages import (
    CheckpointSaved,
    DeleteNode,
    FaultReported,
    NodeJoined,
    NodeLost,
    ProbeProgress,
    ProcessStarted,
    ProgressReported,
    Quiesce,
    RankFinished,
    RankQuiesced,
    Rejoin,
    SaveCheckpoint,
    StartProcess,
    StepCommitted,
    StopProcess,
)
from midstep.protocol.types import (
    Activity,
    Assertion,
    FaultKind,
    FaultLevel,
    FaultReport,
    RankProgress,
    RestoreSource,
    Rung,
    RunningProcess,
    StepReport,
    StoreEndpoint,
    rank_address,
)
from midstep.testing.fake_cluster import STEP, STEP_S, FakeCluster, job, only

BOUNDARY = STEP + 1 + 10  # a second ahead
MOVED = (2, 3)


def prepare(cluster: FakeCluster) -> list[Any]:
    """Everything up to the order to stop at the boundary."""
    get_ready(cluster)
    return cluster.feed(cluster.clocks("node0"), cluster.clocks("node1"))


def get_ready(cluster: FakeCluster) -> list[Any]:
    """Node1 is not well, and the newcomers of its ranks reach their train functions."""
    cluster.feed(cluster.unwell())
    return cluster.feed(*(cluster.waiting(rank) for rank in MOVED))


def stopped(cluster: FakeCluster, rank: int, *, sharded: bool = False) -> RankQuiesced:
    """A rank has reached the boundary; with `sharded` it alone holds what it needs."""
    event = cluster.quiesced(rank, BOUNDARY, peers=[(rank + 2) % 4])
    if not sharded:
        return event
    (hold,) = event.report.holds
    name = f"shard{rank}"
    report = msgspec.structs.replace(event.report, holds=(msgspec.structs.replace(hold, shard_id=name),), needs=(name,))
    return msgspec.structs.replace(event, report=report)


def under(policy: Policy, spares: int = 1) -> FakeCluster:
    """A running job under a policy."""
    return FakeCluster(job(spares=spares), policy).start()


def test_a_node_that_is_well_again_is_not_used_when_it_was_given_back() -> None:
    """The platform has been told to end it, and does so at any moment."""
    cluster = FakeCluster(job(nodes=1, ranks_per_node=1), creates=True)
    cluster.start()
    cluster.feed(cluster.unwell("node0"))
    fault = FaultReport(
        FaultKind.STORAGE, cluster.now, "d", "gone", node="node0", level=FaultLevel.SEPARATE_NPU, code="80E01801"
    )
    assert [order.node for order in only(cluster.feed(FaultReported(fault)), DeleteNode)] == ["node0"]
    cluster.feed(cluster.unwell("node0", Assertion.RECOVER))
    cluster.feed(FaultReported(msgspec.structs.replace(fault, assertion=Assertion.RECOVER)))
    assert cluster.machine.state.world.nodes["node0"].state is NodeState.ISOLATED


def test_newcomers_get_ready_while_training_goes_on(cluster: FakeCluster) -> None:
    """They are started early on the spare node, with numbers of their own; no incident is open."""
    starts = only(cluster.feed(cluster.unwell()), StartProcess)
    assert [(start.rank, start.early, start.connected, start.incarnation) for start in starts] == [
        (2, True, False, 2),
        (3, True, False, 2),
    ]
    assert cluster.holder(2).incarnation == 1
    assert cluster.machine.phase is Phase.RUNNING
    assert cluster.machine.incidents == ()


def test_the_boundary_is_chosen_when_all_newcomers_wait(cluster: FakeCluster) -> None:
    """The clocks are read, and everybody is told to stop at one step, far enough ahead, in the same generation."""
    cluster.feed(cluster.unwell())
    assert cluster.feed(cluster.waiting(2)) == []
    assert len(only(cluster.feed(cluster.waiting(3)), ProbeProgress)) == 2
    assert cluster.feed(cluster.clocks("node0")) == []
    quiesces = only(cluster.feed(cluster.clocks("node1")), Quiesce)
    assert quiesces == [Quiesce(rank, 1, BOUNDARY) for rank in range(4)]
    assert cluster.machine.phase is Phase.PAUSING
    assert cluster.machine.generation == 1


def test_at_the_boundary_the_newcomers_take_over(cluster: FakeCluster) -> None:
    """The old processes end when all have stopped; the step is the boundary's, and nobody else is replaced."""
    prepare(cluster)
    assert cluster.feed(*(stopped(cluster, rank) for rank in range(3))) == []
    bodies = cluster.feed(stopped(cluster, 3))
    assert [(stop.rank, stop.incarnation) for stop in only(bodies, StopProcess)] == [(2, 1), (3, 1)]
    assert only(bodies, Quiesce) == [Quiesce(rank, 2, replaces=True) for rank in MOVED]
    assert only(bodies, StartProcess) == []
    rejoins = only(cluster.feed(cluster.joined(2), cluster.joined(3)), Rejoin)
    assert {rejoin.part.target_step for rejoin in rejoins} == {BOUNDARY}
    assert [rejoin.rank for rejoin in rejoins] == [0, 1, 2, 3]
    cluster.holder(2).pid, cluster.holder(3).pid = 202, 203
    cluster.pass_barrier_two(BOUNDARY)
    (incident,) = cluster.machine.incidents
    assert (incident.rung, incident.outcome, incident.steps_lost) == (Rung.RECOVER, Outcome.RESUMED, 0)
    assert incident.replaced == MOVED
    assert incident.healthy_pids_kept
    states = {node.node: node.state for node in cluster.machine.status(cluster.now).nodes}
    assert states == {"node0": "active", "node1": "isolated", "node2": "active"}


def test_an_old_word_of_an_earlier_stop_in_this_generation_is_none_about_the_boundary(cluster: FakeCluster) -> None:
    """The rank quiesced for this generation once, when it was opened."""
    prepare(cluster)
    assert cluster.feed(cluster.quiesced(0, 2)) == []
    assert cluster.holder(0).state is RankState.QUIESCING
    cluster.feed(*(stopped(cluster, rank) for rank in range(4)))
    assert cluster.machine.phase is Phase.QUIESCING


NO_CHECKPOINT = Policy(restore=(RestoreSource.REPLICA,))


def test_what_only_the_leaving_processes_hold_keeps_them_where_no_checkpoint_is_allowed() -> None:
    """Their state would go with them: nobody is ended, all go on from the boundary, and the record says why."""
    cluster = under(NO_CHECKPOINT)
    prepare(cluster)
    bodies = cluster.feed(*(stopped(cluster, rank, sharded=True) for rank in range(4)))
    assert {(stop.rank, stop.incarnation) for stop in only(bodies, StopProcess)} == {(2, 2), (3, 2)}
    assert {rejoin.part.target_step for rejoin in only(bodies, Rejoin)} == {BOUNDARY}
    (incident,) = cluster.machine.incidents
    assert "node node1 is not left: no clean copy of shard shard2 is left" in incident.repair_reasons[0]
    assert "restore is without checkpoint" in incident.repair_reasons[0]
    assert cluster.machine.state.planned.unwell["node1"].failures == FAILURES


def hand_over(cluster: FakeCluster) -> list[Any]:
    """All have stopped at the boundary, and each alone holds what it needs; return the orders to write it."""
    prepare(cluster)
    bodies = cluster.feed(*(stopped(cluster, rank, sharded=True) for rank in range(4)))
    assert only(bodies, StopProcess) == []
    cluster.expect(Phase.PAUSING)
    return only(bodies, SaveCheckpoint)


def saved(cluster: FakeCluster, rank: int, error: str = "") -> CheckpointSaved:
    """A rank has written its part."""
    return CheckpointSaved(rank, cluster.machine.generation, BOUNDARY, "/ck", error)


def test_what_only_the_leaving_processes_hold_is_written_before_they_go(cluster: FakeCluster) -> None:
    """Those that stay keep their processes, all load the checkpoint of the boundary, and no step is repeated."""
    saves = hand_over(cluster)
    assert [(save.rank, save.step, save.shards, save.publish) for save in saves] == [
        (rank, BOUNDARY, (f"shard{rank}",), False) for rank in (1, 2, 3)
    ]
    last = cluster.feed(*(saved(cluster, rank) for rank in (1, 2, 3)))
    assert [(save.rank, save.publish) for save in only(last, SaveCheckpoint)] == [(0, True)]
    bodies = cluster.feed(saved(cluster, 0))
    assert [(stop.rank, stop.incarnation) for stop in only(bodies, StopProcess)] == [(2, 1), (3, 1)]
    joined = [cluster.joined(rank) for rank in MOVED]
    reports = [msgspec.structs.replace(each.report, checkpoints=(BOUNDARY,)) for each in joined]
    rejoins = only(
        cluster.feed(*(msgspec.structs.replace(j, report=r) for j, r in zip(joined, reports, strict=True))), Rejoin
    )
    assert {(each.part.restore, each.part.target_step) for each in rejoins} == {(RestoreSource.CHECKPOINT, BOUNDARY)}
    cluster.holder(2).pid, cluster.holder(3).pid = 202, 203
    cluster.pass_barrier_two(BOUNDARY)
    (incident,) = cluster.machine.incidents
    assert (incident.rung, incident.outcome, incident.steps_lost) == (Rung.RECOVER, Outcome.RESUMED, 0)
    assert incident.replaced == MOVED
    assert incident.healthy_pids_kept
    assert incident.repair_reasons[0].startswith(f"a checkpoint of step {BOUNDARY} was written first")


def test_a_checkpoint_that_cannot_be_written_keeps_the_leaving_processes(cluster: FakeCluster) -> None:
    """All go on where they are, from the boundary."""
    hand_over(cluster)
    bodies = cluster.feed(saved(cluster, 2, error="disk full"))
    assert {(stop.rank, stop.incarnation) for stop in only(bodies, StopProcess)} == {(2, 2), (3, 2)}
    assert {rejoin.part.target_step for rejoin in only(bodies, Rejoin)} == {BOUNDARY}
    assert "the checkpoint failed: disk full" in cluster.machine.incidents[0].repair_reasons[0]
    assert cluster.feed(saved(cluster, 1)) == []


def test_a_checkpoint_that_takes_too_long_keeps_the_leaving_processes(cluster: FakeCluster) -> None:
    hand_over(cluster)
    bodies = cluster.overdue()
    assert {rejoin.part.target_step for rejoin in only(bodies, Rejoin)} == {BOUNDARY}
    assert "was not written within" in cluster.machine.incidents[0].repair_reasons[0]


def test_a_rank_that_dies_while_the_checkpoint_is_written_is_an_ordinary_fault(cluster: FakeCluster) -> None:
    """The drain is given up; who has stopped is stopped already."""
    hand_over(cluster)
    bodies = cluster.feed(cluster.exited(1))
    cluster.expect(Phase.QUIESCING)
    assert [start.rank for start in only(bodies, StartProcess)] == [1]
    assert only(bodies, Quiesce) == []
    assert cluster.machine.state.planned.current is None


def test_a_restarted_controller_asks_again_for_the_checkpoint(cluster: FakeCluster) -> None:
    saves = hand_over(cluster)
    again = only(cluster.feed(ControllerStarted(term=2)), SaveCheckpoint)
    assert again == saves


def test_a_checkpoint_of_the_boundary_that_is_there_already_is_enough(cluster: FakeCluster) -> None:
    """The periodic one may have been due at just this step."""
    prepare(cluster)
    answers = [stopped(cluster, rank, sharded=True) for rank in range(4)]
    bodies = cluster.feed(
        *(
            msgspec.structs.replace(each, report=msgspec.structs.replace(each.report, checkpoints=(BOUNDARY,)))
            for each in answers
        )
    )
    assert only(bodies, SaveCheckpoint) == []
    assert [(stop.rank, stop.incarnation) for stop in only(bodies, StopProcess)] == [(2, 1), (3, 1)]


def test_without_a_spare_node_it_is_written_down_and_a_node_that_comes_is_used() -> None:
    """The report is a dismissed incident with the reason; the drain begins when a node joins."""
    cluster = under(default_policy(), spares=0)
    assert cluster.feed(cluster.unwell()) == []
    (incident,) = cluster.machine.incidents
    assert incident.outcome is Outcome.DISMISSED
    assert "no spare node to take its place: it is drained when one comes" in incident.ended_reason
    (node,) = [node for node in cluster.machine.status(cluster.now).nodes if node.node == "node1"]
    assert "not well: slow fan; no spare node" in node.note
    starts = only(cluster.feed(cluster.node("node2")), StartProcess)
    assert [start.early for start in starts] == [True, True]


def test_ignore_and_leave_now() -> None:
    """One notes it, the other leaves the node as after a fault of its devices."""
    ignoring = under(Policy(sub_health=SubHealthAction.IGNORE))
    assert ignoring.feed(ignoring.unwell()) == []
    assert "sub_health is ignore" in ignoring.machine.incidents[0].ended_reason
    leaving = under(Policy(sub_health=SubHealthAction.LEAVE_NOW))
    bodies = leaving.feed(leaving.unwell())
    assert [(start.rank, start.early) for start in only(bodies, StartProcess)] == [(2, False), (3, False)]
    assert leaving.machine.phase is Phase.QUIESCING


def test_a_drain_takes_the_budget_of_recover() -> None:
    """With nothing left of it the node stays, and the reason names the budget."""
    tight = default_policy()
    ladder = tuple(
        msgspec.structs.replace(entry, budget=msgspec.structs.replace(entry.budget, per_rank=1))
        if entry.rung is Rung.RECOVER
        else entry
        for entry in tight.ladder
    )
    cluster = under(msgspec.structs.replace(tight, ladder=ladder), spares=2)
    prepare(cluster)
    cluster.feed(*(stopped(cluster, rank) for rank in range(4)))
    cluster.feed(cluster.joined(2), cluster.joined(3))
    cluster.pass_barrier_two(BOUNDARY)
    assert cluster.feed(cluster.unwell("node2")) == []
    assert "budget per_rank of ranks 2, 3 is spent: 1 of 1" in cluster.machine.incidents[-1].ended_reason


def test_a_fault_while_newcomers_get_ready_comes_first(cluster: FakeCluster) -> None:
    """It is an incident like any other; the newcomers end, and their numbers are not used again."""
    cluster.feed(cluster.unwell())
    bodies = cluster.feed(cluster.exited(0))
    assert [(stop.rank, stop.incarnation) for stop in only(bodies, StopProcess)] == [(2, 2), (3, 2)]
    assert [(start.rank, start.early) for start in only(bodies, StartProcess)] == [(0, False)]
    assert cluster.holder(2).next_incarnation() == 3
    assert cluster.machine.incidents[0].rung is Rung.RECOVER_IN_PLACE


def test_a_fault_on_the_way_to_the_boundary_quiesces_who_has_not_stopped(cluster: FakeCluster) -> None:
    """Parked ranks stay parked; it is one incident, with the drain's decision and the fault's."""
    prepare(cluster)
    cluster.feed(stopped(cluster, 0))
    bodies = cluster.feed(cluster.exited(1))
    assert only(bodies, Quiesce) == [Quiesce(rank, 2, replaces=True) for rank in MOVED]
    assert [(start.rank, start.early) for start in only(bodies, StartProcess)] == [(1, False)]
    rungs = [decision.rung for decision in cluster.machine.incidents[0].decisions]
    assert rungs == [Rung.RECOVER, Rung.RECOVER_IN_PLACE]


def test_a_missed_boundary_falls_back_to_an_ordinary_quiesce(cluster: FakeCluster) -> None:
    """Who has not stopped hangs in a collective with nobody: it is aborted, and the ranks move all the same."""
    prepare(cluster)
    cluster.feed(*(stopped(cluster, rank) for rank in (0, 2, 3)))
    assert len(only(cluster.overdue(), ProbeProgress)) == 2
    bodies = cluster.feed(cluster.clocks("node0", Activity.COLLECTIVE), cluster.clocks("node1", Activity.RECOVERING))
    assert only(bodies, Quiesce) == [Quiesce(1, 2)]
    bodies = cluster.feed(cluster.quiesced(1, BOUNDARY, peers=[3]))
    assert [stop.rank for stop in only(bodies, StopProcess)] == [2, 3]
    assert only(bodies, Quiesce) == [Quiesce(rank, 3, replaces=True) for rank in MOVED]


def test_a_checkpoint_on_the_way_to_the_boundary_is_waited_for(cluster: FakeCluster) -> None:
    """Nobody is torn out of writing one."""
    prepare(cluster)
    cluster.feed(*(stopped(cluster, rank) for rank in (0, 2, 3)))
    cluster.overdue()
    clocks = cluster.clocks("node0", Activity.CHECKPOINTING), cluster.clocks("node1", Activity.RECOVERING)
    assert cluster.feed(*clocks) == []
    assert cluster.machine.phase is Phase.PAUSING
    assert only(cluster.feed(stopped(cluster, 1)), Quiesce) == [Quiesce(rank, 2, replaces=True) for rank in MOVED]


def test_a_rank_that_reaches_neither_the_boundary_nor_the_quiesce_is_blamed(cluster: FakeCluster) -> None:
    """From there on it is a fault like any other."""
    prepare(cluster)
    cluster.feed(*(stopped(cluster, rank) for rank in (0, 2, 3)))
    cluster.overdue()
    cluster.overdue()
    starts = only(cluster.overdue(), StartProcess)
    assert [(start.rank, start.early) for start in starts] == [(1, False)]
    assert cluster.machine.incidents[0].reports[-1].kind is FaultKind.UNRESPONSIVE


def test_training_that_ends_before_the_boundary_ends_the_drain(cluster: FakeCluster) -> None:
    """The job ends as if nothing had been planned."""
    prepare(cluster)
    cluster.feed(*(RankFinished(rank, 1, 1, BOUNDARY - 1) for rank in range(4)))
    assert cluster.machine.phase is Phase.FINISHING
    assert cluster.machine.incidents == ()


def test_a_newcomer_that_fails_is_tried_again_later_and_not_for_ever(cluster: FakeCluster) -> None:
    """Training goes on untouched; after some attempts the node is left in peace."""
    for _ in range(FAILURES):
        assert cluster.holder(2).incarnation == 1
        failed = FaultReported(
            FaultReport(
                FaultKind.START_FAILED, cluster.now, "node/node2", "no memory", 2, "node2", 1, cluster.holder(2).given
            )
        )
        if cluster.machine.state.planned.current is None:
            cluster.feed(cluster.unwell())
            failed = msgspec.structs.replace(
                failed, report=msgspec.structs.replace(failed.report, incarnation=cluster.holder(2).given)
            )
        cluster.feed(failed)
        assert cluster.machine.phase is Phase.RUNNING
        cluster.overdue()
    assert cluster.machine.state.planned.current is None
    (node,) = [node for node in cluster.machine.status(cluster.now).nodes if node.node == "node1"]
    assert "no memory" in node.note


def test_a_newcomer_that_fails_while_a_stall_is_looked_into_leaves_its_reading_alone(cluster: FakeCluster) -> None:
    """All clocks are heard before anybody is blamed, or nobody."""
    cluster.feed(cluster.unwell())
    assert len(only(cluster.feed(cluster.fault(0, FaultKind.STALL)), ProbeProgress)) == 2
    cluster.feed(cluster.clocks("node0"))
    given = cluster.holder(2).given
    failed = FaultReport(FaultKind.START_FAILED, cluster.now, "node/node2", "no memory", 2, "node2", 1, given)
    cluster.feed(FaultReported(failed))
    assert cluster.machine.state.planned.current is None
    cluster.expect(Phase.SUSPECTING)
    cluster.feed(cluster.clocks("node1"))
    cluster.expect(Phase.RUNNING)
    assert cluster.machine.incidents[0].outcome is Outcome.DISMISSED


@pytest.mark.parametrize("parked", [(2, 3), ()], ids=["at the boundary", "by the broken collective"])
def test_who_waits_for_orders_is_not_blamed_on_the_way_to_a_boundary(
    cluster: FakeCluster, parked: tuple[int, ...]
) -> None:
    """It may stand there for long while no controller is there; who hangs is found by the clocks or the quiesce."""
    prepare(cluster)
    cluster.feed(*(stopped(cluster, rank) for rank in parked))
    cluster.feed(cluster.fault(0, FaultKind.COMMUNICATION), cluster.fault(0, FaultKind.STALL))
    cluster.expect(Phase.SUSPECTING)

    def clock(rank: int, activity: Activity) -> RankProgress:
        return RankProgress(rank, 1, 1, STEP, activity, 4, 60.0, 60.0, STEP_S)

    reads = [(0, Activity.COLLECTIVE), (1, Activity.RECOVERING)], [(2, Activity.RECOVERING), (3, Activity.RECOVERING)]
    probe = cluster.machine.state.clocks.probe
    bodies = [
        order
        for node, read in zip(("node0", "node1"), reads, strict=True)
        for order in cluster.feed(ProgressReported(node, probe, cluster.now, tuple(clock(*each) for each in read)))
    ]
    assert only(bodies, StartProcess) == []
    assert {order.rank for order in only(bodies, Quiesce)} == {0, 1, 2, 3} - {*parked}


def test_the_clocks_are_not_read_for_a_boundary_while_a_stall_is_looked_into(cluster: FakeCluster) -> None:
    """A second reading would make the first one's answers void, and blame those who had given them."""
    get_ready(cluster)
    due_s = cluster.machine.next_deadline()
    assert due_s is not None
    cluster.now = due_s - 0.1
    cluster.feed(cluster.fault(0, FaultKind.STALL))
    cluster.now = due_s
    assert cluster.feed(DeadlinePassed()) == []
    cluster.feed(cluster.clocks("node0"))
    assert only(cluster.feed(cluster.clocks("node1")), ProbeProgress) == []
    cluster.expect(Phase.RUNNING)
    assert len(only(cluster.overdue(), ProbeProgress)) == 2


def test_a_node_that_is_well_again_is_not_drained(cluster: FakeCluster) -> None:
    """The newcomers end; a node that was drained already becomes a spare one."""
    cluster.feed(cluster.unwell())
    bodies = cluster.feed(cluster.unwell(assertion=Assertion.RECOVER))
    assert len(only(bodies, StopProcess)) == 2
    prepare(cluster)
    cluster.feed(*(stopped(cluster, rank) for rank in range(4)))
    cluster.feed(cluster.unwell(assertion=Assertion.RECOVER))
    assert {node.node: node.state for node in cluster.machine.status(cluster.now).nodes}["node1"] == "spare"


def test_a_restarted_controller_asks_again_for_what_a_drain_waits_for(cluster: FakeCluster) -> None:
    """Early starts, the stop at the boundary, and the order to take over."""
    cluster.feed(cluster.unwell())
    starts = only(cluster.feed(ControllerStarted(term=2)), StartProcess)
    assert [(start.rank, start.early) for start in starts] == [(2, True), (3, True)]
    cluster.feed(*(cluster.waiting(rank) for rank in MOVED))
    cluster.feed(cluster.clocks("node0"), cluster.clocks("node1"))
    assert only(cluster.feed(ControllerStarted(term=3)), Quiesce) == [Quiesce(rank, 1, BOUNDARY) for rank in range(4)]
    cluster.feed(*(stopped(cluster, rank) for rank in range(4)))
    assert only(cluster.feed(ControllerStarted(term=4)), Quiesce) == [Quiesce(rank, 2, replaces=True) for rank in MOVED]


def routed(cluster: FakeCluster) -> tuple[Routes, Callable[[Any], None]]:
    """Routes that know the process of rank 2, and how to let machine and routes take an event in."""
    routes = Routes()

    def learn(event: Any) -> None:
        cluster.now += 0.001
        routes.learn(event, cluster.machine.handle(event, cluster.now))

    routes.learn(ProcessStarted("node1", RunningProcess(2, 102, 1, 1), warm=True), ())
    return routes, learn


def test_an_early_process_is_reached_only_when_the_one_before_it_has_been_told_to_end(cluster: FakeCluster) -> None:
    """Until then the rank's orders go to the process that trains."""
    routes, learn = routed(cluster)
    learn(cluster.unwell())
    learn(ProcessStarted("node2", cluster.newcomer(2), warm=True))
    learn(cluster.waiting(2))
    learn(cluster.waiting(3))
    assert routes.connection(rank_address(2)) == "node/node1"
    learn(cluster.clocks("node0"))
    learn(cluster.clocks("node1"))
    for rank in range(4):
        learn(stopped(cluster, rank))
    assert routes.connection(rank_address(2)) == "node/node2"


def test_a_newcomer_that_is_given_up_never_gets_the_ranks_orders(cluster: FakeCluster) -> None:
    """Also when its start is reported late."""
    routes, learn = routed(cluster)
    learn(cluster.unwell())
    late = ProcessStarted("node2", cluster.newcomer(2), warm=True)
    learn(cluster.unwell(assertion=Assertion.RECOVER))
    learn(late)
    assert routes.connection(rank_address(2)) == "node/node1"


def test_a_newcomer_that_comes_back_with_its_lost_node_never_gets_the_ranks_orders(cluster: FakeCluster) -> None:
    """The rank that trains would not hear of anything any more."""
    routes, learn = routed(cluster)
    learn(cluster.unwell())
    newcomer = cluster.newcomer(2)
    learn(NodeLost("node2", "no word", 0.0))
    learn(NodeJoined("node2", "node2", StoreEndpoint("node2", 1), (newcomer,)))
    assert routes.connection(rank_address(2)) == "node/node1"


def test_a_first_step_report_on_the_way_to_the_boundary_changes_nothing(cluster: FakeCluster) -> None:
    """It comes late, from the resume before."""
    prepare(cluster)
    late = StepCommitted(0, 1, 1, 1, cluster.now, STEP_S)
    assert cluster.feed(late) == []


def test_a_rank_without_a_clock_puts_the_boundary_off(cluster: FakeCluster) -> None:
    """The clocks are read again, a few times, and then the drain is put off."""
    get_ready(cluster)
    finished = cluster.clocks("node1", Activity.FINISHED)
    assert cluster.feed(cluster.clocks("node0"), finished) == []
    for _ in range(READINGS - 1):
        assert len(only(cluster.overdue(), ProbeProgress)) == 2
    assert len(only(cluster.overdue(), StopProcess)) == 2
    assert cluster.machine.phase is Phase.RUNNING


def with_stopped_rank(cluster: FakeCluster, activity_age_s: float) -> ProgressReported:
    """The clocks of node1, of which the kernel has stopped one process."""
    read = cluster.clocks("node1")
    stopped_rank = msgspec.structs.replace(read.ranks[0], suspended=True, activity_age_s=activity_age_s)
    return msgspec.structs.replace(read, ranks=(stopped_rank, *read.ranks[1:]))


def test_a_rank_that_is_stopped_for_a_moment_does_not_put_the_boundary_off(cluster: FakeCluster) -> None:
    """One that is stopped two thirds of the time is drained for that, and would be found stopped again and again."""
    get_ready(cluster)
    bodies = cluster.feed(cluster.clocks("node0"), with_stopped_rank(cluster, LEAD_S))
    assert [order.rank for order in only(bodies, Quiesce)] == [0, 1, 2, 3]


def test_a_rank_that_stays_stopped_puts_the_boundary_off(cluster: FakeCluster) -> None:
    """It could not stop at the boundary; its clock is read again when some time has passed."""
    get_ready(cluster)
    assert cluster.feed(cluster.clocks("node0"), with_stopped_rank(cluster, LEAD_S + 0.1)) == []
    assert len(only(cluster.overdue(), ProbeProgress)) == 2
    assert cluster.machine.phase is Phase.RUNNING


def test_reports_of_ranks_that_are_not_clean_are_no_source() -> None:
    """Only whole copies count when it is asked whether the old processes may end."""
    cluster = under(NO_CHECKPOINT)
    prepare(cluster)
    for rank in (0, 1):
        event = stopped(cluster, rank)
        needs, local_states = event.report.needs, event.report.local_states
        report = StepReport(BOUNDARY, ready=False, clean=False, needs=needs, local_states=local_states)
        cluster.feed(msgspec.structs.replace(event, report=report))
    bodies = cluster.feed(stopped(cluster, 2), stopped(cluster, 3))
    assert {(stop.rank, stop.incarnation) for stop in only(bodies, StopProcess)} == {(2, 2), (3, 2)}
