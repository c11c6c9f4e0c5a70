"""The figures of one day in one small file, and the files that are kept."""

import enum
from pathlib import Path
from typing import Any

import msgspec

HISTORY = Path(__file__).parents[1] / "history"


class Better(enum.Enum):
    """The direction in which a figure gets better."""

    LOWER = "lower"
    HIGHER = "higher"


class Figure(msgspec.Struct, frozen=True):
    """One measured value: the median of its repetitions, with least and greatest.

    `yardstick`: whether it is a ratio to something that was measured in the same minutes. What is not can be compared
    on the same machine only, and only if that was quiet.
    """

    name: str
    median: float
    least: float
    greatest: float
    unit: str = ""
    better: Better = Better.LOWER
    yardstick: bool = False


class Record(msgspec.Struct, frozen=True):
    """The findings of one call of `make bench`."""

    day: str  # ISO 8601
    commit: str
    machine: dict[str, Any]
    foreign_cores: float
    figures: tuple[Figure, ...]


def read(file: Path) -> Record:
    """Read a record. Raises msgspec.ValidationError and OSError."""
    return msgspec.json.decode(file.read_bytes(), type=Record)


def write(record: Record, file: Path) -> None:
    """Write a record."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")


def kept(history: Path = HISTORY) -> list[Record]:
    """Return the kept records, the oldest first."""
    return [read(file) for file in sorted(history.glob("*.json"))]


def keep(record: Record, history: Path = HISTORY) -> Path:
    """Keep a record; return its file. Later ones of a day do not replace it."""
    number = len(list(history.glob(f"{record.day}*.json"))) + 1
    file = history / f"{record.day}-{number}.json"
    write(record, file)
    return file
