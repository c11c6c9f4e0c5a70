"""Encode and decode envelopes: the format of a message, its version and its size limit.

One place for the format, its version and its size limit, so that whatever arrives is either a well-formed
`Envelope` or one of two errors. Nothing of a message is ever executed. What travels at once is a frame of them, see
`frames`.
"""

from typing import Any

import msgspec

from .bounds import LONGEST_TEXT
from .errors import MalformedMessage, OversizedMessage
from .messages import CheckpointSaved, Envelope, FaultReported, NodeChecked, NodeGoing, NodeLost, NodeRefused

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 8 * 1024 * 1024
MAX_MESSAGE_BYTES = MAX_FRAME_BYTES - 8  # a frame has a head
_WITH_TEXT = (CheckpointSaved, FaultReported, NodeChecked, NodeGoing, NodeLost, NodeRefused)
_CUT = " ... (cut)"


class _Head(msgspec.Struct, frozen=True, array_like=True):
    """The first field of every envelope, in this version and in every other one."""

    version: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)
_head_decoder = msgspec.msgpack.Decoder(_Head)


def encode(envelope: Envelope) -> bytes:
    """Turn `envelope` into bytes.

    Text that is no valid Unicode (a file name in an error's text, say) is escaped, and what a report says in words is
    cut to what a receiver takes: no fault report is lost for either.

    Raises:
        OversizedMessage: the bytes would exceed `MAX_MESSAGE_BYTES`, which no receiver accepts.
        MalformedMessage: a field holds what the format cannot carry.
    """
    try:
        data = _encoder.encode(envelope)
        if len(data) > LONGEST_TEXT and isinstance(envelope.body, _WITH_TEXT):
            data = _encoder.encode(_carried(msgspec.to_builtins(envelope)))
    except UnicodeEncodeError:
        data = _encoder.encode(_carried(msgspec.to_builtins(envelope)))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise MalformedMessage(
            f"a {type(envelope.body).__name__} for {envelope.receiver} cannot be encoded: {error}. "
            "It was not sent; this is a mistake of the sender."
        ) from error
    if len(data) > MAX_MESSAGE_BYTES:
        raise OversizedMessage(
            f"a {type(envelope.body).__name__} for {envelope.receiver} has {len(data)} bytes; "
            f"the limit is {MAX_MESSAGE_BYTES}. It was not sent."
        )
    return data


def decode(data: bytes | msgspec.Raw) -> Envelope:
    """Turn one message of a frame into an envelope.

    Whether the envelope is for this process, from this job and not old is for `Mailbox.take` to say.

    Raises:
        OversizedMessage: there are more than `MAX_MESSAGE_BYTES` of them.
        MalformedMessage: they are no envelope of this protocol version.
    """
    size_bytes = memoryview(data).nbytes
    if size_bytes > MAX_MESSAGE_BYTES:
        raise OversizedMessage(f"{size_bytes} bytes arrived as one message; the limit is {MAX_MESSAGE_BYTES}.")
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError, MemoryError) as error:
        raise MalformedMessage(f"{size_bytes} bytes are no message{_version_hint(data)}: {error}.") from error


def _version_hint(data: bytes | msgspec.Raw) -> str:
    """Say whether the sender speaks another version: of all malformed bytes, those have an easy remedy."""
    try:
        version = _head_decoder.decode(data).version
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError, MemoryError):
        return ""
    if version == PROTOCOL_VERSION:
        return ""
    return f" of protocol version {PROTOCOL_VERSION} but of {version} (install the same midstep on every node)"


def _carried(value: Any) -> Any:
    """Copy plain data with every lone surrogate in its text written out as an escape, and long text cut."""
    if isinstance(value, str):
        text = value.encode("utf-8", "backslashreplace").decode("utf-8")
        return text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT - len(_CUT)] + _CUT
    if isinstance(value, dict):
        return {_carried(key): _carried(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_carried(item) for item in value]
    return value
