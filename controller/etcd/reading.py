"""Reading a job from etcd: every record is checked against the chain before anything is made of it."""

import contextlib
import logging
from collections.abc import Callable, Iterator

import msgspec

from ...protocol.errors import JournalError, SnapshotUnreadable
from ...protocol.incidents import ControllerStatus, JobStatus
from ..journal import event_rows
from ..journal.chain import damaged, origin
from ..journal.reading import restore_from
from ..journal.records import Founding, ReplayStart
from ..journal.senders import TakenIn
from ..journal.snapshots import SavedSnapshot
from ..recovery.events import Event
from ..story import StoryEntry, turns
from .client import Etcd, Kept
from .place import EtcdPlace, number_of, numbered
from .values import is_head, value_of

_decode_controller = msgspec.json.Decoder(ControllerStatus).decode
_log = logging.getLogger(__name__)


class Newest(msgspec.Struct, frozen=True):
    """Number and hash of the last event, and the key that has it with the revision of its last change."""

    last: tuple[int, bytes]
    batch: tuple[str, int] | None


def founding(etcd: Etcd, place: EtcdPlace) -> tuple[Founding, bytes]:
    """Return what a job was founded with, and the origin of its chains. Raises JournalError."""
    known = etcd.get(place.founding)
    if known is None:
        raise JournalError(f"{place}: there is no such job. `midstep submit` makes it; check the store and the job.")
    return event_rows.read_founding(place, known.value), origin(known.value)


def last_term(etcd: Etcd, place: EtcdPlace, first: bytes) -> event_rows.TermRecord | None:
    """Return how the last term began; None when there was none. Raises JournalDamaged."""
    last = event_rows.read_terms(place, [kept.value for kept in etcd.list(place.terms)], first)
    known = etcd.get(place.term)
    if (known and known.value) != (None if last is None else msgspec.msgpack.encode(last)):
        raise damaged(place, "its last term is not the one that was written")
    return last


def newest(etcd: Etcd, place: EtcdPlace, first: bytes) -> Newest:
    """Return where the journal ends. Raises JournalError, JournalDamaged."""
    last = etcd.last(place.batches)
    head = None if last is None else _head_of(etcd, place, last)
    if head is None:  # there was none yet, or the job has ended
        for saved in _snapshots(etcd, place):
            return Newest((saved.seq, saved.chain), None)
        return Newest((0, first), None)
    rows = _rows(etcd, place, head)
    return Newest((rows[-1].seq, rows[-1].chain), (head.key, head.revision))


def start(etcd: Etcd, place: EtcdPlace, first: bytes, restore: Callable[[bytes], object]) -> ReplayStart:
    """Have the newest snapshot restored that can be read, and return where the events continue. Raises JournalError."""
    return _start(etcd, place, first, restore, newest_first=True)


def events(
    etcd: Etcd, place: EtcdPlace, begin: ReplayStart, beat: Callable[[], None] = lambda: None
) -> Iterator[tuple[Event, float]]:
    """Yield the events behind `begin` with their times, in order; what was taken in is noted.

    Raises JournalDamaged at the first one that is missing or was changed, JournalError for one that this version does
    not know.
    """
    last, chain = begin.seq, begin.chain
    for kept in etcd.list(place.batches, start=numbered(place.batches, begin.seq + 1)):
        if not is_head(kept.key, place.batches):
            continue
        for row in _rows(etcd, place, kept):
            if row.seq != last + 1:
                raise damaged(place, f"event {last + 1} is missing")
            chain = row.chain_after(chain)
            if chain != row.chain:
                raise damaged(place, f"event {row.seq} ({row.kind}), or what was before it, is not what was written")
            begin.taken_in.take(row.sender, row.session, row.number)
            yield event_rows.event_of(place, row), row.at_s
            last = row.seq
        beat()


def read_status(place: EtcdPlace) -> JobStatus:
    """Return the job's status as of its last event, from the journal alone. Changes nothing. Raises JournalError."""
    with _reading(place) as (etcd, known, first):
        machine, last_s = known.machine(), known.created_s

        def restore(state: bytes) -> None:
            nonlocal last_s
            last_s = restore_from(machine, state)

        for event, at_s in events(etcd, place, start(etcd, place, first, restore)):
            machine.handle(event, at_s)
            last_s = at_s
        return machine.status(last_s)


def read_controllers(place: EtcdPlace) -> tuple[ControllerStatus, ...]:
    """Return the controllers of a job that live, by name. Raises JournalError."""
    with contextlib.closing(Etcd(place)) as etcd:
        return tuple(_decode_controller(kept.value) for kept in etcd.list(place.controllers))


def read_story(place: EtcdPlace) -> Iterator[StoryEntry]:
    """Yield each event that the journal still has, with what followed from it. As `read_status` in all else."""
    with _reading(place) as (etcd, known, first):
        machine = known.machine()
        begin = _start(etcd, place, first, lambda state: restore_from(machine, state), newest_first=False)
        yield from turns(machine, events(etcd, place, begin), begin.seq + 1)


def _start(
    etcd: Etcd, place: EtcdPlace, first: bytes, restore: Callable[[bytes], object], *, newest_first: bool
) -> ReplayStart:
    earliest = etcd.first(place.batches)
    whole = number_of(earliest.key, place.batches) == 1 if earliest else etcd.first(place.snapshots) is None
    failure = ""
    for saved in _snapshots(etcd, place, newest_first=newest_first):
        try:
            restore(saved.state)
        except SnapshotUnreadable as error:
            failure = str(error)
            _log.warning("%s: the snapshot after event %d is passed over: %s", place, saved.seq, error)
            continue
        return ReplayStart(saved.seq, saved.chain, saved.taken_in)
    if not whole:
        raise JournalError(
            f"{place}: the first events are not kept any more, and no snapshot of what they led to can be read "
            f"({failure or 'there is none'}). Use the midstep version that wrote it."
        )
    return ReplayStart(0, first, TakenIn())


def _snapshots(etcd: Etcd, place: EtcdPlace, *, newest_first: bool = True) -> Iterator[SavedSnapshot]:
    """Yield the snapshots that are what was written. One that is not is passed over, with a warning."""
    heads = [kept for kept in etcd.list(place.snapshots, keys_only=True) if is_head(kept.key, place.snapshots)]
    for head in reversed(heads) if newest_first else heads:
        known = etcd.get(head.key)
        seq = number_of(head.key, place.snapshots)
        try:
            yield event_rows.unpack_snapshot(seq, b"" if known is None else value_of(etcd, place, known))
        except ValueError as error:
            _log.warning("%s: the snapshot after event %d is passed over: %s", place, seq, error)


def _rows(etcd: Etcd, place: EtcdPlace, head: Kept) -> list[event_rows.EventRow]:
    try:
        content = value_of(etcd, place, head)
    except ValueError as error:
        raise damaged(place, str(error)) from error
    rows = event_rows.unpack_rows(place, content)
    if not rows or rows[0].seq != number_of(head.key, place.batches):
        raise damaged(place, f"the events in {head.key} are not those that were written")
    return rows


def _head_of(etcd: Etcd, place: EtcdPlace, last: Kept) -> Kept | None:
    """Return the last key that names events; behind it may be parts of some that were never named."""
    while not is_head(last.key, place.batches):
        number = last.key.removeprefix(place.batches).partition("/")[0]
        named = etcd.get(f"{place.batches}{number}")
        before = named or etcd.last(place.batches, before=f"{place.batches}{number}")
        if before is None:
            return None
        last = before
    return last


@contextlib.contextmanager
def _reading(place: EtcdPlace) -> Iterator[tuple[Etcd, Founding, bytes]]:
    with contextlib.closing(Etcd(place)) as etcd:
        etcd.read_as_of_now()
        known, first = founding(etcd, place)
        yield etcd, known, first
