"""Process-level rescheduling as MindCluster describes it, step by step, and the order in which its policies roll back.

ClusterD and MindIO Controller are the machine here, MindIO Processor is the processor of a rank, the management process
of a server is its agent.
"""

from collections.abc import Callable

import pytest

from midstep.controller.recovery.state import Phase
from midstep.controller.recovery.world import NodeState
from midstep.protocol.messages import (
    CreateNode,
    EndJob,
    Quiesce,
    RankQuiesced,
    Rejoin,
    Resume,
    SaveCheckpoint,
    StartProcess,
    StopProcess,
)
from midstep.protocol.types import FaultKind, FaultLevel, RestoreSource, Rung
from midstep.testing.answering_cluster import AnsweringCluster
from midstep.testing.fake_cluster import SHARD

TWO_ATTEMPTS = "ladder: [{rung: recover_in_place, attempts: 2}, {rung: recover}, {rung: stop}]"


def hardware(job: AnsweringCluster) -> None:
    """A detector on the server reports a device that has to be isolated."""
    job.device_fault(2, FaultLevel.SEPARATE_NPU)


def software(job: AnsweringCluster) -> None:
    """The processor in the container reports an exception."""
    job.suffer(FaultKind.EXCEPTION, 2)


# --- the steps --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("happens", [hardware, software])
def test_step_1_faults_of_both_kinds_come_to_one_place(happens: Callable[[AnsweringCluster], None]) -> None:
    """Hardware by its detector, software by the process itself: both are reports of an incident with one decision."""
    job = AnsweringCluster().start()

    happens(job)

    (incident,) = job.incidents
    assert len(incident.reports) == 1
    assert len(incident.decisions) == 1
    assert job.phase is Phase.RUNNING


def test_step_1_faults_that_belong_together_are_decided_on_as_one() -> None:
    """The exception and the device fault behind it: the level of the device decides."""
    job = AnsweringCluster().start()

    job.report(FaultKind.EXCEPTION, 2)
    job.report(FaultKind.DEVICE, 3, level=FaultLevel.RESTART_NPU)
    job.settle()

    assert len(job.incidents) == 1
    assert job.rungs[-1] is Rung.RECOVER


def test_step_2_the_container_on_the_faulty_server_is_ended_and_started_on_the_standby_server() -> None:
    """All ranks of the server move; the server is isolated, other servers keep their processes."""
    job = AnsweringCluster().start()
    before = job.pids_now()

    hardware(job)

    assert {stop.rank for stop in job.commands(StopProcess)} == {2, 3}
    assert {rank: process.node for rank, process in job.processes.items()} == {
        0: "node0", 1: "node0", 2: "node2", 3: "node2",
    }  # fmt: skip
    assert job.machine.state.world.nodes["node1"].state is NodeState.ISOLATED
    assert job.replaced_since(before) == {2, 3}


def test_step_3_stop_training_global_fault_and_policy_are_one_decision() -> None:
    """Nobody is told to stop before it is decided what for, and the decision is there to be read at once."""
    job = AnsweringCluster().start()
    sent = len(job.sent)

    job.report(FaultKind.EXCEPTION, 2)

    assert job.rungs == [Rung.RECOVER_IN_PLACE]
    assert {quiesce.rank for quiesce in job.commands(Quiesce, sent)} == {0, 1, 3}
    assert {start.rank for start in job.commands(StartProcess, sent)} == {2}


def test_step_4_processors_stop_clean_and_wait_for_the_new_process() -> None:
    """They say where they stand, and hear nothing more until the newcomer is there."""
    job = AnsweringCluster().start()
    job.never_joins.add(2)
    sent = len(job.sent)

    software(job)

    quiesced = [event for event, _ in job.journal if isinstance(event, RankQuiesced)]
    assert {event.rank for event in quiesced} == {0, 1, 3}
    assert job.commands(Rejoin, sent) == job.commands(Resume, sent) == []


def test_step_5_after_the_new_process_has_come_all_are_told_to_go_on() -> None:
    """The newcomer as well as those that waited, each once."""
    job = AnsweringCluster().start()
    sent = len(job.sent)

    hardware(job)

    assert sorted(rejoin.rank for rejoin in job.commands(Rejoin, sent)) == [0, 1, 2, 3]
    order = [type(body) for body in job.sent[sent:] if isinstance(body, StartProcess | Rejoin)]
    assert order == [StartProcess] * 2 + [Rejoin] * 4


def test_step_6_each_process_sets_up_its_links_anew() -> None:
    """In one generation, at one meeting place, nobody with the groups of before."""
    job = AnsweringCluster().start()
    sent = len(job.sent)

    hardware(job)

    rejoins = job.commands(Rejoin, sent)
    assert {rejoin.generation for rejoin in rejoins} == {2}
    assert len({rejoin.store for rejoin in rejoins}) == 1
    assert not any(rejoin.connected for rejoin in rejoins)


def test_step_7_the_state_comes_from_healthy_processes_and_the_step_is_repeated() -> None:
    """Only the newcomers receive; all resume at one step, and nothing that was committed is lost."""
    job = AnsweringCluster().start()
    job.train(4)
    committed, sent = job.processes[0].committed, len(job.sent)

    hardware(job)

    transfers = [transfer for rejoin in job.commands(Rejoin, sent) for transfer in rejoin.part.transfers]
    assert {transfer.destination for transfer in transfers} == {2, 3}
    assert {transfer.source for transfer in transfers} <= {0, 1}
    assert {resume.step for resume in job.commands(Resume, sent)} == {committed}
    assert job.incidents[-1].restore is RestoreSource.REPLICA
    assert job.incidents[-1].steps_lost == 0


def test_without_a_replica_parameters_are_restored_from_the_checkpoint() -> None:
    """All processes keep running where they can; here nobody is left who could hand anything over."""
    job = AnsweringCluster(spares=2).start()
    job.checkpoints = (4,)

    job.drop_node("node0")
    job.lose_node("node1")
    job.lose_node("node0")

    assert job.incidents[-1].restore is RestoreSource.CHECKPOINT
    assert job.incidents[-1].resumed_step == 4
    assert job.phase is Phase.RUNNING


def test_local_loading_mode_does_without_replicas() -> None:
    """A policy may restore from checkpoints alone: then the live copies are left alone."""
    job = AnsweringCluster("restore: [checkpoint]").start()
    job.checkpoints = (4,)

    software(job)

    assert job.incidents[-1].restore is RestoreSource.CHECKPOINT
    assert job.incidents[-1].resumed_step == 4


# --- who may be restarted in place ------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [FaultLevel.RESTART_REQUEST, FaultLevel.RESTART_BUSINESS])
def test_recover_in_place_fits_device_faults_that_a_new_process_mends(level: FaultLevel) -> None:
    """RestartRequest and RestartBusiness: the container stays."""
    job = AnsweringCluster().start()
    before = job.pids_now()

    job.device_fault(2, level)

    assert job.rungs == [Rung.RECOVER_IN_PLACE]
    assert job.replaced_since(before) == {2}


@pytest.mark.parametrize("level", [FaultLevel.FREE_RESTART_NPU, FaultLevel.RESTART_NPU, FaultLevel.SEPARATE_NPU])
def test_recover_in_place_does_not_fit_device_faults_beyond_that(level: FaultLevel) -> None:
    """The node is left, and the reason says of what level the fault is."""
    job = AnsweringCluster().start()

    job.device_fault(2, level)

    assert job.rungs == [Rung.RECOVER]
    assert f"has a fault of level {level}" in job.skipped(Rung.RECOVER_IN_PLACE)


def test_recover_in_place_fits_software_faults_on_more_than_one_server() -> None:
    """In MindCluster software faults in several pods are not restarted in place, but moved."""
    job = AnsweringCluster().start()
    before = job.pids_now()

    job.report(FaultKind.EXCEPTION, 0)
    job.report(FaultKind.EXCEPTION, 3)
    job.settle()

    assert set(job.rungs) == {Rung.RECOVER_IN_PLACE}
    assert job.replaced_since(before) == {0, 3}


# --- the roll-back ----------------------------------------------------------------------------------------------------


def test_policies_roll_back_in_sequence() -> None:
    """recover-in-place, recover, pod, job, exit: each that fails hands over to the next, and none is left out."""
    job = AnsweringCluster(creates_nodes=True).start()
    job.checkpoints = (5,)
    job.never_joins = {0, 1, 2, 3}

    job.kill(1)
    job.wait_until(Phase.ENDED)

    assert list(dict.fromkeys(job.rungs)) == [
        Rung.RECOVER_IN_PLACE, Rung.RECOVER, Rung.RESCHEDULE_POD, Rung.RESCHEDULE_JOB, Rung.STOP,
    ]  # fmt: skip
    assert len(job.incidents) == 1


def test_failed_recovery_in_place_hands_over_to_recover() -> None:
    """In MindCluster it goes to dump or exit: in-place travels as `recover`, which is struck off when it failed."""
    job = AnsweringCluster(TWO_ATTEMPTS, spares=2).start()
    job.never_joins = {1}
    job.kill(1)
    while job.rungs[-1] is Rung.RECOVER_IN_PLACE:
        job.wait()
    job.never_joins.clear()
    job.wait_until(Phase.RUNNING)

    assert job.rungs[-1] is Rung.RECOVER
    assert "taken 2 times in this incident" in next(
        skipped.reason
        for decision in job.incidents[-1].decisions
        if decision.rung is Rung.RECOVER
        for skipped in decision.skipped
        if skipped.rung is Rung.RECOVER_IN_PLACE
    )


def test_retry_that_fails_hands_over_to_a_recovery_that_replaces() -> None:
    """What looked like a link is a process that does not answer: the next rung replaces it."""
    job = AnsweringCluster().start()
    before = job.pids_now()
    job.suffer(FaultKind.COMMUNICATION, 0)
    job.deaf.add(3)

    job.wait()
    assert job.rungs == [Rung.RETRY_STEP]
    job.wait()

    assert job.rungs == [Rung.RETRY_STEP, Rung.RECOVER_IN_PLACE]
    assert job.replaced_since(before) == {3}
    assert job.phase is Phase.RUNNING


def test_pod_level_that_fails_hands_over_to_job_level() -> None:
    """MindCluster goes on after twelve scheduling sessions; here after `deadlines.nodes_s`, or at the platform's no."""
    ladder = "ladder: [{rung: reschedule_pod}, {rung: reschedule_job}, {rung: stop}]"
    job = AnsweringCluster(ladder, spares=0, creates_nodes=True).start()
    job.checkpoints = (5,)
    job.mute = lambda body: isinstance(body, CreateNode) and body.node == "node2"

    job.lose_node("node1")
    job.wait_until(Phase.RUNNING)

    assert job.rungs == [Rung.RESCHEDULE_POD, Rung.RESCHEDULE_JOB]


def test_exit_writes_an_emergency_checkpoint_where_one_is_possible() -> None:
    """`dump`: the survivors hold everything, so the last committed step is saved before the job ends."""
    job = AnsweringCluster("ladder: [{rung: stop}]").start()

    software(job)

    assert {save.rank for save in job.commands(SaveCheckpoint)} == {0, 1, 3}
    assert "an emergency checkpoint of step 6 is at" in job.outcome.reason
    assert job.commands(EndJob)


def test_exit_without_a_complete_copy_says_that_there_is_no_checkpoint() -> None:
    """It does not claim what it could not write."""
    job = AnsweringCluster("ladder: [{rung: stop}]").start()
    job.deaf = {0, 1, 3}

    job.suffer(FaultKind.EXCEPTION, 2)
    job.wait_until(Phase.ENDED)

    assert "no emergency checkpoint: nobody holds clean state that can be trusted" in job.outcome.reason


# --- retry ------------------------------------------------------------------------------------------------------------


def struck(job: AnsweringCluster, rank: int) -> None:
    """Device memory of a rank has an error: its process lives, and can mend what it lost."""
    job.processes[rank].standing.mark_corrupted([SHARD])
    job.report(FaultKind.MEMORY, rank, mendable=True, level=FaultLevel.RESTART_BUSINESS)


def test_retry_keeps_the_process_whose_memory_was_struck() -> None:
    """Online recovery: everybody stays alive, the struck rank gets its state from a replica, the step is repeated."""
    job = AnsweringCluster().start()
    before, sent = job.pids_now(), len(job.sent)

    struck(job, 2)
    job.settle()

    assert job.rungs == [Rung.RETRY_STEP]
    assert job.replaced_since(before) == set()
    transfers = [transfer for rejoin in job.commands(Rejoin, sent) for transfer in rejoin.part.transfers]
    assert {transfer.destination for transfer in transfers} == {2}
    assert job.incidents[-1].steps_lost == 0
    assert job.phase is Phase.RUNNING


def test_retry_that_does_not_mend_hands_over_to_recover_in_place() -> None:
    """The same memory again in the same incident: now the process is replaced."""
    job = AnsweringCluster().start()
    before = job.pids_now()
    job.mute = lambda body: isinstance(body, Rejoin) and body.generation == 2
    struck(job, 2)
    job.settle()
    job.mute = lambda body: False

    struck(job, 2)
    job.settle()

    assert job.rungs[0] is Rung.RETRY_STEP
    assert job.rungs[-1] is Rung.RECOVER_IN_PLACE
    assert job.replaced_since(before) == {2}
    assert job.phase is Phase.RUNNING


def test_any_fault_that_needs_a_new_process_turns_the_retry_into_a_recovery() -> None:
    """One rank struck, another dead: one attempt, in which each gets what it needs."""
    job = AnsweringCluster().start()
    before = job.pids_now()
    struck(job, 2)
    process = job.vanish(0)

    job.feed(job.end_of(process))
    job.settle()

    assert 0 in job.replaced_since(before)
    assert job.replaced_since(before) <= {0, 2}
    assert len(job.incidents) == 1
    assert job.incidents[-1].steps_lost == 0
    assert job.phase is Phase.RUNNING
