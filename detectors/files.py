"""A detector that watches files and directories for fault documents, e.g. mounted ConfigMaps.

Changes are noticed by inotify (watchfiles), and by polling every few seconds, since network file systems have no
inotify. Whole files are read, whether they were replaced by a rename, by a change of the link in a mounted ConfigMap,
or written in place.

Most documents list what is wrong now, without history. So `Snapshots`, which is pure, compares two readings of the same
document: a fault that is no longer in it has recovered. A document that cannot be read, or is gone, changes nothing:
its last readable content stays in force.
"""

import asyncio
import errno
import logging
import os
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import xxhash
from watchfiles import awatch

from ..protocol.compat import StrEnum
from ..protocol.types import Assertion, FaultKind, FaultLevel, FaultReport, detector_address
from .documents import NO_SERIALS, Document, displayed, documents_in, is_document
from .reading import MAX_DOCUMENT_BYTES, MAX_ID, Reading, Report

POLL_S = 2.0  # where inotify reports nothing
DEBOUNCE_MS = 50
MAX_FILES = 10_000
_log = logging.getLogger(__name__)
_Stamp = tuple[int, int, int]
_NO_ERROR = ""
_Saved = tuple[dict[str, dict[str, Reading]], dict[str, str]]


class Sign(StrEnum):
    """A sign of progress for the process that supervises the watch, one character each."""

    PROGRESS = "."  # one file was checked
    LOOKED = "\n"  # all files were checked


class FileDetector:
    """Watches files, and directories with files or with directories of files. Use as `await watch(report)`."""

    def __init__(
        self,
        name: str,
        sources: Sequence[Path],
        state: Path | None = None,
        serials: Mapping[str, str] = NO_SERIALS,
        alive: Callable[[Sign], None] = lambda sign: None,
    ) -> None:
        """Prepare to watch.

        Args:
            name: The name of the detector under which it reports.
            sources: Files and directories.
            state: File in which a restarted detector finds what it has reported.
            serials: Nodes of machines that a document may name by their serial number.
            alive: Called as the watch makes progress.
        """
        self._serials = serials
        self._alive = alive
        self._sources = tuple(source.absolute() for source in sources)
        self._snapshots = Snapshots(detector_address(name), state)
        self._read: dict[Path, tuple[_Stamp, tuple[Document, ...]]] = {}  # of each file, as it was last read
        self._beyond = False  # there are more files than MAX_FILES

    async def watch(self, report: Report) -> None:
        """Report the faults that stand, then every change, until cancelled."""
        while True:
            await self._check_and_report(report)
            watched = self._directories() or [_nearest(source) for source in self._sources]
            try:
                await self._until_directories_change(watched, report)
            except (OSError, RuntimeError, ExceptionGroup) as error:
                # A directory was removed while it was watched, or a file has a name that watchfiles cannot decode.
                _log.warning(
                    "cannot watch %s, trying again: %s", ", ".join(displayed(str(path)) for path in watched), error
                )
                await asyncio.sleep(POLL_S)  # the directory may come back, or be gone for long

    async def _until_directories_change(self, watched: list[Path], report: Report) -> None:
        """Check files at every change in these directories and every POLL_S, until others are to be watched."""
        async for _ in awatch(
            *watched,
            watch_filter=None,
            debounce=DEBOUNCE_MS,
            step=DEBOUNCE_MS // 2,
            rust_timeout=int(POLL_S * 1000),
            yield_on_timeout=True,
            recursive=False,
            ignore_permission_denied=True,
        ):
            await self._check_and_report(report)
            if self._directories() not in ([], watched):
                return

    def look(self, now: float) -> list[FaultReport]:
        """Read the files that have changed since the last call, and return what is to be reported."""
        return [report for reports in self._looks(now) for report in reports]

    def _looks(self, now: float) -> Iterator[list[FaultReport]]:
        """Yield what is to be reported of each file as soon as it has been read: another may take longer."""
        there: set[Path] = set()
        for path in self._files():
            there.add(path)
            yield self._snapshots.take(self._documents(path), now)
        for path in [path for path in self._read if path not in there]:
            yield self._gone(path, now)
        yield self._snapshots.take([self._too_many()], now)

    def _gone(self, path: Path, now: float) -> list[FaultReport]:
        name = displayed(str(path))
        reports = self._snapshots.forget(name, now)
        if reports is None:
            return self._snapshots.take(
                [Document(name, "", error="is gone; the faults that it last had stay in force")], now
            )
        del self._read[path]
        return reports

    async def _check_and_report(self, report: Report) -> None:
        news = False
        for reports in self._looks(time.time()):
            for each in reports:
                report(each)
                news = True
            self._alive(Sign.PROGRESS)
            await asyncio.sleep(0)  # reports are sent and acknowledged while further files are read
        if news:
            self._snapshots.keep()
        self._alive(Sign.LOOKED)

    def _documents(self, path: Path) -> tuple[Document, ...]:
        """Return the documents of a file; read it only when it was replaced or written."""
        name, known = displayed(str(path)), self._read.get(path)
        try:
            stamp = _stamp_of(path.stat())
            if known is not None and known[0] == stamp:
                return known[1]
            stamp, data = _contents(path)
        except OSError as error:
            return (Document(name, "", error=f"cannot be read: {error.strerror or error}"),)
        documents = documents_in(path, data, self._serials)
        for document in documents:
            if document.error:
                _log.error("%s is skipped: %s", document.name, document.error)
        if all(document.name != name for document in documents):
            documents = (Document(name, ""), *documents)  # the file itself is readable
        self._read[path] = (stamp, documents)
        return documents

    def _too_many(self) -> Document:
        """Return a document that is in error while there are more than MAX_FILES files."""
        name = ", ".join(displayed(str(source)) for source in self._sources)
        error = f"has more than {MAX_FILES} files, and further ones are not read; remove some" if self._beyond else ""
        return Document(f"{name}:files", "", error=error)

    def _files(self) -> Iterator[Path]:
        """Yield every file to be checked; a source that is a file is, whatever its name."""
        left = MAX_FILES
        for source in self._sources:
            if not os.path.isdir(source):
                yield source
                continue
            for directory in [source, *_inside(source)]:
                for path in _entries(directory):
                    if left >= 0 and is_document(path) and os.path.isfile(path):
                        left -= 1
                        if left >= 0:
                            yield path
        self._beyond = left < 0

    def _directories(self) -> list[Path]:
        """Return the directories to watch; a file's is its parent, in which it may be replaced.

        Those whose names are not UTF-8 are polled only: watchfiles cannot name them.
        """
        directories: dict[Path, None] = {}
        for source in self._sources:
            places = [source, *_inside(source)] if os.path.isdir(source) else [source.parent]
            directories.update(dict.fromkeys(place for place in places if os.path.isdir(place) and _is_text(place)))
        return list(directories)


if sys.version_info < (3, 11):
    from exceptiongroup import ExceptionGroup


def _contents(path: Path) -> tuple[_Stamp, bytes]:
    """Return a file's stamp and its bytes, at most one more than allowed. Raises OSError, also for a pipe."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # opening a pipe would wait for its writer
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "is no regular file")
        return _stamp_of(status), file.read(MAX_DOCUMENT_BYTES + 1)


def _stamp_of(status: os.stat_result) -> _Stamp:
    return status.st_ino, status.st_mtime_ns, status.st_size


def _is_text(path: Path) -> bool:
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def _inside(directory: Path) -> list[Path]:
    """Return the directories in one, as far as they can be mounted ConfigMaps: not the hidden ones behind the links."""
    return [path for path in _entries(directory) if os.path.isdir(path) and not path.name.startswith(".")]


def _entries(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except OSError:  # it was removed or may not be read: its files are reported as gone
        return []


def _nearest(path: Path) -> Path:
    """Return the nearest directory above a path that is there, in which it may appear."""
    return next(parent for parent in path.parents if os.path.isdir(parent) and _is_text(parent))


class Snapshots:
    """The last readable content of every document of one detector, and its present error."""

    def __init__(self, seen_by: str, kept: Path | None = None) -> None:
        """Begin with what an earlier detector has left. `seen_by`: the address that reports carry.

        `kept`: the file in which the next one finds it.
        """
        self._seen_by = seen_by
        self._kept = kept
        self._faults: dict[str, dict[str, Reading]] = {}  # document -> fault_id -> reading
        self._errors: dict[str, str] = {}
        if kept is not None and kept.is_file():
            try:
                self.restore(kept.read_bytes())
            except OSError as error:
                _log.warning("cannot read %s, so faults that stand are reported again: %s", kept, error)

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

    def keep(self) -> None:
        """Keep what was reported, where there is a file for it."""
        if self._kept is None:
            return
        draft = self._kept.with_name(f".{self._kept.name}")
        try:
            draft.write_bytes(self.saved())
            draft.replace(self._kept)
        except OSError as error:
            _log.warning("cannot write %s, so faults are reported again after a restart: %s", self._kept, error)

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
