"""Lost state moves while the groups still come up, and whatever is killed meanwhile, no bit is another."""

import re
from pathlib import Path

import pytest

from midstep.protocol.types import InjectionPoint

from .comparing import assert_nobody_harmed, assert_same_numbers, finish
from .conftest import StartJob
from .jobs import ONE_NODE, Job, Record, inject
from .test_injection_points import Incidents, gates_of, incidents_of

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
FAULTS = [fault for faults, _, _ in CASES.values() for fault in faults]
DIFFERING = Path(__file__).with_name("differing.py")
# The training of `training.py` where rank 3's first process dies in the rebuild of a recovery, and not at once: by then
# all others have begun theirs, and what they move early is on its way. A link-up may take 1.5 s.
DYING_LATE = f"""
import os, signal, sys, time
from pathlib import Path

sys.path.insert(0, {str(Path(__file__).parent)!r})

from training import train

import midstep
from midstep.protocol.environment import INCARNATION

def die_late(recovery):
    if recovery.step:
        time.sleep(0.7)
        os.kill(os.getpid(), signal.SIGKILL)
    recovery.default()

dies = (os.environ["RANK"], os.environ[INCARNATION]) == ("3", "1")
own = midstep.Lifecycle(rebuild=die_late) if dies else None
train(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), lifecycle=own)
"""
# The training of `training.py`, whose little state is read from a process of the same host as much state is.
READING = f"""
import sys
from pathlib import Path

sys.path.insert(0, {str(Path(__file__).parent)!r})

from training import train

from midstep.processor import process_memory

process_memory.LEAST_BYTES = 0
train(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
"""
EARLY, GIVEN_UP = "shards have moved early", "was given up"
STATE_BYTES = 10_000  # the model of these jobs has more


@pytest.fixture(scope="module")
def killed(start_shared_job: StartJob) -> Job:
    return start_shared_job(faults=FAULTS, gates=gates_of(CASES), **ONE_NODE)


@pytest.fixture(scope="module")
def incidents(killed: Job) -> Incidents:
    return incidents_of(killed, CASES)


def noted(job: Job, rank: int, life: int) -> list[str]:
    """Return what a process has noted about what it has moved early."""
    (log,) = job.directory.rglob(f"rank-{rank}.{life}.debug.log")
    return [line for line in log.read_text().splitlines() if EARLY in line or GIVEN_UP in line]


def moved_in(line: str, how: str = "bytes to this rank") -> int:
    """Return how many bytes a note says that have moved so."""
    (found,) = re.findall(rf"(\d+) {how}", line)
    return int(found)


@pytest.mark.parametrize("case", CASES)
def test_a_kill_beside_an_early_transfer_replaces_no_other_rank(incidents: Incidents, case: str) -> None:
    _, replaced, step = CASES[case]
    assert_nobody_harmed(incidents[case], replaced)
    assert incidents[case]["resumed_step"] == step


def test_kills_beside_early_transfers_change_no_bit(killed: Job, incidents: Incidents, undisturbed: Record) -> None:
    assert incidents
    assert_same_numbers(killed.record(), undisturbed)


def test_lost_state_moves_while_the_groups_come_up(killed: Job, incidents: Incidents, device: str) -> None:
    """All of it; on the fake device it moves from device to device, which is never early."""
    assert incidents
    first = noted(killed, 1, 2)
    assert [EARLY in line for line in first] == [True] * (device == "cpu")
    assert all(moved_in(line) > STATE_BYTES for line in first), first


def test_state_moves_early_again_after_an_attempt_that_failed(
    start_job: StartJob, undisturbed: Record, device: str, tmp_path: Path
) -> None:
    """The newcomer's first attempt is given up when a third rank dies, and what had arrived is sent once more.

    On the fake device the first attempt of an incident moves state from device to device, which is never early.
    """
    script = tmp_path / "dying_late.py"
    script.write_text(DYING_LATE)
    job = start_job(script=script, faults=[inject(1, InjectionPoint.FORWARD, 12)], **ONE_NODE)
    (incident,) = finish(job)["incidents"]
    assert_nobody_harmed(incident, {1, 3})
    assert_same_numbers(job.record(), undisturbed)
    moved = noted(job, 1, 2)
    assert [EARLY in line for line in moved] == ([False, True] if device == "cpu" else [True])
    assert moved_in(moved[-1]) > STATE_BYTES, moved


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


@pytest.mark.soak
def test_kills_beside_reads_of_the_sources_memory_change_no_bit(
    start_job: StartJob, undisturbed: Record, device: str, tmp_path: Path
) -> None:
    """The newcomer reads what it has lost from the process of its source, which may be killed meanwhile."""
    script = tmp_path / "reading.py"
    script.write_text(READING)
    job = start_job(script=script, faults=FAULTS, gates=gates_of(CASES), **ONE_NODE)
    for case, incident in incidents_of(job, CASES).items():
        assert_nobody_harmed(incident, CASES[case][1])
    assert_same_numbers(job.record(), undisturbed)
    (note,) = noted(job, 1, 2) or ["0 read"]
    assert (moved_in(note, "read") > STATE_BYTES) == (device == "cpu"), note
