"""The recovery machine, fed by hand: events in, actions out."""

import msgspec
import pytest

from midstep.controller.recovery.events import ControllerStarted, DeadlinePassed, Finish, Send, StopRequested
from midstep.controller.recovery.state import Phase
from midstep.policies.schema import Budget, IncidentPolicy, NodePolicy, Policy, RungPolicy
from midstep.protocol.incidents import Outcome
from midstep.protocol.messages import (
    CheckpointSaved,
    CreateNode,
    EndJob,
    FaultReported,
    NodeJoined,
    NodeLost,
    ProbeProgress,
    ProgressReported,
    Quiesce,
    RankFinished,
    Rejoin,
    Release,
    Resume,
    SaveCheckpoint,
    StartProcess,
    StopProcess,
)
from midstep.protocol.rules import DO_NOT_REQUEUE
from midstep.protocol.types import (
    Activity,
    FaultKind,
    FaultLevel,
    RankProgress,
    Rung,
    RunningProcess,
    StoreEndpoint,
)
from midstep.testing.fake_cluster import FakeCluster, job, only


def test_a_job_starts_when_its_nodes_and_spares_are_there() -> None:
    """Four seated processes are started, two on each of the first two nodes."""
    fresh = FakeCluster()
    assert only(fresh.feed(fresh.node("node0"), fresh.node("node2")), StartProcess) == []
    starts = only(fresh.feed(fresh.node("node1")), StartProcess)
    assert [start.rank for start in starts] == [0, 1, 2, 3]
    assert all(start.connected for start in starts)
    assert [fresh.holder(rank).node for rank in range(4)] == ["node0", "node0", "node1", "node1"]


def test_a_killed_rank_comes_back_in_place_and_the_others_stay(cluster: FakeCluster) -> None:
    """Survivors are quiesced at once, only the dead rank is started, and the incident closes at the first new step."""
    bodies = cluster.feed(cluster.exited(1))
    assert [body.rank for body in only(bodies, Quiesce)] == [0, 2, 3]
    assert [(body.rank, body.connected) for body in only(bodies, StartProcess)] == [(1, False)]
    cluster.feed(cluster.quiesced(0, 5), cluster.quiesced(2, 5), cluster.quiesced(3, 5, peers=[1]))
    bodies = cluster.feed(cluster.joined(1))
    parts = {body.rank: body.part for body in only(bodies, Rejoin)}
    assert parts[1].target_step == 5
    assert [transfer.destination for transfer in parts[1].transfers] == [1]
    assert parts[1].local_states[0].source == 3
    cluster.holder(1).pid = 999
    cluster.pass_barrier_two(5)
    (incident,) = cluster.machine.incidents
    assert incident.outcome is Outcome.RESUMED
    assert incident.rung is Rung.RECOVER_IN_PLACE
    assert incident.healthy_pids_kept
    assert incident.steps_lost == 0


def test_a_rank_with_final_gradients_finishes_its_update(cluster: FakeCluster) -> None:
    """When somebody has committed the step, a rank at the barrier is told to finish and not to reload."""
    cluster.feed(cluster.exited(1))
    cluster.feed(cluster.quiesced(0, 6, peers=[1]), cluster.quiesced(2, 5, ready=True), cluster.quiesced(3, 6))
    bodies = cluster.feed(cluster.joined(1))
    parts = {body.rank: body.part for body in only(bodies, Rejoin)}
    assert parts[2].target_step == 6
    assert parts[2].finish_update
    assert not any(transfer.destination == 2 for transfer in parts[2].transfers)


def test_collateral_reports_wait_for_the_culprit(cluster: FakeCluster) -> None:
    """A broken collective alone decides nothing; the exit that explains it does."""
    assert cluster.feed(cluster.fault(0, FaultKind.COMMUNICATION)) == []
    assert cluster.machine.phase is Phase.SUSPECTING
    bodies = cluster.feed(cluster.exited(1))
    assert [body.rank for body in only(bodies, StartProcess)] == [1]


def test_a_first_step_that_is_told_again_with_the_last_one_ends_no_incident_later(cluster: FakeCluster) -> None:
    """The record is that of a controller that takes over, to which each word comes by itself."""
    cluster.feed(cluster.exited(1))
    cluster.feed(*(cluster.quiesced(rank, 5, peers=[1]) for rank in (0, 2, 3)), cluster.joined(1))
    cluster.feed(*(cluster.ready(rank, 5) for rank in range(4)))
    cluster.feed(*(cluster.committed(rank, 6) for rank in (0, 1, 2)))
    last = cluster.committed(3, 6)
    again = msgspec.structs.replace(cluster.committed(0, 6), at_s=last.at_s + 1.0)
    cluster.now += 2.0
    cluster.machine.handle(last, cluster.now, again)
    assert cluster.machine.incidents[0].resumed_s == last.at_s


def test_a_link_fault_with_nobody_at_fault_repeats_the_step(cluster: FakeCluster) -> None:
    """After the grouping time everybody quiesces and nobody is replaced."""
    cluster.feed(cluster.fault(0, FaultKind.COMMUNICATION))
    cluster.now += 1
    bodies = cluster.feed(DeadlinePassed())
    assert len(only(bodies, Quiesce)) == 4
    assert only(bodies, StartProcess) == []
    assert cluster.machine.incidents[0].rung is Rung.RETRY_STEP


def test_a_stall_is_blamed_on_the_rank_that_the_others_wait_for(cluster: FakeCluster) -> None:
    """The step clocks of all nodes are read; the stopped rank is replaced."""
    bodies = cluster.feed(cluster.fault(0, FaultKind.STALL))
    assert len(only(bodies, ProbeProgress)) == 2

    def clock(rank: int, *, suspended: bool = False) -> RankProgress:
        return RankProgress(rank, 1, 1, 5, Activity.COLLECTIVE, 40, 2.0, 2.0, 0.1, suspended)

    probe = bodies[0].probe
    cluster.feed(ProgressReported("node0", probe, cluster.now, (clock(0), clock(1))))
    bodies = cluster.feed(ProgressReported("node1", probe, cluster.now, (clock(2), clock(3, suspended=True))))
    assert [body.rank for body in only(bodies, StartProcess)] == [3]


def test_a_lost_node_moves_its_ranks_to_the_spare(cluster: FakeCluster) -> None:
    """Both ranks of the node are started on the spare; the other node's ranks stay."""
    bodies = cluster.feed(NodeLost("node1", "its agent is gone", cluster.now))
    assert [body.rank for body in only(bodies, StartProcess)] == [2, 3]
    assert cluster.holder(2).node == cluster.holder(3).node == "node2"
    assert [body.rank for body in only(bodies, Quiesce)] == [0, 1]
    assert cluster.machine.incidents[0].rung is Rung.RECOVER


def test_the_decision_names_the_spare_that_is_taken() -> None:
    """Of several that is the first by name, in whatever order they came."""
    cluster = FakeCluster(job(spares=2))
    cluster.join("node0", "node1", "node3", "node2")
    cluster.pass_barrier_two(0)
    cluster.feed(NodeLost("node1", "its agent is gone", cluster.now))
    assert cluster.holder(2).node == "node2"
    assert "to spare node node2" in cluster.machine.incidents[0].decisions[-1].reason


def test_a_second_kill_in_the_recovery_is_part_of_the_same_incident(cluster: FakeCluster) -> None:
    """The newcomer on its way is kept, the second victim is replaced too, and no survivor is asked again."""
    cluster.feed(cluster.exited(1))
    generation = cluster.machine.generation
    cluster.feed(cluster.quiesced(0, 5))
    incarnation = cluster.holder(1).incarnation
    bodies = cluster.feed(cluster.exited(2))
    assert [body.rank for body in only(bodies, StartProcess)] == [2]
    assert cluster.holder(1).incarnation == incarnation
    assert only(bodies, Quiesce) == []
    assert cluster.machine.generation == generation
    assert len(cluster.machine.incidents) == 1


def test_nodes_that_are_lost_one_after_the_other_share_a_generation() -> None:
    """However many there are, each survivor is asked to quiesce once, and all lost ranks come back together."""
    cluster = FakeCluster(job(nodes=6, ranks_per_node=2, spares=3)).start()
    before, lost = cluster.machine.generation, (0, 1, 4, 5, 8, 9)
    bodies = cluster.feed(*(NodeLost(f"node{number}", "powered off", 0.0) for number in (0, 2, 4)))
    assert [body.rank for body in only(bodies, StartProcess)] == list(lost)
    assert {body.generation for body in only(bodies, StartProcess)} == {before + 1}
    quiesced = [body.rank for body in only(bodies, Quiesce)]
    assert len(quiesced) == len({*quiesced})
    assert {*quiesced} - {*lost} == {2, 3, 6, 7, 10, 11}
    incident = cluster.machine.incidents[-1]
    assert (incident.generations, incident.replaced) == ((before + 1,), lost)


def test_survivors_that_were_not_told_of_a_replacement_are_asked_again(cluster: FakeCluster) -> None:
    """A step was to be retried by all; a rank that ends meanwhile makes it a generation with a newcomer."""
    cluster.feed(cluster.fault(1, FaultKind.EXCEPTION, mendable=True))
    bodies = cluster.feed(cluster.exited(2))
    assert {(body.rank, body.replaces) for body in only(bodies, Quiesce)} == {(0, True), (1, True), (3, True)}


def test_a_replacement_that_dies_again_and_again_hands_over_to_the_next_rung(cluster: FakeCluster) -> None:
    """It is tried again in place as often as the policy says, three times by default; then the rank moves."""
    for _ in range(4):
        cluster.feed(cluster.exited(1))
    incident = cluster.machine.incidents[0]
    assert [decision.rung for decision in incident.decisions] == [*[Rung.RECOVER_IN_PLACE] * 3, Rung.RECOVER]
    assert "taken 3 times in this incident, attempts is 3" in incident.decisions[3].skipped[-1].reason


@pytest.mark.parametrize("attempts", [1, 2, 8])
def test_a_rung_is_tried_as_often_as_its_attempts_say(attempts: int) -> None:
    """Whatever becomes of the replacements: no committed step is given up while the policy has a way to keep it."""
    rungs = (Rung.RECOVER_IN_PLACE, Rung.RESCHEDULE_POD)
    ladder = (
        *(RungPolicy(rung, attempts=attempts, budget=Budget(per_job=None)) for rung in rungs),
        RungPolicy(Rung.STOP),
    )
    policy = Policy(ladder=ladder, incident=IncidentPolicy(max_attempts=99), node=NodePolicy(failures=None))
    cluster = FakeCluster(policy=policy).start()
    while cluster.machine.phase is not Phase.SAVING:
        cluster.feed(cluster.exited(1))
    decided = [decision.rung for decision in cluster.machine.incidents[0].decisions]
    assert decided == [*[Rung.RECOVER_IN_PLACE] * attempts, Rung.RESCHEDULE_POD]


def test_a_plain_script_that_always_fails_is_restarted_exactly_as_often_as_allowed() -> None:
    """With --max-restarts 3 there are four runs, then the job stops and names the budget."""
    plain = FakeCluster(msgspec.structs.replace(job(), max_restarts=3))
    for number in range(3):
        plain.feed(plain.node(f"node{number}"))
    runs = 1
    while not isinstance(plain.log[-1], Finish):
        runs += bool(only(plain.feed(plain.exited(0, 1)), StartProcess))
    assert runs == 4
    assert "max-restarts is spent: 3 of 3" in plain.log[-1].reason


def test_all_ranks_dead_starts_the_world_from_its_checkpoint(cluster: FakeCluster) -> None:
    """With every replica gone the whole world is restarted, seated."""
    for rank in range(3):
        cluster.feed(cluster.exited(rank))
    bodies = cluster.feed(cluster.exited(3))
    assert cluster.machine.phase is Phase.STARTING
    assert all(start.connected for start in only(bodies, StartProcess))


def test_a_finished_job_is_released_and_ends_well(cluster: FakeCluster) -> None:
    """All ranks finish, are released, exit with 0, and so does the job."""
    bodies = cluster.feed(*(RankFinished(rank, cluster.machine.generation, 1, 10) for rank in range(4)))
    assert len(only(bodies, Release)) == 4
    bodies = cluster.feed(*(cluster.exited(rank, 0) for rank in range(4)))
    assert only(bodies, EndJob)
    assert cluster.log[-1] == Finish(0, "all ranks have finished")


def test_a_stop_saves_an_emergency_checkpoint_first(cluster: FakeCluster) -> None:
    """Survivors park, all save their rank-local state, the lowest publishes last."""
    cluster.feed(StopRequested("Ctrl-C"))
    bodies = cluster.feed(*(cluster.quiesced(rank, 7) for rank in range(4)))
    assert [(save.rank, save.publish) for save in only(bodies, SaveCheckpoint)] == [(1, False), (2, False), (3, False)]
    generation = cluster.machine.generation
    bodies = cluster.feed(*(CheckpointSaved(rank, generation, 7, "/ck") for rank in (1, 2, 3)))
    assert [(save.rank, save.publish) for save in only(bodies, SaveCheckpoint)] == [(0, True)]
    cluster.feed(CheckpointSaved(0, generation, 7, "/ck"))
    finish = cluster.log[-1]
    assert isinstance(finish, Finish)
    assert "emergency checkpoint of step 7 is at /ck" in finish.reason


def test_a_stop_between_two_commits_saves_the_own_state_of_ranks_about_to_commit(
    cluster: FakeCluster,
) -> None:
    """The shards come from who has committed; a checkpoint without all rank-local states would not be complete."""
    cluster.feed(StopRequested("Ctrl-C"))
    stopped = [cluster.quiesced(rank, 7 - rank % 2, ready=rank % 2 == 1) for rank in range(4)]
    bodies = cluster.feed(*stopped)
    assert [(save.rank, save.publish) for save in only(bodies, SaveCheckpoint)] == [(2, False), (1, False), (3, False)]
    generation = cluster.machine.generation
    bodies = cluster.feed(*(CheckpointSaved(rank, generation, 7, "/ck") for rank in (1, 2, 3)))
    assert [(save.rank, save.publish, save.step) for save in only(bodies, SaveCheckpoint)] == [(0, True, 7)]


def test_a_stop_saves_nothing_that_may_be_made_of_struck_memory(cluster: FakeCluster) -> None:
    """Whoever loads it one day could not know."""
    late = cluster.fault(1, FaultKind.MEMORY_MULTI_BIT).report
    cluster.feed(FaultReported(msgspec.structs.replace(late, trusted_step=3)))
    cluster.feed(StopRequested("Ctrl-C"))
    bodies = cluster.feed(*(cluster.quiesced(rank, 7) for rank in (0, 2, 3)))
    assert only(bodies, SaveCheckpoint) == []
    finish = cluster.log[-1]
    assert isinstance(finish, Finish)
    assert "nobody holds clean state that can be trusted" in finish.reason


def test_a_rank_that_lost_a_shard_writes_none_of_what_another_is_to_write(cluster: FakeCluster) -> None:
    """Who is asked to save, and who writes which shard, are found in the same way."""
    cluster.feed(StopRequested("Ctrl-C"))
    answers = [cluster.quiesced(rank, 7) for rank in range(4)]
    (hold,) = answers[0].report.holds
    both = (hold, msgspec.structs.replace(hold, shard_id="other"))
    needs = tuple(each.shard_id for each in both)
    reports = [msgspec.structs.replace(each.report, holds=both, needs=needs) for each in answers]
    reports[0] = msgspec.structs.replace(reports[0], holds=(hold,))
    bodies = cluster.feed(
        *(msgspec.structs.replace(each, report=report) for each, report in zip(answers, reports, strict=True))
    )
    saves = [*only(bodies, SaveCheckpoint)]
    generation = cluster.machine.generation
    saves += only(cluster.feed(*(CheckpointSaved(each.rank, generation, 7, "/ck") for each in saves)), SaveCheckpoint)
    written = [shard for save in saves for shard in save.shards]
    assert sorted(written) == sorted(needs)


@pytest.mark.parametrize("saving", [False, True])
def test_a_checkpoint_that_is_under_way_gets_its_time_anew_after_a_restart_of_the_controller(
    cluster: FakeCluster, saving: bool
) -> None:
    """Nobody could answer while no controller was there."""
    cluster.feed(StopRequested("Ctrl-C"))
    if saving:
        cluster.feed(*(cluster.quiesced(rank, 7) for rank in range(4)))
    cluster.now += 1000.0
    cluster.feed(ControllerStarted(term=2))
    due_s = cluster.machine.next_deadline()
    assert due_s is not None
    assert due_s > cluster.now


def test_a_plain_script_that_fails_ends_the_job_when_no_restart_is_allowed() -> None:
    """A rank that never joined cannot be kept; without --max-restarts the job stops and names the budget."""
    plain = FakeCluster()
    for number in range(3):
        plain.feed(plain.node(f"node{number}"))
    plain.feed(plain.exited(0, 1))
    finish = plain.log[-1]
    assert isinstance(finish, Finish)
    assert finish.exit_code == 1
    assert "max-restarts" in finish.reason


def test_a_restarted_controller_asks_again_for_what_is_outstanding(cluster: FakeCluster) -> None:
    """In QUIESCING, those who have not answered are asked again, and the newcomer is started again."""
    cluster.feed(cluster.exited(1))
    cluster.feed(cluster.quiesced(0, 5))
    bodies = cluster.feed(ControllerStarted(term=2))
    assert [body.rank for body in only(bodies, Quiesce)] == [2, 3]
    assert [body.rank for body in only(bodies, StartProcess)] == [1]


def test_a_restarted_controller_hears_of_strays_on_a_node_that_it_left(cluster: FakeCluster) -> None:
    """Its predecessor may have died before it told them to stop: the isolated node is asked what runs there."""
    report = cluster.fault(2, FaultKind.DEVICE).report
    cluster.feed(FaultReported(msgspec.structs.replace(report, level=FaultLevel.SEPARATE_NPU)))
    assert cluster.holder(2).node == "node2"
    cluster.feed(ControllerStarted(term=2))
    assert "node/node1" in [action.receiver for action in cluster.log if isinstance(action, Send)][-6:]
    stray = RunningProcess(2, 102, 1, 1)
    bodies = cluster.feed(NodeJoined("node1", "node1", StoreEndpoint("127.0.0.1", 1), (stray,)))
    assert [order.rank for order in only(bodies, StopProcess)] == [2]


def test_a_restarted_controller_asks_again_for_nodes() -> None:
    """Its predecessor may have died before it asked the platform."""
    cluster = FakeCluster(job(spares=0))
    cluster.machine.state.arrivals.can_be_created = True
    cluster.start()
    cluster.feed(NodeLost("node0", "gone", cluster.now))
    asked = only(cluster.feed(ControllerStarted(term=2)), CreateNode)
    assert [order.node for order in asked] == ["node2"]


def test_nothing_begins_anew_from_a_half_repaired_process(cluster: FakeCluster) -> None:
    """Its source died while it copied, and nobody else holds anything: all restart, from what their script makes."""
    cluster.feed(cluster.exited(1))
    cluster.feed(*(cluster.quiesced(rank, 5, peers=[1]) for rank in (0, 2, 3)), cluster.joined(1))
    assert cluster.machine.phase is Phase.REJOINING
    cluster.feed(*(cluster.exited(rank) for rank in (0, 2, 3)))
    answer = cluster.quiesced(1, 5)
    half = msgspec.structs.replace(answer.report, clean=False, holds=())
    bodies = cluster.feed(msgspec.structs.replace(answer, report=half), *(cluster.joined(rank) for rank in (0, 2, 3)))
    assert only(bodies, Rejoin) == []
    assert [order.rank for order in only(bodies, StartProcess)] == [0, 1, 2, 3]


def test_replaying_the_same_events_gives_the_same_actions() -> None:
    """Two machines fed alike do alike."""
    one, other = FakeCluster(), FakeCluster()
    for each in (one, other):
        each.start()
        each.feed(each.exited(1))
        each.feed(each.quiesced(0, 5), each.fault(2, FaultKind.COMMUNICATION))
    assert one.log == other.log


def test_reports_of_an_earlier_process_change_nothing(cluster: FakeCluster) -> None:
    """An exit that was overtaken by a restart is counted and dropped."""
    late = cluster.exited(1)
    cluster.feed(cluster.exited(1))
    generation = cluster.machine.generation
    assert cluster.feed(late) == []
    assert cluster.machine.generation == generation


def test_resume_goes_to_all_ranks_at_one_step(cluster: FakeCluster) -> None:
    """Barrier two closes with the same step for everybody."""
    cluster.feed(cluster.exited(1))
    cluster.feed(cluster.quiesced(0, 5, peers=[1]), cluster.quiesced(2, 5), cluster.quiesced(3, 5))
    cluster.feed(cluster.joined(1))
    bodies = cluster.feed(*(cluster.ready(rank, 5) for rank in range(4)))
    assert {(body.rank, body.step) for body in only(bodies, Resume)} == {(rank, 5) for rank in range(4)}


def test_a_rank_that_writes_a_checkpoint_holds_nobody_up(cluster: FakeCluster) -> None:
    """The others' stall is dismissed: nobody is quiesced, and the job goes on running."""
    bodies = cluster.feed(cluster.fault(1, FaultKind.STALL))
    probe = bodies[0].probe

    def clock(rank: int, activity: Activity) -> RankProgress:
        return RankProgress(rank, 1, 1, 5, activity, 40 if rank else 39, 2.0, 2.0, 0.1)

    first = (clock(0, Activity.CHECKPOINTING), clock(1, Activity.COLLECTIVE))
    second = (clock(2, Activity.COLLECTIVE), clock(3, Activity.COLLECTIVE))
    bodies = cluster.feed(ProgressReported("node0", probe, cluster.now, first))
    bodies += cluster.feed(ProgressReported("node1", probe, cluster.now, second))
    assert bodies == []
    assert cluster.machine.phase is Phase.RUNNING
    assert cluster.machine.incidents[0].outcome is Outcome.DISMISSED


def test_a_pause_of_all_ranks_together_is_nobodys_stall(cluster: FakeCluster) -> None:
    """Where nobody waits for anybody there is nothing to repair: the suspicion is dismissed."""
    bodies = cluster.feed(cluster.fault(1, FaultKind.STALL))
    probe = bodies[0].probe

    def clock(rank: int) -> RankProgress:
        return RankProgress(rank, 1, 1, 5, Activity.COMPUTING, 40, 9.0, 9.0, 0.1)

    cluster.feed(ProgressReported("node0", probe, cluster.now, (clock(0), clock(1))))
    assert cluster.feed(ProgressReported("node1", probe, cluster.now, (clock(2), clock(3)))) == []
    assert cluster.machine.phase is Phase.RUNNING
    assert cluster.machine.incidents[0].outcome is Outcome.DISMISSED


@pytest.mark.parametrize("exit_first", [True, False])
def test_a_process_that_ends_well_before_its_train_function_does_not_end_the_controller(exit_first: bool) -> None:
    """Where others wait for it, it is at fault, whichever came first; its script is started as often as is allowed."""
    starting = FakeCluster(job(nodes=1, spares=0))
    starting.feed(starting.node("node0"))
    came = (starting.exited(0, 0), starting.joined(1, fresh=True, own=0))
    bodies = starting.feed(*(came if exit_first else reversed(came)))
    assert [start.rank for start in only(bodies, StartProcess)] == [0]
    [incident] = starting.machine.incidents
    assert "rank 0 ended with status 0 before it reached its train function" in incident.reports[0].detail


def test_a_replacement_that_ends_well_before_its_train_function_is_replaced(cluster: FakeCluster) -> None:
    """The survivors wait for it, so its status does not matter."""
    cluster.feed(cluster.exited(1))
    assert [start.rank for start in only(cluster.feed(cluster.exited(1, 0)), StartProcess)] == [1]
    cluster.recover(5)


def test_a_rank_that_is_stopped_after_it_has_finished_is_not_replaced(cluster: FakeCluster) -> None:
    """Its exit has a deadline, and the others need nothing of it."""
    cluster.feed(*(RankFinished(rank, cluster.machine.generation, 1, 10) for rank in range(4)))
    assert cluster.feed(cluster.fault(0, FaultKind.UNRESPONSIVE)) == []
    assert cluster.machine.incidents == ()


def test_a_rank_that_is_stopped_and_whose_end_was_not_heard_is_replaced(cluster: FakeCluster) -> None:
    """Only it knows that it has finished: what it has said did not arrive, or was not believed."""
    earlier = cluster.machine.generation - 1
    cluster.feed(*(RankFinished(rank, earlier, 1, 10) for rank in range(4)))
    bodies = cluster.feed(cluster.fault(0, FaultKind.UNRESPONSIVE))
    assert [start.rank for start in only(bodies, StartProcess)] == [0]


def test_what_midstep_refuses_ends_the_job_at_once_and_is_not_tried_again_in_another_process() -> None:
    """However many ranks say so: what was committed is saved by all of them, none is replaced."""
    cluster = FakeCluster().start()
    refused = [cluster.fault(rank, FaultKind.REFUSED, detail="gloo has no such reduction") for rank in (2, 0, 1, 3)]
    said = cluster.feed(*refused)
    assert len(only(said, Quiesce)) == 4
    cluster.expect(Phase.SAVING)
    for rank in range(4):
        said += cluster.feed(cluster.quiesced(rank, 8))
    saves = [*only(said, SaveCheckpoint)]
    generation = cluster.machine.generation
    said += cluster.feed(*(CheckpointSaved(each.rank, generation, 8, "/ck") for each in saves))
    publish = only(said, SaveCheckpoint)[-1]
    cluster.feed(CheckpointSaved(publish.rank, generation, 8, "/ck"))
    finish = cluster.log[-1]
    assert isinstance(finish, Finish)
    assert finish.exit_code == DO_NOT_REQUEUE
    assert "rank 2 asks for something that midstep refuses: gloo has no such reduction" in finish.reason
    assert only(said, StartProcess) == []
