"""A rank is killed at every moment of a step, and a second one at every moment of the recovery from the first."""

from collections.abc import Mapping
from typing import Any

import pytest

from midstep.protocol.types import InjectionPoint

from .comparing import assert_nobody_harmed, assert_same_numbers, finish
from .conftest import StartJob
from .jobs import ONE_NODE, ROOMY, Job, Record, inject

pytestmark = [pytest.mark.chaos, pytest.mark.both_devices(second_in_soak=True), pytest.mark.timeout(240)]

# What happens, who is replaced, and the step at which all resume.
IN_A_STEP = {
    "forward": ([inject(1, InjectionPoint.FORWARD, 6)], {1}, 6),
    "backward": ([inject(2, InjectionPoint.BACKWARD, 12)], {2}, 12),
    "collective": ([inject(3, InjectionPoint.COLLECTIVE, 18)], {3}, 18),
    "commit barrier": ([inject(0, InjectionPoint.BARRIER, 24)], {0}, 24),
    "update": ([inject(1, InjectionPoint.UPDATE, 31, life=2)], {1}, 32),
    "checkpoint, the writer of the shards": ([inject(0, InjectionPoint.CHECKPOINT, 39, life=2)], {0}, 40),
    "checkpoint, another rank": ([inject(2, InjectionPoint.CHECKPOINT, 49, life=2)], {2}, 50),
}
IN_A_RECOVERY = {
    "stop": ([inject(2, InjectionPoint.FORWARD, 6), inject(0, InjectionPoint.STOP, 6)], {0, 2}, 6),
    "clean": ([inject(3, InjectionPoint.FORWARD, 12), inject(1, InjectionPoint.CLEAN, 12)], {1, 3}, 12),
    "rebuild": (
        [inject(0, InjectionPoint.FORWARD, 18, life=2), inject(2, InjectionPoint.REBUILD, 18, life=2)],
        {0, 2},
        18,
    ),
    "repair": (
        [inject(1, InjectionPoint.FORWARD, 24, life=2), inject(3, InjectionPoint.REPAIR, 24, life=2)],
        {1, 3},
        24,
    ),
    "rollback": (
        [inject(2, InjectionPoint.FORWARD, 30, life=3), inject(0, InjectionPoint.ROLLBACK, 30, life=3)],
        {0, 2},
        30,
    ),
}
# The newcomer itself is killed: it may have been a second fault, so it is tried once more in place.
AGAIN = {
    "rebuild": (
        [inject(0, InjectionPoint.FORWARD, 34, life=4), inject(0, InjectionPoint.REBUILD, None, life=5)],
        {0},
        34,
    ),
    "join": ([inject(1, InjectionPoint.FORWARD, 38, life=3), inject(1, InjectionPoint.JOIN, None, life=4)], {1}, 38),
    "rollback": (
        [inject(2, InjectionPoint.FORWARD, 42, life=4), inject(2, InjectionPoint.ROLLBACK, None, life=5)],
        {2},
        42,
    ),
    "repair": (
        [inject(3, InjectionPoint.FORWARD, 46, life=3), inject(3, InjectionPoint.REPAIR, None, life=4)],
        {3},
        46,
    ),
}
# Killed twice, as often as the policy tries it in place: its node is left, and the rank beside it moves with it.
IN_PLACE = {"rung": "recover_in_place", "attempts": 2, "budget": {"per_job": 1000}}
LADDER = [IN_PLACE if entry["rung"] == "recover_in_place" else entry for entry in ROOMY["ladder"]]
TWICE = {
    "join": (
        [
            inject(3, InjectionPoint.FORWARD, 52, life=5),
            inject(3, InjectionPoint.JOIN, None, life=6),
            inject(3, InjectionPoint.JOIN, None, life=7),
        ],
        {2, 3},
        52,
    ),
}
Cases = dict[str, tuple[list[Any], set[int], int]]
Incidents = dict[str, dict[str, Any]]
ALL_IN_RECOVERIES: Cases = {
    **IN_A_RECOVERY,
    **{f"{point} again": case for point, case in AGAIN.items()},
    **{f"{point} twice": case for point, case in TWICE.items()},
}


@pytest.fixture(scope="module")
def killed_in_steps(start_shared_job: StartJob) -> Job:
    faults = [fault for faults, _, _ in IN_A_STEP.values() for fault in faults]
    return start_shared_job(faults=faults, gates=gates_of(IN_A_STEP), **ONE_NODE)


@pytest.fixture(scope="module")
def step_incidents(killed_in_steps: Job) -> Incidents:
    return incidents_of(killed_in_steps, IN_A_STEP)


@pytest.mark.parametrize("point", IN_A_STEP)
def test_a_kill_at_any_injection_point_of_a_step_replaces_one_rank(step_incidents: Incidents, point: str) -> None:
    """Only the killed rank gets a new process, and all repeat the step that nobody had committed."""
    _, replaced, step = IN_A_STEP[point]
    assert_nobody_harmed(step_incidents[point], replaced)
    assert step_incidents[point]["resumed_step"] == step


def test_kills_in_steps_change_no_bit(killed_in_steps: Job, step_incidents: Incidents, undisturbed: Record) -> None:
    """After a kill at every moment of a step, everything is equal to the undisturbed run, bit for bit."""
    assert step_incidents
    assert_same_numbers(killed_in_steps.record(), undisturbed)


@pytest.fixture(scope="module")
def killed_in_recoveries(start_shared_job: StartJob, step_incidents: Incidents) -> Job:
    assert step_incidents  # that job is over: there are few cores
    faults = [fault for faults, _, _ in ALL_IN_RECOVERIES.values() for fault in faults]
    gates = gates_of(ALL_IN_RECOVERIES)
    return start_shared_job(spares=len(TWICE), faults=faults, policy={**ROOMY, "ladder": LADDER}, gates=gates)


@pytest.fixture(scope="module")
def recovery_incidents(killed_in_recoveries: Job) -> Incidents:
    return incidents_of(killed_in_recoveries, ALL_IN_RECOVERIES)


@pytest.mark.parametrize("point", IN_A_RECOVERY)
def test_a_second_kill_at_any_injection_point_of_a_recovery_is_part_of_the_same_incident(
    recovery_incidents: Incidents, point: str
) -> None:
    """Only the two killed ranks get new processes, and all repeat the step that the first kill had interrupted."""
    _, replaced, step = IN_A_RECOVERY[point]
    assert_nobody_harmed(recovery_incidents[point], replaced)
    assert recovery_incidents[point]["rung"] == "recover_in_place"
    assert recovery_incidents[point]["resumed_step"] == step
    widened = len(recovery_incidents[point]["generations"]) == 1
    assert widened == (point in {"stop", "clean"})  # of a survivor, while its generation gathers all


@pytest.mark.parametrize("point", AGAIN)
def test_a_replacement_that_is_killed_is_replaced_again_in_place(recovery_incidents: Incidents, point: str) -> None:
    """The same rung is taken once more, every healthy process stays alive, and no step is lost."""
    _, replaced, step = AGAIN[point]
    incident = recovery_incidents[f"{point} again"]
    assert_nobody_harmed(incident, replaced)
    assert [decision["rung"] for decision in incident["decisions"]] == ["recover_in_place", "recover_in_place"]
    assert incident["resumed_step"] == step


@pytest.mark.parametrize("point", TWICE)
def test_a_replacement_that_is_killed_twice_comes_back_on_another_node(
    recovery_incidents: Incidents, point: str
) -> None:
    """The next rung is taken when the attempts are used up; the ranks of the other node stay alive, no step is lost."""
    _, replaced, step = TWICE[point]
    incident = recovery_incidents[f"{point} twice"]
    assert_nobody_harmed(incident, replaced)
    rungs = [decision["rung"] for decision in incident["decisions"]]
    assert rungs == ["recover_in_place", "recover_in_place", "recover"]
    assert "taken 2 times in this incident, attempts is 2" in " ".join(incident["reasons"])
    assert incident["resumed_step"] == step


def test_kills_in_recoveries_change_no_bit(
    killed_in_recoveries: Job, recovery_incidents: Incidents, undisturbed: Record
) -> None:
    """After a second kill in every phase of a recovery, everything is equal to the undisturbed run, bit for bit."""
    assert recovery_incidents
    assert_same_numbers(killed_in_recoveries.record(), undisturbed)


def gates_of(cases: Mapping[str, tuple[Any, ...]]) -> list[int]:
    """Return a step in front of each case but the first: a fault in an incident that is still open belongs to that."""
    return [faults[0].step - 1 for faults, *_ in cases.values()][1:]


def incidents_of(job: Job, cases: Mapping[str, tuple[Any, ...]], *, gated: bool = True) -> Incidents:
    """Let one incident after the other happen, wait for the job, and return its incidents by case."""
    for gate in gates_of(cases) if gated else ():
        job.held_at(gate)
        job.open_gate(gate)
    incidents = finish(job)["incidents"]
    told = [(incident["cause"], incident["resumed_step"]) for incident in incidents]
    assert len(incidents) == len(cases), f"{told}\n{job.said()}"
    return dict(zip(cases, incidents, strict=True))
