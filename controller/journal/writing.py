"""Writing events into the journal: all that a turn has with one statement, since each has its price."""

import sqlite3
from collections.abc import Sequence

import msgspec

from .chain import link
from .store import JournalEntry

_INSERT = (
    "INSERT INTO events (seq, term, at_s, sender, session, number, kind, payload, chain)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (sender, session, number) DO NOTHING"
)

_encode = msgspec.msgpack.Encoder().encode

End = tuple[int, bytes]
Row = tuple[int, int, float, str, int, int | None, str, bytes, bytes]


class Insertion(msgspec.Struct, frozen=True):
    """The last event with its hash, which entries were not there before, and how large all of them are."""

    last: End
    fresh: tuple[bool, ...]
    size_bytes: int


def insert(
    connection: sqlite3.Connection, entries: Sequence[JournalEntry], *, term: int, at_s: float, last: End
) -> Insertion:
    """Write events behind the `last` one, in the transaction that is open, but for those that are there already."""
    rows, end = [], last
    for entry in entries:
        rows.append(_row(entry, end, term, at_s))
        end = (rows[-1][0], rows[-1][-1])
    size_bytes = sum(len(row[-2]) for row in rows)
    connection.execute("SAVEPOINT entries")
    if connection.executemany(_INSERT, rows).rowcount == len(rows):
        connection.execute("RELEASE entries")
        return Insertion(end, (True,) * len(rows), size_bytes)
    connection.execute("ROLLBACK TO entries")  # hashes and numbers behind one that was left out are wrong
    connection.execute("RELEASE entries")
    fresh, end = [], last
    for entry in entries:
        row = _row(entry, end, term, at_s)
        fresh.append(connection.execute(_INSERT, row).rowcount == 1)
        if fresh[-1]:
            end = (row[0], row[-1])
    return Insertion(end, tuple(fresh), size_bytes)


def _row(entry: JournalEntry, last: End, term: int, at_s: float) -> Row:
    kind, payload = type(entry.event).__name__, _encode(entry.event)
    columns = (last[0] + 1, term, at_s, entry.sender, entry.session, entry.number or None, kind, payload)
    return (*columns, link(last[1], *columns))
