"""These things are known to go wrong in DLRover Unified and must not here: each test asserts the opposite."""

import pytest

from midstep.controller.recovery.state import Phase
from midstep.protocol.messages import Quiesce, StartProcess
from midstep.protocol.types import FaultKind, FaultLevel, Rung
from midstep.testing.answering_cluster import AnsweringCluster


@pytest.mark.parametrize("rank", [0, 1])
def test_second_crash_in_the_same_role_is_handled(rank: int) -> None:
    """There the first failover is never marked as over, so the second crash is skipped and the job hangs."""
    job = AnsweringCluster().start()

    job.kill(1)
    job.kill(rank)
    job.kill(rank)

    assert [incident.rung for incident in job.incidents] == [Rung.RECOVER_IN_PLACE] * 3
    assert job.phase is Phase.RUNNING
    job.complete()
    assert job.outcome.exit_code == 0


def test_controller_killed_in_healthy_running_does_not_restart_the_job() -> None:
    """There a condition is the wrong way round: a healthy job is restarted as a whole, and hangs in READY."""
    job = AnsweringCluster().start()
    before, generation, sent = job.pids_now(), job.machine.generation, len(job.sent)

    job.restart_controller()
    job.settle()

    assert job.commands(Quiesce, sent) == job.commands(StartProcess, sent) == []
    assert (job.pids_now(), job.machine.generation, job.phase) == (before, generation, Phase.RUNNING)
    assert job.incidents == ()


def test_root_cause_matters() -> None:
    """There nobody is ever responsible. Here those who only felt another's fault keep their processes and budgets."""
    job = AnsweringCluster().start()
    before = job.pids_now()
    for victim in (0, 2, 3):
        job.report(FaultKind.COMMUNICATION, victim)
    assert job.phase is Phase.SUSPECTING

    job.kill(1)

    assert job.replaced_since(before) == {1}
    (incident,) = job.incidents
    assert len(incident.reports) == 4
    (spent,) = job.machine.state.spent
    assert (spent.ranks, spent.nodes) == ((1,), ("node0",))


def test_failure_responsibility_is_nobodys_where_nobody_is_at_fault() -> None:
    """A network that hiccuped costs no rank and no node anything."""
    job = AnsweringCluster().start()
    before = job.pids_now()

    job.suffer(FaultKind.COMMUNICATION, 3)
    job.wait()

    assert job.rungs == [Rung.RETRY_STEP]
    assert job.replaced_since(before) == set()
    (spent,) = job.machine.state.spent
    assert (spent.ranks, spent.nodes) == ((), ())


def test_node_limit_reached_really_stops() -> None:
    """There the stop is asked for, and the failover goes on: counters are reset, workers restarted."""
    policy = "ladder: [{rung: recover, budget: {per_job: 1, window_s: 0}}, {rung: stop}]"
    job = AnsweringCluster(policy, spares=3).start()
    job.device_fault(0, FaultLevel.SEPARATE_NPU)
    job.expect(Phase.RUNNING)
    sent = len(job.sent)

    job.device_fault(2, FaultLevel.SEPARATE_NPU)

    assert job.phase is Phase.ENDED
    assert job.outcome.exit_code == 1
    assert job.commands(StartProcess, sent) == []


def test_restarted_controller_keeps_counters_that_changed_since_the_last_stage() -> None:
    """There failure counts and removed nodes are saved at a change of stage only, and lost with the master."""
    policy = """
ladder:
  - {rung: recover_in_place, budget: {per_node: 2}}
  - {rung: recover}
  - {rung: stop}
"""
    job = AnsweringCluster(policy).start()
    job.kill(0)
    job.restart_controller()
    job.kill(1)
    job.restart_controller()

    job.kill(0)
    job.restart_controller()

    assert job.rungs == [Rung.RECOVER]
    assert job.machine.status(job.now).nodes[0].state == "isolated"


def test_restarted_controller_does_not_lose_its_memory() -> None:
    """There the default backend may come back empty, take the job for a new one and end it."""
    job = AnsweringCluster().start()
    job.kill(1)
    job.lose_node("node1")
    incidents = job.incidents

    job.restart_controller()

    assert job.incidents == incidents
    assert job.finish is None
    assert job.machine.state.term == 1


def test_failover_after_failover_of_the_controller_is_not_skipped() -> None:
    """A worker that fails while there is no controller is told of by its agent later, and restarted then."""
    job = AnsweringCluster().start()
    process = job.vanish(2)
    missed = job.end_of(process)

    job.restart_controller()
    job.feed(missed)
    job.settle()

    assert job.rungs == [Rung.RECOVER_IN_PLACE]
    assert job.phase is Phase.RUNNING


def test_agents_that_return_after_controller_failover_bring_their_nodes_along() -> None:
    """DLRover's users saw a job without nodes after a failover of the master."""
    job = AnsweringCluster().start()
    before = job.pids_now()

    job.restart_controller()
    for number in range(3):
        job.node_joins(f"node{number}")
    job.settle()

    states = [node.state for node in job.machine.status(job.now).nodes]
    assert states == ["active", "active", "spare"]
    assert job.pids_now() == before
    assert job.incidents == ()
