"""Values of any size: one that is larger than a request may be is cut into keys.

The key that names them is written last, so that none of them counts before all are there.
"""

from collections.abc import Callable, Sequence

import msgspec

from .client import Etcd, Kept, Operation, put
from .place import EtcdPlace

PART_BYTES = 1024 * 1024  # etcd refuses requests of more than 1.5 MiB unless it is told otherwise
_PARTS_DIGITS = 6
_SEPARATOR = "/"


class _Head(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`parts` 0: all of the value is here."""

    parts: int
    content: bytes


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Head).decode


def put_parts(key: str, value: bytes, write: Callable[[Sequence[Operation]], None], lease: int = 0) -> Operation:
    """Have the parts of a large value written, and return the operation that makes all of it count."""
    if len(value) <= PART_BYTES:
        return put(key, _encode(_Head(0, value)), lease)
    pieces = [value[start : start + PART_BYTES] for start in range(0, len(value), PART_BYTES)]
    for number, piece in enumerate(pieces):
        write([put(_part(key, number), piece, lease)])
    return put(key, _encode(_Head(len(pieces), b"")), lease)


def value_of(etcd: Etcd, place: EtcdPlace, head: Kept) -> bytes:
    """Return the whole value that a key names. Raises ValueError when it is not what was written, JournalError."""
    try:
        known = _decode(head.value)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{place}: {head.key} is not what was written ({error})") from error
    if not known.parts:
        return known.content
    pieces = [etcd.get(_part(head.key, number)) for number in range(known.parts)]
    if None in pieces:
        raise ValueError(f"{place}: a part of {head.key} is missing")
    return b"".join(piece.value for piece in pieces if piece is not None)


def is_head(key: str, folder: str) -> bool:
    """Say whether a key in a folder names a value, rather than being a part of one."""
    return _SEPARATOR not in key.removeprefix(folder)


def _part(key: str, number: int) -> str:
    return f"{key}{_SEPARATOR}{number:0{_PARTS_DIGITS}d}"
