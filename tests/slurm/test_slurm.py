"""A job as docs/clusters.md has users give it to Slurm: what is lost of it, how it is ended. The bits stay the same."""

import pytest

from midstep.protocol.token import TOKEN_VARIABLE
from midstep.protocol.types import FaultKind

from ..chaos.comparing import assert_nobody_harmed, assert_same_numbers, assert_same_steps
from ..chaos.jobs import Record
from ..machines.machines import Machine
from .conftest import RANKS, STEPS, StartJob
from .job import BATCH, WITHOUT_SPARE, End, SlurmJob

KILLED, OFF, END = 20, 40, STEPS - 1
FIRST = 1  # of Slurm's machines; it has the controller
SLOW_S = 0.05  # a step, so that the job is not over before it can be stopped
STOPPED_S = 120.0
INTERRUPTED = 130


def test_a_killed_rank_and_a_machine_without_power_change_no_bit(start_job: StartJob, undisturbed: Record) -> None:
    """The spare takes over, and Slurm, which has given the machine up, lets the others end well."""
    job = start_job(gates=(KILLED, OFF, END))
    for rank in job.held_at(KILLED).ranks:
        assert TOKEN_VARIABLE not in job.machine_of(rank.rank).run("cat", f"/proc/{rank.pid}/environ")
    job.kill_rank(1)
    job.until(lambda status: len(status.incidents) >= 1, "the killed rank to be seen")
    job.open_gate(KILLED)

    job.held_at(OFF)
    machine, lost = not_the_first(job)
    machine.power_off()
    job.until(lambda status: len(status.incidents) >= 2, "the lost machine to be seen")
    job.open_gate(OFF)
    job.held_at(END)
    until_given_up(job, machine)
    job.open_gate(END)

    report = job.finish()
    assert [incident["rung"] for incident in report["incidents"]] == ["recover_in_place", "recover"]
    for incident, replaced in zip(report["incidents"], (1, lost), strict=True):
        assert_nobody_harmed(incident, {replaced}, ranks=RANKS)
    causes = [incident["cause"].split(":")[0] for incident in report["incidents"]]
    assert causes == [FaultKind.EXIT, FaultKind.NODE_LOST]
    assert_same_numbers(job.record(), undisturbed, ranks=RANKS)
    assert job.end() == End("COMPLETED", "0:0")
    job.assert_nothing_left()


@pytest.mark.parametrize(
    ("options", "end"),
    [((), End("CANCELLED", "0:15")), (("--signal=TERM",), End("FAILED", f"{INTERRUPTED}:0"))],
    ids=["scancel", "scancel --signal=TERM"],
)
def test_a_job_that_is_cancelled_stops_with_a_checkpoint(
    start_job: StartJob, undisturbed: Record, options: tuple[str, ...], end: End
) -> None:
    """Slurm sends SIGTERM to every process on every machine: all of them stay until the step is saved."""
    job = start_job(gates=(KILLED,), step_s=SLOW_S, batch=WITHOUT_SPARE)
    job.held_at(KILLED)
    job.cancel(*options)
    job.open_gate(KILLED)
    job.controller.wait(STOPPED_S)
    report = job.report()
    assert (report["exit_code"], report["incidents"]) == (INTERRUPTED, []), job.said()
    (steps,) = {len(steps) for steps in job.record().steps.values()}
    assert (job.checkpoints / f"step-{steps:08}").is_dir(), job.said()
    assert_same_steps(job.record(), undisturbed)
    assert job.end() == end
    job.assert_nothing_left()


def test_a_job_that_slurm_starts_again_continues_from_the_step_that_was_saved(
    start_job: StartJob, undisturbed: Record
) -> None:
    """Without --no-kill, Slurm ends a job that has lost a machine, and puts it into the queue again."""
    job = start_job(gates=(KILLED, OFF), step_s=SLOW_S, batch=BATCH, srun=())
    job.held_at(KILLED)
    machine, _ = not_the_first(job)
    machine.power_off()
    job.until(lambda status: len(status.incidents) >= 1, "the lost machine to be seen")
    job.open_gate(KILLED)
    job.held_at(OFF)
    job.until_signalled()
    job.open_gate(OFF)

    job.until_queued_again()
    job.cluster.mend()
    job.start_again()
    assert job.finish()["incidents"] == []
    assert_same_numbers(job.record(), undisturbed, ranks=RANKS)
    assert [job.steps_written(rank) for rank in range(RANKS)] == [STEPS] * RANKS, "a step was done twice"
    assert job.end() == End("COMPLETED", "0:0")
    job.assert_nothing_left()


def not_the_first(job: SlurmJob) -> tuple[Machine, int]:
    """Return a machine that has a rank and not the controller, and that rank."""
    status = job.answer()
    rank = next(rank.rank for rank in status.ranks if rank.node != job.machines[FIRST].name)
    return job.machine_of(rank), rank


def until_given_up(job: SlurmJob, machine: Machine) -> None:
    """Wait until Slurm has given a machine up, and done to the job what it does then."""
    cluster = job.cluster
    cluster.until(
        lambda: cluster.states()[machine.name].startswith("down"), machine.name, lambda: f"{cluster.states()}"
    )
