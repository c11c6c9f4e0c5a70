"""Where another release of midstep speaks, both sides say so, and what is to be done about it."""

import asyncio
import logging
from typing import cast

import msgspec
import pytest

from midstep.protocol.codec import PROTOCOL_VERSION, encode, frame_of, pack
from midstep.protocol.errors import ForeignVersion
from midstep.protocol.link import ControllerLink
from midstep.protocol.mailbox import Mailbox
from midstep.protocol.messages import Envelope, IntroduceNode, RanksReported
from midstep.protocol.transport import DealerSocket, Received
from midstep.protocol.types import CONTROLLER

from .test_frames_of_a_turn import RANKS_PER_NODE, A, B, Socket, finished, reported, wire_of

LATER = PROTOCOL_VERSION + 1


def of_a_later_release(envelope: Envelope) -> Envelope:
    return msgspec.structs.replace(envelope, version=LATER)


def test_a_node_of_another_release_is_answered_and_the_others_are_heard(caplog: pytest.LogCaptureFixture) -> None:
    """It sees the version of the answer; whatever else it says is logged no more."""
    socket = Socket(A, B)
    wire = wire_of(socket)
    unknown = msgspec.msgpack.encode([LATER, "j", {"later": True}])
    socket.arrived.append(Received(A, A, next(pack([encode(of_a_later_release(reported(0))), unknown]))))
    mailbox = Mailbox(job="j", address=B, session=1)
    body = RanksReported("b", (finished(RANKS_PER_NODE),))
    socket.arrived.append(Received(B, B, frame_of(mailbox.post(body, CONTROLLER, 0.0))))
    with caplog.at_level(logging.WARNING):
        assert [arrival.connection for arrival in wire.receive(0.0)] == [B]
    wire.flush()
    assert [node for node, _ in socket.sent] == [A]
    assert {envelope.version for envelope in socket.sent[0][1]} == {PROTOCOL_VERSION}
    assert wire.refused == {"ForeignVersion": 2}
    [line] = caplog.messages
    assert "node/a is turned away" in line
    assert "Install the same release of midstep on every node" in line


@pytest.mark.parametrize("understood", [False, True])
def test_a_controller_of_another_release_ends_only_what_has_understood_none_before(understood: bool) -> None:
    """A job that runs waits until one comes that it understands: it may train on meanwhile."""

    async def scenario() -> list[ForeignVersion]:
        told: list[ForeignVersion] = []
        link = ControllerLink(
            Mailbox(job="j", address=A, session=1),
            cast(DealerSocket, Socket()),
            on_command=lambda _: None,
            on_new_controller=lambda: None,
            on_foreign=told.append,
        )
        order = Mailbox(job="j", address=CONTROLLER, session=1).post(IntroduceNode(), A, 0.0)
        for envelope in [order] * understood + [of_a_later_release(order)]:
            link._received([Received("", "", frame_of(envelope))])
        link.close()
        return told

    told = asyncio.run(scenario())
    assert [f"speaks version {LATER} of" in str(error) for error in told] == [True] * (not understood)
