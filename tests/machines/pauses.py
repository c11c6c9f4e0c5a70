"""How long a training pauses, seen from outside: by the files in which its ranks write down each step."""

import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

LOOK_S = 0.005
ASK_S = 0.1
LIMIT_S = 300.0


class Pauses(threading.Thread):
    """Notes when every rank has made a step more, from the files that they write; asks no controller.

    By the times of the files: this process may look late, and a pause would then seem shorter than it was.
    """

    def __init__(self, records: Path, ranks: int) -> None:
        super().__init__(name="steps", daemon=True)
        self._files = files_of(records, ranks)
        self._seen_s: list[float] = []
        self._enough = threading.Event()

    def run(self) -> None:
        """Look until it is enough."""
        sizes = [file.stat().st_size for file in self._files]
        while not self._enough.wait(LOOK_S):
            grown = [file.stat() for file in self._files]
            if all(now.st_size > before for now, before in zip(grown, sizes, strict=True)):
                sizes = [now.st_size for now in grown]
                self._seen_s.append(max(now.st_mtime for now in grown))

    def stop(self, since_s: float) -> float:
        """Return the longest pause since then (a wall-clock time), also one that has begun just before."""
        self._enough.set()
        self.join()
        return max(after - before for before, after in pairwise(self._seen_s) if after >= since_s)


def files_of(records: Path, ranks: int) -> Sequence[Path]:
    """Return the files in which ranks write down their steps."""
    return [records / f"steps.{rank}" for rank in range(ranks)]


def until_more(records: Path, ranks: int, steps: int, said: Callable[[], str]) -> None:
    """Wait until each rank has made so many steps more; counts lines, of which the last may be half written.

    `said`: what the job has printed, for an AssertionError when that takes too long.
    """
    files = files_of(records, ranks)
    wanted = [_lines(file) + steps for file in files]
    deadline = time.monotonic() + LIMIT_S
    while any(_lines(file) < count for file, count in zip(files, wanted, strict=True)):
        assert time.monotonic() < deadline, said()
        time.sleep(ASK_S)


def _lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0
