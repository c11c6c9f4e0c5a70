"""Lost state moves while the groups still come up, and whatever is killed meanwhile, no bit is another."""

from pathlib import Path

import pytest

from midstep.protocol.types import InjectionPoint

from .comparing import assert_nobody_harmed, assert_same_numbers, finish
from .conftest import StartJob
from .jobs import ONE_NODE, Job, Record, inject
from .test_injection_points import Incidents, incidents_of

pytestmark = [pytest.mark.chaos, pytest.mark.both_devices(second_in_soak=True), pytest.mark.timeout(240)]

# What happens, the ranks that are replaced, and the step of the resume. Rank 1 is lost each time, rank 0 is its source.
CASES = {
    "nothing else": ([inject(1, InjectionPoint.FORWARD, 6)], {1}, 6),
    "another rank in rebuild": (
        [inject(1, InjectionPoint.FORWARD, 12, life=2), inject(3, InjectionPoint.REBUILD, 12)],
        {1, 3},
        12,
    ),
    "the source in rebuild": (
        [inject(1, InjectionPoint.FORWARD, 18, life=3), inject(0, InjectionPoint.REBUILD, 18)],
        {0, 1},
        18,
    ),
    "the source in repair": (
        [inject(1, InjectionPoint.FORWARD, 24, life=4), inject(0, InjectionPoint.REPAIR, 24, life=2)],
        {0, 1},
        24,
    ),
    "the newcomer in rebuild": (
        [inject(1, InjectionPoint.FORWARD, 30, life=5), inject(1, InjectionPoint.REBUILD, None, life=6)],
        {1},
        30,
    ),
    "the newcomer in repair": (
        [inject(1, InjectionPoint.FORWARD, 36, life=7), inject(1, InjectionPoint.REPAIR, None, life=8)],
        {1},
        36,
    ),
}
DIFFERING = Path(__file__).with_name("differing.py")
EARLY, GIVEN_UP = "shards have moved early", "was given up"
STATE_BYTES = 10_000  # the model of these jobs has more


@pytest.fixture(scope="module")
def killed(start_shared_job: StartJob) -> Job:
    return start_shared_job(faults=[fault for faults, _, _ in CASES.values() for fault in faults], **ONE_NODE)


@pytest.fixture(scope="module")
def incidents(killed: Job) -> Incidents:
    return incidents_of(killed, CASES)


def noted(job: Job, rank: int, life: int) -> list[str]:
    """Return what a process has noted about what it has moved early."""
    (log,) = job.directory.rglob(f"rank-{rank}.{life}.debug.log")
    return [line for line in log.read_text().splitlines() if EARLY in line or GIVEN_UP in line]


@pytest.mark.parametrize("case", CASES)
def test_a_kill_beside_an_early_transfer_replaces_no_other_rank(incidents: Incidents, case: str) -> None:
    _, replaced, step = CASES[case]
    assert_nobody_harmed(incidents[case], replaced)
    assert incidents[case]["resumed_step"] == step


def test_kills_beside_early_transfers_change_no_bit(killed: Job, incidents: Incidents, undisturbed: Record) -> None:
    assert incidents
    assert_same_numbers(killed.record(), undisturbed)


def test_state_moves_early_again_after_an_attempt_that_failed(killed: Job, incidents: Incidents, device: str) -> None:
    """The newcomer's first attempt is given up when a third rank dies, and what had arrived is sent once more.

    On the fake device the first attempt of an incident moves state from device to device, which is never early.
    """
    assert incidents
    first, again = noted(killed, 1, 2), noted(killed, 1, 3)
    if device != "cpu":
        assert not first
        assert [EARLY in line for line in again] == [True]
        return
    assert [EARLY in line for line in first] == [True]
    assert [EARLY in line for line in again] == [False, True]
    for line in (first[0], again[1]):
        assert int(line.split()[-5]) > STATE_BYTES, line


def test_one_rank_that_moves_nothing_early_is_enough_for_all(
    start_job: StartJob, undisturbed: Record, device: str
) -> None:
    """The source has a callback of its own, the newcomer has none: state moves in repair, bit for bit as ever."""
    job = start_job(script=DIFFERING, faults=[inject(1, InjectionPoint.FORWARD, 12)], **ONE_NODE)
    (incident,) = finish(job)["incidents"]
    assert_nobody_harmed(incident, {1})
    assert_same_numbers(job.record(), undisturbed)
    if device == "cpu":
        (log,) = job.directory.rglob("rank-1.2.debug.log")
        assert "not all ranks move shards early" in log.read_text()
        assert EARLY not in log.read_text()
