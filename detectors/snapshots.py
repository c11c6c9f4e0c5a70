"""What changed between two looks at the same documents: a fault that vanished from one has recovered.

Most documents say what is wrong now, and nothing of what was. Pure: what was found goes in, fault reports come out. A
document that cannot be read, or is gone, changes nothing: the last one that could be read stays in force.
"""

from collections.abc import Iterable

import msgspec
import xxhash

from ..protocol.types import Assertion, FaultKind, FaultLevel, FaultReport
from .documents import Document
from .reading import MAX_ID, Reading

_NO_ERROR = ""
_Saved = tuple[dict[str, dict[str, Reading]], dict[str, str]]


class Snapshots:
    """The last good state of every document of one detector, and what was wrong with each when it was last read."""

    def __init__(self, seen_by: str) -> None:
        """`seen_by`: the address in whose name is reported."""
        self._seen_by = seen_by
        self._faults: dict[str, dict[str, Reading]] = {}  # document -> fault_id -> reading
        self._errors: dict[str, str] = {}

    @property
    def errors(self) -> dict[str, str]:
        """What is wrong with documents now, by name."""
        return dict(self._errors)

    def saved(self) -> bytes:
        """Return what `restore` needs to go on from here."""
        return msgspec.msgpack.encode((self._faults, self._errors))

    def restore(self, data: bytes) -> None:
        """Take over from an earlier life. What cannot be read is forgotten: faults that stand are told of again."""
        try:
            self._faults, self._errors = msgspec.msgpack.decode(data, type=_Saved)
        except msgspec.MsgspecError:
            self._faults, self._errors = {}, {}

    def take(self, documents: Iterable[Document], now: float) -> list[FaultReport]:
        """Return what is to be reported after a look that found `documents`, in their order."""
        reports: list[FaultReport] = []
        for document in documents:
            reports += self._trouble(document, now)
            if not document.error:
                reports += self._changes(document, now)
        return reports

    def forget(self, file: str, now: float) -> list[FaultReport] | None:
        """Forget the documents of a file that is gone, and return what is to be reported; None if one has faults.

        So files that come and go, and have no fault to tell of, leave nothing behind.
        """
        names = [name for name in self._faults.keys() | self._errors.keys() if f"{name}:".startswith(f"{file}:")]
        readings = [reading for name in names for reading in self._faults.get(name, {}).values()]
        if any(reading.assertion is Assertion.OCCUR for reading in readings):
            return None
        reports: list[FaultReport] = []
        for name in sorted(names):
            reports += self._trouble(Document(name, ""), now)
            self._faults.pop(name, None)
        return reports

    def _trouble(self, document: Document, now: float) -> list[FaultReport]:
        """Report a document that cannot be read, once, and once more when it can again."""
        known = self._errors.get(document.name, _NO_ERROR)
        if document.error == known:
            return []
        if document.error:
            self._errors[document.name] = document.error
        else:
            del self._errors[document.name]
        return [
            FaultReport(
                kind=FaultKind.DETECTOR,
                at_s=now,
                seen_by=self._seen_by,
                detail=f"{document.name}: {document.error or 'can be read again'}"[:2000],
                level=FaultLevel.NOT_HANDLE,
                fault_id=_fault_id(document.name),
                assertion=Assertion.OCCUR if document.error else Assertion.RECOVER,
            )
        ]

    def _changes(self, document: Document, now: float) -> list[FaultReport]:
        before = self._faults.get(document.name, {})
        found = {reading.fault_id: reading for reading in document.readings}
        changed = [reading for fault_id, reading in found.items() if _said(before.get(fault_id)) != _said(reading)]
        if document.snapshot:
            gone = [reading for fault_id, reading in before.items() if fault_id not in found]
            recovered = [msgspec.structs.replace(each, assertion=Assertion.RECOVER, at_s=now) for each in gone]
            changed = [each for each in recovered if before[each.fault_id].assertion is Assertion.OCCUR] + changed
        self._faults[document.name] = found
        return [reading.report(self._seen_by, now) for reading in changed]


def _fault_id(name: str) -> str:
    """Return the name of the fault that a document cannot be read: that of a long one ends in a digest."""
    known = f"unreadable/{name}"
    if len(known) <= MAX_ID:
        return known
    digest = xxhash.xxh3_128_hexdigest(name.encode())
    return f"{known[: MAX_ID - len(digest) - 1]}-{digest}"


def _said(reading: Reading | None) -> object:
    """What of a reading is news when it differs: not its time, which some documents renew."""
    return None if reading is None else (reading.assertion, reading.level, reading.code, reading.device)
