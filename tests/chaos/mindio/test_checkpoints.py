"""A script that knows mindio_ttp loses every copy of something: all ranks load its own checkpoint, and live on."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from midstep.cli.main import main

from ..comparing import assert_same_steps, finish
from ..jobs import RANKS, ROOMY, Job, Record
from .test_training import ARGUMENTS, FIRST, NO_CONTEXT, SCRIPT, STEPS, Fault, calm, handlers

__all__ = ["calm"]  # the fixture

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

BEGUN = 10  # steps that an earlier job has trained, and saved at its end
LOAD, LOAD_REBUILT = 5, 6


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The folder of a training that was begun by another job."""
    folder = tmp_path / "saved"
    job = start(tmp_path / "begun", folder, steps=BEGUN)
    try:
        job.wait()
        assert not finish(job)["incidents"], job.said()
    finally:
        job.close()
    return folder


def start(root: Path, folder: Path, *how: str, faults: Any = (), steps: int = STEPS, **options: Any) -> Job:
    """Start a job whose script loads what is in the folder."""
    arguments = [str(root / "records"), str(steps), json.dumps(faults), "--load", str(folder), *how]
    given = {"nodes": 1, "ranks_per_node": RANKS, **options}
    return Job(root, script=SCRIPT, arguments=arguments, policy=ROOMY, options=["--mindio"], **given)


def loads(job: Job, rank: int, life: int = 1) -> list[list[Any]]:
    """Return the arguments of the repair handler in a process, the names of kinds and ranks left out."""
    calls = [call[2:] for call in handlers(job, rank, life) if call[0] == "repair"]
    for step, rebuilt, _, info, *rest in calls:
        assert info == {
            "type": [0],
            "repair_type": LOAD_REBUILT if rebuilt else LOAD,
            "src": [],
            "dst": [],
            "rank_list": [],
        }
        assert rest == [ARGUMENTS, NO_CONTEXT], step
    return [call[:3] for call in calls]


def assert_ended_alike(job: Job, calm: Record) -> None:
    """Each step was done with the bits of the undisturbed training, and so are the ends."""
    record = job.record()
    assert {rank: end["state"] for rank, end in record.ends.items()} == {
        rank: end["state"] for rank, end in calm.ends.items()
    }
    assert_same_steps(record, calm)


def test_where_no_copy_is_left_all_load_the_scripts_checkpoint_and_live_on(
    calm: Record, saved: Path, tmp_path: Path
) -> None:
    """Both holders of a half are killed, twice; the first time one of the new processes, too, while it loads."""
    kills: list[Fault] = [
        (rank, step, "before", "kill") for step, ranks in ((17, (1, 3)), (22, (0, 2))) for rank in ranks
    ]
    job = start(tmp_path, saved, faults=[*kills, (1, "load")])
    try:
        job.wait()
        incidents = finish(job)["incidents"]
    finally:
        job.close()
    assert [set(each["replaced"]) for each in incidents] == [{1, 3}, {0, 2}], job.said()
    assert all(each["healthy_pids_kept"] for each in incidents)
    assert [each["resumed_step"] for each in incidents] == [5, 10]
    assert_ended_alike(job, calm)


def test_a_lost_node_and_damaged_memory_without_replicas_cost_no_living_process(
    calm: Record, saved: Path, tmp_path: Path
) -> None:
    """New processes are on a node without anything of the job; a rank with damaged memory is told to make it again."""
    job = start(
        tmp_path,
        saved,
        "alone",
        faults=[(0, 22, "before", "memory")],
        nodes=2,
        ranks_per_node=RANKS // 2,
        spares=1,
        gates=[17, 21],
    )
    try:
        job.held_at(17 - BEGUN)
        job.kill_node("node1")
        job.open_gate(17)
        job.held_at(21 - BEGUN)  # a fault in an incident that is still open belongs to that
        job.open_gate(21)
        job.wait()
        incidents = finish(job)["incidents"]
    finally:
        job.close()
    assert [set(each["replaced"]) for each in incidents] == [{2, 3}, set()], job.said()
    assert all(each["healthy_pids_kept"] for each in incidents)
    assert [each["resumed_step"] for each in incidents] == [5, 10]
    assert loads(job, 0) == [[FIRST + 15, False, [2, 3]], [FIRST + 20, True, [0]]]
    assert loads(job, 1)[1] == loads(job, 2, 2)[1] == [FIRST + 20, False, [0]]
    assert_ended_alike(job, calm)


@pytest.mark.parametrize(
    ("says", "resumed"),
    [("wrong", 10), ("wrong, load ckpt step=115", 5)],
    ids=["the newest", "a chosen one"],
)
def test_numbers_that_the_script_finds_wrong_take_all_back_to_a_checkpoint_of_its_choice(
    says: str, resumed: int, calm: Record, saved: Path, tmp_path: Path
) -> None:
    """All processes live on. The ranks that were stopped before they had found the same hear of the step."""
    job = start(tmp_path, saved, faults=[(1, 22, "before", says)])
    try:
        job.wait()
        (incident,) = finish(job)["incidents"]
    finally:
        job.close()
    assert not incident["replaced"], job.said()
    assert incident["healthy_pids_kept"]
    assert (incident["rung"], incident["resumed_step"]) == ("retry_step", resumed)
    assert all(loads(job, rank) == [[FIRST + BEGUN + resumed, False, []]] for rank in range(RANKS))
    assert_ended_alike(job, calm)


@pytest.mark.soak
def test_a_node_whose_ranks_have_no_replica_is_drained_by_a_dump(calm: Record, saved: Path, tmp_path: Path) -> None:
    """It is written between two steps and loaded by all, so no step is lost."""
    job = start(tmp_path, saved, "alone", "slow", nodes=2, ranks_per_node=RANKS // 2, spares=1, gates=[12])
    try:
        job.held_at(12 - BEGUN)
        done = CliRunner().invoke(main, ["drain", "node1", str(job.directory), "--why", "repairs"])
        assert done.exit_code == 0, done.output
        job.until(lambda status: status.phase == "pausing", "a boundary")
        job.open_gate(12)
        job.wait()
        (incident,) = finish(job)["incidents"]
    finally:
        job.close()
    assert (set(incident["replaced"]), incident["steps_lost"]) == ({2, 3}, 0), job.said()
    assert incident["healthy_pids_kept"]
    assert [step for step, *_ in loads(job, 0)] == [FIRST + incident["resumed_step"] + BEGUN]
    assert_ended_alike(job, calm)


@pytest.mark.soak
def test_a_script_that_loads_another_step_than_planned_is_started_again(
    calm: Record, saved: Path, tmp_path: Path
) -> None:
    """Otherwise midstep would count other steps than the script does."""
    kills = [(rank, 17, "before", "kill") for rank in (1, 3)]
    job = start(tmp_path, saved, "lies", faults=kills)
    try:
        job.wait()
        (incident,) = finish(job)["incidents"]
    finally:
        job.close()
    assert "of step 115, and has loaded the one of step 114" in json.dumps(incident), job.said()
    assert set(incident["replaced"]) == set(range(RANKS))
    assert_ended_alike(job, calm)
