"""The recovery machine's memory as bytes: every field of its state, also of those that will be added.

What a job was founded with (its spec, and the ladder of its policy) is not part of it. Fields are found by reflection,
so that none can be forgotten; each is decoded by its declared type.
"""

from collections.abc import Callable
from typing import Any, get_type_hints

import msgspec

from ..protocol.errors import SnapshotUnreadable
from .state.job_state import JobState

_FOUNDED = frozenset({"job", "ladder"})
_STARTED = "started"
_encode = msgspec.msgpack.Encoder().encode
_decode_parts = msgspec.msgpack.Decoder(dict[str, msgspec.Raw]).decode
_DECODERS: dict[str, Callable[[msgspec.Raw], Any]] = {
    name: msgspec.msgpack.Decoder(kind).decode
    for name, kind in {**get_type_hints(JobState), _STARTED: bool}.items()
    if name not in _FOUNDED
}


def encode(state: JobState, started: bool) -> bytes:
    """Return the memory of a machine between two events. `started`: it has had its first one."""
    return _encode({name: started if name == _STARTED else getattr(state, name) for name in _DECODERS})


def restore(memory: bytes, state: JobState) -> bool:
    """Fill the state of a machine of the same job; say whether it has had its first event.

    All or nothing. Raises SnapshotUnreadable: a field is missing, unknown, or not of its type.
    """
    try:
        parts = _decode_parts(memory)
        if parts.keys() != _DECODERS.keys():
            other = ", ".join(sorted(parts.keys() ^ _DECODERS.keys()))
            raise SnapshotUnreadable(f"it was written by another version of midstep (other fields: {other})")
        values = {name: decode(parts[name]) for name, decode in _DECODERS.items()}
    except msgspec.MsgspecError as error:
        raise SnapshotUnreadable(f"it is not what this version of midstep writes: {error}") from error
    started = bool(values.pop(_STARTED))
    for name, value in values.items():
        setattr(state, name, value)
    return started
