"""Where MindCluster gives up, or its users complain, and midstep goes on."""

from itertools import permutations

import pytest

from midstep.controller.recovery.state import Phase
from midstep.protocol.incidents import Outcome
from midstep.protocol.messages import NodeLost, Quiesce, Rejoin, Resume, StartProcess
from midstep.protocol.types import Activity, FaultKind, FaultLevel, Rung
from midstep.testing.answering_cluster import AnsweringCluster

TWO_ATTEMPTS = "ladder: [{rung: recover_in_place, attempts: 2}, {rung: recover}, {rung: stop}]"


@pytest.mark.parametrize("held", [Quiesce, Rejoin, Resume])
@pytest.mark.parametrize("second", [0, 1, 3])
def test_fault_in_a_recovery_is_part_of_the_same_incident(held: type, second: int) -> None:
    """There a fault before the first new step makes the last repair fail, for good: no nested recovery."""
    job = AnsweringCluster().start()
    job.late = lambda body: isinstance(body, held)
    job.kill(1)

    job.kill(second)
    job.arrive()
    job.wait_until(Phase.RUNNING)

    (incident,) = job.incidents
    assert incident.outcome is Outcome.RESUMED
    assert incident.steps_lost == 0


def test_faults_that_appear_between_report_and_decision_are_taken_in() -> None:
    """b59348d9: faults between the first report and the global fault were lost."""
    job = AnsweringCluster().start()
    before = job.pids_now()
    job.report(FaultKind.COMMUNICATION, 0)

    job.report(FaultKind.EXCEPTION, 1)
    job.report(FaultKind.EXCEPTION, 3)
    job.settle()

    assert job.replaced_since(before) == {1, 3}
    assert len(job.incidents) == 1


def test_duplicate_messages_change_nothing() -> None:
    """41819efc, 07efef4e: the global fault was processed twice, messages came twice."""
    job = AnsweringCluster().start()
    process = job.vanish(1)
    job.feed(job.end_of(process))
    for event, _ in job.journal[-1:] * 3:
        job.feed(event)
    job.settle()
    generation, pids = job.machine.generation, job.pids_now()

    for event, _ in list(job.journal[-12:]):
        job.feed(event)
    job.settle()

    assert (job.machine.generation, job.pids_now()) == (generation, pids)
    assert job.phase is Phase.RUNNING


def test_two_nodes_that_fail_in_succession_do_not_hang() -> None:
    """fddc49dd: the second made the recovery in place wait for ever."""
    job = AnsweringCluster(nodes=4, spares=2).start()
    job.mute = lambda body: isinstance(body, Quiesce)
    job.lose_node("node1")
    job.mute = lambda body: False

    job.lose_node("node3")
    job.wait_until(Phase.RUNNING)

    assert len(job.incidents) == 1
    assert {process.node for process in job.processes.values()} == {"node0", "node2", "node4", "node5"}


def test_several_nodes_at_once_move_to_several_spares() -> None:
    """Each rank of them finds a place, all others keep their process."""
    job = AnsweringCluster(nodes=4, spares=2).start()
    before = job.pids_now()
    for name in ("node1", "node3"):
        job.drop_node(name)

    job.feed(NodeLost("node1", "rack without power", job.now), NodeLost("node3", "rack without power", job.now))
    job.settle()

    assert job.phase is Phase.RUNNING
    assert job.replaced_since(before) == {2, 3, 6, 7}


@pytest.mark.parametrize("rank", range(4))
def test_rank_0_needs_no_rescheduling_of_the_job(rank: int) -> None:
    """There a fault of the pod with rank 0 is job-level; here it makes no difference which rank it is."""
    job = AnsweringCluster().start()
    before = job.pids_now()

    job.device_fault(rank, FaultLevel.SEPARATE_NPU)

    assert job.rungs == [Rung.RECOVER]
    assert job.replaced_since(before) == {rank, rank ^ 1}
    assert job.machine.state.accounts.restarts == 0


def test_in_place_and_moved_ranks_are_mixed_in_one_incident() -> None:
    """A software fault on one node, a broken device on another: one recovery, and each rank where it belongs."""
    job = AnsweringCluster().start()
    before = job.pids_now()

    job.report(FaultKind.EXCEPTION, 0)
    job.report(FaultKind.DEVICE, 2, level=FaultLevel.SEPARATE_NPU)
    job.settle()

    assert job.replaced_since(before) == {0, 2, 3}
    assert {rank: process.node for rank, process in job.processes.items()} == {
        0: "node0", 1: "node0", 2: "node2", 3: "node2",
    }  # fmt: skip
    assert len(job.incidents) == 1


def test_order_of_reports_does_not_change_who_goes_where() -> None:
    """Three faults in any order: the same places, the same processes kept."""
    results = set()
    for order in permutations([(FaultKind.EXCEPTION, 0), (FaultKind.DEVICE, 2), (FaultKind.COMMUNICATION, 1)]):
        job = AnsweringCluster().start()
        before = job.pids_now()
        for kind, rank in order:
            level = FaultLevel.SEPARATE_NPU if kind is FaultKind.DEVICE else FaultLevel.SOFTWARE
            job.report(kind, rank, level=level)
        job.settle()
        places = tuple(job.processes[rank].node for rank in range(4))
        results.add((places, frozenset(job.replaced_since(before)), len(job.incidents), job.phase))

    assert results == {(("node0", "node0", "node2", "node2"), frozenset({0, 2, 3}), 1, Phase.RUNNING)}


def test_ladder_remembers_what_failed_in_this_incident_and_forgets_it_after() -> None:
    """A rung that failed is not taken again before the job has resumed, and is taken first in the next incident."""
    job = AnsweringCluster(TWO_ATTEMPTS, spares=2).start()
    job.never_joins = {1}
    job.kill(1)
    while job.rungs[-1] is Rung.RECOVER_IN_PLACE:
        job.wait()
    job.never_joins.clear()
    job.wait_until(Phase.RUNNING)
    first = list(dict.fromkeys(job.rungs))

    job.kill(1)

    assert first == [Rung.RECOVER_IN_PLACE, Rung.RECOVER]
    assert job.rungs == [Rung.RECOVER_IN_PLACE]


def test_fault_while_links_are_set_up_does_not_fail_the_recovery() -> None:
    """There it does, for good. Here the links are tried again under a new generation, with who is left."""
    job = AnsweringCluster().start()
    job.mute = lambda body: isinstance(body, Rejoin) and body.generation == 2
    job.kill(1)
    job.expect(Phase.REJOINING)

    job.kill(2)

    assert job.phase is Phase.RUNNING
    assert len(job.incidents) == 1


def test_fault_before_the_first_step_is_recovered() -> None:
    """There `step == 0` means that there is no fast recovery at all."""
    job = AnsweringCluster()
    for number in range(3):
        job.node_joins(f"node{number}")
    job.mute = lambda body: isinstance(body, Resume)
    job.settle()
    job.mute = lambda body: False
    before = job.pids_now()

    job.kill(1)

    assert job.replaced_since(before) == {1}
    assert job.rungs == [Rung.RECOVER_IN_PLACE]
    assert job.phase is Phase.RUNNING


def test_hung_process_is_found_though_its_heart_beats() -> None:
    """There the heart of a hung process beats in a C++ thread. Here the training thread's clock tells."""
    job = AnsweringCluster().start()
    before = job.pids_now()
    job.processes[3].suspended = True

    job.suffer(FaultKind.STALL, 0)

    assert job.replaced_since(before) == {3}
    assert "rank 3 holds up the others" in job.incidents[-1].reports[-1].detail


def test_flash_interruption_is_dismissed() -> None:
    """A rank that was late and goes on is no fault: nobody is stopped, nothing is charged."""
    job = AnsweringCluster().start()
    before, generation = job.pids_now(), job.machine.generation
    job.clock_changes = {"activity": Activity.COMPUTING, "activity_age_s": 0.01}

    job.suffer(FaultKind.STALL, 0)

    assert job.incidents[-1].outcome is Outcome.DISMISSED
    assert (job.pids_now(), job.machine.generation, job.phase) == (before, generation, Phase.RUNNING)
    assert job.machine.state.spent == ()


def test_node_that_says_nothing_more_is_found_without_kubernetes() -> None:
    """233581ff: a stopped kubelet is not supported there. Here a node is lost when its agent is not heard."""
    job = AnsweringCluster().start()

    job.lose_node("node1")

    assert job.rungs == [Rung.RECOVER]
    assert job.phase is Phase.RUNNING


def test_stop_in_a_pause_does_not_hang() -> None:
    """a6257622: stopping while paused hung. Here a stop ends whatever is under way, within its deadlines."""
    job = AnsweringCluster().start()
    job.mute = lambda body: isinstance(body, Quiesce | StartProcess)
    job.kill(1)

    job.stop()
    job.wait_until(Phase.ENDED)

    assert job.outcome.exit_code == 130


def test_no_process_says_anything_any_more_and_the_incident_still_ends() -> None:
    """There a timeout at any wait is an exit. Here each one climbs a rung, and the last one is the exit."""
    job = AnsweringCluster(creates_nodes=True).start()
    job.mute = lambda body: True

    job.report(FaultKind.EXCEPTION, 1)
    job.wait_until(Phase.ENDED)

    assert job.rungs[-1] is Rung.STOP
    assert job.outcome.exit_code == 1


def test_success_is_reported_when_all_have_made_a_step() -> None:
    """As there; what is different is that a fault before it is dealt with, not an exit."""
    job = AnsweringCluster().start()
    job.mute = lambda body: isinstance(body, Resume) and (body.rank, body.generation) == (3, 2)
    job.kill(1)

    assert job.phase is Phase.RESUMING
    assert job.incidents[-1].resumed_s is None
    job.processes[3].suspended = True
    job.wait_until(Phase.RUNNING)

    assert job.incidents[-1].outcome is Outcome.RESUMED
    assert len(job.incidents) == 1
