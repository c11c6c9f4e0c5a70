"""The records that a measured job writes by the machine's one clock, and the figures that follow from them.

Nothing here asks midstep how it did: the same lines come from a job under torchrun, so the comparison is fair.
"""

import itertools
import json
import os
import signal
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KILL_FILE = "kill"
LOSE_NODE = "MIDSTEP_BENCH_LOSE_NODE"  # set: not one rank is killed, but its node
NEIGHBOUR_S = 0.2  # a rank that goes with the node has noted its last step by then
VOTED = "voted"  # in this step
AROUND = 2  # steps before and after
WARM_UP_STEPS = 5  # the first steps allocate; no median counts them
BUSY = "busy_s"  # what all cores have worked by the end of the warm-up, and by the end of the job


class Recorder:
    """One process's notes: each is in the file, with its time, when the call returns."""

    def __init__(self, directory: Path, rank: int) -> None:
        path = directory / f"rank-{rank}.{os.getpid()}.jsonl"
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def mark(self, name: str) -> None:
        """This process has come to a certain place."""
        self._write({"mark": name})

    def step(self, index: int) -> None:
        """This process has completed a step, its update included."""
        self._write({"step": index})

    def note(self, name: str, value: float) -> None:
        """Something was measured."""
        self._write({"name": name, "value": value})

    def _write(self, note: dict[str, Any]) -> None:
        os.write(self._fd, json.dumps({**note, "at_s": time.monotonic()}).encode() + b"\n")


def kill_once(directory: Path) -> None:
    """End this process, or its node, as a power cut would, and note when; only once in a run."""
    if not (directory / KILL_FILE).exists():
        if os.environ.get(LOSE_NODE):
            time.sleep(NEIGHBOUR_S)
        (directory / KILL_FILE).write_text(str(time.monotonic()))
        if os.environ.get(LOSE_NODE):
            os.kill(os.getppid(), signal.SIGKILL)  # the agent, and everything on its node ends with it
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Life:
    """The records of one process: when it reached its marks and completed its steps. Seconds, monotonic."""

    rank: int
    marks: dict[str, float]
    steps: tuple[tuple[int, float], ...]

    @property
    def began_s(self) -> float:
        """When the script began."""
        return min(self.marks.values())

    def took_over(self, killed_s: float) -> bool:
        """Return whether it trained after the kill and not before. It may have begun before that, and waited."""
        return bool(self.steps) and self.steps[0][1] > killed_s


@dataclass(frozen=True)
class Recovery:
    """One recovery as the job itself saw it. All in seconds.

    `recovery_s`: from the kill until all ranks had completed one and the same step again. `excess_s`: beyond one median
    step. `wall_lost_s`: what the interrupted step took from the end of the one before it, beyond one median step; the
    steps that were done again are in it.
    """

    recovery_s: float
    excess_s: float
    wall_lost_s: float
    median_step_s: float
    steps_repeated: int
    processes_started: int
    newcomer: dict[str, float]  # how long the slowest new process took from one mark to the next


def read_lives(directory: Path) -> list[Life]:
    """Return what all processes of a run wrote, in the order in which they began."""
    lives = []
    for path in directory.glob("rank-*.jsonl"):
        notes = [json.loads(line) for line in path.read_text().splitlines()]
        marks = {note["mark"]: note["at_s"] for note in notes if "mark" in note}
        steps = tuple((note["step"], note["at_s"]) for note in notes if "step" in note)
        lives.append(Life(int(path.stem.split("-")[1].split(".")[0]), marks, steps))
    return sorted(lives, key=lambda life: life.began_s)


def noted(directory: Path, name: str) -> list[float]:
    """Return all that was measured under a name."""
    notes = [json.loads(line) for path in directory.glob("rank-*.jsonl") for line in path.read_text().splitlines()]
    return [note["value"] for note in notes if note.get("name") == name]


def recovery(directory: Path, ranks: int, killed_step: int) -> Recovery:
    """Work out one recovery from the notes of a run. Raises ValueError when there was none."""
    try:
        killed_s = float((directory / KILL_FILE).read_text())
    except OSError as error:
        raise ValueError(f"nobody was killed: {error}") from error
    lives = read_lives(directory)
    again_s = _complete(lives, ranks, lambda at_s: at_s > killed_s)
    before_s = _complete(lives, ranks, lambda at_s: True)
    new = [life for life in lives if life.took_over(killed_s)]
    if not again_s or killed_step not in again_s or not new:
        raise ValueError("the ranks did not all come back")
    first_s = min(again_s.values())
    usual_s = _median_step_s([before_s[step] for step in range(WARM_UP_STEPS, killed_step)])
    return Recovery(
        recovery_s=first_s - killed_s,
        excess_s=first_s - killed_s - usual_s,
        wall_lost_s=again_s[killed_step] - before_s[killed_step - 1] - usual_s,
        median_step_s=usual_s,
        steps_repeated=killed_step - min(again_s),
        processes_started=len(new),
        newcomer=_newcomer(new, killed_s, first_s),
    )


def median_step_s(directory: Path, ranks: int) -> float:
    """Return the median step time of a run in which nothing happened, warm-up aside."""
    ends = _complete(read_lives(directory), ranks, lambda at_s: True)
    return _median_step_s([at_s for step, at_s in sorted(ends.items()) if step >= WARM_UP_STEPS])


def cost_of_votes(directory: Path, ranks: int) -> float | None:
    """Return how much longer an undisturbed run takes for its votes, as a ratio, warm-up aside.

    A step with a vote is held against those around it: steps of one run differ by more in its course than a vote costs.
    None: there were not both kinds.
    """
    ends = sorted(_complete(read_lives(directory), ranks, lambda at_s: True).items())
    took_s = {step: at_s - before_s for (_, before_s), (step, at_s) in itertools.pairwise(ends) if step > WARM_UP_STEPS}
    voted = {int(step) for step in noted(directory, VOTED)}.intersection(took_s)
    plain = took_s.keys() - voted
    more_s = [
        took_s[step] - statistics.mean(took_s[each] for each in near)
        for step in voted
        if (near := plain.intersection(range(step - AROUND, step + AROUND + 1)))
    ]
    if not more_s:
        return None
    in_all_s = statistics.mean(more_s) * len(voted)
    return 1 + in_all_s / (sum(took_s.values()) - in_all_s)


def _median_step_s(ends: list[float]) -> float:
    return statistics.median(later - earlier for earlier, later in itertools.pairwise(ends))


def _complete(lives: list[Life], ranks: int, counts: Callable[[float], bool]) -> dict[int, float]:
    """Return when each step was first complete on all ranks, of the completions whose time `counts`."""
    ends: dict[int, dict[int, float]] = {}
    for life in lives:
        for step, at_s in life.steps:
            if counts(at_s):
                ends.setdefault(step, {}).setdefault(life.rank, at_s)
    return {step: max(by_rank.values()) for step, by_rank in ends.items() if len(by_rank) == ranks}


def _newcomer(lives: list[Life], killed_s: float, first_s: float) -> dict[str, float]:
    latest: dict[str, float] = {}
    for life in lives:
        for name, at_s in life.marks.items():
            if at_s > killed_s:
                latest[name] = max(at_s, latest.get(name, 0.0))
    phases, last_s = {}, killed_s
    for name, at_s in sorted(latest.items(), key=lambda item: item[1]):
        phases[name], last_s = at_s - last_s, at_s
    return {**phases, "first step": first_s - last_s}
