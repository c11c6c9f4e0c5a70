"""What has to hold after every recovery, whatever happened."""

from typing import Any

from .jobs import RANKS, Job, Record


def assert_same_numbers(record: Record, undisturbed: Record, *, ranks: int = RANKS) -> None:
    """Every rank ended, and every step that was done, once or again, gave the bits of the undisturbed run."""
    assert sorted(record.ends) == list(range(ranks)), "not every rank has come to its end"
    for rank, end in record.ends.items():
        differing = [key for key, value in undisturbed.ends[rank].items() if key != "pid" and end[key] != value]
        assert not differing, f"rank {rank} ended with other {', '.join(differing)}"
    assert_same_steps(record, undisturbed)


def assert_same_steps(record: Record, undisturbed: Record) -> None:
    """Every step that was done, once or again, gave the bits of the undisturbed run."""
    for rank, steps in record.steps.items():
        other = [index for index, found in steps.items() if found != undisturbed.steps[rank][index]]
        assert not other, f"rank {rank} computed something else in steps {other}"


def assert_nobody_harmed(incident: dict[str, Any], replaced: set[int], *, ranks: int = RANKS) -> None:
    """The incident was mended by replacing just these ranks; nobody else lost a process, nobody a step."""
    assert incident["outcome"] == "resumed", incident
    assert set(incident["replaced"]) == replaced, incident
    before, after = incident["pids_before"], incident["pids_after"]
    kept = {rank for rank in before if before[rank] == after.get(rank)}
    # On several machines the newcomer may have the number that the process before had elsewhere.
    assert kept >= {str(rank) for rank in range(ranks)} - {str(rank) for rank in replaced}, incident
    assert incident["healthy_pids_kept"], incident
    assert incident["steps_lost"] == 0, incident
    assert incident["restore"] == "replica", incident


def finish(job: Job) -> dict[str, Any]:
    """Wait for a job that has to end well, see that nothing is left of it, and return its report."""
    assert job.wait() == 0, job.said()
    job.assert_nothing_left()
    return job.report()
