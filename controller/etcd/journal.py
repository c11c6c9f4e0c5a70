"""The journal of a job in etcd: what is acknowledged is durable at a quorum; a deposed controller can write nothing.

Each write is one transaction that compares the term, and the last events as this controller has written them. A request
that failed may have been carried out: the next one finds that out by what it compares, and writes over it.
"""

import contextlib
import logging
import math
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from types import TracebackType

import msgspec

from ...policies.schema import Policy
from ...protocol.dedup import SenderMemory
from ...protocol.errors import ElectionLost, JournalError, StoreUnreachable
from ...protocol.types import JobSpec
from ..clock import Clock
from ..journal import event_rows
from ..journal.chain import damaged
from ..journal.compaction import Growth, Limits
from ..journal.records import Founding
from ..journal.senders import TakenIn
from ..journal.store import JournalEntry
from ..recovery.events import Event
from ..recovery.world import KEY_BYTES
from . import reading
from .client import Condition, Etcd, Operation, absent, delete, holds, put, unchanged
from .election import POLL_S, EtcdLeadership, LeaderEntry, wait_to_lead
from .place import EtcdPlace, numbered
from .presence import Presence
from .values import put_parts

KEPT_S = 7 * 24 * 3600  # for reports of a job that has ended
TERMS_AT_ONCE = 100  # etcd takes 128 operations in a transaction
TRIES = 3  # of one write, when an earlier one is found to have been carried out

_log = logging.getLogger(__name__)


def submit(place: EtcdPlace, job: JobSpec, policy: Policy, platform: str = "") -> bool:
    """Found the journal of a new job; `platform`: see Founding. Return False when there is one of that name.

    Raises JournalError.
    """
    founding = msgspec.msgpack.encode(
        Founding(job, policy, False, time.time(), secrets.token_bytes(KEY_BYTES), platform)
    )
    with contextlib.closing(Etcd(place)) as etcd:
        return etcd.change([absent(place.founding)], [put(place.founding, founding)]) is not None


class EtcdJournal:
    """The journal, open for the one controller that leads. `term` and `session` are higher than all earlier ones."""

    def __init__(self, etcd: Etcd, place: EtcdPlace, presence: Presence, limits: Limits) -> None:
        """Read what there is. Not for callers: `EtcdJournal.open`."""
        self._etcd = etcd
        self._place = place
        self._growth = Growth(limits)
        self._taken_in = TakenIn()
        self.founding, self._origin = reading.founding(etcd, place)
        before = reading.last_term(etcd, place, self._origin)
        newest = reading.newest(etcd, place, self._origin)
        self._last, self._last_batch = newest.last, newest.batch
        if before is not None and before.events > self._last[0]:
            raise damaged(place, f"its end is lost: {before.events} events were in it, and {self._last[0]} are")
        self.clock = Clock.continuing(None if before is None else before.clock, presence.leaders_clock.heard)
        self.term = (before.term if before else 0) + 1
        self.session = max(time.time_ns(), (before.session if before else 0) + 1)
        record = event_rows.TermRecord(
            self.term, self.session, presence.name, presence.host, self.clock.reading(), *self._last, b""
        )
        chain = record.chain_after(before.chain if before else self._origin)
        self._record = msgspec.msgpack.encode(msgspec.structs.replace(record, chain=chain))
        self._record_before = None if before is None else msgspec.msgpack.encode(before)
        entry = LeaderEntry(presence.name, presence.host, presence.pid, self.term, self.session)
        self._presence = presence
        self._lead = EtcdLeadership(etcd, place, presence, entry, self._record)
        self._snapshot: int | None = None  # the newest one

    @classmethod
    def open(
        cls,
        place: EtcdPlace,
        presence: Presence,
        *,
        lease_s: float,
        wait_s: float | None = 0.0,
        beat: Callable[[], None] = lambda: None,
        limits: Limits | None = None,
        admitted: Callable[[], bool] = lambda: True,
    ) -> "EtcdJournal":
        """Become the active controller of the job: be elected (waiting up to `wait_s`) and begin a new term.

        `beat` is called now and then. `admitted` says whether this controller may take a lead that is free. Raises
        JournalError: no such job, etcd cannot be reached, or another controller is active; JournalDamaged when the
        journal is not what was written.
        """

        def beat_both() -> None:
            beat()
            presence.beat()

        with ExitStack() as stack:
            etcd = Etcd(place)
            stack.callback(etcd.close)
            give_up_s = math.inf if wait_s is None else time.monotonic() + wait_s
            while True:
                left_s = None if wait_s is None else max(0.0, give_up_s - time.monotonic())
                wait_to_lead(etcd, place, left_s, lease_s=lease_s, beat=beat_both, admitted=admitted)
                try:
                    with etcd.as_of_now():  # the next term of another controller may begin meanwhile
                        journal = cls(etcd, place, presence, limits or Limits())
                    journal._begin()
                except (ElectionLost, StoreUnreachable) as error:
                    if time.monotonic() >= give_up_s:
                        raise
                    _log.info("it did not become the leader: %s", error)
                    beat_both()
                    time.sleep(POLL_S)
                    continue
                stack.pop_all()
                return journal

    def _begin(self) -> None:
        conditions, operations = self._lead.claim()
        before = self._record_before
        conditions.append(absent(self._place.term) if before is None else holds(self._place.term, before))
        # One that was taken for dead may have written until now.
        conditions += [*self._as_written(), absent(numbered(self._place.batches, self._last[0] + 1))]
        operations += [
            put(self._place.term, self._record),
            put(numbered(self._place.terms, self.term), self._record),
        ]
        if self._etcd.change(conditions, operations) is None:
            raise ElectionLost(f"{self._place}: another controller was quicker to take the lead.")
        self._presence.leaders_clock.lead(self.clock, self._lead.holds())

    def append(self, entries: Sequence[JournalEntry], at_s: float) -> tuple[bool, ...]:
        """Make events durable, all or none; False marks those that were there already.

        `at_s` is the controller's time that the machine is given with them. Raises JournalError when it is not known
        that they are durable (nothing may follow from them then), JournalSuperseded when a later term has begun,
        JournalDamaged when the keys are not the ones any more that this controller has written.
        """
        rows, fresh, last = event_rows.chained(entries, float(at_s), self.term, self._last, self._taken_in)
        if not rows:
            return fresh
        key = numbered(self._place.batches, rows[0].seq)
        name = put_parts(key, event_rows.pack_rows(rows), self._write)
        revision, there = None, 0
        for _ in range(TRIES):
            revision = self._etcd.change([*self._as_written(), self._lead.holds(), unchanged(key, there)], [name])
            if revision is not None:
                break
            there = self._written_before(key)
        if revision is None:
            raise JournalError(f"{self._place}: {key} is changed again and again. End what writes there.")
        self._last, self._last_batch = last, (key, revision)
        for row in rows:
            self._taken_in.take(row.sender, row.session, row.number)
            self._growth.grown(1, len(row.payload))
        return fresh

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

    def load(
        self, restore: Callable[[bytes], None], beat: Callable[[], None] = lambda: None
    ) -> Iterator[tuple[Event, float]]:
        """Have the newest snapshot restored, if there is one, and yield the events after it with their times, in order.

        As `Journal.load`.
        """
        start = reading.start(self._etcd, self._place, self._origin, restore)
        self._taken_in, self._snapshot = start.taken_in, start.seq or None
        self._growth.restart()
        for event, at_s in reading.events(self._etcd, self._place, start, beat):
            self._growth.grown(1, 0)
            yield event, at_s

    def taken_in(self) -> Iterator[tuple[str, SenderMemory]]:
        """Yield what was taken in from each sender, in its latest session. Known once `load` has been read."""
        return self._taken_in.senders()

    def compact(self, snapshot: Callable[[], bytes], *, quiet: bool) -> None:
        """Write a snapshot when enough events have come, and delete what came before the one before it.

        That one stays, with the events after it: a snapshot that cannot be read is passed over. Raises as `append`.
        """
        if not self._growth.is_due(quiet=quiet):
            return
        key = numbered(self._place.snapshots, self._last[0])
        content = event_rows.pack_snapshot(self._last, snapshot(), self._taken_in)
        name = put_parts(key, content, self._write)
        operations = [name]
        if self._snapshot is not None:
            operations += [
                delete(self._place.batches, numbered(self._place.batches, self._snapshot + 1)),
                delete(self._place.snapshots, numbered(self._place.snapshots, self._snapshot)),
            ]
        self._write(operations)
        self._snapshot = self._last[0]
        self._growth.restart()

    def conclude(self, snapshot: Callable[[], bytes]) -> None:
        """Leave the end of the job, for `midstep report`, and delete all else. etcd forgets the rest after KEPT_S."""
        lease = self._etcd.grant(KEPT_S)
        content = event_rows.pack_snapshot(self._last, snapshot(), self._taken_in)
        key = numbered(self._place.snapshots, self._last[0])
        kept = [head for head in (self._etcd.get(self._place.founding), self._etcd.get(self._place.term)) if head]
        kept += self._etcd.list(self._place.terms)
        for start in range(0, len(kept), TERMS_AT_ONCE):
            self._write([put(each.key, each.value, lease) for each in kept[start : start + TERMS_AT_ONCE]])
        name = put_parts(key, content, self._write, lease)
        events = delete(self._place.batches, numbered(self._place.batches, self._last[0] + 1))
        operations = [name, events]
        if self._snapshot is not None and self._snapshot < self._last[0]:
            operations.append(delete(self._place.snapshots, key))
        self._write(operations)
        self._last_batch, self._snapshot = None, self._last[0]
        self._growth.restart()

    def require_lead(self) -> None:
        """Raise JournalSuperseded when another controller leads by now, e.g. after this process stood still."""
        self._lead.require()
        self._lead.beat()

    def close(self) -> None:
        """Close the connections. The lead ends with the controller's lease (`Presence.close`)."""
        self._etcd.close()

    def __enter__(self) -> "EtcdJournal":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
