"""Readings, the common form of all fault documents: each is one fault at one place. And checks of their values.

Everything here is pure. A document is taken as a whole or not at all: one with a mistake anywhere is refused with the
place of the mistake, since in the part that can be read a device may seem healthy because the other part is missing.
"""

import json
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec

from ..policies.fault_codes import LevelName, level_named
from ..protocol.errors import DocumentError
from ..protocol.types import Assertion, FaultKind, FaultLevel, FaultReport

MAX_DOCUMENT_BYTES = 4 << 20  # a ConfigMap has at most 1 MiB; a list of them, as `kubectl get` prints, more
MAX_READINGS = 10_000  # of one document
MAX_ID = 500  # characters of a code with its place
MAX_NAME = 253  # of a node, and of a key, as Kubernetes has them
MAX_DEVICE = 4096  # larger numbers are not devices of a node
MAX_TEXT = 2000  # of a detail
_MILLISECONDS_FROM = 1e11  # larger times are milliseconds: as seconds they would be in the year 5138
_SHOWN = 120

T = TypeVar("T")
Report = Callable[[FaultReport], None]  # where a detector reports every fault that occurs or recovers


class Reading(msgspec.Struct, frozen=True):
    """One fault at one place, from a document. `level` None: the code decides; `at_s` 0: not known.

    Where it is: a node (and a device of it), or, with `node` empty, wherever `rank` runs.
    """

    kind: FaultKind
    fault_id: str
    node: str
    device: int | None = None
    code: str | None = None
    level: FaultLevel | None = None
    assertion: Assertion = Assertion.OCCUR
    at_s: float = 0.0
    detail: str = ""
    rank: int | None = None

    def report(self, seen_by: str, now: float) -> FaultReport:
        """Return the reading as `seen_by` reports it at `now` (wall-clock seconds)."""
        return FaultReport(
            kind=self.kind,
            at_s=now,
            age_s=now - self.at_s if 0 < self.at_s <= now else 0.0,
            seen_by=seen_by,
            detail=self.detail,
            node=self.node or None,
            rank=self.rank,
            device=self.device,
            level=self.level or FaultLevel.SOFTWARE,
            code=self.code,
            fault_id=self.fault_id,
            assertion=self.assertion,
        )


def decoded(key: str, text: str | bytes, form: type[T]) -> T:
    """Return JSON text as `form`. Raises DocumentError with the key and the path in it."""
    try:
        return msgspec.json.decode(text, type=form)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise DocumentError(key, plain(str(error))) from error


def converted(key: str, value: Any, form: type[T]) -> T:
    """Return plain values as `form`. Raises DocumentError."""
    try:
        return msgspec.convert(value, type=form)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise DocumentError(key, plain(str(error))) from error


def level_of(key: str, name: str) -> FaultLevel | None:
    """Return the level that a document names; None when it names none. Raises DocumentError for an unknown one."""
    try:
        if len(name) > MAX_NAME:
            raise ValueError
        return level_named(LevelName(name.strip())) if name.strip() else None
    except ValueError:
        raise DocumentError(key, f"{shown(name)} is not a level; known: {', '.join(LevelName)}") from None


def node_name(key: str, name: str) -> str:
    """Return the name of a node if it is a valid one. Raises DocumentError."""
    if not 0 < len(name) <= MAX_NAME or not name.isprintable() or any(letter in name for letter in " /"):
        raise DocumentError(key, f"{shown(name)} is not a valid name of a node")
    return name


def seconds(time: float) -> float:
    """Return a time of a document, which may be in milliseconds, as seconds; 0 for an invalid one."""
    if not 0 < time < _MILLISECONDS_FROM * 1000:
        return 0.0
    return time / 1000 if time >= _MILLISECONDS_FROM else float(time)


def bounded(key: str, readings: Iterable[Reading]) -> tuple[Reading, ...]:
    """Return the readings of a document, each fault once. Raises DocumentError when they are too many to be real.

    Takes them one by one, so that no more are made than may be.
    """
    kept: dict[str, Reading] = {}
    for number, reading in enumerate(readings):
        if number >= MAX_READINGS:
            raise DocumentError(key, f"more than {MAX_READINGS} faults; a real document has fewer")
        if len(reading.fault_id) > MAX_ID or len(reading.code or "") > MAX_ID:
            raise DocumentError(key, f"{shown(reading.code or reading.fault_id)} is longer than a code can be")
        kept[reading.fault_id] = reading
    return tuple(kept.values())


def shown(value: object) -> str:
    """Format a value for a message: a text in quotes, on one line, cut; the content of a list is not shown."""
    match value:
        case None:
            return "nothing"
        case dict():
            return "a mapping"
        case list():
            return "a list"
        case str():
            return json.dumps(value[:_SHOWN])
        case _:
            return str(value)[:_SHOWN]


def plain(text: str, most: int = 2 * _SHOWN) -> str:
    """Return a text on one line, cut to `most` characters, with ? for unprintable ones."""
    cut = text if len(text) <= most else f"{text[: most - 3]}..."
    return "".join(letter if letter.isprintable() else "?" for letter in " ".join(cut.split()))
