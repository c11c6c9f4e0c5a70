"""Whatever bytes arrive, in whatever order and how often: nothing but WireError, and nothing delivered twice."""

import random
from collections import Counter

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from midstep.protocol.codec import PROTOCOL_VERSION, decode, encode
from midstep.protocol.errors import WireError
from midstep.protocol.mailbox import Mailbox
from midstep.protocol.messages import Ack, Command, Envelope, Message, Quiesce, RanksReported, Report
from midstep.protocol.types import CONTROLLER

ADDRESSES = st.sampled_from([CONTROLLER, "rank/0", "node/a", "platform", ""])
NUMBERS = st.one_of(st.integers(0, 20), st.integers(-(2**63), 2**63 - 1))
MEMBERS = (*Report.__args__, RanksReported, *Command.__args__, Ack)
PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8), inner, max_size=5),
    max_leaves=15,
)


def messages() -> st.SearchStrategy[Message]:
    return st.sampled_from(MEMBERS).flatmap(st.from_type)


@st.composite
def envelopes(draw: st.DrawFn) -> Envelope:
    small = st.integers(0, 5)
    return Envelope(
        version=draw(st.sampled_from([PROTOCOL_VERSION] * 9 + [PROTOCOL_VERSION + 1])),
        job=draw(st.sampled_from(["job"] * 9 + ["another"])),
        sender=draw(ADDRESSES),
        receiver=draw(ADDRESSES),
        term=draw(small),
        generation=draw(small),
        session=draw(small),
        number=draw(NUMBERS),
        body=draw(st.builds(Ack, session=small, number=NUMBERS)),
    )


def receive(box: Mailbox, data: bytes) -> Envelope | None:
    """The receive path of every process: bytes in, a delivered envelope out, or None."""
    try:
        envelope = decode(data)
    except WireError:
        return None
    taken = box.take(envelope, 0.0)
    if taken.reply is not None:
        encode(taken.reply)
    if not taken.deliver:
        return None
    encode(box.acknowledge(envelope))
    return envelope


def box() -> Mailbox:
    return Mailbox(job="job", address="rank/0", session=1)


@given(st.lists(st.binary(max_size=200), max_size=10))
def test_arbitrary_bytes_deliver_nothing_and_break_nothing(chunks: list[bytes]) -> None:
    receiver = box()
    assert [receive(receiver, chunk) for chunk in chunks] == [None] * len(chunks)
    assert not receiver.refused


@given(PLAIN)
def test_arbitrary_well_formed_data_is_no_message(value: object) -> None:
    assert receive(box(), msgspec.msgpack.encode(value)) is None


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_every_message_survives_the_wire(data: st.DataObject) -> None:
    body = data.draw(messages())
    envelope = Envelope(PROTOCOL_VERSION, "job", CONTROLLER, "rank/0", 1, 1, 1, 1, body)
    try:
        wire = encode(envelope)
        back = decode(wire)
    except WireError:
        return  # a number that no job has: refused where it was made, or where it arrives
    assert encode(back) == wire


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_damaged_message_is_refused_or_still_a_message(data: st.DataObject) -> None:
    body = data.draw(messages())
    try:
        wire = bytearray(encode(Envelope(PROTOCOL_VERSION, "job", CONTROLLER, "rank/0", 1, 1, 1, 1, body)))
    except WireError:
        return
    for _ in range(data.draw(st.integers(1, 4))):
        wire[data.draw(st.integers(0, len(wire) - 1))] = data.draw(st.integers(0, 255))
    delivered = receive(box(), bytes(wire[: data.draw(st.integers(0, len(wire)))]))
    assert delivered is None or isinstance(delivered.body, MEMBERS)


@given(st.lists(envelopes(), max_size=30), st.randoms(use_true_random=False))
def test_replayed_wrong_and_forged_envelopes_are_never_delivered_twice(
    arrivals: list[Envelope], chance: random.Random
) -> None:
    receiver = box()
    repeated = [msgspec.structs.replace(item, body=Quiesce(rank=0, generation=1)) for item in arrivals] * 3 + arrivals
    chance.shuffle(repeated)
    delivered: Counter[tuple[str, int, int, int]] = Counter()
    for envelope in repeated:
        got = receive(receiver, encode(envelope))
        if got is not None and got.number:
            delivered[got.sender, got.term, got.session, got.number] += 1
            assert (got.job, got.receiver) == ("job", "rank/0")
    assert all(count == 1 for count in delivered.values())
