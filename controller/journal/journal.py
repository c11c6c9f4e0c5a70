"""The truth about a job: every event that its recovery machine was given, durable before anything follows from it.

A controller that was killed opens the same journal, folds the events into a new machine, and continues in the phase in
which its predecessor died. Each opening is a new *term*, which fences the commands of all earlier ones. A journal that
is not what was written is refused: to act on an older world would kill healthy ranks.

What a journal does is the same everywhere, and is here. Where it is kept is a `JournalStore`: a sqlite file on one
host, an etcd, or a folder that several machines share. A store appends if nothing has come that this controller does
not know of, lists what it has, and keeps snapshots. Who leads is decided elsewhere (`election/`).
"""

import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import msgspec

from ...policies.schema import Policy
from ...protocol.errors import ElectionLost, JournalError, SnapshotUnreadable, StoreUnreachable
from ...protocol.mailbox import SenderMemory
from ...protocol.types import JobSpec
from ..clock import Clock, HeardClock
from ..election.election import Election, Leadership
from ..journaled import Journaled
from ..recovery.world import KEY_BYTES
from .records import (
    End,
    EventRow,
    Founding,
    JournalEntry,
    ReplayStart,
    SavedSnapshot,
    TakenIn,
    TermRecord,
    chained,
    damaged,
    event_of,
    origin,
)
from .records import read_founding as decode_founding

URGENT = 2  # times the limit
AGAIN_S = 0.1  # between two tries to begin a term

_log = logging.getLogger(__name__)


class Limits(msgspec.Struct, frozen=True):
    """When a snapshot is due, by what has come since the last one; at any moment, not only a quiet one, at twice that.

    So that a takeover reads less than a second's worth, and the journal stays bounded. Measured on two cores
    (`benchmarks/controller_restart.py`): 40,000 to 75,000 events are replayed in a second. `kept_bytes`: of archived
    events and earlier snapshots. What is older is dropped: reports still have every incident, `midstep report --story`
    begins later.
    """

    events: int = 10_000
    size_bytes: int = 4 * 1024 * 1024
    kept_bytes: int = 64 * 1024 * 1024


class AlreadyWrittenError(Exception):
    """Some of the events to be appended are there. `identities` says which."""

    def __init__(self, identities: frozenset[tuple[str, int, int]]) -> None:
        super().__init__(f"{len(identities)} events are there already")
        self.identities = identities


class JournalReader(Protocol):
    """Read a journal, also beside a controller that writes it, or long afterwards."""

    def founding(self) -> bytes:
        """Return what the job was founded with. Raises JournalError: there is no such job."""

    def snapshots(self, *, newest_first: bool = True) -> Iterator[SavedSnapshot]:
        """Yield the snapshots that are what was written. One that is not is passed over, with a warning."""

    def first_kept(self) -> int:
        """Return the number of the first event that is kept; 1 where there is none."""

    def batches(self, start: ReplayStart) -> Iterator[Sequence[EventRow]]:
        """Yield the events behind a start, some at a time, in order. Raises JournalDamaged, JournalError."""


class JournalStore(JournalReader, Protocol):
    """Where the journal of a job is kept, open for the controller of one term.

    All that writes raises JournalSuperseded when a later term has begun, JournalDamaged when the store does not have
    what this controller has written, JournalError when it is not known that the change is durable.
    """

    limits: Limits

    def take_over(self, leadership: Leadership, begin: Callable[[], TermRecord]) -> None:
        """Have `begin` read the end of the journal, and write the term that it returns behind that end.

        Raises ElectionLost when something else has been written there first.
        """

    def last_term(self, first: bytes) -> TermRecord | None:
        """Return how the last term began. `first`: the origin of the chains."""

    def end(self, first: bytes) -> End:
        """Return number and hash of the last event; 0 and the origin where there is none."""

    def append(self, rows: Sequence[EventRow]) -> None:
        """Make events durable behind the end, all or none. Raises AlreadyWrittenError."""

    def weight_of(self, rows: Sequence[EventRow]) -> tuple[int, int]:
        """Return what events that were appended at once cost a takeover, by the measures of `limits`."""

    def write_snapshot(self, last: End, state: bytes, taken_in: TakenIn) -> None:
        """Keep the state after the last event, and the snapshot before it."""

    def tidy(self) -> None:
        """Archive or remove a little of what no takeover reads any more, at a quiet moment."""

    def conclude(self, last: End, state: Callable[[], bytes], taken_in: TakenIn) -> None:
        """The job is over: leave what reports need, and nothing that would have to be removed."""

    def require_newest(self) -> None:
        """Raise JournalSuperseded when a later term is found in the store. Asked often, and cheap."""

    def close(self) -> None:
        """Close files and connections. Idempotent."""


class Growth:
    """The entries since the last snapshot."""

    def __init__(self, limits: Limits) -> None:
        """Nothing is due before `restart`."""
        self._limits = limits
        self._begun = False
        self._events = 0
        self._bytes = 0

    def restart(self) -> None:
        """Count from here: after a takeover, and after each snapshot."""
        self._begun, self._events, self._bytes = True, 0, 0

    def grown(self, events: int, size_bytes: int) -> None:
        """Count what has come."""
        self._events += events
        self._bytes += size_bytes

    def is_due(self, *, quiet: bool) -> bool:
        """Say whether a snapshot is to be written now."""
        times = 1 if quiet else URGENT
        much = self._events >= times * self._limits.events or self._bytes >= times * self._limits.size_bytes
        return self._begun and self._events > 0 and much


def new_founding(job: JobSpec, policy: Policy, *, can_create_nodes: bool = False, platform: str = "") -> bytes:
    """Return what the journal of a new job begins with. As in Founding."""
    key = secrets.token_bytes(KEY_BYTES)
    return msgspec.msgpack.encode(Founding(job, policy, can_create_nodes, time.time(), key, platform))


class Journal:
    """The journal, open for its one writer. `term` and `session` are higher than those of every earlier opening."""

    def __init__(
        self, store: JournalStore, leadership: Leadership, name: str, heard: Callable[[], HeardClock | None]
    ) -> None:
        """Begin a term. Not for callers: see `open_journal`. `name`: of this controller.

        `heard` returns what it knows of the last leader's clock.
        """
        self._store = store
        self._leadership = leadership
        self._name = name
        self._heard = heard
        self._growth = Growth(store.limits)
        self._taken_in = TakenIn()
        self._there: set[tuple[str, int, int]] = set()  # events that only the store knew of
        self.guarded_until_s: float | None = None  # a sign of life of the last leader, on the clock; None: not known
        store.take_over(leadership, self._begin)

    def _begin(self) -> TermRecord:
        """Read the end of the journal; return the term that begins there."""
        content = self._store.founding()
        self.founding, self._origin = decode_founding(self._store, content), origin(content)
        before, self._last = self._store.last_term(self._origin), self._store.end(self._origin)
        if before is not None and before.events > self._last[0]:
            raise damaged(self._store, f"its end is lost: {before.events} events were in it, and {self._last[0]} are")
        self.clock = Clock.continuing(None if before is None else before.clock, self._heard())
        last_sign_s = getattr(self._leadership, "last_sign_s", None)  # an election need not know it
        if before is not None and last_sign_s is not None:
            self.guarded_until_s = self.clock.now() - (time.monotonic() - last_sign_s)
        self.term = 1 if before is None else before.term + 1
        self.session = max(time.time_ns(), 0 if before is None else before.session + 1)  # also after a step back
        name = self._name or f"pid {os.getpid()}"
        record = TermRecord(self.term, self.session, name, socket.gethostname(), self.clock.reading(), *self._last, b"")
        return msgspec.structs.replace(record, chain=record.chain_after(before.chain if before else self._origin))

    def append(self, entries: Sequence[JournalEntry], at_s: float) -> tuple[bool, ...]:
        """Make events durable, all or none; False marks those that were there already.

        `at_s` is the controller's time that the machine is given with them. Raises JournalError when it is not known
        that they are durable (nothing may follow from them then), JournalSuperseded when a later term has begun,
        JournalDamaged when the store does not have any more what this controller has written.
        """
        while True:
            rows, fresh = chained(entries, float(at_s), self.term, self._last, self._knows)
            if not rows:
                return fresh
            try:
                self._store.append(rows)
            except AlreadyWrittenError as found:
                self._there |= found.identities
                continue
            self._last = rows[-1].seq, rows[-1].chain
            self._count(rows)
            for row in rows:
                self._taken_in.take(row.sender, row.session, row.number)
            return fresh

    def _knows(self, entry: JournalEntry) -> bool:
        return entry.identity in self._there or self._taken_in.has(*entry.identity)

    def load(
        self, restore: Callable[[bytes], None], beat: Callable[[], None] = lambda: None
    ) -> Iterator[tuple[Journaled, float]]:
        """Have the newest snapshot restored, if there is one, and yield the events after it with their times, in order.

        `restore` raises SnapshotUnreadable for a snapshot that it cannot read; then an earlier one is taken. `beat` is
        called now and then: a big journal is no hang. Read it to the end before anything is appended. Raises
        JournalDamaged where the journal is not whole.
        """

        def beat_both() -> None:
            beat()
            self._leadership.beat()

        start = find_start(self._store, self._origin, restore, self._store.snapshots())
        self._taken_in = start.taken_in
        self._growth.restart()
        yield from events_behind(self._store, start, beat_both, self._count)

    def _count(self, rows: Sequence[EventRow]) -> None:
        self._growth.grown(*self._store.weight_of(rows))

    def replay(self) -> Iterator[tuple[Journaled, float]]:
        """Yield every event that is kept with its time, in order, whether a snapshot has it or not."""
        start = earliest_start(self._store, self._origin, lambda state: None)
        yield from events_behind(self._store, start)

    def taken_in(self) -> Iterator[tuple[str, SenderMemory]]:
        """Yield what was taken in from each sender, in its latest session. Known once `load` has been read."""
        return self._taken_in.senders()

    def compact(self, snapshot: Callable[[], bytes], *, quiet: bool) -> None:
        """Write a snapshot when enough has come since the last one, or put away some of what is before the last.

        Short, so that it can be done between two turns; at a `quiet` moment rather than in the middle of an incident.
        `snapshot` returns the state after the last event. Raises as `append` does; nothing is lost or changed then.
        """
        if self._growth.is_due(quiet=quiet):
            self._store.write_snapshot(self._last, snapshot(), self._taken_in)
            self._growth.restart()
        elif quiet:
            self._store.tidy()

    def conclude(self, snapshot: Callable[[], bytes]) -> None:
        """The job is over: leave what reports need, and nothing that would have to be removed. Raises as `append`."""
        self._store.conclude(self._last, snapshot, self._taken_in)
        self._growth.restart()

    def require_lead(self) -> None:
        """Raise JournalSuperseded when another controller leads by now, e.g. after this process stood still."""
        self._leadership.require()
        self._leadership.beat()
        self._store.require_newest()

    def close(self) -> None:
        """Close the store, and let another controller in. Idempotent."""
        self._store.close()
        self._leadership.close()

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_journal(
    connect: Callable[[Leadership], JournalStore],
    election: Election,
    *,
    name: str = "",
    heard: Callable[[], HeardClock | None] = lambda: None,
    wait_s: float | None = 0.0,
    beat: Callable[[], None] = lambda: None,
) -> Journal:
    """Become the active controller of a job: be elected (waiting up to `wait_s`) and begin a new term.

    `connect` opens the store for the one that leads. `name`, `heard`: as in Journal. `beat` is called now and then.
    Raises JournalError: no such job, the store fails, or another controller is active; JournalDamaged when the journal
    is not what was written.
    """
    give_up_s = None if wait_s is None else time.monotonic() + wait_s
    while True:
        leadership = election.stand(None if give_up_s is None else max(0.0, give_up_s - time.monotonic()), beat)
        store = None
        try:
            store = connect(leadership)
            return Journal(store, leadership, name, heard)
        except BaseException as error:
            if store is not None:
                store.close()
            leadership.close()
            if not isinstance(error, ElectionLost | StoreUnreachable):
                raise
            if give_up_s is not None and time.monotonic() >= give_up_s:
                raise
            _log.info("it did not become the leader: %s", error)
        beat()
        time.sleep(AGAIN_S)


def earliest_start(store: JournalReader, first: bytes, restore: Callable[[bytes], object]) -> ReplayStart:
    """Return where the events begin that are kept."""
    return find_start(store, first, restore, () if store.first_kept() == 1 else store.snapshots(newest_first=False))


def find_start(
    store: JournalReader, first: bytes, restore: Callable[[bytes], object], snapshots: Iterable[SavedSnapshot]
) -> ReplayStart:
    """Have the first of some snapshots restored that can be read, and return where the events continue.

    Where there is none, the events begin with the founding. Raises JournalError when neither will do.
    """
    failure = ""
    for saved in snapshots:
        try:
            restore(saved.state)
        except SnapshotUnreadable as error:
            failure = str(error)
            _log.warning("%s: the snapshot after event %d is passed over: %s", store, saved.seq, error)
            continue
        return ReplayStart(saved.seq, saved.chain, saved.taken_in, saved.at)
    kept = store.first_kept()
    if kept > 1:
        raise JournalError(
            f"{store}: the events before number {kept} are not kept any more, and no snapshot of what they led to can "
            f"be read ({failure or 'there is none that is what was written'}). Use the midstep version that wrote it."
        )
    return ReplayStart(0, first, TakenIn())


def events_behind(
    store: JournalReader,
    start: ReplayStart,
    beat: Callable[[], None] = lambda: None,
    count: Callable[[Sequence[EventRow]], None] = lambda rows: None,
) -> Iterator[tuple[Journaled, float]]:
    """Yield the events behind a start with their times, in order; what was taken in is noted.

    Raises JournalDamaged at the first one that is missing or was changed, JournalError for one that this version does
    not know.
    """
    last, chain = start.seq, start.chain
    for rows in store.batches(start):
        for row in rows:
            if row.seq != last + 1:
                raise damaged(store, f"event {last + 1} is missing")
            chain = row.chain_after(chain)
            if chain != row.chain:
                raise damaged(store, f"event {row.seq} ({row.kind}), or what was before it, is not what was written")
            start.taken_in.take(row.sender, row.session, row.number)
            yield event_of(store, row), row.at_s
            last = row.seq
        count(rows)
        beat()
