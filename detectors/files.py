"""A detector that watches files and directories: documents as a cluster leaves them, e.g. mounted ConfigMaps.

Changes are noticed by the kernel's word (watchfiles), and by looking every few seconds where the kernel has none to
give, as on network file systems. What is looked at are whole files: replaced by a rename, by a swap of the link that a
mounted ConfigMap hangs on, or written in place.
"""

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from watchfiles import awatch

from ..protocol.types import FaultReport, detector_address
from .detector import Tell
from .documents import Document, documents_in, is_document
from .public_fault import NO_SERIALS
from .reading import MAX_DOCUMENT_BYTES
from .snapshots import Snapshots

LOOK_S = 2.0  # without a word from the kernel
DEBOUNCE_MS = 50
MAX_FILES = 10_000

_log = logging.getLogger(__name__)
_Stamp = tuple[int, int, int]


class FileDetector:
    """Watches files, and directories with files or with directories of files. Use as `await watch(tell)`."""

    def __init__(
        self,
        name: str,
        sources: Sequence[Path],
        state: Path | None = None,
        serials: Mapping[str, str] = NO_SERIALS,
    ) -> None:
        """`state`: a file in which a detector that is started again finds what it has told of.

        `serials`: the nodes of machines that a document may name by their serial number.
        """
        self._serials = serials
        self._sources = tuple(source.absolute() for source in sources)
        self._state = state
        self._snapshots = Snapshots(detector_address(name))
        self._read: dict[Path, tuple[_Stamp, tuple[Document, ...]]] = {}  # what a file had when it was last read
        if state is not None and state.is_file():
            self._snapshots.restore(state.read_bytes())

    async def watch(self, tell: Tell) -> None:
        """Tell of what is there, then of every change, until cancelled."""
        while True:
            self._look_and_tell(tell)
            watched = self._directories() or [_nearest(source) for source in self._sources]
            try:
                await self._until_they_change(watched, tell)
            except (OSError, RuntimeError) as error:  # a directory went away while it was being watched
                _log.warning("watching %s: %s", ", ".join(map(str, watched)), error)
                await asyncio.sleep(LOOK_S)  # it may be there again, or be gone for long

    async def _until_they_change(self, watched: list[Path], tell: Tell) -> None:
        """Look at every change in these directories, and now and then, until others are to be watched."""
        async for _ in awatch(
            *watched,
            watch_filter=None,
            debounce=DEBOUNCE_MS,
            step=DEBOUNCE_MS // 2,
            rust_timeout=int(LOOK_S * 1000),
            yield_on_timeout=True,
            recursive=False,
            ignore_permission_denied=True,
        ):
            self._look_and_tell(tell)
            if self._directories() not in ([], watched):
                return

    def look(self, now: float) -> list[FaultReport]:
        """Read what has changed since the last look, and return what is to be reported."""
        found: list[Document] = []
        there: set[Path] = set()
        for path in self._files():
            there.add(path)
            found += self._documents(path)
        for path in [path for path in self._read if path not in there]:
            found.append(Document(str(path), "", error="is gone; what it last said stays in force"))
        return self._snapshots.take(found, now)

    def _look_and_tell(self, tell: Tell) -> None:
        reports = self.look(time.time())
        for report in reports:
            tell(report)
        if reports and self._state is not None:
            draft = self._state.with_name(f".{self._state.name}")
            draft.write_bytes(self._snapshots.saved())
            draft.replace(self._state)

    def _documents(self, path: Path) -> tuple[Document, ...]:
        """Return the documents of a file, read anew only when it is another file or was written."""
        known = self._read.get(path)
        try:
            status = path.stat()
            stamp = (status.st_ino, status.st_mtime_ns, status.st_size)
            if known is not None and known[0] == stamp:
                return known[1]
            with path.open("rb") as file:
                data = file.read(MAX_DOCUMENT_BYTES + 1)
        except OSError as error:
            return (Document(str(path), "", error=f"cannot be read: {error.strerror or error}"),)
        documents = documents_in(path, data, self._serials)
        for document in documents:
            if document.error:
                _log.error("%s is skipped: %s", document.name, document.error)
        if all(document.name != str(path) for document in documents):
            documents = (Document(str(path), ""), *documents)  # the file itself is well
        self._read[path] = (stamp, documents)
        return documents

    def _files(self) -> Iterator[Path]:
        """Yield every file to be looked at; one that a source names is, whatever its name."""
        left = MAX_FILES
        for source in self._sources:
            if not source.is_dir():
                yield source
                continue
            for directory in [source, *_inside(source)]:
                for path in _entries(directory):
                    if is_document(path) and path.is_file() and left > 0:
                        left -= 1
                        yield path

    def _directories(self) -> list[Path]:
        """Return the directories whose entries matter; a file's is its parent, in which it may be replaced."""
        directories: dict[Path, None] = {}
        for source in self._sources:
            places = [source, *_inside(source)] if source.is_dir() else [source.parent]
            directories.update(dict.fromkeys(place for place in places if place.is_dir()))
        return list(directories)


def _inside(directory: Path) -> list[Path]:
    """Return the directories in one, as far as they can be mounted ConfigMaps: not the hidden ones behind the links."""
    return [path for path in _entries(directory) if path.is_dir() and not path.name.startswith(".")]


def _entries(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except OSError:  # it has just gone, or is closed to us: then its files are told of as gone
        return []


def _nearest(path: Path) -> Path:
    """Return the nearest directory above a path that is there, in which it may appear."""
    return next(parent for parent in path.parents if parent.is_dir())
