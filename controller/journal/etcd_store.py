"""The journal of a job in etcd: what is acknowledged is durable at a quorum; a deposed controller can write nothing.

Each write is one transaction that compares the term, and the last events as this controller has written them. A request
that failed may have been carried out: the next one finds that out by what it compares, and writes over it.

A value that is larger than a request may be is cut into keys. The key that names them is written last, so that none of
them counts before all are there.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence

import msgspec

from ...policies.schema import Policy
from ...protocol.errors import ElectionLost, JournalError
from ...protocol.types import JobSpec
from ..election.election import Leadership
from ..election.etcd_election import EtcdElection, EtcdLeadership
from ..election.presence import EtcdPresence
from ..etcd.client import Condition, Etcd, Kept, Operation, absent, delete, holds, put, unchanged
from ..etcd.place import EtcdPlace, number_of, numbered
from .journal import Journal, Limits, new_founding, open_journal
from .records import (
    End,
    EventRow,
    ReplayStart,
    SavedSnapshot,
    TakenIn,
    TermRecord,
    damaged,
    pack_rows,
    pack_snapshot,
    read_terms,
    unpack_rows,
    unpack_snapshot,
)

KEPT_S = 7 * 24 * 3600  # for reports of a job that has ended
PART_BYTES = 1024 * 1024  # etcd refuses requests of more than 1.5 MiB unless it is told otherwise
TERMS_AT_ONCE = 100  # etcd takes 128 operations in a transaction
TRIES = 3  # of one write, when an earlier one is found to have been carried out
_PARTS_DIGITS = 6
_SEPARATOR = "/"

_log = logging.getLogger(__name__)


class _Head(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`parts` 0: all of the value is here."""

    parts: int
    content: bytes


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Head).decode


class EtcdReader:
    """A journal in etcd that is read."""

    def __init__(self, etcd: Etcd, place: EtcdPlace) -> None:
        self._etcd = etcd
        self._place = place

    def __str__(self) -> str:
        return str(self._place)

    def founding(self) -> bytes:
        """Return what the job was founded with; see `JournalReader`."""
        known = self._etcd.get(self._place.founding)
        if known is None:
            raise JournalError(
                f"{self._place}: there is no such job. `midstep submit` makes it; check the store and the job."
            )
        return known.value

    def snapshots(self, *, newest_first: bool = True) -> Iterator[SavedSnapshot]:
        """Yield the snapshots that are what was written; see `JournalReader`."""
        folder = self._place.snapshots
        heads = [kept for kept in self._etcd.list(folder, keys_only=True) if _is_head(kept.key, folder)]
        for head in reversed(heads) if newest_first else heads:
            known = self._etcd.get(head.key)
            seq = number_of(head.key, folder)
            try:
                yield unpack_snapshot(seq, b"" if known is None else self._value_of(known))
            except ValueError as error:
                _log.warning("%s: the snapshot after event %d is passed over: %s", self._place, seq, error)

    def first_kept(self) -> int:
        """Return the number of the first event that is kept; see `JournalReader`."""
        earliest = self._etcd.first(self._place.batches)
        if earliest is not None:
            return number_of(earliest.key, self._place.batches)
        saved = self._etcd.last(self._place.snapshots)
        return 1 if saved is None else number_of(saved.key, self._place.snapshots) + 1

    def batches(self, start: ReplayStart) -> Iterator[Sequence[EventRow]]:
        """Yield the events behind a start; see `JournalReader`."""
        folder = self._place.batches
        for kept in self._etcd.list(folder, start=numbered(folder, start.seq + 1)):
            if _is_head(kept.key, folder):
                yield self._rows(kept)

    def _rows(self, head: Kept) -> list[EventRow]:
        try:
            content = self._value_of(head)
        except ValueError as error:
            raise damaged(self._place, str(error)) from error
        rows = unpack_rows(self._place, content)
        if not rows or rows[0].seq != number_of(head.key, self._place.batches):
            raise damaged(self._place, f"the events in {head.key} are not those that were written")
        return rows

    def _value_of(self, head: Kept) -> bytes:
        """Return the whole value that a key names. Raises ValueError when it is not what was written, JournalError."""
        try:
            known = _decode(head.value)
        except msgspec.MsgspecError as error:
            raise ValueError(f"{self._place}: {head.key} is not what was written ({error})") from error
        if not known.parts:
            return known.content
        pieces = [self._etcd.get(_part(head.key, number)) for number in range(known.parts)]
        if None in pieces:
            raise ValueError(f"{self._place}: a part of {head.key} is missing")
        return b"".join(piece.value for piece in pieces if piece is not None)


class EtcdStore(EtcdReader):
    """A journal in etcd, open for its one writer; see `JournalStore`."""

    def __init__(self, etcd: Etcd, place: EtcdPlace, leadership: EtcdLeadership, limits: Limits) -> None:
        super().__init__(etcd, place)
        self.limits = limits
        self._lead = leadership
        self._before: TermRecord | None = None
        self._last: End = (0, b"")
        self._last_batch: tuple[str, int] | None = None  # the key of the last events, and its last change
        self._snapshot: int | None = None  # the newest one

    def take_over(self, leadership: Leadership, begin: Callable[[], TermRecord]) -> None:
        """Begin a term in one transaction, with the lead; see `JournalStore`."""
        with self._etcd.as_of_now():  # the next term of another controller may begin meanwhile
            record = begin()
        encoded = _encode(record)
        conditions, operations = self._lead.claim(record, encoded)
        term = self._place.term
        conditions.append(absent(term) if self._before is None else holds(term, _encode(self._before)))
        # One that was taken for dead may have written until now.
        conditions += [*self._as_written(), absent(numbered(self._place.batches, self._last[0] + 1))]
        operations += [put(term, encoded), put(numbered(self._place.terms, record.term), encoded)]
        if self._etcd.change(conditions, operations) is None:
            raise ElectionLost(f"{self._place}: another controller was quicker to take the lead.")

    def last_term(self, first: bytes) -> TermRecord | None:
        """Return how the last term began; see `JournalStore`."""
        last = read_terms(self._place, [kept.value for kept in self._etcd.list(self._place.terms)], first)
        known = self._etcd.get(self._place.term)
        if (known and known.value) != (None if last is None else _encode(last)):
            raise damaged(self._place, "its last term is not the one that was written")
        self._before = last
        return last

    def end(self, first: bytes) -> End:
        """Return number and hash of the last event; see `JournalStore`."""
        last = self._etcd.last(self._place.batches)
        head = None if last is None else self._head_of(last)
        if head is not None:
            row = self._rows(head)[-1]
            self._last, self._last_batch = (row.seq, row.chain), (head.key, head.revision)
        else:  # there was none yet, or the job has ended
            saved = next(self.snapshots(), None)
            self._last = (0, first) if saved is None else (saved.seq, saved.chain)
        return self._last

    def _head_of(self, last: Kept) -> Kept | None:
        """Return the last key that names events; behind it may be parts of some that were never named."""
        folder = self._place.batches
        while not _is_head(last.key, folder):
            number = last.key.removeprefix(folder).partition(_SEPARATOR)[0]
            named = self._etcd.get(f"{folder}{number}")
            before = named or self._etcd.last(folder, before=f"{folder}{number}")
            if before is None:
                return None
            last = before
        return last

    def append(self, rows: Sequence[EventRow]) -> None:
        """Make events durable; see `JournalStore`."""
        key = numbered(self._place.batches, rows[0].seq)
        name = self._put_parts(key, pack_rows(list(rows)))
        there = 0
        for _ in range(TRIES):
            revision = self._etcd.change([*self._as_written(), self._lead.holds(), unchanged(key, there)], [name])
            if revision is not None:
                self._last, self._last_batch = (rows[-1].seq, rows[-1].chain), (key, revision)
                return
            there = self._written_before(key)
        raise JournalError(f"{self._place}: {key} is changed again and again. End what writes there.")

    def weight_of(self, rows: Sequence[EventRow]) -> tuple[int, int]:
        """Return what events cost a takeover; see `JournalStore`."""
        return len(rows), sum(len(row.payload) for row in rows)

    def _as_written(self) -> list[Condition]:
        """Hold when the last events are the ones that this controller has read or written."""
        return [] if self._last_batch is None else [unchanged(*self._last_batch)]

    def _written_before(self, key: str) -> int:
        """Return the revision of what an earlier request of this term has left, which seemed to have failed.

        Raises JournalSuperseded, JournalDamaged.
        """
        self._lead.require_term()
        if self._last_batch is not None:
            last = self._etcd.get(self._last_batch[0])
            if last is None or last.revision != self._last_batch[1]:
                raise damaged(self._place, f"after event {self._last[0]} it was changed by another program")
        known = self._etcd.get(key)
        return 0 if known is None else known.revision

    def _write(self, operations: Sequence[Operation]) -> None:
        """Write what counts only when something else names it."""
        if self._etcd.change([self._lead.holds()], operations) is None:
            self._lead.require_term()
            raise JournalError(f"{self._place}: etcd has refused a write of the present term. Try again.")

    def _put_parts(self, key: str, value: bytes, lease: int = 0) -> Operation:
        """Write the parts of a large value, and return the operation that makes all of it count."""
        if len(value) <= PART_BYTES:
            return put(key, _encode(_Head(0, value)), lease)
        pieces = [value[start : start + PART_BYTES] for start in range(0, len(value), PART_BYTES)]
        for number, piece in enumerate(pieces):
            self._write([put(_part(key, number), piece, lease)])
        return put(key, _encode(_Head(len(pieces), b"")), lease)

    def snapshots(self, *, newest_first: bool = True) -> Iterator[SavedSnapshot]:
        """Yield the snapshots that are what was written; the last one that is asked for is the one that is used."""
        for saved in super().snapshots(newest_first=newest_first):
            self._snapshot = saved.seq
            yield saved

    def write_snapshot(self, last: End, state: bytes, taken_in: TakenIn) -> None:
        """Keep the state after the last event, and delete what came before the snapshot before; see `JournalStore`."""
        operations = [self._put_parts(numbered(self._place.snapshots, last[0]), pack_snapshot(last, state, taken_in))]
        if self._snapshot is not None:
            operations += [
                delete(self._place.batches, numbered(self._place.batches, self._snapshot + 1)),
                delete(self._place.snapshots, numbered(self._place.snapshots, self._snapshot)),
            ]
        self._write(operations)
        self._snapshot = last[0]

    def tidy(self) -> None:
        """Delete what is not read any more, with each snapshot."""

    def conclude(self, last: End, state: Callable[[], bytes], taken_in: TakenIn) -> None:
        """Leave the end of the job, for `midstep report`, and delete all else. etcd forgets the rest after KEPT_S."""
        lease = self._etcd.grant(KEPT_S)
        content = pack_snapshot(last, state(), taken_in)
        key = numbered(self._place.snapshots, last[0])
        kept = [head for head in (self._etcd.get(self._place.founding), self._etcd.get(self._place.term)) if head]
        kept += self._etcd.list(self._place.terms)
        for start in range(0, len(kept), TERMS_AT_ONCE):
            self._write([put(each.key, each.value, lease) for each in kept[start : start + TERMS_AT_ONCE]])
        name = self._put_parts(key, content, lease)
        operations = [name, delete(self._place.batches, numbered(self._place.batches, last[0] + 1))]
        if self._snapshot is not None and self._snapshot < last[0]:
            operations.append(delete(self._place.snapshots, key))
        self._write(operations)
        self._last_batch, self._snapshot = None, last[0]

    def require_newest(self) -> None:
        """The leadership asks etcd where it is in doubt, and each write compares the term."""

    def close(self) -> None:
        """The connections are the leadership's to close."""


def submit(place: EtcdPlace, job: JobSpec, policy: Policy, platform: str = "") -> bool:
    """Found the journal of a new job; `platform`: see Founding. Return False when there is one of that name.

    Raises JournalError.
    """
    founding = new_founding(job, policy, platform=platform)
    with contextlib.closing(Etcd(place)) as etcd:
        return etcd.change([absent(place.founding)], [put(place.founding, founding)]) is not None


@contextlib.contextmanager
def reading(place: EtcdPlace) -> Iterator[EtcdReader]:
    """Open a journal to read it as it is now. Raises JournalError."""
    with contextlib.closing(Etcd(place)) as etcd:
        etcd.read_as_of_now()
        yield EtcdReader(etcd, place)


def open_in_etcd(
    place: EtcdPlace,
    presence: EtcdPresence,
    *,
    lease_s: float,
    wait_s: float | None = 0.0,
    beat: Callable[[], None] = lambda: None,
    limits: Limits | None = None,
    admitted: Callable[[], bool] = lambda: True,
) -> Journal:
    """Become the active controller of the job; see `open_journal`.

    `admitted` says whether this controller may take a lead that is free.
    """
    leader: list[EtcdLeadership] = []

    def connect(leadership: Leadership) -> EtcdStore:
        assert isinstance(leadership, EtcdLeadership)
        leader[:] = [leadership]
        return EtcdStore(leadership.etcd, place, leadership, limits or Limits())

    def beat_both() -> None:
        beat()
        presence.beat()

    election = EtcdElection(place, presence, lease_s=lease_s, admitted=admitted)
    journal = open_journal(
        connect, election, name=presence.name, heard=lambda: presence.heard, wait_s=wait_s, beat=beat_both
    )
    presence.lead(journal.clock, leader[0].holds())
    return journal


def _is_head(key: str, folder: str) -> bool:
    """Say whether a key in a folder names a value, rather than being a part of one."""
    return _SEPARATOR not in key.removeprefix(folder)


def _part(key: str, number: int) -> str:
    return f"{key}{_SEPARATOR}{number:0{_PARTS_DIGITS}d}"
