"""Ranks that die or hang while an emergency checkpoint is written: the others begin again, if they hold everything."""

from typing import Any

import msgspec
import pytest

from midstep.controller.recovery.events import DeadlinePassed, Finish, StopRequested
from midstep.controller.recovery.state import Phase
from midstep.devices.kinds import EXTERNAL
from midstep.policies.schema import CommunicatorPolicy, default_policy
from midstep.protocol.messages import CheckpointSaved, RankQuiesced, SaveCheckpoint, StartProcess, StopProcess
from midstep.protocol.types import ShardHold
from midstep.testing.fake_cluster import FakeCluster, only

from .test_scaling import SCALES, lose, resume, scaling

SAVE_S = default_policy().deadlines.save_s


def saves(bodies: list[Any]) -> list[tuple[int, bool]]:
    """Return who is asked to write, and whether to publish."""
    return [(save.rank, save.publish) for save in only(bodies, SaveCheckpoint)]


def finished(cluster: FakeCluster) -> str:
    """Return why the job is over."""
    finish = cluster.log[-1]
    assert isinstance(finish, Finish)
    return finish.reason


@pytest.fixture
def shrinking() -> FakeCluster:
    """Node1 is lost; ranks 0 and 1 hold everything of step 5, each of them, and rank 1 is asked to write first."""
    job = scaling()
    lose(job)
    assert saves(job.feed(job.quiesced(0, 5, peers=[1, 2, 3]), job.quiesced(1, 5, peers=[0, 2, 3]))) == [(1, False)]
    return job


def test_when_a_writer_dies_the_others_begin_anew(shrinking: FakeCluster) -> None:
    """In another attempt, so that nothing is mixed; the smaller world starts once it is complete, and loses no step."""
    attempt = shrinking.machine.generation
    bodies = shrinking.feed(shrinking.exited(1))
    assert saves(bodies) == [(0, True)]
    assert only(bodies, SaveCheckpoint)[0].generation > attempt
    assert shrinking.machine.phase is Phase.SAVING
    assert shrinking.feed(CheckpointSaved(1, attempt, 5, "/ck")) == [], "an answer to the attempt that was given up"
    starts = only(shrinking.feed(shrinking.saved(0)), StartProcess)
    assert [start.rank for start in starts] == [0, 1]
    resume(shrinking, 2, 5)
    assert shrinking.machine.incidents[0].steps_lost == 0


def test_a_writer_that_hangs_is_left_out_when_its_time_is_up(shrinking: FakeCluster) -> None:
    """It is stopped with the others when the smaller world starts."""
    shrinking.now += SAVE_S
    assert saves(shrinking.feed(DeadlinePassed())) == [(0, True)]
    bodies = shrinking.feed(shrinking.saved(0))
    assert sorted(stop.rank for stop in only(bodies, StopProcess)) == [0, 1]
    assert [start.rank for start in only(bodies, StartProcess)] == [0, 1]


def test_writers_that_all_hang_do_not_keep_the_world_from_going_on(shrinking: FakeCluster) -> None:
    """Each attempt has its deadline and fewer writers; the record says what was missing."""
    for _ in range(2):
        shrinking.now += SAVE_S
        bodies = shrinking.feed(DeadlinePassed())
    assert [start.rank for start in only(bodies, StartProcess)] == [0, 1]
    resume(shrinking, 2, 3)
    incident = shrinking.machine.incidents[0]
    assert incident.steps_lost == 2
    assert "rank 0 did not write the emergency checkpoint in time" in incident.repair_reasons[0]


def test_one_rank_that_did_not_park_and_one_that_died_later_keep_nobody_waiting(cluster: FakeCluster) -> None:
    """Rank 3 never parks, rank 1 dies while it writes: ranks 0 and 2 write."""
    cluster.feed(StopRequested("enough"))
    cluster.feed(*(cluster.quiesced(rank, 7, peers=[3]) for rank in range(3)))
    cluster.now += SAVE_S
    assert saves(cluster.feed(DeadlinePassed())) == [(1, False), (2, False)]
    assert saves(cluster.feed(cluster.exited(1))) == [(2, False)]


def test_no_checkpoint_is_made_without_the_only_copy_of_a_shard_that_died_with_its_rank(cluster: FakeCluster) -> None:
    """It could not be loaded, and would stand before the one that can: what a lost rank needed is remembered."""

    def alone(rank: int) -> RankQuiesced:
        shard = f"shard{rank}"
        event = cluster.quiesced(rank, 7)
        report = msgspec.structs.replace(event.report, holds=(ShardHold(shard, 8, held=True),), needs=(shard,))
        return msgspec.structs.replace(event, report=report)

    cluster.feed(StopRequested("enough"))
    assert len(saves(cluster.feed(*(alone(rank) for rank in range(4))))) == 3
    assert saves(cluster.feed(cluster.exited(2))) == []
    reason = finished(cluster)
    assert "rank 2 died while the checkpoint was written" in reason
    assert "no clean copy of shard2 is left" in reason


def test_where_a_script_writes_the_rank_that_publishes_writes_with_the_others() -> None:
    """Handlers may need each other: it answers nothing yet, and is asked again when all have written."""
    external = CommunicatorPolicy(name=EXTERNAL)
    job = scaling(msgspec.structs.replace(SCALES, communicator=external))
    lose(job)

    orders = only(job.feed(job.quiesced(0, 5, peers=[1, 2, 3]), job.quiesced(1, 5, peers=[0, 2, 3])), SaveCheckpoint)

    assert [(order.rank, order.publish, order.answer) for order in orders] == [(1, False, True), (0, False, False)]
    assert {order.writers for order in orders} == {(0,)}
    last = only(job.feed(job.saved(1)), SaveCheckpoint)
    assert [(order.rank, order.publish, order.answer) for order in last] == [(0, True, True)]
