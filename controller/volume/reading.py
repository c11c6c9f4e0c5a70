"""Reading a job from a volume: every record is checked against the chain before anything is made of it."""

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from ...protocol.errors import JournalError, SnapshotUnreadable
from ...protocol.incidents import JobStatus
from ..journal.chain import damaged, origin
from ..journal.event_rows import event_of
from ..journal.event_rows import read_founding as decode_founding
from ..journal.reading import restore_from
from ..journal.records import Founding, ReplayStart
from ..journal.senders import TakenIn
from ..recovery.events import Event
from ..story import StoryEntry, turns
from .entries import Mark, VolumeSnapshot, entries_behind, read_entry, read_snapshot
from .files import NumberedFiles, read_whole
from .place import ENTRIES, FOUNDING

_log = logging.getLogger(__name__)


class VolumeFiles(msgspec.Struct, frozen=True):
    """What a folder with a journal has in it."""

    folder: Path
    log: NumberedFiles
    snapshots: NumberedFiles

    @property
    def founding(self) -> Path:
        """The file that says what the job is."""
        return self.folder / FOUNDING


class VolumeStart(msgspec.Struct, frozen=True):
    """Where a replay begins: behind an entry, whose last event is known."""

    mark: Mark
    replay: ReplayStart


def files_of(folder: Path) -> VolumeFiles:
    """Return what a folder has in it, if it holds a journal."""
    return VolumeFiles(folder, NumberedFiles(folder / ENTRIES), NumberedFiles(folder / "snapshots"))


def read_founding(files: VolumeFiles) -> tuple[Founding, bytes]:
    """Return what a job was founded with, and the origin of its chains. Raises JournalError."""
    content = read_whole(files.founding)
    if content is None:
        raise JournalError(
            f"{files.folder}: there is no such job. `midstep submit` makes it; check the folder, and that all machines "
            "see the same volume."
        )
    return decode_founding(files.folder, content), origin(content)


def find_start(files: VolumeFiles, first: bytes, restore: Callable[[bytes], object]) -> VolumeStart:
    """Have the newest snapshot restored that can be read, and return where the events continue. Raises JournalError."""
    return _start(files, first, restore, reversed(files.snapshots.numbers()))


def events(
    files: VolumeFiles, start: VolumeStart, beat: Callable[[], None] = lambda: None
) -> Iterator[tuple[Event, float]]:
    """Yield the events behind a start with their times, in order; what was taken in is noted.

    Raises JournalDamaged at the first one that is missing or was changed, JournalError for one that this version does
    not know.
    """
    last, chain = start.replay.seq, start.replay.chain
    for entry in entries_behind(files.log, start.mark):
        if not entry.body.rows and (entry.body.term.events, entry.body.term.last) != (last, chain):
            raise damaged(files.folder, f"term {entry.body.term.term} did not begin after event {last}")
        for row in entry.body.rows:
            if row.seq != last + 1:
                raise damaged(files.folder, f"event {last + 1} is missing")
            chain = row.chain_after(chain)
            if chain != row.chain:
                raise damaged(files.folder, f"event {row.seq} ({row.kind}) is not what was written")
            start.replay.taken_in.take(row.sender, row.session, row.number)
            yield event_of(files.folder, row), row.at_s
            last = row.seq
        beat()


def read_status(folder: Path) -> JobStatus:
    """Return the job's status as of its last event, from the journal alone. Changes nothing. Raises JournalError."""
    files = files_of(folder)
    known, first = read_founding(files)
    machine, last_s = known.machine(), known.created_s

    def restore(state: bytes) -> None:
        nonlocal last_s
        last_s = restore_from(machine, state)

    for event, at_s in events(files, find_start(files, first, restore)):
        machine.handle(event, at_s)
        last_s = at_s
    return machine.status(last_s)


def read_story(folder: Path) -> Iterator[StoryEntry]:
    """Yield each event that the journal still has, with what followed from it. As `read_status` in all else."""
    files = files_of(folder)
    known, first = read_founding(files)
    machine = known.machine()
    numbers = files.log.numbers()
    early = [] if _is_whole(numbers, 1) else [each for each in files.snapshots.numbers() if _is_whole(numbers, each)]
    start = _start(files, first, lambda state: restore_from(machine, state), early)
    yield from turns(machine, events(files, start), start.replay.seq + 1)


def _is_whole(numbers: Sequence[int], first: int) -> bool:
    """Say whether there is every entry from a number on."""
    return first in numbers and numbers[-1] - first == sum(each > first for each in numbers)


def _start(
    files: VolumeFiles, first: bytes, restore: Callable[[bytes], object], candidates: Iterator[int] | Sequence[int]
) -> VolumeStart:
    failure = ""
    for number in candidates:
        found = read_snapshot(files.snapshots, number)
        if found is None or not _belongs(files, found):
            continue
        try:
            restore(found.saved.state)
        except SnapshotUnreadable as error:
            failure = str(error)
            _log.warning("%s: the snapshot after entry %d is passed over: %s", files.folder, number, error)
            continue
        return VolumeStart(found.mark, ReplayStart(found.saved.seq, found.saved.chain, found.saved.taken_in))
    numbers = files.log.numbers()
    if numbers and numbers[0] != 1:
        raise JournalError(
            f"{files.folder}: the first events are not kept any more, and no snapshot of what they led to can be read "
            f"({failure or 'there is none'}). Use the midstep version that wrote it."
        )
    return VolumeStart(Mark(0, first), ReplayStart(0, first, TakenIn()))


def _belongs(files: VolumeFiles, found: VolumeSnapshot) -> bool:
    entry = read_entry(files.log, found.mark.number)
    if entry is None or entry.mark != found.mark:
        _log.warning("%s: the snapshot after entry %d has no such entry", files.folder, found.mark.number)
        return False
    return True
