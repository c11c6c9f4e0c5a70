"""Sub-healthy nodes in MindCluster (`subHealthyStrategy`: ignore, graceExit, forceExit, hotSwitch), and here."""

from midstep.controller.recovery.state import Phase
from midstep.controller.recovery.world import NodeState
from midstep.protocol.messages import Quiesce, Rejoin
from midstep.protocol.types import Assertion, FaultKind, FaultLevel, Rung
from midstep.testing.answering_cluster import AnsweringCluster


def not_well(job: AnsweringCluster, node: str = "node1") -> None:
    """A detector says that a node is sub-healthy."""
    level = FaultLevel.SUB_HEALTH
    job.suffer(FaultKind.NODE, node=node, level=level, assertion=Assertion.OCCUR, fault_id="slow fan")


def test_ignore_leaves_a_node_that_is_not_well_in_use() -> None:
    """It is noted, and nobody is interrupted."""
    job = AnsweringCluster("sub_health: ignore").start()
    before, sent = job.pids_now(), len(job.sent)

    not_well(job)

    assert job.pids_now() == before
    assert job.commands(Quiesce, sent) == []
    assert job.phase is Phase.RUNNING


def test_hot_switch_starts_the_new_processes_before_anybody_stops() -> None:
    """As there a backup is brought up first; training goes on until it is ready."""
    job = AnsweringCluster("sub_health: drain").start()
    job.mute = lambda body: isinstance(body, Quiesce)
    before = job.pids_now()

    not_well(job)

    assert {rank: process.node for rank, process in job.newcomers.items()} == {2: "node2", 3: "node2"}
    assert job.pids_now() == before


def test_hot_switch_loses_no_step_and_keeps_all_others() -> None:
    """There training is paused and started again. Here all stop between two steps, and none is repeated."""
    job = AnsweringCluster("sub_health: drain").start()
    before, sent = job.pids_now(), len(job.sent)

    not_well(job)

    assert job.phase is Phase.RUNNING
    assert job.replaced_since(before) == {2, 3}
    assert {process.node for process in job.processes.values()} == {"node0", "node2"}
    (incident,) = job.incidents
    assert (incident.rung, incident.steps_lost) == (Rung.RECOVER, 0)
    assert {quiesce.after_step is not None for quiesce in job.commands(Quiesce, sent)} >= {True}
    assert {rejoin.part.target_step for rejoin in job.commands(Rejoin, sent)} == {incident.resumed_step}


def test_hot_switch_without_a_spare_waits_for_one() -> None:
    """The node works, so nothing is forced: its ranks move when a spare comes."""
    job = AnsweringCluster("sub_health: drain", spares=0).start()
    before = job.pids_now()
    not_well(job)
    assert job.pids_now() == before

    job.node_joins("node7")
    job.settle()

    assert job.replaced_since(before) == {2, 3}
    assert job.processes[2].node == "node7"


def test_grace_exit_needs_no_exit() -> None:
    """There the job saves a checkpoint, exits and is rescheduled. A drained node costs no restart of the job."""
    job = AnsweringCluster("sub_health: drain").start()

    not_well(job, "node0")

    assert job.machine.state.accounts.restarts == 0
    assert job.finish is None
    assert job.machine.state.world.nodes["node0"].state is not NodeState.ACTIVE


def test_force_exit_leaves_the_node_at_once() -> None:
    """As after a fault of its devices: the interrupted step is repeated, nobody on other nodes is ended."""
    job = AnsweringCluster("sub_health: leave_now").start()
    before = job.pids_now()

    not_well(job)

    assert job.rungs == [Rung.RECOVER]
    assert job.replaced_since(before) == {2, 3}


def test_node_that_is_well_again_can_be_used_again() -> None:
    """Later jobs of MindCluster are not placed there; here its detector's word that it is over is enough."""
    job = AnsweringCluster("sub_health: drain").start()
    not_well(job)
    assert job.processes[2].node == "node2"

    level = FaultLevel.SUB_HEALTH
    job.suffer(FaultKind.NODE, node="node1", level=level, assertion=Assertion.RECOVER, fault_id="slow fan")

    assert job.machine.state.world.nodes["node1"].state is NodeState.SPARE


def test_fault_in_a_hot_switch_is_an_incident_like_any_other() -> None:
    """There hot switching and a fault at the same time end in rescheduling; here the fault comes first."""
    job = AnsweringCluster("sub_health: drain").start()
    before = job.pids_now()
    job.mute = lambda body: isinstance(body, Quiesce) and body.after_step is not None
    not_well(job)
    job.mute = lambda body: False

    job.kill(0)
    while job.phase is not Phase.RUNNING:
        job.wait()

    assert 0 in job.replaced_since(before)
    assert job.finish is None
    assert all(incident.steps_lost == 0 for incident in job.incidents)


def test_controller_that_dies_in_a_hot_switch_finishes_it() -> None:
    """What was planned is in the journal."""
    job = AnsweringCluster("sub_health: drain").start()
    before = job.pids_now()
    job.mute = lambda body: isinstance(body, Quiesce)
    not_well(job)
    job.mute = lambda body: False

    job.restart_controller()
    job.settle()
    for _ in range(20):
        if job.replaced_since(before) and job.phase is Phase.RUNNING:
            break
        job.wait()

    assert job.replaced_since(before) == {2, 3}
    assert job.phase is Phase.RUNNING
