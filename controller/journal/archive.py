"""Events that no takeover has to read any more: packed, so that stories of old incidents can be told, and bounded.

Each step is one transaction and short, so that a controller can do it between two turns and may die at any point of it.
"""

import sqlite3
import zlib
from pathlib import Path
from typing import Any

import msgspec

from . import snapshots
from .chain import damaged

BLOCK = 1000  # events packed in one go: some milliseconds
_LEVEL = 1
_COLUMNS = "seq, term, at_s, sender, session, number, kind, payload, chain"
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[tuple[int, int, float, str, int, int | None, str, bytes, bytes]]).decode

EventRow = tuple[Any, ...]  # of the events' table, checked by its hash before anything is made of it


def oldest_event(connection: sqlite3.Connection) -> int:
    """Return the number of the first event that is not archived; 1 when there is none."""
    seq = connection.execute("SELECT min(seq) FROM events").fetchone()[0]
    return 1 if seq is None else int(seq)


def pack(connection: sqlite3.Connection, first: int, last: int) -> int:
    """Archive events from `first` on, at most to `last`, and no more than a block; return the last one packed.

    Inside a transaction of the caller.
    """
    last = min(last, first + BLOCK - 1)
    following = [seq for seq in snapshots.numbers(connection) if seq >= first]
    last = min([last, *following])  # so that no block lies on both sides of a snapshot
    rows = connection.execute(f"SELECT {_COLUMNS} FROM events WHERE seq BETWEEN ? AND ? ORDER BY seq", (first, last))
    packed = zlib.compress(_encode(rows.fetchall()), _LEVEL)
    connection.execute("INSERT INTO archive VALUES (?, ?, ?)", (first, last, packed))
    connection.execute(
        "INSERT OR IGNORE INTO anchors SELECT seq, chain FROM events"
        " WHERE seq BETWEEN ? AND ? AND seq IN (SELECT events FROM lease)",
        (first, last),
    )
    connection.execute("DELETE FROM events WHERE seq BETWEEN ? AND ?", (first, last))
    return last


def trim(connection: sqlite3.Connection, most_bytes: int) -> None:
    """Drop the earliest archived events, up to a snapshot, until the rest has `most_bytes`. In a caller's transaction.

    The last two snapshots, and the events after the first of these, are never touched.
    """
    while _size(connection) > most_bytes:
        later = [
            seq for seq in snapshots.numbers(connection) if seq >= (first_kept(connection) or 1)
        ]  # fmt: skip
        if len(later) < 2:
            return
        connection.execute("DELETE FROM archive WHERE last <= ?", (later[0],))
        connection.execute("DELETE FROM snapshots WHERE seq < ?", (later[0],))


def first_kept(connection: sqlite3.Connection) -> int | None:
    """Return the number of the first event that is kept, archived or not; None when there is none."""
    archived = connection.execute("SELECT min(first) FROM archive").fetchone()[0]
    seq = connection.execute("SELECT min(seq) FROM events").fetchone()[0] if archived is None else archived
    return None if seq is None else int(seq)


def unpack(connection: sqlite3.Connection, path: Path, seq: int) -> list[EventRow]:
    """Return the rows of the archived block that has event `seq`; empty when none has."""
    row = connection.execute(
        "SELECT last, rows FROM archive WHERE first <= ? ORDER BY first DESC LIMIT 1", (seq,)
    ).fetchone()
    if row is None or row[0] < seq:
        return []
    try:
        return list(_decode(zlib.decompress(row[1])))
    except (zlib.error, msgspec.MsgspecError, TypeError) as error:
        raise damaged(path, f"the archived events around number {seq} are not what was written") from error


def _size(connection: sqlite3.Connection) -> int:
    archived = connection.execute("SELECT total(length(rows)) FROM archive").fetchone()[0]
    snapshots = connection.execute("SELECT total(length(state) + length(taken_in)) FROM snapshots").fetchone()[0]
    return int(archived + snapshots)
