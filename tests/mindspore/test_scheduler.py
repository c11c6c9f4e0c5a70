"""Ranks of `midstep run --mindio` call MindSpore's own `init` and all-reduce; nothing but midstep starts them."""

import json
from pathlib import Path

import pytest

from midstep.agent.scheduler_host import LOG

from .jobs import RANKS, Job, schedulers, until

mindspore = pytest.importorskip("mindspore")

SCRIPT = Path(__file__).with_name("own_collectives.py")
STEPS, GATE = 6, 3
REGISTERS_AGAIN = tuple(map(int, mindspore.__version__.split(".")[:2])) >= (2, 10)
REGISTERED = "is registered successfully"  # MindSpore's scheduler, of each rank


def sums(job: Job, rank: int) -> list[list[int]]:
    """Return the step, the sum and the process of each step of a rank."""
    file = job.records / f"sums.{rank}"
    return [[int(part) for part in line.split()] for line in file.read_text().splitlines()] if file.exists() else []


@pytest.mark.skipif(not REGISTERS_AGAIN, reason="ranks of this MindSpore do not register again")
@pytest.mark.timeout(700)
def test_its_own_collectives_work_and_outlive_a_scheduler_that_is_killed(tmp_path: Path) -> None:
    """The next one serves the same place, all ranks register there, nothing is replaced; it ends with the job."""
    (tmp_path / "job" / "records").mkdir(parents=True)
    gate = tmp_path / "job" / "records" / f"gate.{GATE}"
    gate.touch()
    options = ["--mindio", "--env", "MINDIO_FOR_MINDSPORE=1", "--env", "GLOG_v=2"]
    job = Job(tmp_path / "job", options=options, script=SCRIPT, arguments=[str(STEPS)])
    until(lambda: all(len(sums(job, rank)) > GATE for rank in range(RANKS)), "the first steps")
    log = job.directory / "logs" / LOG
    assert log.read_text().count(REGISTERED) == RANKS
    [first] = schedulers(job)
    first.kill()
    until(lambda: log.read_text().count(REGISTERED) == 2 * RANKS, "all ranks at the next scheduler")
    [second] = schedulers(job)
    gate.unlink()

    assert job.finish() == []
    assert not second.is_running()
    for rank in range(RANKS):
        said = sums(job, rank)
        assert [[step, total] for step, total, _ in said] == [
            [step, sum(each + step for each in range(RANKS))] for step in range(STEPS)
        ]
        assert len({pid for _, _, pid in said}) == 1
        size, told = json.loads((job.records / f"end.{rank}.json").read_text())
        assert size == RANKS
        assert told == {
            **{"MS_ROLE": "MS_WORKER", "MS_NODE_ID": str(rank), "MS_WORKER_NUM": str(RANKS), "MS_ENABLE_RECOVERY": "1"},
            **{"RANK_ID": str(rank), "RANK_SIZE": str(RANKS), "DEVICE_ID": str(rank)},
        }


@pytest.mark.timeout(300)
def test_ranks_that_end_while_no_scheduler_is_there_end(tmp_path: Path) -> None:
    """MindSpore signs off at exit, waits for the scheduler without a limit, and lets no thread of Python run."""
    (tmp_path / "job" / "records").mkdir(parents=True)
    gate = tmp_path / "job" / "records" / f"gate.{GATE}"
    gate.touch()
    options = ["--mindio", "--env", "MINDIO_FOR_MINDSPORE=1"]
    job = Job(tmp_path / "job", options=options, script=SCRIPT, arguments=[str(STEPS)])
    until(lambda: all(len(sums(job, rank)) > GATE for rank in range(RANKS)), "the first steps")
    [scheduler] = schedulers(job)
    scheduler.kill()
    gate.unlink()
    assert job.finish() == []
    assert all(len(sums(job, rank)) == STEPS for rank in range(RANKS))
