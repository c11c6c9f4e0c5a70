"""The journal of a job in a folder that several machines share: who makes an entry's number first has written it.

Each write is one file that is made only where there is none of its number. A controller that was deposed finds that
number taken, whatever it believes and however long it stood still: no clock decides, and no lock of the file system.
"""

import contextlib
import logging
import math
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import msgspec

from ...policies.schema import Policy
from ...protocol.dedup import SenderMemory
from ...protocol.errors import ElectionLost, JournalError, JournalSuperseded, StoreUnreachable
from ...protocol.types import JobSpec
from ..clock import Clock, HeardClock
from ..election.election import Election, Leadership
from ..journal.chain import damaged
from ..journal.compaction import Growth, Limits
from ..journal.event_rows import TermRecord, chained
from ..journal.records import Founding
from ..journal.senders import TakenIn
from ..journal.store import JournalEntry
from ..recovery.events import Event
from ..recovery.world import KEY_BYTES
from . import reading
from .entries import Body, LogEntry, Mark, newest, pack, pack_snapshot, read_entry
from .files import link_whole

# In entries, each a file that a takeover opens, and bytes.
LIMITS = Limits(events=500)
TRIES = 3  # of one write, when an earlier one is found to have been carried out
REMOVED_AT_ONCE = 20  # entries in one turn
AGAIN_S = 0.25  # between two tries to begin
LOOK_S = 1.0  # between two looks for a later term

_log = logging.getLogger(__name__)


def submit(folder: Path, job: JobSpec, policy: Policy, platform: str = "") -> bool:
    """Found the journal of a new job; `platform`: see Founding. Return False when there is one in that folder.

    Raises JournalError, also when the file system is none on which controllers can know who was first.
    """
    files = reading.files_of(folder)
    for made in (files.log, files.snapshots):
        made.make_folder()
    founding = Founding(job, policy, False, time.time(), secrets.token_bytes(KEY_BYTES), platform)
    return link_whole(files.founding, msgspec.msgpack.encode(founding))


class VolumeJournal:
    """The journal, open for the one controller that leads. `term` and `session` are higher than all earlier ones."""

    def __init__(
        self, files: reading.VolumeFiles, leadership: Leadership, name: str, heard: HeardClock | None, limits: Limits
    ) -> None:
        """Read what there is. Not for callers: `VolumeJournal.open`."""
        self._files = files
        self._leadership = leadership
        self._growth = Growth(limits)
        self._taken_in = TakenIn()
        self.founding, self._origin = reading.read_founding(files)
        end = newest(files.log, self._origin)
        before = end.body.term if isinstance(end, LogEntry) else None
        self._mark = end.mark if isinstance(end, LogEntry) else end
        self._last = end.last if isinstance(end, LogEntry) else (0, self._origin)
        self.clock = Clock.continuing(None if before is None else before.clock, heard)
        self.term = (before.term if before else 0) + 1
        self.session = max(time.time_ns(), (before.session if before else 0) + 1)
        record = TermRecord(self.term, self.session, name, socket.gethostname(), self.clock.reading(), *self._last, b"")
        chain = record.chain_after(before.chain if before else self._origin)
        self._record = msgspec.structs.replace(record, chain=chain)
        self._next = self._mark.number + 1
        self._kept: int | None = None  # the entry of the newest snapshot
        self._removable = 0  # entries up to, and without, this one
        self._look_s = 0.0

    @classmethod
    def open(
        cls,
        folder: Path,
        election: Election,
        *,
        name: str = "",
        heard: Callable[[], HeardClock | None] = lambda: None,
        wait_s: float | None = 0.0,
        beat: Callable[[], None] = lambda: None,
        limits: Limits = LIMITS,
    ) -> "VolumeJournal":
        """Become the active controller of the job: be elected (waiting up to `wait_s`) and begin a new term.

        `name`: of this controller. `heard` returns what it knows of the last leader's clock. `beat` is called now and
        then. Raises JournalError: no such job, the volume fails, or another controller is active; JournalDamaged when
        the journal is not what was written.
        """
        files = reading.files_of(folder)
        give_up_s = math.inf if wait_s is None else time.monotonic() + wait_s
        reading.read_founding(files)
        while True:
            left_s = None if wait_s is None else max(0.0, give_up_s - time.monotonic())
            with contextlib.ExitStack() as stack:
                leadership = election.stand(left_s, beat)
                stack.callback(leadership.close)
                try:
                    journal = cls(files, leadership, name or f"pid {os.getpid()}", heard(), limits)
                    journal._begin()
                except (ElectionLost, StoreUnreachable) as error:
                    if time.monotonic() >= give_up_s:
                        raise
                    _log.info("it did not become the leader: %s", error)
                else:
                    stack.pop_all()
                    return journal
            beat()
            time.sleep(AGAIN_S)

    def _begin(self) -> None:
        content, mark = pack(self._next, self._mark, Body(self._record, []))
        made = self._files.log.make(self._next, content)
        # What was listed before may have been old. What is listed after one's own change is not.
        if not made or not self._follows_what_is_kept() or not self._is_last(mark):
            raise ElectionLost(f"{self._files.folder}: another controller was quicker to begin a term.")
        self._advance(mark, self._last)
        self._leadership.begin(self.term)
        self._files.log.remove_drafts()

    def append(self, entries: Sequence[JournalEntry], at_s: float) -> tuple[bool, ...]:
        """Make events durable, all or none; False marks those that were there already.

        `at_s` is the controller's time that the machine is given with them. Raises JournalError when it is not known
        that they are durable (nothing may follow from them then), JournalSuperseded when a later term has begun,
        JournalDamaged when the files are not the ones any more that this controller has written.
        """
        rows, fresh, last = chained(entries, float(at_s), self.term, self._last, self._taken_in)
        if not rows:
            return fresh
        for _ in range(TRIES):
            content, mark = pack(self._next, self._mark, Body(self._record, rows))
            if self._files.log.make(self._next, content):
                break
            self._require_own(self._next)
            self._next += 1  # an earlier request that seemed to have failed: the next entry passes it over
        else:
            raise JournalError(f"{self._files.log}: entry {self._next} is made again and again. End what writes there.")
        if not self._follows_what_is_kept():
            self._require_others()
        self._advance(mark, last)
        for row in rows:
            self._taken_in.take(row.sender, row.session, row.number)
        self._growth.grown(1, len(content))
        return fresh

    def _advance(self, mark: Mark, last: tuple[int, bytes]) -> None:
        self._mark, self._last, self._next = mark, last, mark.number + 1

    def _require_own(self, number: int) -> None:
        """Raise JournalSuperseded when an entry is not of this term, JournalDamaged when it is of none."""
        entry = read_entry(self._files.log, number)
        if entry is None:
            raise StoreUnreachable(f"{self._files.log}: entry {number} is there, and cannot be found. Try again.")
        if entry.body.term.session == self.session:
            return
        if entry.body.term.term <= self.term:
            raise damaged(self._files.folder, f"after event {self._last[0]} it was changed by another program")
        self._superseded(entry.body.term.term)

    def _follows_what_is_kept(self) -> bool:
        """Say whether the entry just made counts: a number is free again when what was there is not kept any more.

        One that slept through that has made what no reader looks at, in front of all that is kept. It stays until the
        next removal.
        """
        if not self._mark.number:
            return True
        before = read_entry(self._files.log, self._mark.number)
        return before is not None and before.mark == self._mark

    def _is_last(self, made: Mark) -> bool:
        """Say whether an entry just made is behind all others, but for those that have followed on it since."""
        if not any(number > made.number for number in self._files.log.numbers()):
            return True
        following = read_entry(self._files.log, made.number + 1)
        return following is not None and following.after == made

    def _require_others(self) -> None:
        """Raise JournalSuperseded when the journal continues elsewhere, JournalDamaged when it does not."""
        if any(number > self._next for number in self._files.log.numbers()):
            self._superseded(self.term + 1)
        raise damaged(self._files.folder, f"entry {self._mark.number} was deleted while this controller was writing")

    def _superseded(self, term: int) -> NoReturn:
        raise JournalSuperseded(
            f"{self._files.folder}: term {term} has begun, another controller leads the job by now. This one, of term "
            f"{self.term}, is not in service any more, and must leave."
        )

    def _require_newest(self) -> None:
        """Raise JournalSuperseded when there is an entry of another one behind the last one of this term."""
        if self._files.log.has(self._next):
            self._require_own(self._next)

    def load(
        self, restore: Callable[[bytes], None], beat: Callable[[], None] = lambda: None
    ) -> Iterator[tuple[Event, float]]:
        """Have the newest snapshot restored, if there is one, and yield the events after it with their times, in order.

        As `Journal.load`.
        """
        start = reading.find_start(self._files, self._origin, restore)
        self._taken_in, self._kept = start.replay.taken_in, start.mark.number or None
        self._growth.restart()
        self._growth.grown(self._mark.number - start.mark.number, 0)

        def beat_both() -> None:
            beat()
            self._leadership.beat()

        yield from reading.events(self._files, start, beat_both)

    def taken_in(self) -> Iterator[tuple[str, SenderMemory]]:
        """Yield what was taken in from each sender, in its latest session. Known once `load` has been read."""
        return self._taken_in.senders()

    def compact(self, snapshot: Callable[[], bytes], *, quiet: bool) -> None:
        """Write a snapshot when enough entries have come, or remove some that came before the one before it.

        That one stays, with the entries after it: a snapshot that cannot be read is passed over. Raises as `append`.
        """
        if not self._growth.is_due(quiet=quiet):
            if quiet and self._removable:
                self._remove_some()
            return
        self._require_newest()
        mark = self._mark
        self._files.snapshots.remove(mark.number)  # one of that number could not be read, or is the same
        self._files.snapshots.make(mark.number, pack_snapshot(mark, self._last, snapshot(), self._taken_in))
        if self._kept is not None:
            self._removable = self._kept
        self._kept = mark.number
        self._growth.restart()

    def _remove_some(self) -> None:
        """Remove the earliest first, so that what is left is without a gap."""
        self._require_newest()
        for files in (self._files.snapshots, self._files.log):
            earliest = [each for each in files.numbers() if each < self._removable][:REMOVED_AT_ONCE]
            for number in earliest:
                files.remove(number)
        if not earliest:
            self._removable = 0

    def conclude(self, snapshot: Callable[[], bytes]) -> None:
        """The files stay as they are, in the job's directory."""

    def require_lead(self) -> None:
        """Raise JournalSuperseded when another controller leads by now, e.g. after this process stood still."""
        self._leadership.require()
        self._leadership.beat()
        now = time.monotonic()
        if now >= self._look_s:
            self._look_s = now + LOOK_S
            try:
                self._require_newest()
            except StoreUnreachable as error:
                _log.warning("whether this controller still leads is not known: %s", error)

    def close(self) -> None:
        """Let another controller in. Idempotent."""
        self._leadership.close()

    def __enter__(self) -> "VolumeJournal":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
