"""Frames give back what went in, message by message, and anything else is refused in one of two ways."""

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstep.protocol.codec import (
    MAX_FRAME_BYTES,
    MAX_MESSAGE_BYTES,
    MOST_OF_A_FRAME,
    PROTOCOL_VERSION,
    decode,
    encode,
    envelopes_of,
    frame_of,
    pack,
    unpack,
)
from midstep.protocol.errors import MalformedMessage, OversizedMessage, WireError
from midstep.protocol.messages import Ack, Envelope


def message(number: int = 1) -> Envelope:
    return Envelope(PROTOCOL_VERSION, "job", "controller", "rank/3", 2, 7, 1, 0, Ack(1, number))


@pytest.mark.parametrize("count", [1, 2, 15, 16, 255, 256, MOST_OF_A_FRAME])
def test_messages_come_out_of_one_frame_as_they_went_in(count: int) -> None:
    messages = [encode(message(number)) for number in range(count)]
    (frame,) = pack(messages)
    assert [bytes(each) for each in unpack(frame)] == messages


def test_no_messages_are_no_frame() -> None:
    assert list(pack([])) == []


def test_more_messages_than_a_frame_may_have_are_several_frames() -> None:
    messages = [encode(message(number)) for number in range(2 * MOST_OF_A_FRAME + 1)]
    frames = list(pack(messages))
    assert [len(unpack(frame)) for frame in frames] == [MOST_OF_A_FRAME, MOST_OF_A_FRAME, 1]
    assert [bytes(each) for frame in frames for each in unpack(frame)] == messages


def test_messages_that_are_too_big_together_travel_apart() -> None:
    """Each of the greatest size fits into a frame of its own."""
    big = bytes(MAX_MESSAGE_BYTES)
    frames = list(pack([b"\x01", big, b"\x01", b"\x01"]))
    assert [len(frame) for frame in frames] == [2, MAX_MESSAGE_BYTES + 1, 3]
    assert max(map(len, frames)) <= MAX_FRAME_BYTES


def test_one_wrong_message_spoils_no_other() -> None:
    """Until each is decoded nothing is known of what a message holds."""
    (frame,) = pack([encode(message(1)), msgspec.msgpack.encode(["no", "message"]), encode(message(2))])
    good, wrong, other = unpack(frame)
    assert (decode(good), decode(other)) == (message(1), message(2))
    with pytest.raises(MalformedMessage):
        decode(wrong)
    with pytest.raises(MalformedMessage):
        envelopes_of(frame)


@pytest.mark.parametrize(
    "data",
    [
        b"\x90",  # without a message
        b"\x92\x01",  # cut
        b"\x91\x01\x01",  # and more behind it
        b"\x81\xa1a\x01",
        b"\xc1",
        b"\xdc\x04\x01" + b"\x01" * (MOST_OF_A_FRAME + 1),
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 1_000_000,
    ],
    ids=["empty", "cut", "longer", "map", "never", "too many", "a lie", "deep"],
)
def test_what_is_no_frame_is_refused(data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        unpack(data)


def test_a_frame_that_is_too_big_is_refused() -> None:
    with pytest.raises(OversizedMessage):
        unpack(bytes(MAX_FRAME_BYTES + 1))


def test_a_message_without_a_frame_is_refused() -> None:
    """Its fields are taken for messages, of which none is one."""
    for part in unpack(encode(message())):
        with pytest.raises(MalformedMessage):
            decode(part)


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_refused_or_a_frame(data: bytes) -> None:
    try:
        parts = unpack(data)
    except WireError:
        return
    assert b"".join(map(bytes, parts)) in data


@given(st.integers(0, 2**32))
def test_a_damaged_frame_raises_nothing_else(seed: int) -> None:
    chance = random.Random(seed)
    data = bytearray(frame_of(message()) + encode(message()))
    for _ in range(chance.randrange(1, 5)):
        data[chance.randrange(len(data))] = chance.randrange(256)
    try:
        for part in unpack(bytes(data[: chance.randrange(len(data))])):
            decode(part)
    except WireError:
        return
