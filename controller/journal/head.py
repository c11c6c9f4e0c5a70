"""The end of a journal, noted in a second place: what a journal whose last records are lost cannot show by itself.

The note lies in the job's run directory, apart from the journal. It is not synced to disk: it outlives the controller,
and after the death of the machine nothing is left that an older world could harm.
"""

import logging
import os
from pathlib import Path

import msgspec
from xxhash import xxh3_64_digest

HEAD_NAME = "journal.head"
_DIGEST_BYTES = 8
_LONGEST = 256

_log = logging.getLogger(__name__)


class Head(msgspec.Struct, frozen=True, array_like=True):
    """How far a journal has come: its origin, its last term and event by number, with their hashes."""

    origin: bytes
    term: int
    lease: bytes
    events: int
    chain: bytes


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[bytes, bytes]).decode
_decode_head = msgspec.msgpack.Decoder(Head).decode


def read_head(path: Path) -> Head | None:
    """Return what was noted last; None when there is no note, or none that can be read."""
    try:
        data = path.read_bytes()[:_LONGEST]
        size = int.from_bytes(data[:2], "big")
        digest, head = _decode(data[2 : 2 + size])
        return _decode_head(head) if xxh3_64_digest(head) == digest else None
    except (OSError, msgspec.MsgspecError, ValueError):
        return None


class HeadFile:
    """The note, open for the one writer of the journal."""

    def __init__(self, path: Path) -> None:
        """Open the file for this user only. Raises OSError."""
        self._path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._told = False

    def write(self, head: Head) -> None:
        """Note where the journal ends, after it was made durable. Failure leaves the note before, and is logged."""
        content = _encode(head)
        data = _encode((xxh3_64_digest(content), content))
        try:
            os.pwrite(self._descriptor, len(data).to_bytes(2, "big") + data, 0)
        except OSError as error:
            if not self._told:
                self._told = True
                _log.warning("%s cannot be written: %s; a loss of the journal's end may not be seen", self._path, error)

    def close(self) -> None:
        """Close the file; it stays."""
        os.close(self._descriptor)

    def __enter__(self) -> "HeadFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
