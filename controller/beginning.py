"""Whether training may begin at its first step: a pure function of the reports of barrier one.

Where a checkpoint has once been complete, to begin at the first step throws training away. That is what the user
decides, by `checkpoint.begin_again`, and never a file that could not be read.
"""

from collections.abc import Iterable, Mapping

from ..protocol.types import RestoreSource, StepReport

INSTEAD = (
    "name another checkpoint.directory, or set checkpoint.begin_again: true to begin at the first step all the same, "
    "which keeps what is there under other names"
)


def why_not_begin(
    reports: Mapping[int, StepReport],
    *,
    restore: Iterable[str],
    trusted_step: int | None,
    begin_again: bool,
    marked_before: bool,
) -> str:
    """Return why training must not begin at its first step; empty: it may.

    Runs at barrier one, in the controller, when a plan leads to step 0. `marked_before`: this job has trained before,
    and marked the checkpoint directory then. Where a directory cannot be listed, `begin_again` does not help: what is
    there could not be distinguished from later checkpoints.
    """
    where = next((report.trace.directory for report in reports.values() if report.trace.directory), "the directory")
    unlisted = {rank: report.trace.unlisted for rank, report in reports.items() if report.trace.unlisted}
    if unlisted:
        rank, why = next(iter(unlisted.items()))
        return (
            f"training does not begin at its first step, as rank {rank}{_others(unlisted)} does not know whether "
            f"checkpoints are there: {why}. Mend {where} and start the job again"
        )
    if begin_again:
        return ""
    found = _found(reports, restore=tuple(restore), trusted_step=trusted_step, where=where)
    if not found and marked_before and all(report.trace.unmarked for report in reports.values()):
        found = f"this job has marked {where}, and no rank finds the mark there: it is empty, or not mounted. Mend it"
    return f"training does not begin at its first step: {found}, {INSTEAD}" if found else ""


def _found(reports: Mapping[int, StepReport], *, restore: tuple[str, ...], trusted_step: int | None, where: str) -> str:
    """Say which trace of checkpoints there is and what can be done about it; empty where there is none."""
    readers = {rank: report.checkpoints for rank, report in reports.items() if report.checkpoints}
    if readers:
        rank, steps = next(iter(readers.items()))
        there = f"rank {rank}{_others(readers)} can read the checkpoint of step {max(steps)} in {where}"
        if RestoreSource.CHECKPOINT not in restore:
            return f"{there}, and restore is without checkpoint. Add it to continue from there"
        if trusted_step is not None and min(steps) > trusted_step:
            return f"{there}, and no state of more than {trusted_step} updates can be trusted. Bring an older one back"
        blind = [rank for rank, report in reports.items() if not report.checkpoints]
        cannot = f"rank {blind[0]}{_others(blind)} none" if blind else "no checkpoint can be read by all"
        return f"{there}, and {cannot}. Mount one directory on all nodes"
    for rank, report in reports.items():
        if report.trace.unusable:
            return f"no checkpoint in {where} can be used, says rank {rank}: {report.trace.unusable}. Bring one back"
    return ""


def _others(ranks: Mapping[int, object] | list[int]) -> str:
    others = len(ranks) - 1
    return f" (and {others} more)" if others else ""
