"""Changes between two readings of the same documents: a fault that is no longer in one has recovered.

Most documents list what is wrong now, without history. Pure: documents are arguments, fault reports are returned. A
document that cannot be read, or is gone, changes nothing: its last readable content stays in force.
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
    """The last readable content of every document of one detector, and its present error."""

    def __init__(self, seen_by: str) -> None:
        """Begin with no documents. `seen_by`: the address that reports carry."""
        self._seen_by = seen_by
        self._faults: dict[str, dict[str, Reading]] = {}  # document -> fault_id -> reading
        self._errors: dict[str, str] = {}

    @property
    def errors(self) -> dict[str, str]:
        """The present errors of documents, by name."""
        return dict(self._errors)

    def saved(self) -> bytes:
        """Return the state for `restore`."""
        return msgspec.msgpack.encode((self._faults, self._errors))

    def restore(self, data: bytes) -> None:
        """Take over a saved state. Without a valid one, faults that stand are reported again."""
        try:
            self._faults, self._errors = msgspec.msgpack.decode(data, type=_Saved)
        except msgspec.MsgspecError:
            self._faults, self._errors = {}, {}

    def take(self, documents: Iterable[Document], now: float) -> list[FaultReport]:
        """Take in `documents`, and return what is to be reported, in their order."""
        reports: list[FaultReport] = []
        for document in documents:
            reports += self._error_change(document, now)
            if not document.error:
                reports += self._changes(document, now)
        return reports

    def forget(self, file: str, now: float) -> list[FaultReport] | None:
        """Forget the documents of a file that is gone, and return what is to be reported; None if one has faults.

        So files without faults that come and go do not add up.
        """
        names = [name for name in self._faults.keys() | self._errors.keys() if f"{name}:".startswith(f"{file}:")]
        readings = [reading for name in names for reading in self._faults.get(name, {}).values()]
        if any(reading.assertion is Assertion.OCCUR for reading in readings):
            return None
        reports: list[FaultReport] = []
        for name in sorted(names):
            reports += self._error_change(Document(name, ""), now)
            self._faults.pop(name, None)
        return reports

    def _error_change(self, document: Document, now: float) -> list[FaultReport]:
        """Return a report when a document becomes unreadable, and one when it can be read again."""
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
        changed = [
            reading for fault_id, reading in found.items() if _content(before.get(fault_id)) != _content(reading)
        ]
        if document.snapshot:
            gone = [reading for fault_id, reading in before.items() if fault_id not in found]
            recovered = [msgspec.structs.replace(each, assertion=Assertion.RECOVER, at_s=now) for each in gone]
            changed = [each for each in recovered if before[each.fault_id].assertion is Assertion.OCCUR] + changed
        self._faults[document.name] = found
        return [reading.report(self._seen_by, now) for reading in changed]


def _fault_id(name: str) -> str:
    """Return the fault id of an unreadable document; that of a long name ends in a digest."""
    known = f"unreadable/{name}"
    if len(known) <= MAX_ID:
        return known
    digest = xxhash.xxh3_128_hexdigest(name.encode())
    return f"{known[: MAX_ID - len(digest) - 1]}-{digest}"


def _content(reading: Reading | None) -> object:
    """Return what makes a reading news when it differs: not its time, which some documents renew."""
    return None if reading is None else (reading.assertion, reading.level, reading.code, reading.device)
