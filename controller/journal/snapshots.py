"""The snapshots in a journal: the state after an event, from which a later controller continues.

A snapshot is tied to the chain of the events by the hash of the event that it follows on. Several are kept: one that
cannot be read is passed over for an earlier one, and the events after that one are kept as well.
"""

import logging
import sqlite3
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from . import sqlite_file
from .chain import link
from .senders import TakenIn

_LEVEL = 1  # of compression: the controller waits for it

_log = logging.getLogger(__name__)


class SavedSnapshot(msgspec.Struct, frozen=True):
    """A snapshot as it was written: after event `seq`, whose hash is `chain`."""

    seq: int
    chain: bytes
    state: bytes
    taken_in: TakenIn


def write(connection: sqlite3.Connection, last: tuple[int, bytes], state: bytes, taken_in: TakenIn) -> None:
    """Write a snapshot of the state after the `last` event. Inside a transaction of the caller."""
    columns = (*last, zlib.compress(state, _LEVEL), zlib.compress(taken_in.encode(), _LEVEL))
    connection.execute("INSERT OR REPLACE INTO snapshots VALUES (?, ?, ?, ?, ?)", (*columns, link(b"", *columns)))


def numbers(connection: sqlite3.Connection) -> list[int]:
    """Return after which events there are snapshots, the earliest first."""
    if not sqlite_file.is_compacted(connection):
        return []
    return [seq for (seq,) in connection.execute("SELECT seq FROM snapshots ORDER BY seq")]


def read(connection: sqlite3.Connection, path: Path, *, newest_first: bool = True) -> Iterator[SavedSnapshot]:
    """Yield the snapshots that are what was written. One that is not is passed over, with a warning."""
    with sqlite_file.explained(path, "look for snapshots"):
        known = numbers(connection)
    for seq in reversed(known) if newest_first else known:
        with sqlite_file.explained(path, "read a snapshot"):
            row = connection.execute("SELECT * FROM snapshots WHERE seq = ?", (seq,)).fetchone()
        if row is None:  # it was removed by a running controller
            continue
        *columns, digest = row
        try:
            if digest != link(b"", *columns):
                raise ValueError("it is not what was written")
            _, chain, state, taken_in = columns
            saved = SavedSnapshot(seq, chain, zlib.decompress(state), TakenIn.decode(zlib.decompress(taken_in)))
        except (ValueError, TypeError, zlib.error, msgspec.MsgspecError) as error:
            _log.warning("%s: the snapshot after event %d is passed over: %s", path, seq, error)
            continue
        yield saved
