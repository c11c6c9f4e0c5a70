"""Frames: what goes to one peer in one turn travels at once, as a list of messages.

To send, encrypt, carry and wake up cost far more than the bytes of a message, and the ranks of a node answer an order
at the same time. Each message in a frame stays one of its own: it is admitted, numbered and acknowledged as if it had
come alone, and those that a relay forwards are unchanged.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated

import msgspec

from .codec import MAX_FRAME_BYTES, MAX_MESSAGE_BYTES, decode, encode
from .errors import MalformedMessage, OversizedMessage
from .messages import Envelope

MOST_OF_A_FRAME = 1024  # messages
_SHORT, _LONG = 0x90, 0xDC  # MessagePack's heads of arrays: of up to 15 items, of up to 65,535
_MOST_SHORT = 15

_Frame = Annotated[list[msgspec.Raw], msgspec.Meta(min_length=1, max_length=MOST_OF_A_FRAME)]
_split = msgspec.msgpack.Decoder(_Frame).decode


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
