"""What ties the records of a journal together, so that one that is missing, changed or foreign shows.

Each record carries a hash of its own columns and of the hash before it; the first one follows from the job that the
journal was founded for. This detects accidents: a write that never came, a file that was cut, copied over or restored.
It does not stop a program that owns the files and computes the hashes again.
"""

import msgspec
from xxhash import xxh3_128_digest

from ...protocol.errors import JournalDamaged

Column = int | float | str | bytes | None
_encode = msgspec.msgpack.Encoder().encode

ADVICE = (
    "It may tell of an older world, so no controller acts on it. The ranks that train continue, without recovery. Let "
    "them finish or end the job, and start it in another job directory; keep this one to look at."
)


def origin(founding: bytes) -> bytes:
    """Return the hash that the chains of a journal begin with."""
    return xxh3_128_digest(founding)


def link(before: bytes, *columns: Column) -> bytes:
    """Return the hash of a record: of its columns as the file has them, and of the hash `before` it."""
    return xxh3_128_digest(_encode((before, columns)))


def damaged(path: object, what: str) -> JournalDamaged:
    """Return the error for a journal that is not what was written."""
    return JournalDamaged(f"{path}: {what}. {ADVICE}")
