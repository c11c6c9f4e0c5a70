"""Encode and decode envelopes: the format of a message, its version and its size limit.

One place for the format, its version and its size limit, so that whatever arrives is either a well-formed
`Envelope` or one of two errors. Nothing of a message is ever executed. Messages that leave for one peer in one turn of
the sender's loop travel in one frame, a list.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any

import msgspec

from .bounds import LONGEST_TEXT
from .errors import ForeignVersion, MalformedMessage, OversizedMessage
from .messages import (
    ActionEnded,
    CheckpointSaved,
    Envelope,
    FaultReported,
    NodeChecked,
    NodeGoing,
    NodeLost,
    NodeRefused,
)

PROTOCOL_VERSION = 3
MAX_FRAME_BYTES = 8 * 1024 * 1024
MAX_MESSAGE_BYTES = MAX_FRAME_BYTES - 512  # a frame has a head, and in that of a proxy the name of its node
_WITH_TEXT = (ActionEnded, CheckpointSaved, FaultReported, NodeChecked, NodeGoing, NodeLost, NodeRefused)
_CUT = " ... (cut)"
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)
MOST_OF_A_FRAME = 1024  # messages
_SHORT, _LONG = 0x90, 0xDC  # MessagePack's heads of arrays: of up to 15 items, of up to 65,535
_MOST_SHORT = 15
_Frame = Annotated[list[msgspec.Raw], msgspec.Meta(min_length=1, max_length=MOST_OF_A_FRAME)]
_split = msgspec.msgpack.Decoder(_Frame).decode


class _Head(msgspec.Struct, frozen=True, array_like=True):
    """The first fields of every envelope, in this version and in every other one."""

    version: int
    job: str


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
        ForeignVersion: they are of another version of the protocol.
        MalformedMessage: they are no envelope.
    """
    size_bytes = memoryview(data).nbytes
    if size_bytes > MAX_MESSAGE_BYTES:
        raise OversizedMessage(f"{size_bytes} bytes arrived as one message; the limit is {MAX_MESSAGE_BYTES}.")
    try:
        envelope = _decoder.decode(data)
    except _NO_MESSAGE as error:
        version = _version_of(data)
        if version is not None and version != PROTOCOL_VERSION:
            raise _foreign(version) from error
        raise MalformedMessage(f"{size_bytes} bytes are no message: {error}.") from error
    if envelope.version != PROTOCOL_VERSION:
        raise _foreign(envelope.version)
    return envelope


_NO_MESSAGE = (msgspec.MsgspecError, ValueError, OverflowError, RecursionError, MemoryError)
_head_decoder = msgspec.msgpack.Decoder(_Head)


def _foreign(version: int) -> ForeignVersion:
    return ForeignVersion(
        f"it speaks version {version} of midstep's protocol, and this process speaks {PROTOCOL_VERSION}. Install the "
        "same release of midstep on every node."
    )


def _version_of(data: bytes | msgspec.Raw) -> int | None:
    """Return the version of what is no envelope of this one. None: it is none of any other either."""
    try:
        return _head_decoder.decode(data).version
    except _NO_MESSAGE:
        return None


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


def pack(messages: Iterable[bytes]) -> Iterator[bytes]:
    """Yield as few frames as hold these encoded messages, in their order."""
    held: list[bytes] = []
    size_bytes = 0
    for message in messages:
        if len(held) >= MOST_OF_A_FRAME or (held and size_bytes + len(message) > MAX_MESSAGE_BYTES):
            yield _frame(held)
            held, size_bytes = [], 0
        held.append(message)
        size_bytes += len(message)
    if held:
        yield _frame(held)


def unpack(frame: bytes) -> list[msgspec.Raw]:
    """Return the messages of a frame, to be decoded one by one: what is wrong with one is no matter of the others.

    Raises:
        OversizedMessage: the frame has more than `MAX_FRAME_BYTES`.
        MalformedMessage: it is no frame.
    """
    if len(frame) > MAX_FRAME_BYTES:
        raise OversizedMessage(f"{len(frame)} bytes arrived as one frame; the limit is {MAX_FRAME_BYTES}.")
    try:
        return _split(frame)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError, MemoryError) as error:
        raise MalformedMessage(f"{len(frame)} bytes are no frame of messages: {error}.") from error


def frame_of(envelope: Envelope) -> bytes:
    """Return a frame of one message. Raises as `encode` does."""
    return _frame([encode(envelope)])


def envelopes_of(frame: bytes) -> list[Envelope]:
    """Return the messages of a frame, where one that is wrong spoils it. Raises as `unpack` and `decode` do."""
    return [decode(message) for message in unpack(frame)]


def _frame(messages: Sequence[bytes]) -> bytes:
    count = len(messages)
    head = bytes((_SHORT | count,)) if count <= _MOST_SHORT else bytes((_LONG, count >> 8, count & 0xFF))
    return head + b"".join(messages)
