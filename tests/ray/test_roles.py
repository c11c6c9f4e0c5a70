"""Roles with scripts of their own on Ray: one recovers at every moment, while the other makes steps."""

from pathlib import Path

import msgspec

from midstep.controller.endpoints.control_requests import Accepted, ReportFaultRequest
from midstep.controller.endpoints.discovery_files import read_result
from midstep.protocol import environment as names
from midstep.protocol.incidents import JobStatus, Outcome
from midstep.protocol.types import FaultKind, FaultLevel, FaultReport, InjectionPoint

from ..chaos.comparing import assert_nobody_harmed, assert_same_numbers
from ..chaos.jobs import TRAINING, Record, inject
from ..machines.conftest import run_undisturbed
from .cluster import RayCluster
from .conftest import RANKS, STEPS
from .roles_job import RolesOnRay

ENDLESS = 100_000
STEPS_MEANWHILE = 3
# In the order of one job: each of them hits rank 1 in the life that the one before has given it.
MOMENTS = (
    (InjectionPoint.FORWARD, 8),
    (InjectionPoint.COLLECTIVE, 24),
    (InjectionPoint.BARRIER, 40),
    (InjectionPoint.UPDATE, 56),
    (InjectionPoint.BACKWARD, 72),
)
LOST = 20
SLOW_S = 0.3
MOST_RANKS = 3  # two roles of so many nodes share a machine, as five have room for nodes
HELD = STEPS // 2
LADDER = [{"rung": "recover_in_place", "budget": {"per_rank": len(MOMENTS)}}, {"rung": "stop"}]


def test_a_role_recovers_at_every_moment_while_the_other_makes_steps(
    cluster: RayCluster, tmp_path: Path, undisturbed: Record
) -> None:
    """Each is a job of Ray with actors of its own; the job ends with the one, and stops the other."""
    cluster.mend()
    kills = [inject(1, point, step, life=life) for life, (point, step) in enumerate(MOMENTS, start=1)]
    world = {"script": str(TRAINING), "ranks": RANKS, "nnodes": RANKS, "ladder": LADDER}
    actor = {
        **world,
        "arguments": [str(tmp_path / "records-actor"), str(STEPS), "0.01"],
        "env": {names.FAULTS: msgspec.json.encode(kills).decode()},
    }
    rollout = {**world, "arguments": [str(tmp_path / "records-rollout"), str(ENDLESS), "0.01"]}
    job = RolesOnRay(cluster, tmp_path, {"actor": actor, "rollout": rollout}, until=["actor"])
    try:
        hit, other = job.role("actor"), job.role("rollout")
        others = [rank.pid for rank in other.until(lambda status: status.phase == "running", "the other role").ranks]
        for count in range(1, len(MOMENTS) + 1):
            hit.until_incidents(count)
            other.until_steps(other.steps_done() + STEPS_MEANWHILE)
        assert [rank.pid for rank in other.answer().ranks] == others
        assert job.launcher.wait(600) == 0, hit.said()

        incidents = hit.report()["incidents"]
        assert [incident["rung"] for incident in incidents] == ["recover_in_place"] * len(MOMENTS)
        for incident in incidents:
            assert_nobody_harmed(incident, {1}, ranks=RANKS)
        assert_same_numbers(hit.record(), undisturbed, ranks=RANKS)
        assert other.report()["incidents"] == []
        hit.assert_nothing_left()
    finally:
        job.close()


def test_a_machine_that_one_role_leaves_for_a_fault_is_left_by_the_other_between_two_steps(
    cluster: RayCluster, tmp_path: Path
) -> None:
    """Each role has a node with ranks there, and a spare elsewhere. The other role loses no step and no budget."""
    cluster.mend()
    undisturbed = run_undisturbed(tmp_path / "undisturbed", ranks=MOST_RANKS, steps=STEPS)
    ladder = [{"rung": "recover"}, {"rung": "stop"}]
    world = {"script": str(TRAINING), "ranks": MOST_RANKS, "nnodes": MOST_RANKS, "spares": 1, "ladder": ladder}
    roles = {
        name: {**world, "arguments": [str(tmp_path / f"records-{name}"), str(steps), "0.01"]}
        for name, steps in (("actor", STEPS), ("rollout", ENDLESS))
    }
    job = RolesOnRay(cluster, tmp_path, roles, until=["actor"])
    try:
        actor, rollout = job.role("actor"), job.role("rollout")
        actor.gate(HELD).touch()
        at_gate = actor.held_at(HELD)
        rollout.until_there_is_a_spare()
        actor.until_there_is_a_spare()
        there = rollout.until(lambda status: status.phase == "running", "the other role")
        machine, node = next(each for each in _with_ranks(at_gate).items() if each[0] in _with_ranks(there))
        why = "its fans stand still"
        fault = FaultReport(FaultKind.NODE, 0.0, "operator", why, node=node, level=FaultLevel.NODE)
        assert isinstance(actor._ask(ReportFaultRequest(fault)), Accepted)
        actor.open_gate(HELD)
        rollout.until(
            lambda status: status.phase == "running" and machine not in _with_ranks(status), "the other role to move"
        )
        rollout.until_steps(rollout.steps_done() + STEPS_MEANWHILE)
        moved = rollout.answer()
        assert job.launcher.wait(600) == 0, actor.said()

        assert not any(budget.used for budget in moved.budgets)
        (left,) = [each for each in rollout.report()["incidents"] if each["outcome"] != Outcome.DISMISSED]
        assert f"role actor has left machine {machine}: {why}" in str(left["decisions"])
        assert left["steps_lost"] == 0
        assert_same_numbers(actor.record(), undisturbed, ranks=MOST_RANKS)
        for rank, steps in undisturbed.steps.items():
            others = rollout.record().steps[rank]
            assert all(others[step] == bits for step, bits in steps.items()), f"rank {rank} of the other role"
        actor.assert_nothing_left()
    finally:
        job.close()


def _with_ranks(status: JobStatus) -> dict[str, str]:
    """Return the machines that have ranks of a role, with the node there."""
    domains = {each.node: each.failure_domain for each in status.nodes}
    return {domains[rank.node]: rank.node for rank in status.ranks}


def test_when_the_launcher_is_lost_resume_has_all_roles_begin_again_from_their_last_committed_step(
    cluster: RayCluster, tmp_path: Path, undisturbed: Record
) -> None:
    """The store of the roles was in it. Their jobs live on without it: they are found in Ray, and stopped first."""
    cluster.mend()
    world = {"script": str(TRAINING), "ranks": RANKS, "nnodes": RANKS, "ladder": LADDER}
    roles = {
        name: {**world, "arguments": [str(tmp_path / f"records-{name}"), str(steps), str(SLOW_S)]}
        for name, steps in (("actor", STEPS), ("rollout", ENDLESS))
    }
    job = RolesOnRay(cluster, tmp_path, roles, until=["actor"])
    try:
        first = job.role("actor")
        first.until_steps(LOST)
        job.role("rollout").until_steps(LOST)
        job.kill_launchers()
        first.until_steps(first.steps_done() + STEPS_MEANWHILE)
        job.resume()
        assert job.launcher.wait(600) == 0, first.said()

        result = read_result(first.directory)
        assert result is not None
        assert result.exit_code == 130
        again = job.role("actor", 2)
        assert again.report()["incidents"] == []
        assert_same_numbers(again.record(), undisturbed, ranks=RANKS)
        assert all(len(steps) == 1 for ranks in again.record().steps.values() for steps in ranks.values())
        again.assert_nothing_left()
    finally:
        job.close()
