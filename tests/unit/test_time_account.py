"""The account of a job's time: every second is spent on one thing, and the sums follow from the journal alone."""

import msgspec
import pytest

from midstep.controller.learned import Learned
from midstep.controller.liveness import Liveness
from midstep.controller.recovery.events import ControllerStarted, StopRequested
from midstep.controller.recovery.state import Phase
from midstep.controller.routes import Routes
from midstep.controller.time_account import MOST_BUCKETS, TimeAccount
from midstep.protocol.messages import Quiesce
from midstep.protocol.time_spent import TimeCategory as C
from midstep.protocol.time_spent import TimeSpent
from midstep.protocol.types import FaultKind
from midstep.testing.fake_cluster import STEP_S, FakeCluster, only

HOUR_S = 3600.0


def told(cluster: FakeCluster, after_s: float = 0.0) -> TimeSpent:
    """The account so far, which adds up."""
    spent = cluster.times.until(cluster.now + after_s)
    assert spent is not None
    assert sum(spent.seconds.values()) == pytest.approx(spent.wall_s, abs=1e-6)
    return spent


def test_a_job_waits_for_nodes_and_starts_before_it_trains() -> None:
    cluster = FakeCluster()
    cluster.feed(ControllerStarted(1))
    cluster.now += 30.0
    cluster.join()
    assert told(cluster).goodput is None, "nobody has trained yet"
    cluster.now += 20.0
    cluster.pass_barrier_two(0)
    cluster.now += 50.0
    spent = told(cluster)
    assert spent.seconds[C.WAITING] == pytest.approx(30.0, abs=0.1)
    assert spent.seconds[C.START] == pytest.approx(20.0, abs=0.1)
    assert spent.goodput == pytest.approx(0.5, abs=0.01)


def test_a_recovery_is_told_by_its_parts(cluster: FakeCluster) -> None:
    """From when the fault was seen, however late that was heard."""
    cluster.now += 100.0
    exited = msgspec.structs.replace(cluster.exited(1), at_s=cluster.now - 3.0)
    cluster.feed(exited)
    cluster.now += 5.0
    for rank in (0, 2, 3):
        cluster.feed(cluster.quiesced(rank, 5, peers=[1]))
    cluster.feed(cluster.joined(1))
    cluster.now += 7.0
    cluster.feed(*(cluster.ready(rank, 5) for rank in range(4)))
    cluster.now += 2.0
    cluster.feed(*(cluster.committed(rank, 6) for rank in range(4)))
    cluster.expect(Phase.RUNNING)
    spent = told(cluster)
    parts = {C.DETECT: 3.0, C.QUIESCE: 5.0, C.REJOIN: 7.0, C.FIRST_STEP: 2.0, C.TRAINING: 97.0}
    assert {each: spent.seconds[each] for each in parts} == pytest.approx(parts, abs=0.1)
    (incident,) = cluster.machine.incidents
    assert spent.recovery_s == pytest.approx(incident.recovery_s, abs=0.05)


def test_ranks_train_from_their_first_step_on_however_late_the_last_one_is_heard(cluster: FakeCluster) -> None:
    cluster.now += 100.0
    cluster.feed(cluster.exited(1))
    cluster.feed(*(cluster.quiesced(rank, 5, peers=[1]) for rank in (0, 2, 3)), cluster.joined(1))
    cluster.feed(*(cluster.ready(rank, 5) for rank in range(4)))
    cluster.now += 2.0
    cluster.feed(*(cluster.committed(rank, 6) for rank in range(3)))
    last = cluster.committed(3, 6)
    cluster.now += 8.0
    cluster.feed(last)
    cluster.expect(Phase.RUNNING)
    spent = told(cluster)
    assert spent.seconds[C.FIRST_STEP] == pytest.approx(2.0, abs=0.1)
    assert spent.seconds[C.TRAINING] == pytest.approx(108.0, abs=0.1)


def test_a_suspicion_is_a_part_of_the_detection(cluster: FakeCluster) -> None:
    cluster.now += 100.0
    cluster.feed(cluster.fault(0, FaultKind.COMMUNICATION))
    cluster.now += 4.0
    cluster.feed(cluster.exited(1))
    assert told(cluster).seconds[C.DETECT] == pytest.approx(4.0, abs=0.1)


def test_steps_that_were_lost_are_repeated_in_the_training_after_that(cluster: FakeCluster) -> None:
    """Two steps lost of a tenth of a second: 0.2 s of what is trained then are no progress."""
    cluster.now += 100.0
    cluster.machine.state.progress.committed = 7
    cluster.feed(cluster.exited(1))
    cluster.recover(5)
    assert C.REPEATED not in told(cluster).seconds
    assert told(cluster, after_s=STEP_S).seconds[C.REPEATED] == pytest.approx(STEP_S)
    cluster.now += 50.0
    spent = told(cluster)
    assert spent.seconds[C.REPEATED] == pytest.approx(2 * STEP_S)
    assert spent.seconds[C.TRAINING] == pytest.approx(150.0 - 2 * STEP_S, abs=0.1)


def test_where_nobody_is_left_who_knows_how_far_training_was_its_time_tells(cluster: FakeCluster) -> None:
    """All processes are gone, and training begins again: what was trained since the start is repeated."""
    cluster.now += 100.0
    cluster.feed(*(cluster.exited(rank) for rank in range(4)))
    cluster.recover(0)
    (incident,) = cluster.machine.incidents
    assert not incident.committed_is_known
    cluster.now += 500.0
    assert told(cluster).seconds[C.REPEATED] == pytest.approx(100.0, abs=2 * STEP_S)


def test_time_without_a_controller_is_unguarded(cluster: FakeCluster) -> None:
    """From the last sign of life of the one before; a controller that knows of none leaves it to what was before."""
    cluster.now += 100.0
    cluster.feed(ControllerStarted(2, cluster.now - 8.0))
    assert told(cluster).seconds[C.UNGUARDED] == pytest.approx(8.0, abs=0.1)
    cluster.now += 100.0
    cluster.feed(ControllerStarted(3))
    assert told(cluster).seconds[C.UNGUARDED] == pytest.approx(8.0, abs=0.1)


def test_a_drain_is_a_planned_change_from_the_boundary_on(cluster: FakeCluster) -> None:
    """What is prepared for it costs nothing: training goes on."""
    cluster.feed(cluster.unwell("node1"))
    cluster.now += 40.0
    cluster.feed(*(cluster.waiting(rank) for rank in (2, 3)))
    bodies = cluster.feed(cluster.clocks("node0"), cluster.clocks("node1"))
    boundary = only(bodies, Quiesce)[0].after_step
    assert boundary is not None
    cluster.now += 10.0
    cluster.feed(*(cluster.quiesced(rank, boundary, peers=range(4)) for rank in range(4)))
    cluster.now += 3.0
    cluster.feed(*(cluster.joined(rank) for rank in (2, 3)))
    cluster.pass_barrier_two(boundary)
    spent = told(cluster)
    assert spent.seconds[C.PLANNED] == pytest.approx(3.0, abs=0.1)
    assert spent.seconds[C.TRAINING] == pytest.approx(50.0, abs=0.1)
    assert spent.recovery_s == 0.0


def test_the_end_of_a_job_ends_its_time(cluster: FakeCluster) -> None:
    cluster.now += 10.0
    cluster.feed(StopRequested("enough"), StopRequested("enough"))
    cluster.expect(Phase.ENDED)
    assert told(cluster, after_s=1e6).wall_s == told(cluster).wall_s


def test_what_is_heard_after_the_end_of_a_job_takes_none_of_its_time(cluster: FakeCluster) -> None:
    """A platform, or a node, has something to say a while later."""
    cluster.now += 10.0
    cluster.feed(StopRequested("enough"), StopRequested("enough"))
    before = told(cluster)
    cluster.now += 50.0
    cluster.feed(cluster.node("node9"))
    assert told(cluster).seconds == before.seconds


def test_a_window_tells_of_its_own_time_only(cluster: FakeCluster) -> None:
    """An hour of recovery, then a day of training: the last hour is all training, and the last day nearly all."""
    cluster.feed(cluster.exited(1))
    cluster.now += HOUR_S
    cluster.recover(5)
    cluster.now += 23.5 * HOUR_S
    hour, day = cluster.times.windows(cluster.now)
    assert (hour.wall_s, day.wall_s) == (HOUR_S, 24 * HOUR_S)
    assert hour.goodput == pytest.approx(1.0)
    assert day.goodput == pytest.approx(23.5 / 24, abs=1e-3)
    assert sum(day.seconds.values()) == pytest.approx(day.wall_s)


def test_an_account_of_years_stays_small(cluster: FakeCluster) -> None:
    cluster.now += 3 * 365 * 24 * HOUR_S
    cluster.feed(cluster.exited(1))
    assert len(cluster.times.buckets) == MOST_BUCKETS
    month = cluster.times.windows(cluster.now)[-1]
    assert month.goodput == pytest.approx(1.0)
    assert month.wall_s == 30 * 24 * HOUR_S
    assert told(cluster).wall_s > 3 * 365 * 24 * HOUR_S - 1.0


def test_a_snapshot_has_the_account(cluster: FakeCluster) -> None:
    """A controller that continues from one counts on."""
    learned = _learned(cluster)
    for event, at_s in cluster.journal:
        learned.take(event, at_s)
    other = _learned(cluster)
    other.restore(learned.snapshot())
    assert other.times == learned.times == cluster.times
    assert other.times != TimeAccount()


def _learned(cluster: FakeCluster) -> Learned:
    return Learned(cluster.new_machine(), Routes(), Liveness(cluster.policy.heartbeat))
