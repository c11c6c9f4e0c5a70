"""A detector that watches files and directories for fault documents, e.g. mounted ConfigMaps.

Changes are noticed by inotify (watchfiles), and by polling every few seconds, since network file systems have no
inotify. Whole files are read, whether they were replaced by a rename, by a change of the link in a mounted ConfigMap,
or written in place.
"""

import asyncio
import errno
import logging
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from watchfiles import awatch

from ..protocol.compat import StrEnum
from ..protocol.types import FaultReport, detector_address
from .documents import Document, displayed, documents_in, is_document
from .public_fault import NO_SERIALS
from .reading import MAX_DOCUMENT_BYTES, Report
from .snapshots import Snapshots

POLL_S = 2.0  # where inotify reports nothing
DEBOUNCE_MS = 50
MAX_FILES = 10_000

if sys.version_info < (3, 11):
    from exceptiongroup import ExceptionGroup

_log = logging.getLogger(__name__)
_Stamp = tuple[int, int, int]


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
        self._state = state
        self._snapshots = Snapshots(detector_address(name))
        self._read: dict[Path, tuple[_Stamp, tuple[Document, ...]]] = {}  # of each file, as it was last read
        self._beyond = False  # there are more files than MAX_FILES
        if state is not None and state.is_file():
            self._restore(state)

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
        if news and self._state is not None:
            self._save(self._state)
        self._alive(Sign.LOOKED)

    def _restore(self, state: Path) -> None:
        try:
            self._snapshots.restore(state.read_bytes())
        except OSError as error:
            _log.warning("cannot read %s, so faults that stand are reported again: %s", state, error)

    def _save(self, state: Path) -> None:
        """Save what was reported. Without it a restarted detector reports standing faults again, which is harmless."""
        draft = state.with_name(f".{state.name}")
        try:
            draft.write_bytes(self._snapshots.saved())
            draft.replace(state)
        except OSError as error:
            _log.warning("cannot write %s, so faults are reported again after a restart: %s", state, error)

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
