"""Roles with scripts of their own on Ray: one recovers at every moment, while the other makes steps."""

from pathlib import Path

import msgspec

from midstep.controller.endpoints.discovery_files import read_result
from midstep.protocol import environment as names
from midstep.protocol.types import InjectionPoint

from ..chaos.comparing import assert_nobody_harmed, assert_same_numbers
from ..chaos.jobs import TRAINING, Record, inject
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
