"""Suspicions: nobody healthy is blamed for a stall that is over or old, or by the clock of a stray."""

import msgspec
import pytest

from midstep.controller.recovery.blame import ENOUGH_SUSPICIONS
from midstep.controller.recovery.events import ControllerStarted, DeadlinePassed
from midstep.controller.recovery.state import Phase
from midstep.policies.schema import Policy, RungPolicy
from midstep.protocol.incidents import Outcome
from midstep.protocol.messages import (
    NodeLost,
    ProbeProgress,
    ProgressReported,
    Quiesce,
    RankFinished,
    Release,
    StartProcess,
)
from midstep.protocol.types import Activity, FaultKind, RankProgress, Rung
from midstep.testing.fake_cluster import FakeCluster, job, only

RUNS = {"step": 9, "collectives": 20, "age_s": 0.05}
STANDS = {"step": 8, "collectives": 40, "age_s": 9.0}


def clock(rank: int, activity: Activity, *, step: int, collectives: int, age_s: float, life: int = 1) -> RankProgress:
    """A step clock as an agent reads it."""
    return RankProgress(rank, life, 1, step, activity, collectives, age_s, age_s, 0.1)


def probed(cluster: FakeCluster, *clocks: RankProgress) -> list[object]:
    """All nodes answer the probe that is under way."""
    probe = cluster.machine.state.clocks.probe
    bodies: list[object] = []
    for node, ranks in (("node0", (0, 1)), ("node1", (2, 3))):
        readings = tuple(each for each in clocks if each.rank in ranks)
        bodies += cluster.feed(ProgressReported(node, probe, cluster.now, readings))
    return bodies


def test_a_stall_that_is_over_is_dismissed(cluster: FakeCluster) -> None:
    """In a world that runs somebody is always behind; nobody is quiesced or replaced for it."""
    cluster.feed(cluster.fault(0, FaultKind.STALL))
    ahead = {**RUNS, "collectives": 21}
    bodies = probed(
        cluster,
        *(clock(rank, Activity.COLLECTIVE, **ahead) for rank in (0, 1, 2)),  # type: ignore[arg-type]
        clock(3, Activity.COMPUTING, **RUNS),  # type: ignore[arg-type]
    )
    assert bodies == []
    assert cluster.machine.phase is Phase.RUNNING
    assert cluster.machine.incidents[0].outcome is Outcome.DISMISSED


@pytest.mark.parametrize(
    ("allowed", "is_blamed"),
    [
        ((0.5, 0.5, 0.5, 0.5), True),  # rank 3 has stood still for 0.45 s, and is expected to be at one thing for 0.4 s
        ((0.5, 0.6, 0.5, 0.5), False),  # the rank that allows most counts: it may have seen more
        ((0.5, 0.5, 0.5, 0.0), False),  # rank 3 is new, and has the policy's limit
    ],
)
def test_a_rank_is_blamed_by_what_the_ranks_have_learned_to_allow(
    cluster: FakeCluster, allowed: tuple[float, ...], *, is_blamed: bool
) -> None:
    cluster.feed(cluster.fault(0, FaultKind.STALL))
    stands = {**STANDS, "age_s": 0.45}
    clocks = [clock(rank, Activity.COLLECTIVE, **{**stands, "collectives": 41}) for rank in range(3)]  # type: ignore[arg-type]
    clocks.append(clock(3, Activity.COMPUTING, **stands))  # type: ignore[arg-type]
    learned = [msgspec.structs.replace(each, allowed_s=s) for each, s in zip(clocks, allowed, strict=True)]
    started = only(probed(cluster, *learned), StartProcess)
    assert [each.rank for each in started] == ([3] if is_blamed else [])


def test_what_a_thousand_ranks_say_alike_is_kept_for_some_of_them() -> None:
    """Each complaint costs the same then; one of another kind, and the culprit's own report, are always taken in."""
    cluster = FakeCluster(job(nodes=100, ranks_per_node=10), checked=False).start()
    cluster.feed(*(cluster.fault(rank, FaultKind.COMMUNICATION) for rank in range(1, 999)))
    cluster.feed(cluster.fault(999, FaultKind.STALL))
    kinds = [each.kind for each in cluster.machine.state.incident.suspicions]
    assert (len(kinds), kinds[-1]) == (ENOUGH_SUSPICIONS + 1, FaultKind.STALL)
    cluster.feed(cluster.exited(0))
    assert cluster.machine.incidents[-1].replaced == (0,)


def test_a_stall_report_of_an_earlier_generation_changes_nothing(cluster: FakeCluster) -> None:
    """It was on its way while the world recovered from what it tells of."""
    late = cluster.fault(2, FaultKind.STALL)
    cluster.feed(cluster.exited(1))
    for rank in (0, 2, 3):
        cluster.feed(cluster.quiesced(rank, 5, peers=[1]))
    cluster.feed(cluster.joined(1))
    cluster.pass_barrier_two(5)
    assert cluster.feed(late) == []
    assert cluster.machine.phase is Phase.RUNNING
    assert len(cluster.machine.incidents) == 1


def test_the_clock_of_an_earlier_process_is_not_believed(cluster: FakeCluster) -> None:
    """A stray that still runs on another node does not speak for the rank."""
    cluster.feed(cluster.fault(0, FaultKind.STALL))
    bodies = probed(
        cluster,
        *(clock(rank, Activity.COLLECTIVE, **RUNS) for rank in (0, 1)),  # type: ignore[arg-type]
        clock(2, Activity.COLLECTIVE, **RUNS),  # type: ignore[arg-type]
        clock(3, Activity.COMPUTING, **STANDS, life=7),  # type: ignore[arg-type]
    )
    assert only(bodies, StartProcess) == []


def test_every_stall_is_probed_anew(cluster: FakeCluster) -> None:
    """A probe that another fault has overtaken is not waited for, so its nodes do not count as silent."""
    cluster.feed(cluster.fault(0, FaultKind.STALL))
    cluster.feed(cluster.exited(1))
    for rank in (0, 2, 3):
        cluster.feed(cluster.quiesced(rank, 5, peers=[1]))
    cluster.feed(cluster.joined(1))
    cluster.pass_barrier_two(5)
    assert len(only(cluster.feed(cluster.fault(0, FaultKind.STALL)), ProbeProgress)) == 2


def test_clocks_read_for_an_earlier_suspicion_blame_nobody(cluster: FakeCluster) -> None:
    """Another fault overtook it: what its clocks said is old when the next link-up fails."""
    cluster.feed(cluster.fault(0, FaultKind.STALL))
    probe = cluster.machine.state.clocks.probe
    stands = clock(1, Activity.COMPUTING, **STANDS)  # type: ignore[arg-type]
    waits = clock(0, Activity.COLLECTIVE, **{**STANDS, "collectives": 41})  # type: ignore[arg-type]
    cluster.feed(ProgressReported("node0", probe, cluster.now, (waits, stands)))
    cluster.feed(cluster.exited(2))
    for rank in (0, 1, 3):
        cluster.feed(cluster.quiesced(rank, 5, peers=[2]))
    cluster.feed(cluster.joined(2), cluster.fault(0, FaultKind.LINK_UP))
    cluster.now += 1
    bodies = cluster.feed(DeadlinePassed())
    assert only(bodies, StartProcess) == []
    assert len(only(bodies, Quiesce)) == 4


def test_a_checkpoint_does_not_excuse_a_broken_collective(cluster: FakeCluster) -> None:
    """Who has left its step waits for orders: everybody is quiesced."""
    cluster.feed(cluster.fault(0, FaultKind.COMMUNICATION), cluster.fault(1, FaultKind.STALL))
    bodies = probed(
        cluster,
        *(clock(rank, Activity.COLLECTIVE, **{**STANDS, "collectives": 41}) for rank in (0, 1, 2)),  # type: ignore[arg-type]
        clock(3, Activity.CHECKPOINTING, **STANDS),  # type: ignore[arg-type]
    )
    assert bodies
    assert cluster.machine.phase is not Phase.RUNNING


def test_who_has_left_the_first_step_after_a_resume_with_a_broken_collective_is_not_blamed(
    cluster: FakeCluster,
) -> None:
    """It may stand there for long while no controller is there. Whoever is dead does not answer the next quiesce."""
    cluster.feed(cluster.exited(1))
    for rank in (0, 2, 3):
        cluster.feed(cluster.quiesced(rank, 5, peers=[1]))
    cluster.feed(cluster.joined(1), *(cluster.ready(rank, 5) for rank in range(4)))
    cluster.expect(Phase.RESUMING)
    cluster.feed(cluster.fault(0, FaultKind.COMMUNICATION), cluster.fault(0, FaultKind.STALL))
    left = {"step": 8, "collectives": 7, "age_s": 37.0}
    bodies = probed(
        cluster,
        clock(0, Activity.COLLECTIVE, **{**left, "collectives": 8}),  # type: ignore[arg-type]
        clock(1, Activity.RECOVERING, **left, life=2),  # type: ignore[arg-type]
        clock(2, Activity.RECOVERING, **left),  # type: ignore[arg-type]
    )
    assert only(bodies, StartProcess) == []
    assert [order.rank for order in only(bodies, Quiesce)] == [0, 1, 2, 3]


def test_who_was_stopped_before_it_heard_the_order_to_resume_is_blamed(cluster: FakeCluster) -> None:
    """It left no step, and would wait for ever; the one that computes meanwhile holds up nobody."""
    cluster.feed(cluster.fault(0, FaultKind.STALL))
    stands = RankProgress(3, 1, 1, 8, Activity.RECOVERING, 0, 60.0, 60.0, 0.1, suspended=True)
    bodies = probed(
        cluster,
        *(clock(rank, Activity.COMPUTING, **RUNS) for rank in (0, 1, 2)),  # type: ignore[arg-type]
        stands,
    )
    assert [order.rank for order in only(bodies, StartProcess)] == [3]


def test_a_silent_node_is_blamed_in_the_end(cluster: FakeCluster) -> None:
    """Its ranks are replaced when the probe is over time, and the others quiesce."""
    cluster.feed(cluster.fault(0, FaultKind.STALL))
    probe = cluster.machine.state.clocks.probe
    waits = tuple(clock(rank, Activity.COLLECTIVE, **STANDS) for rank in (0, 1))  # type: ignore[arg-type]
    cluster.feed(ProgressReported("node0", probe, cluster.now, waits))
    bodies = cluster.overdue()
    assert [order.rank for order in only(bodies, StartProcess)] == [2, 3]
    assert [order.rank for order in only(bodies, Quiesce)] == [0, 1]


def test_clocks_that_took_long_to_read_are_read_again_once(cluster: FakeCluster) -> None:
    """What the first node said was true before a cable was mended. It runs by now, and no step is repeated."""
    cluster.feed(cluster.fault(0, FaultKind.STALL))
    probe = cluster.machine.state.clocks.probe
    waits = tuple(clock(rank, Activity.COLLECTIVE, **STANDS) for rank in (0, 1))  # type: ignore[arg-type]
    cluster.feed(ProgressReported("node0", probe, cluster.now, waits))
    cluster.now += 4.0
    runs = tuple(clock(rank, Activity.COMPUTING, **RUNS) for rank in (2, 3))  # type: ignore[arg-type]
    bodies = cluster.feed(ProgressReported("node1", probe, cluster.now, runs))
    assert len(only(bodies, ProbeProgress)) == len(bodies) == 2
    cluster.now += 4.0
    assert probed(cluster, *(clock(rank, Activity.COMPUTING, **RUNS) for rank in range(4))) == []  # type: ignore[arg-type]
    assert cluster.machine.phase is Phase.RUNNING


@pytest.mark.parametrize("step", [9, 12])
def test_clocks_that_stand_at_different_steps_are_read_again(cluster: FakeCluster, step: int) -> None:
    """One answer came late, and the rank for which the others had waited has gone on meanwhile, as they have."""
    cluster.feed(cluster.fault(0, FaultKind.STALL))
    waits = [clock(rank, Activity.COLLECTIVE, **STANDS) for rank in (0, 1, 2)]  # type: ignore[arg-type]
    bodies = probed(cluster, *waits, clock(3, Activity.COMPUTING, step=step, collectives=50, age_s=0.1))
    assert len(only(bodies, ProbeProgress)) == len(bodies) == 2
    assert probed(cluster, *(clock(rank, Activity.COMPUTING, **RUNS) for rank in range(4))) == []  # type: ignore[arg-type]
    assert cluster.machine.incidents[0].outcome is Outcome.DISMISSED


def test_a_rank_that_stays_a_step_behind_is_judged(cluster: FakeCluster) -> None:
    """By what is read the second time, as it is."""
    cluster.feed(cluster.fault(0, FaultKind.STALL))
    ahead = [clock(rank, Activity.COLLECTIVE, step=9, collectives=50, age_s=9.0) for rank in (0, 1, 2)]
    behind = clock(3, Activity.UPDATING, **STANDS)  # type: ignore[arg-type]
    assert only(probed(cluster, *ahead, behind), StartProcess) == []
    assert [order.rank for order in only(probed(cluster, *ahead, behind), StartProcess)] == [3]


def test_a_process_that_the_kernel_has_stopped_is_blamed_at_the_first_reading(cluster: FakeCluster) -> None:
    """It is certain."""
    cluster.feed(cluster.fault(0, FaultKind.STALL))
    ahead = [clock(rank, Activity.COLLECTIVE, step=9, collectives=50, age_s=9.0) for rank in (0, 1, 2)]
    stopped = msgspec.structs.replace(clock(3, Activity.UPDATING, **STANDS), suspended=True)  # type: ignore[arg-type]
    assert [order.rank for order in only(probed(cluster, *ahead, stopped), StartProcess)] == [3]


def test_a_node_that_is_cut_off_is_not_blamed_before_it_counts_as_silent(cluster: FakeCluster) -> None:
    """The stall is seen at once, by those on the other side. The heartbeats say whether it is for good."""
    cluster.feed(cluster.fault(0, FaultKind.STALL))
    asked_s = cluster.now
    probe = cluster.machine.state.clocks.probe
    waits = tuple(clock(rank, Activity.COLLECTIVE, **STANDS) for rank in (0, 1))  # type: ignore[arg-type]
    assert cluster.feed(ProgressReported("node0", probe, cluster.now, waits)) == []
    due_s = cluster.machine.next_deadline()
    assert due_s is not None
    heartbeat = cluster.policy.heartbeat
    assert due_s > asked_s + heartbeat.interval_s * heartbeat.missed
    cluster.now += heartbeat.interval_s * heartbeat.missed
    answered = tuple(clock(rank, Activity.COLLECTIVE, **RUNS) for rank in (2, 3))  # type: ignore[arg-type]
    assert only(cluster.feed(ProgressReported("node1", probe, cluster.now, answered)), StartProcess) == []


def test_a_new_controller_gives_nodes_the_whole_time_to_read_their_clocks(cluster: FakeCluster) -> None:
    """None of them could answer while no controller was there, and an answer that is lost is sent again later."""
    cluster.feed(cluster.fault(0, FaultKind.STALL))
    asked_s, due_s = cluster.now, cluster.machine.next_deadline()
    assert due_s is not None
    allowed_s = due_s - asked_s
    cluster.now = due_s - 0.1
    assert len(only(cluster.feed(ControllerStarted(term=2)), ProbeProgress)) == 2
    again_s = cluster.machine.next_deadline()
    assert again_s is not None
    assert again_s - cluster.now >= allowed_s


def test_a_rejoin_that_takes_too_long_is_begun_anew_and_blames_no_newcomer_for_its_step(cluster: FakeCluster) -> None:
    """All are recovering. Who hangs there does not answer the next quiesce, and is blamed for that."""
    cluster.feed(cluster.exited(1))
    for rank in (0, 2, 3):
        cluster.feed(cluster.quiesced(rank, 5, peers=[1]))
    cluster.feed(cluster.joined(1))
    cluster.expect(Phase.REJOINING)
    cluster.now += 61
    (probe, _) = only(cluster.feed(DeadlinePassed()), ProbeProgress)

    def clock(rank: int) -> RankProgress:
        step, incarnation = (0, 2) if rank == 1 else (5, 1)
        return RankProgress(rank, incarnation, 2, step, Activity.RECOVERING, 0, 60.0, 60.0, 0.1)

    cluster.feed(ProgressReported("node0", probe.probe, cluster.now, (clock(0), clock(1))))
    bodies = cluster.feed(ProgressReported("node1", probe.probe, cluster.now, (clock(2), clock(3))))
    assert only(bodies, StartProcess) == []
    assert [body.rank for body in only(bodies, Quiesce)] == [0, 1, 2, 3]


def test_ranks_that_finish_while_a_stall_is_looked_into_are_released(cluster: FakeCluster) -> None:
    """The stall comes to nothing, and nobody reports its end twice."""
    cluster.feed(cluster.fault(0, FaultKind.STALL))
    cluster.feed(*(RankFinished(rank, 1, 1, 9) for rank in range(4)))
    bodies = probed(cluster, *(clock(rank, Activity.FINISHED, **RUNS) for rank in range(4)))  # type: ignore[arg-type]
    assert [body.rank for body in only(bodies, Release)] == [0, 1, 2, 3]
    assert cluster.machine.phase is Phase.FINISHING
    assert cluster.machine.incidents[0].outcome is Outcome.DISMISSED


def test_first_steps_that_are_committed_while_a_stall_is_looked_into_end_the_incident(cluster: FakeCluster) -> None:
    """Each rank reports its first step once."""
    cluster.feed(cluster.exited(1))
    for rank in (0, 2, 3):
        cluster.feed(cluster.quiesced(rank, 5, peers=[1]))
    cluster.feed(cluster.joined(1))
    cluster.feed(*(cluster.ready(rank, 5) for rank in range(4)))
    cluster.expect(Phase.RESUMING)
    cluster.feed(cluster.fault(0, FaultKind.STALL))
    cluster.feed(*(cluster.committed(rank, 6) for rank in range(4)))
    cluster.expect(Phase.SUSPECTING)
    lives = {rank: cluster.holder(rank).incarnation for rank in range(4)}
    ahead = [clock(rank, Activity.COLLECTIVE, **RUNS, life=lives[rank]) for rank in range(3)]  # type: ignore[arg-type]
    last = clock(3, Activity.COMPUTING, step=9, collectives=19, age_s=0.05)
    probed(cluster, *ahead, last)
    cluster.expect(Phase.RUNNING)
    assert [incident.outcome for incident in cluster.machine.incidents] == [Outcome.RESUMED]


def test_who_hangs_in_its_last_step_is_found_although_all_others_have_finished(cluster: FakeCluster) -> None:
    """The first step since the resume is the last: nobody waits in a collective, and there is no other deadline."""
    cluster.feed(cluster.exited(1))
    for rank in (0, 2, 3):
        cluster.feed(cluster.quiesced(rank, 5, peers=[1]))
    cluster.feed(cluster.joined(1), *(cluster.ready(rank, 5) for rank in range(4)))
    cluster.feed(*(RankFinished(rank, cluster.machine.generation, 1, 6) for rank in (0, 2, 3)))
    cluster.expect(Phase.RESUMING)
    cluster.now += 301
    cluster.feed(DeadlinePassed())
    done = {"step": 6, "collectives": 20, "age_s": 300.0}
    bodies = probed(
        cluster,
        *(clock(rank, Activity.FINISHED, **done) for rank in (0, 2, 3)),  # type: ignore[arg-type]
        clock(1, Activity.COMPUTING, step=5, collectives=20, age_s=300.0, life=2),
    )
    assert [order.rank for order in only(bodies, Quiesce)] == [0, 1, 2, 3]


def broken_collectives() -> FakeCluster:
    """Every rank's collective has failed, and no rung of the ladder helps without a rank at fault."""
    ladder = (RungPolicy(Rung.RECOVER), RungPolicy(Rung.STOP))
    cluster = FakeCluster(job(spares=1), Policy(ladder=ladder)).start()
    cluster.feed(*(cluster.fault(rank, FaultKind.COMMUNICATION) for rank in range(4)))
    return cluster


def test_a_job_does_not_stop_before_every_node_was_asked() -> None:
    """The node that broke the collectives may be lost, and the agents' own connections know that a little later."""
    cluster = broken_collectives()
    asked = only(cluster.overdue(), ProbeProgress)
    assert len(asked) == 2
    cluster.expect(Phase.SUSPECTING)
    cluster.feed(NodeLost("node1", "its agent is gone", cluster.now))
    cluster.expect(Phase.QUIESCING)
    assert cluster.machine.incidents[-1].replaced == (2, 3)


def test_a_node_that_does_not_answer_is_at_fault_for_the_broken_collectives() -> None:
    """Its silence is all that there is to be seen."""
    cluster = broken_collectives()
    cluster.overdue()
    waits = (clock(rank, Activity.RECOVERING, **RUNS) for rank in (0, 1))  # type: ignore[arg-type]
    cluster.feed(ProgressReported("node0", cluster.machine.state.clocks.probe, cluster.now, tuple(waits)))
    cluster.overdue()
    assert cluster.machine.incidents[-1].replaced == (2, 3)


def test_a_job_stops_when_all_nodes_have_answered_and_none_is_at_fault() -> None:
    """It is asked once."""
    cluster = broken_collectives()
    cluster.overdue()
    probed(cluster, *(clock(rank, Activity.RECOVERING, **RUNS) for rank in range(4)))  # type: ignore[arg-type]
    assert "no rank is known to be at fault" in cluster.machine.incidents[-1].decisions[-1].reason
