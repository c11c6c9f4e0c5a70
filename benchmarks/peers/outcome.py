"""Work out from the lines of its processes how a run went. Pure: lines in, figures out."""

import itertools
import statistics
from collections.abc import Iterable, Sequence

import msgspec

from .course import Course
from .kinds import WARM_UP_STEPS
from .notes import Finished, Process, Stepped


class NoRecovery(ValueError):
    """The lines do not show that training went on. `course`: under a schedule, as far as it came."""

    def __init__(self, why: str, course: Course | None = None) -> None:
        super().__init__(why)
        self.course = course


class Outcome(msgspec.Struct, frozen=True):
    """One run. Times in seconds.

    `recovery_s`: from the fault until all ranks of a world had completed one and the same step again; `world`: how many
    they were. `excess_s`: beyond one median step. `wall_lost_s`: from the end of the step before the fault to that of
    the faulty one, beyond one median step; what was done again is in it. All three are zero where there was no fault.
    """

    step_s: float
    world: int
    digest: str  # of the parameters at the end, "" where the processes do not agree on them
    recovery_s: float = 0.0
    excess_s: float = 0.0
    wall_lost_s: float = 0.0
    steps_repeated: int = 0
    processes_restarted: int = 0


def undisturbed(processes: Sequence[Process], ranks: int) -> Outcome:
    """Work out a run in which nothing happened. Raises NoRecovery when it did not end."""
    ends = _complete(processes, ranks)
    digest = _digest(processes, ranks)
    if digest is None:
        raise NoRecovery("it did not finish")
    return Outcome(
        _median_step_s([at_s for step, at_s in sorted(ends.items()) if step >= WARM_UP_STEPS]), ranks, digest
    )


def recovered(
    processes: Sequence[Process], ranks: int, fault_s: float, fault_step: int, fewest: int | None = None
) -> Outcome:
    """Work out a run with one fault. `fewest`: ranks that may be left. Raises NoRecovery with what is missing."""
    before = _complete([process for process in processes if process.began_s <= fault_s], ranks)
    usual_s = _median_step_s([before[step] for step in range(WARM_UP_STEPS, fault_step) if step in before])
    fewest = ranks - 1 if fewest is None else fewest
    for world in range(ranks, fewest - 1, -1):
        again = _complete(processes, world, after_s=fault_s)
        digest = _digest(processes, world)
        if fault_step in again and digest is not None:
            first_s = min(again.values())
            return Outcome(
                step_s=usual_s,
                world=world,
                digest=digest,
                recovery_s=first_s - fault_s,
                excess_s=first_s - fault_s - usual_s,
                wall_lost_s=again[fault_step] - before[fault_step - 1] - usual_s,
                steps_repeated=fault_step - min(again),
                processes_restarted=sum(_takes_over(process, fault_s) for process in processes),
            )
    raise NoRecovery(f"no world of {ranks} to {fewest} ranks trained to the end after the fault")


def _takes_over(process: Process, fault_s: float) -> bool:
    """Return whether a process trained after the fault and not before it; when it was begun does not matter."""
    steps = [note.at_s for note in process.notes if isinstance(note, Stepped)]
    return bool(steps) and min(steps) > fault_s


def finished(processes: Iterable[Process]) -> int:
    """Return how many processes have come to the end."""
    return sum(isinstance(process.notes[-1], Finished) for process in processes)


def _median_step_s(ends: list[float]) -> float:
    if len(ends) < 2:
        raise NoRecovery("too few steps were complete before the fault")
    return statistics.median(later - earlier for earlier, later in itertools.pairwise(ends))


def _complete(processes: Sequence[Process], world: int, after_s: float = 0.0) -> dict[int, float]:
    """Return when each step was complete in a world of this size: by its first time in each process the last one."""
    ends: dict[int, dict[int, float]] = {}
    for process in processes:
        for note in process.notes:
            if isinstance(note, Stepped) and note.world == world and note.at_s > after_s:
                ends.setdefault(note.step, {}).setdefault(process.pid, note.at_s)
    return {step: max(by_pid.values()) for step, by_pid in ends.items() if len(by_pid) >= world}


def _digest(processes: Sequence[Process], world: int) -> str | None:
    """Return the digest on which all agree, "" if they do not; None if fewer than the world have finished."""
    digests = [process.notes[-1].digest for process in processes if isinstance(process.notes[-1], Finished)]
    if len(digests) < world:
        return None
    return digests[0] if len(set(digests)) == 1 else ""
