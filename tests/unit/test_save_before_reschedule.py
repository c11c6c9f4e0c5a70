"""Before a rung ends healthy processes, what they hold is saved: by whom, when not, and what the report says of it."""

from typing import Any

import msgspec
import pytest

from midstep.controller.recovery.events import DeadlinePassed, StopRequested
from midstep.controller.recovery.state import Phase
from midstep.policies.rules import advice
from midstep.policies.schema import Policy, RungPolicy
from midstep.protocol.messages import (
    CreateNode,
    DeleteNode,
    NodeLost,
    NodeRefused,
    Quiesce,
    RankQuiesced,
    SaveCheckpoint,
    StartProcess,
)
from midstep.protocol.types import FaultKind, RestoreSource, Rung, ShardHold
from midstep.testing.fake_cluster import FakeCluster, job, only

from .test_scaling import resume


def rescheduling(rung: Rung = Rung.RESCHEDULE_POD, *, creates: bool = True, **more: Any) -> FakeCluster:
    """A running job without spares that has one rung; its platform creates nodes."""
    policy = Policy(ladder=(RungPolicy(rung), RungPolicy(Rung.STOP)), **more)
    return FakeCluster(job(spares=0), policy, creates=creates).start()


def park(cluster: FakeCluster, *ranks: int, step: int = 5) -> list[Any]:
    """Ranks park at a step, with copies of everybody's rank-local state."""
    return cluster.feed(*(cluster.quiesced(rank, step, peers=range(4)) for rank in ranks))


@pytest.mark.parametrize("rung", [Rung.RESCHEDULE_POD, Rung.RESCHEDULE_JOB])
def test_no_committed_step_is_lost_by_a_reschedule_where_survivors_hold_all(rung: Rung) -> None:
    """One process is killed, the others save, then all start from that; the report says so."""
    cluster = rescheduling(rung)
    assert only(cluster.feed(cluster.exited(1)), StartProcess) == []
    cluster.expect(Phase.SAVING)
    assert [save.step for save in only(park(cluster, 0, 2, 3), SaveCheckpoint)] == [5, 5]
    started = cluster.feed(cluster.saved(2), cluster.saved(3), cluster.saved(0))
    for created in only(started, CreateNode):
        started = cluster.feed(cluster.node(created.node))
    assert [start.rank for start in only(started, StartProcess)] == [0, 1, 2, 3]
    resume(cluster, 4, 5)
    (incident,) = cluster.machine.incidents
    assert (incident.rung, incident.steps_lost) == (rung, 0)
    assert "an emergency checkpoint of step 5 is at /ck" in incident.repair_reasons


def test_a_rank_that_is_a_step_further_does_not_keep_the_others_from_saving_what_they_all_hold() -> None:
    """Its step is not whole: the one with the other shard is gone, and its copy stands at the commit barrier."""
    cluster = rescheduling()
    cluster.feed(cluster.exited(1))

    def parked(rank: int, step: int) -> RankQuiesced:
        shard = f"shard{rank % 2}"
        event = cluster.quiesced(rank, step, peers=range(4))
        report = msgspec.structs.replace(event.report, holds=(ShardHold(shard, 10, True),), needs=(shard,))
        return msgspec.structs.replace(event, report=report)

    for holder in cluster.machine.state.world.holders:
        holder.needs = (f"shard{holder.rank % 2}",)
    saves = only(cluster.feed(parked(0, 5), parked(2, 6), parked(3, 5)), SaveCheckpoint)
    assert [(save.rank, save.step) for save in saves] == [(3, 5)], "rank 0 comes last, and publishes"


def test_the_platform_is_asked_for_a_lost_node_while_the_others_save() -> None:
    """And once more where it refused meanwhile."""
    cluster = rescheduling()
    asked = cluster.feed(NodeLost("node1", "gone", cluster.now))
    assert only(asked, DeleteNode) == [DeleteNode("node1")]
    (created,) = only(asked, CreateNode)
    park(cluster, 0, 1)
    cluster.feed(NodeRefused(created.node, "no more machines"))
    cluster.expect(Phase.SAVING)
    bodies = cluster.feed(cluster.saved(1), cluster.saved(0))
    (again,) = only(bodies, CreateNode)
    cluster.expect(Phase.WAITING)
    started = only(cluster.feed(cluster.node(again.node)), StartProcess)
    assert [start.rank for start in started] == [0, 1, 2, 3]


def test_a_node_that_is_lost_while_it_saves_is_replaced_too() -> None:
    cluster = rescheduling()
    cluster.feed(cluster.exited(0))
    park(cluster, 1, 2, 3)
    cluster.feed(NodeLost("node1", "gone", cluster.now))
    created = only(cluster.feed(cluster.saved(1)), CreateNode)
    assert len(created) == 1
    cluster.expect(Phase.WAITING)


@pytest.mark.parametrize("deadline", ["to park", "to write"])
def test_who_does_not_park_or_write_in_time_keeps_nobody_waiting(deadline: str) -> None:
    """The others save, or the world starts from an older checkpoint, and the report says why."""
    cluster = rescheduling()
    cluster.feed(cluster.exited(0))
    if deadline == "to write":
        park(cluster, 1, 2, 3)
    while cluster.machine.phase is Phase.SAVING:
        cluster.overdue()
    cluster.expect(Phase.STARTING)
    resume(cluster, 4, 3)
    said = "; ".join(cluster.machine.incidents[0].repair_reasons)
    assert "no emergency checkpoint" in said
    assert ("in time" in said) == (deadline == "to write")


def test_nothing_is_saved_where_the_policy_says_so_or_nothing_could_be_loaded() -> None:
    for more in ({"save_before_reschedule": False}, {"restore": (RestoreSource.REPLICA,)}):
        cluster = rescheduling(**more)
        assert len(only(cluster.feed(cluster.exited(1)), StartProcess)) == 4


def test_a_world_that_has_not_trained_since_it_was_started_is_not_saved_again() -> None:
    """What it holds is on disk."""
    cluster = rescheduling()
    cluster.feed(cluster.exited(1))
    park(cluster, 0, 2, 3)
    cluster.feed(cluster.saved(2), cluster.saved(3), cluster.saved(0))
    cluster.feed(cluster.joined(0, fresh=True), cluster.joined(2, fresh=True))
    cluster.expect(Phase.STARTING)
    assert len(only(cluster.feed(cluster.exited(1)), StartProcess)) == 4


def test_a_world_on_its_way_back_is_saved_though_it_has_not_trained_since() -> None:
    """What it holds is in memory only."""
    rungs = (RungPolicy(Rung.RECOVER_IN_PLACE, attempts=1), RungPolicy(Rung.RESCHEDULE_POD), RungPolicy(Rung.STOP))
    cluster = FakeCluster(job(spares=0), Policy(ladder=rungs)).start()
    cluster.feed(cluster.exited(1))
    park(cluster, 0, 2, 3)
    cluster.feed(cluster.joined(1, own=5))
    cluster.expect(Phase.REJOINING)
    cluster.feed(cluster.exited(1))
    assert [save.step for save in only(park(cluster, 0, 2, 3), SaveCheckpoint)] == [5, 5]


def test_who_has_replaced_a_process_at_fault_saves_with_the_others_where_no_links_come_up() -> None:
    """The rung after that ends all of them for the fault of a process that is gone already."""
    rungs = (RungPolicy(Rung.RECOVER_IN_PLACE, attempts=1), RungPolicy(Rung.RESCHEDULE_POD), RungPolicy(Rung.STOP))
    cluster = FakeCluster(job(spares=0), Policy(ladder=rungs)).start()
    cluster.feed(cluster.exited(1))
    park(cluster, 0, 2, 3)
    cluster.feed(cluster.joined(1, own=5))
    asked: list[Quiesce] = []
    while cluster.machine.phase is not Phase.SAVING:
        cluster.feed(*(cluster.fault(rank, FaultKind.LINK_UP) for rank in range(4)))
        asked = only(cluster.overdue(), Quiesce)
        if cluster.machine.phase is Phase.QUIESCING:
            park(cluster, *range(4))
    assert [quiesce.rank for quiesce in asked] == [0, 1, 2, 3]
    assert {save.step for save in only(park(cluster, *range(4)), SaveCheckpoint)} == {5}


def test_no_healthy_process_is_a_reason_that_the_report_gives() -> None:
    cluster = rescheduling(creates=False)
    faults = [cluster.exited(rank) for rank in range(1, 4)]
    cluster.feed(cluster.exited(0), *faults)
    while cluster.machine.phase is Phase.SAVING:
        cluster.overdue()
    resume(cluster, 4, 1)
    assert "no emergency checkpoint" in cluster.machine.incidents[0].repair_reasons[0]


def test_a_stop_while_a_reschedule_saves_ends_the_job_with_that_checkpoint() -> None:
    cluster = rescheduling()
    cluster.feed(cluster.exited(1))
    park(cluster, 0, 2, 3)
    cluster.feed(StopRequested("Ctrl-C"))
    cluster.feed(cluster.saved(2), cluster.saved(3), cluster.saved(0))
    assert cluster.finish is not None
    assert "an emergency checkpoint of step 5" in cluster.finish.reason


def test_the_checkpoint_has_a_deadline_of_its_own() -> None:
    cluster = rescheduling(deadlines=msgspec.structs.replace(Policy().deadlines, save_s=7.0))
    cluster.feed(cluster.exited(1))
    park(cluster, 0, 2, 3)
    due_s = cluster.machine.next_deadline()
    assert due_s == pytest.approx(cluster.now + 7.0)
    cluster.now = due_s or 0.0
    asked = only(cluster.feed(DeadlinePassed()), SaveCheckpoint)
    assert [(save.rank, save.publish) for save in asked] == [(0, True)], "it holds everything alone, too"


def test_the_check_says_when_those_that_have_saved_would_give_up_while_others_write() -> None:
    """They wait for the controller's next word meanwhile."""
    slow = msgspec.structs.replace(Policy().deadlines, save_s=3000.0)
    assert any("ranks that have saved give up" in note for note in advice(Policy(deadlines=slow)))
    assert not any("ranks that have saved give up" in note for note in advice(Policy()))
