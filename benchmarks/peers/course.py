"""Work out from the lines of its processes how a run under a schedule went. Pure: lines in, figures out."""

import itertools
import statistics
from collections.abc import Mapping, Sequence

import msgspec

from .kinds import WARM_UP_STEPS
from .notes import Finished, Process, Stepped


class Course(msgspec.Struct, frozen=True):
    """One run under a schedule of faults. Seconds since its programs were started."""

    done_s: tuple[float, ...]  # when each step was complete for the first time; fewer than planned: it gave up
    worlds: tuple[int, ...]  # of how many ranks it was then
    met: tuple[int, ...]  # the faults that happened, by their numbers in the schedule, in their order
    steps_repeated: int
    processes_restarted: int
    digest: str  # of the parameters at the end; "" where it did not come there, or the processes do not agree

    @property
    def step_s(self) -> float:
        """Return the median time between two steps that follow each other, of the most ranks that there were."""
        most = max(self.worlds, default=0)
        pairs = itertools.pairwise(zip(self.done_s[WARM_UP_STEPS:], self.worlds[WARM_UP_STEPS:], strict=True))
        gaps = [later - earlier for (earlier, before), (later, world) in pairs if before == world == most]
        return statistics.median(gaps) if gaps else 0.0

    def trained(self, ranks: int) -> float:
        """Return how much of the batches of so many ranks was trained: less than 1 when some were left out."""
        return sum(self.worlds) / (len(self.worlds) * ranks) if self.worlds else 0.0

    def goodput(self, ranks: int) -> float:
        """Return which part of its time the batches that it trained take in median steps of its own."""
        return self.step_s * sum(self.worlds) / ranks / self.done_s[-1] if self.done_s else 0.0

    def lost_s(self, ranks: int) -> float:
        """Return the time from the first step to the last one in which it did not train these batches."""
        return self.done_s[-1] - self.done_s[0] - self.step_s * sum(self.worlds[1:]) / ranks if self.done_s else 0.0


def of(processes: Sequence[Process], steps: int, began_s: float, faults: Mapping[int, float]) -> Course:
    """Work out a run whose programs were started at `began_s`. `faults`: when those that were met happened."""
    ends = _ends(processes, steps)
    world = ends[-1][1] if ends else 0
    return Course(
        done_s=tuple(round(at_s - began_s, 3) for at_s, _ in ends),
        worlds=tuple(size for _, size in ends),
        met=tuple(sorted(faults, key=faults.__getitem__)),
        steps_repeated=_repeated(processes),
        processes_restarted=max(0, sum(bool(_steps(process)) for process in processes) - (ends[0][1] if ends else 0)),
        digest=_digest(processes, world) if len(ends) == steps else "",
    )


def enough(processes: Sequence[Process], steps: int, ranks: int) -> int:
    """Return how many processes have to finish: those of the world that did the last step, all before it."""
    worlds = [note.world for process in processes for note in _steps(process) if note.step == steps - 1]
    return min(worlds, default=ranks)


def newest_s(processes: Sequence[Process]) -> float | None:
    """Return when a step was done last that was never done before."""
    first: dict[int, float] = {}
    for process in processes:
        for note in _steps(process):
            first[note.step] = min(note.at_s, first.get(note.step, note.at_s))
    return max(first.values(), default=None)


def _ends(processes: Sequence[Process], steps: int) -> list[tuple[float, int]]:
    """Return when each step, from 0 on, was complete in a world of which size.

    A step whose line a rank did not come to write is complete with the next one that all have written.
    """
    noted: dict[tuple[int, int], dict[int, float]] = {}
    for process in processes:
        for note in _steps(process):
            noted.setdefault((note.step, note.world), {}).setdefault(process.pid, note.at_s)
    complete: dict[int, tuple[float, int]] = {}
    for (step, world), by_pid in noted.items():
        if len(by_pid) >= world:
            end = (sorted(by_pid.values())[world - 1], world)
            complete[step] = min(end, complete.get(step, end))
    ends: list[tuple[float, int]] = []
    for step in reversed(range(steps)):
        known = [each for each in (complete.get(step), ends[-1] if ends else None) if each is not None]
        if known:
            ends.append(min(known))
    return ends[::-1]


def _repeated(processes: Sequence[Process]) -> int:
    """Return how many steps were done again, at the place where most were."""
    done: dict[int, list[int]] = {}
    for process in processes:
        for note in _steps(process):
            done.setdefault(note.place, []).append(note.step)
    return max((len(steps) - len(set(steps)) for steps in done.values()), default=0)


def _digest(processes: Sequence[Process], world: int) -> str:
    digests = [process.notes[-1].digest for process in processes if isinstance(process.notes[-1], Finished)]
    return digests[0] if len(digests) >= world and len(set(digests)) == 1 else ""


def _steps(process: Process) -> list[Stepped]:
    return [note for note in process.notes if isinstance(note, Stepped)]
