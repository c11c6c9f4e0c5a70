"""The lines that processes of a workload write, each with the time of the machine's one clock.

No peer is asked how it did. A line is in its file when the call that writes it returns, so a process may die right
after.
"""

import os
import time
from pathlib import Path

import msgspec

_FAULT = "fault-"
_PREFIX = "process-"


class Began(msgspec.Struct, frozen=True, tag="began"):
    """The script was entered."""

    at_s: float


class Stepped(msgspec.Struct, frozen=True, tag="stepped"):
    """A step is complete, its update included, in a world of so many ranks."""

    at_s: float
    step: int
    world: int
    place: int = 0  # the rank, or what a peer has instead


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """All steps are done; `digest` is that of the parameters."""

    at_s: float
    digest: str


Note = Began | Stepped | Finished


class Process(msgspec.Struct, frozen=True):
    """The lines that one process wrote, in its order."""

    pid: int
    notes: tuple[Note, ...]

    @property
    def began_s(self) -> float:
        """When its script was entered."""
        return self.notes[0].at_s


class Writer:
    """Writes the notes of this process."""

    def __init__(self, directory: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._fd = os.open(directory / f"{_PREFIX}{os.getpid()}.jsonl", flags, 0o600)
        self._write(Began(time.monotonic()))

    def stepped(self, step: int, world: int, place: int = 0) -> None:
        """Note a step, with the number of ranks that took part."""
        self._write(Stepped(time.monotonic(), step, world, place))

    def finished(self, digest: str) -> None:
        """Note the end."""
        self._write(Finished(time.monotonic(), digest))

    def _write(self, note: Note) -> None:
        os.write(self._fd, msgspec.json.encode(note) + b"\n")


def note_fault(directory: Path, number: int) -> bool:
    """Note that a fault of the schedule happens now. Returns False if it has happened before."""
    try:
        with (directory / f"{_FAULT}{number}").open("x") as file:
            file.write(str(time.monotonic()))
    except FileExistsError:
        return False
    return True


def read_faults(directory: Path) -> dict[int, float]:
    """Return when each fault happened of those that did, by its number in the schedule."""
    return {int(file.name.removeprefix(_FAULT)): float(file.read_text()) for file in directory.glob(f"{_FAULT}*")}


def read_processes(directory: Path) -> list[Process]:
    """Return what each process has written so far, in the order in which they began."""
    decoder: msgspec.json.Decoder[Note] = msgspec.json.Decoder(Note)
    found = []
    for path in directory.glob(f"{_PREFIX}*.jsonl"):
        notes = tuple(map(decoder.decode, path.read_bytes().splitlines()))
        if notes:
            found.append(Process(int(path.stem.removeprefix(_PREFIX)), notes))
    return sorted(found, key=lambda process: process.began_s)
