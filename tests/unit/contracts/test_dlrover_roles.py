"""DLRover Unified's roles: with a sub-master (an own ladder) a role fails over alone, without one with the job."""

from midstep.controller.recovery.state import Phase
from midstep.protocol.types import FaultKind, FaultLevel, Rung
from midstep.testing.answering_cluster import AnsweringCluster

ROLES = """
ladder: [{rung: reschedule_pod, budget: {per_job: 2}}, {rung: stop}]
roles:
  trainer:
    ranks: 0-2
    ladder: [{rung: recover_in_place, budget: {per_job: 2}}, {rung: stop}]
  evaluator: {ranks: "3"}
"""
TWO_LADDERS = """
roles:
  trainer: {ranks: 0-1, ladder: [{rung: recover_in_place, budget: {per_job: 1}}, {rung: stop}]}
  evaluator: {ranks: 2-3, ladder: [{rung: recover_in_place, budget: {per_job: 2}}, {rung: recover}, {rung: stop}]}
"""


def test_worker_of_a_role_with_sub_master_fails_over_with_its_role() -> None:
    """Only the process at fault is replaced, by the role's own ladder; the other role does not notice."""
    job = AnsweringCluster(ROLES).start()
    before = job.pids_now()

    job.kill(1)

    assert job.rungs == [Rung.RECOVER_IN_PLACE]
    assert job.replaced_since(before) == {1}


def test_worker_of_a_role_without_sub_master_fails_over_with_the_job() -> None:
    """Everything restarts, other roles too, and the reason says that the role has no ladder of its own."""
    job = AnsweringCluster(ROLES).start()
    job.checkpoints = (5,)
    before = job.pids_now()

    job.kill(3)

    assert job.rungs == [Rung.RESCHEDULE_POD]
    assert job.replaced_since(before) == {0, 1, 2, 3}
    assert job.machine.state.accounts.restarts == 1
    assert job.phase is Phase.RUNNING


def test_restarts_of_a_role_count_for_that_role() -> None:
    """The trainer's one restart is spent, the evaluator has two of its own."""
    job = AnsweringCluster(TWO_LADDERS).start()
    job.kill(0)
    job.kill(2)
    job.kill(3)
    assert [incident.rung for incident in job.incidents] == [Rung.RECOVER_IN_PLACE] * 3

    job.kill(1)

    assert "role trainer: budget per_job is spent: 1 of 1" in job.outcome.reason


def test_limit_of_a_role_ends_the_job_and_names_the_role() -> None:
    """DLRover stops the job when an actor of any role passes its limit."""
    job = AnsweringCluster(ROLES).start()
    for _ in range(3):
        job.kill(0)

    assert job.outcome.exit_code == 1
    assert "role trainer: budget per_job is spent: 2 of 2" in job.outcome.reason


def test_roles_that_fail_together_take_a_way_that_both_have() -> None:
    """One incident, one rung; a rung that is on one ladder only is passed over with that reason."""
    job = AnsweringCluster(TWO_LADDERS).start()
    before = job.pids_now()

    job.report(FaultKind.EXCEPTION, 0)
    job.report(FaultKind.EXCEPTION, 2)
    job.settle()

    assert len(job.incidents) == 1
    assert job.replaced_since(before) == {0, 2}
    assert job.phase is Phase.RUNNING


def test_node_relaunch_serves_the_role_that_may_have_it() -> None:
    """The evaluator's ladder has `recover`, the trainer's has not: its broken device ends the job, and says so."""
    job = AnsweringCluster(TWO_LADDERS).start()
    job.device_fault(2, FaultLevel.SEPARATE_NPU)
    assert job.rungs == [Rung.RECOVER]

    other = AnsweringCluster(TWO_LADDERS).start()
    other.device_fault(0, FaultLevel.SEPARATE_NPU)

    assert other.outcome.exit_code == 1
    assert "role trainer" in other.outcome.reason


def test_role_failover_is_not_lost_with_the_controller() -> None:
    """The counts of each role come from the journal."""
    job = AnsweringCluster(TWO_LADDERS).start()
    job.kill(0)

    job.restart_controller()
    job.kill(2)
    job.kill(1)

    assert "role trainer: budget per_job is spent: 1 of 1" in job.outcome.reason
