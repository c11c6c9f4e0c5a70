"""A device is harmed in every way that the fake one can be, and each fault takes the rung that the policy says."""

from typing import Any

import pytest

from midstep.protocol.faults import ArmedFault, FaultAction, InjectionPoint

from .comparing import assert_nobody_harmed, assert_same_numbers, finish
from .conftest import StartJob
from .jobs import ONE_NODE, ROOMY, Job, Record, inject
from .test_injection_points import Incidents, gates_of, incidents_of

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

RETRY, IN_PLACE, RECOVER = ["retry_step"], ["recover_in_place"], ["recover"]


def harm(rank: int, action: FaultAction, point: InjectionPoint, step: int, *, life: int = 1) -> ArmedFault:
    return inject(rank, point, step, life=life, action=action)


# What happens, the rungs taken, who is replaced, the step at which all resume.
Case = tuple[list[ArmedFault], list[str], set[int], int]
MENDED: dict[str, Case] = {
    "an error in temporary memory": (
        [harm(1, FaultAction.MEMORY_TEMPORARY, InjectionPoint.FORWARD, 4)],
        RETRY,
        set(),
        4,
    ),
    "an error in a parameter": ([harm(2, FaultAction.MEMORY_PERSISTENT, InjectionPoint.BACKWARD, 8)], RETRY, set(), 8),
    "an error in a parameter, in the update": (
        [harm(1, FaultAction.MEMORY_PERSISTENT, InjectionPoint.UPDATE, 12)],
        RETRY,
        set(),
        13,
    ),
    "an error in temporary memory, in the update": (
        [harm(3, FaultAction.MEMORY_TEMPORARY, InjectionPoint.UPDATE, 16)],
        RETRY,
        set(),
        17,
    ),
    "several bits, noticed at once": ([harm(0, FaultAction.MULTI_BIT, InjectionPoint.FORWARD, 20)], RETRY, set(), 20),
    "a suspicion of memory": ([harm(1, FaultAction.SUSPECT_MEMORY, InjectionPoint.BACKWARD, 24)], RETRY, set(), 24),
    "a link that fails": ([harm(0, FaultAction.LINK_DOWN, InjectionPoint.COLLECTIVE, 28)], RETRY, set(), 28),
    "a link that stays down until it is rebuilt": (
        [harm(2, FaultAction.LINK_BROKEN, InjectionPoint.COLLECTIVE, 32)],
        RETRY,
        set(),
        32,
    ),
    "a suspicion of another device": ([harm(3, FaultAction.REMOTE, InjectionPoint.COLLECTIVE, 36)], RETRY, set(), 36),
    "a collective that hangs": (
        [harm(1, FaultAction.HANG_COLLECTIVE, InjectionPoint.COLLECTIVE, 40)],
        RETRY,
        set(),
        40,
    ),
    "a link-up that fails, in the recovery from a link": (
        [
            harm(0, FaultAction.LINK_DOWN, InjectionPoint.BACKWARD, 44),
            harm(2, FaultAction.LINK_UP_FAILS, InjectionPoint.REBUILD, 44),
        ],
        RETRY,
        set(),
        44,
    ),
    "memory of two ranks at once": (
        [
            harm(1, FaultAction.MEMORY_PERSISTENT, InjectionPoint.FORWARD, 48),
            harm(2, FaultAction.MEMORY_TEMPORARY, InjectionPoint.FORWARD, 48),
        ],
        RETRY,
        set(),
        48,
    ),
    "a link that fails while a parameter is repaired": (
        [
            harm(2, FaultAction.MEMORY_PERSISTENT, InjectionPoint.FORWARD, 52),
            harm(0, FaultAction.LINK_DOWN, InjectionPoint.REPAIR, 52),  # the source
        ],
        RETRY,
        set(),
        52,
    ),
}
REPLACED: dict[str, Case] = {
    "no memory left": ([harm(2, FaultAction.OUT_OF_MEMORY, InjectionPoint.FORWARD, 5)], IN_PLACE, {2}, 5),
    "a task queue that has ended": (
        [harm(2, FaultAction.TASK_QUEUE_DEAD, InjectionPoint.COLLECTIVE, 9, life=2)],
        IN_PLACE,
        {2},
        9,
    ),
    "a tensor that nobody repaired": (
        [harm(3, FaultAction.UNSAFE_TENSOR, InjectionPoint.BACKWARD, 14)],
        IN_PLACE,
        {3},
        14,
    ),
    "memory that is not torch's": (
        [harm(0, FaultAction.MEMORY_OUTSIDE, InjectionPoint.FORWARD, 23)],
        [*RETRY, *IN_PLACE],
        {0},
        23,
    ),
    "a device that is gone": ([harm(1, FaultAction.DROP_DEVICE, InjectionPoint.COLLECTIVE, 33)], RECOVER, {0, 1}, 33),
}
# The link-up of a rung is given up for good: with two attempts each, and one try in place.
IMPATIENT: dict[str, Any] = {
    **ROOMY,
    "ladder": [
        {"rung": "retry_step"},
        {"rung": "recover_in_place", "attempts": 1},
        {"rung": "recover"},
        {"rung": "stop"},
    ],
    "communicator": {"link_up_attempts": 2},
}
# In the same job, of which some ranks are in their second and third lives by then.
HANDED_ON: dict[str, Case] = {
    "communicators that do not come up again": (
        [
            harm(0, FaultAction.LINK_DOWN, InjectionPoint.BACKWARD, 41, life=3),
            *[harm(2, FaultAction.LINK_UP_FAILS, InjectionPoint.REBUILD, 41, life=3)] * 2,
        ],
        [*RETRY, *IN_PLACE],
        {0},
        41,
    ),
    "nor with a newcomer on the same node": (
        [
            harm(1, FaultAction.LINK_DOWN, InjectionPoint.BACKWARD, 49, life=2),
            *[harm(3, FaultAction.LINK_UP_FAILS, InjectionPoint.REBUILD, 49, life=2)] * 4,
        ],
        [*RETRY, *IN_PLACE, *RECOVER],
        {0, 1},
        49,
    ),
}


def run(start: StartJob, cases: dict[str, Case], **options: Any) -> tuple[Job, Incidents]:
    faults = [fault for faults, *_ in cases.values() for fault in faults]
    job = start(device="fake", faults=faults, **options)
    return job, incidents_of(job, cases, gated="gates" in options)


@pytest.fixture(scope="module")
def mended(start_shared_job: StartJob, undisturbed: Record) -> tuple[Job, Incidents]:
    assert undisturbed.ends  # that job is over: there are few cores
    # More faults than a node is trusted with by default. Without gates, at which no stall would be found.
    return run(start_shared_job, MENDED, policy={**ROOMY, "node": {"failures": 100}}, **ONE_NODE)


@pytest.fixture(scope="module")
def replaced(start_shared_job: StartJob, mended: tuple[Job, Incidents]) -> tuple[Job, Incidents]:
    assert mended
    cases = {**REPLACED, **HANDED_ON}
    return run(start_shared_job, cases, gates=gates_of(cases), spares=2, policy=IMPATIENT)


def rungs(incident: dict[str, Any]) -> list[str]:
    """Return the rungs in the order in which they were taken; one that was only widened counts once."""
    return list(dict.fromkeys(decision["rung"] for decision in incident["decisions"]))


@pytest.mark.parametrize("fault", MENDED)
def test_a_fault_that_a_process_can_mend_costs_no_process(mended: tuple[Job, Incidents], fault: str) -> None:
    """All processes stay alive, no step is lost, and the interrupted one is repeated."""
    _, taken, who, step = MENDED[fault]
    incident = mended[1][fault]
    assert rungs(incident) == taken, incident["reasons"]
    assert_nobody_harmed(incident, who)
    assert incident["resumed_step"] == step


@pytest.mark.parametrize("fault", REPLACED)
def test_a_fault_that_a_process_cannot_mend_costs_that_process(replaced: tuple[Job, Incidents], fault: str) -> None:
    """The rung is the cheapest that fits, or the next one after a process has found that it cannot mend itself."""
    _, taken, who, step = REPLACED[fault]
    incident = replaced[1][fault]
    assert rungs(incident) == taken, incident["reasons"]
    assert_nobody_harmed(incident, who)
    assert incident["resumed_step"] == step


@pytest.mark.parametrize("fault", HANDED_ON)
def test_a_link_up_that_is_given_up_hands_over_to_the_next_rung(replaced: tuple[Job, Incidents], fault: str) -> None:
    """It fails in rebuild, is tried again as often as the policy says, and then a coarser rung brings it up."""
    _, taken, who, step = HANDED_ON[fault]
    incident = replaced[1][fault]
    assert rungs(incident) == taken, incident["reasons"]
    assert "no communicators after 2 attempts" in " ".join(incident["reasons"])
    assert_nobody_harmed(incident, who)
    assert incident["resumed_step"] == step


@pytest.mark.soak
def test_an_error_that_all_ranks_may_have_used_goes_back_behind_it(
    start_job: StartJob, replaced: tuple[Job, Incidents], undisturbed: Record
) -> None:
    """Several bits, noticed after updates that were made of them: no replica is trusted, only an older checkpoint."""
    assert replaced
    job = start_job(device="fake", faults=[harm(2, FaultAction.MULTI_BIT_LATE, InjectionPoint.FORWARD, 27)], **ONE_NODE)
    (incident,) = finish(job)["incidents"]
    assert rungs(incident) == IN_PLACE, incident["reasons"]
    assert incident["restore"] == "checkpoint"
    assert incident["steps_lost"] == 27 - incident["resumed_step"]
    assert incident["resumed_step"] in {10, 20}
    assert "can be trusted" in " ".join(incident["reasons"])
    assert_same_numbers(job.record(), undisturbed)


def test_only_what_was_struck_is_brought_from_a_replica(mended: tuple[Job, Incidents]) -> None:
    """Temporary memory and links need no state; a struck parameter needs its shard, in the living process."""
    moved = {fault: incident["bytes_moved"] for fault, incident in mended[1].items()}
    assert moved["an error in a parameter"] > 10_000
    assert moved["several bits, noticed at once"] > 10_000
    for fault in (
        "an error in temporary memory",
        "a suspicion of memory",
        "a link that fails",
        "a collective that hangs",
    ):
        assert moved[fault] == 0, fault


def test_lost_shards_travel_from_device_to_device(
    mended: tuple[Job, Incidents], replaced: tuple[Job, Incidents]
) -> None:
    """To a process that mends itself, and to a newcomer; rank-local states travel between the hosts."""
    for incident in (mended[1]["an error in a parameter"], replaced[1]["no memory left"]):
        assert 10_000 < incident["bytes_over_devices"] <= incident["bytes_moved"]
        assert "from device to device" in " ".join(incident["reasons"])


def test_a_repair_over_devices_that_fails_is_made_from_host_to_host(mended: tuple[Job, Incidents]) -> None:
    """The links were rebuilt and checked, and fail all the same: the next attempt needs none of them."""
    incident = mended[1]["a link that fails while a parameter is repaired"]
    assert incident["bytes_moved"] > 10_000
    assert incident["bytes_over_devices"] == 0
    assert "from host to host" in " ".join(incident["reasons"])


def test_a_broken_link_is_tried_again_by_rebuilding(mended: tuple[Job, Incidents]) -> None:
    """Resuming the communicators fails in the link-up, and the next generation rebuilds them."""
    for fault in ("a link that stays down until it is rebuilt", "a link-up that fails, in the recovery from a link"):
        assert len(mended[1][fault]["generations"]) >= 2


def test_device_faults_change_no_bit(
    mended: tuple[Job, Incidents], replaced: tuple[Job, Incidents], undisturbed: Record
) -> None:
    """After all of them everything is equal to an undisturbed run on the CPU, bit for bit."""
    assert_same_numbers(mended[0].record(), undisturbed)
    assert_same_numbers(replaced[0].record(), undisturbed)
