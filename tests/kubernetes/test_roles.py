"""Roles with scripts of their own in pods: one recovers while the other makes steps; the launcher is lost, or stops."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from midstep.controller.endpoints.discovery_files import read_result
from midstep.protocol import environment as names
from midstep.protocol.types import InjectionPoint

from ..chaos.comparing import assert_nobody_harmed, assert_same_numbers
from ..chaos.jobs import TRAINING, Record, inject
from .cluster.cluster import Cluster
from .conftest import RANKS, STEPS
from .managed import MIDSTEP, victim
from .operations import DEVICE_INFO, SEPARATED, drain, leader, left, write
from .roles_job import RolesInPods

pytestmark = pytest.mark.timeout(600)

StartRoles = Callable[..., RolesInPods]
ENDLESS = 100_000
STEPS_MEANWHILE = 3
# In the order of one job: each of them hits rank 1 in the life that the one before has given it.
MOMENTS = (
    (InjectionPoint.FORWARD, 20),
    (InjectionPoint.COLLECTIVE, 50),
    (InjectionPoint.BARRIER, 80),
    (InjectionPoint.UPDATE, 110),
    (InjectionPoint.BACKWARD, 140),
)
LADDER = [
    {"rung": "recover_in_place", "budget": {"per_rank": len(MOMENTS)}},
    {"rung": "recover", "budget": {"per_job": 3}},
    {"rung": "stop"},
]
SLOW_S = 0.2
LED, DRAINED, FAULTY, END = 20, 70, 120, 190


@pytest.fixture
def start_roles(cluster: Cluster, shared: Path) -> Iterator[StartRoles]:
    """Start a job of an actor, with which it ends, and a rollout; what is left is deleted when the test is over."""
    started: list[RolesInPods] = []

    def start(
        name: str,
        *,
        step_s: float = 0.01,
        environment: dict[str, str] | None = None,
        gates: Sequence[int] = (),
        spares: int = 0,
        options: Sequence[str] = (),
    ) -> RolesInPods:
        root = shared / name
        actor: dict[str, Any] = {
            "script": str(TRAINING),
            "arguments": [str(root / "records-actor"), str(STEPS), str(step_s)],
            "ranks": RANKS,
            "nnodes": 2,
            "spares": spares,
            "ladder": LADDER,
            "env": environment or {},
        }
        rollout = {**actor, "arguments": [str(root / "records-rollout"), str(ENDLESS), str(step_s)], "env": {}}
        rollout |= {"ranks": 2, "nnodes": 1, "spares": 0}
        roles = {"actor": actor, "rollout": rollout}
        job = RolesInPods(cluster, root, name, roles, until=["actor"], gates={"actor": gates}, options=options)
        started.append(job)
        return job

    yield start
    for job in started:
        job.delete()


def test_a_role_recovers_at_every_moment_while_the_other_makes_steps(
    start_roles: StartRoles, undisturbed: Record
) -> None:
    kills = [inject(1, point, step, life=life) for life, (point, step) in enumerate(MOMENTS, start=1)]
    job = start_roles("moments", environment={names.FAULTS: msgspec.json.encode(kills).decode()}, gates=(END,))
    hit, other = job.role("actor"), job.role("rollout")
    others = other.until(lambda status: status["phase"] == "running", "the other role")["ranks"]
    for count in range(1, len(MOMENTS) + 1):
        hit.until_incidents(count)
        steps = other.until(lambda status: status["phase"] == "running", "the other role")["ranks"][0]["step"]
        other.until_steps(steps + STEPS_MEANWHILE)
    now = other.until(lambda status: status["phase"] == "running", "the other role")["ranks"]
    assert [rank["pid"] for rank in now] == [rank["pid"] for rank in others]
    hit.held_at(END)
    incidents, of_other = hit.report_of_controller()["incidents"], other.report_of_controller()["incidents"]
    hit.open_gate(END)
    assert job.exit_code() == 0, hit.said()

    assert [incident["rung"] for incident in incidents] == ["recover_in_place"] * len(MOMENTS)
    for incident in incidents:
        assert_nobody_harmed(incident, {1}, ranks=RANKS)
    assert_same_numbers(hit.record(), undisturbed, ranks=RANKS)
    assert of_other == []
    assert job.left() == []


@pytest.mark.nightly
def test_a_role_has_a_second_controller_and_leaves_hosts_that_are_drained_or_faulty(
    start_roles: StartRoles, undisturbed: Record
) -> None:
    """Each of a role's jobs has what a job of one script has by these options; the other role notices nothing."""
    options = ("--controllers", "2", "--watch-nodes", "--config-maps", DEVICE_INFO)
    job = start_roles("several", step_s=0.02, gates=(LED, DRAINED, FAULTY, END), spares=1, options=options)
    cluster, hit, other = job.cluster, job.role("actor"), job.role("rollout")
    hit.held_at(LED)
    others = other.until(lambda status: status["phase"] == "running", "the other role")["ranks"]
    cluster.kubectl("delete", "pod", leader(hit, 1), "--grace-period=0", "--force", "--wait=false")
    leader(hit, 2)
    hit.open_gate(LED)

    node, _ = victim(hit, hit.held_at(DRAINED))
    hit.until_spare()
    host = drain(hit, node)
    hit.until_pausing()
    hit.open_gate(DRAINED)
    left(hit, node)
    status = hit.held_at(FAULTY)
    cluster.kubectl("uncordon", host)
    hit.until_spare()

    node, ranks = victim(hit, status)
    host = cluster.machine_of(hit.pod_of(node)).name
    write(cluster, host)
    write(cluster, host, SEPARATED)
    hit.until(lambda now: len(now["incidents"]) == 2, "the fault to be answered")
    hit.open_gate(FAULTY)
    left(hit, node)
    hit.held_at(END)
    moved, faulty = hit.report_of_controller()["incidents"]
    now = other.until(lambda status: status["phase"] == "running", "the other role")
    assert ([rank["pid"] for rank in now["ranks"]], now["incidents"]) == ([rank["pid"] for rank in others], [])
    hit.open_gate(END)
    assert job.exit_code() == 0, hit.said()
    assert (moved["steps_lost"], moved["healthy_pids_kept"]) == (0, True), moved
    assert_nobody_harmed(faulty, ranks, ranks=RANKS)
    assert_same_numbers(hit.record(), undisturbed, ranks=RANKS)
    assert job.left() == []


def test_when_the_pod_of_the_launcher_is_lost_all_roles_begin_again_from_their_last_committed_step(
    start_roles: StartRoles, undisturbed: Record
) -> None:
    """The store of the roles is lost with it; the roles' own jobs are found again, and stopped with checkpoints."""
    job = start_roles("lost", step_s=SLOW_S)
    first = job.role("actor")
    first.until_steps(20)
    job.role("rollout").until_steps(5)
    job.cluster.kubectl("delete", "pod", job.launcher_pod(), "--grace-period=0", "--force")

    job.role("actor", 2).until_steps(21)
    job.role("rollout", 2).until_steps(5)
    assert job.exit_code() == 0, first.said()
    result = read_result(first.directory)
    assert result is not None
    assert result.exit_code == 130
    assert_same_numbers(first.record(), undisturbed, ranks=RANKS)
    assert job.left() == []


def test_a_stop_that_is_asked_for_beside_the_launcher_stops_all_roles(start_roles: StartRoles) -> None:
    job = start_roles("halted", step_s=SLOW_S)
    for role in ("actor", "rollout"):
        job.role(role).until_steps(5)
    job.cluster.kubectl("exec", job.launcher_pod(), "-c", "launcher", "--", *MIDSTEP, "stop", str(job.directory))

    assert job.exit_code() == 130
    assert all((job.directory / "checkpoints" / role).is_dir() for role in ("actor", "rollout"))
    assert job.left() == []
