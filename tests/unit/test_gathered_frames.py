"""A proxy hands on at once what waits for an answer, and the rest a little later."""

import asyncio

import pytest

from midstep.launch import proxy
from midstep.launch.proxy import GatheredFrames
from midstep.protocol.codec import frame_of
from midstep.protocol.mailbox import Mailbox
from midstep.protocol.messages import NodeHeartbeat, NodeStaying
from midstep.protocol.proxied import SIGN_OF_LIFE, FromProxy, Parcel
from midstep.protocol.types import CONTROLLER, node_address

NODE, OTHER = node_address("a"), node_address("b")
MAILBOX = Mailbox(job="j", address=NODE, session=1)
HEARTBEAT = Parcel(NODE, frame_of(MAILBOX.post(NodeHeartbeat("a", 1.0, ()), CONTROLLER, 0.0, reliable=False)))
REPORT = Parcel(OTHER, frame_of(MAILBOX.post(NodeStaying("b"), CONTROLLER, 0.0)))


LONG_S, TURNS = 30.0, 20


def said_of(*parcels: Parcel) -> list[FromProxy]:
    """Return what a proxy says first of these, or has not said when its loop has turned some times."""

    async def hear() -> list[FromProxy]:
        said: list[FromProxy] = []
        gathering = GatheredFrames(said.append)
        for parcel in parcels:
            gathering.add([parcel])
        for _ in range(TURNS):
            await asyncio.sleep(0.001)
        gathering.clear()
        return said

    return asyncio.run(hear())


def test_a_heartbeat_waits_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """But not for ever."""
    monkeypatch.setattr(proxy, "GATHER_S", LONG_S)
    assert said_of(HEARTBEAT) == []
    monkeypatch.setattr(proxy, "GATHER_S", 0.002)
    assert said_of(HEARTBEAT, HEARTBEAT) == [FromProxy((HEARTBEAT, HEARTBEAT))]


def test_what_has_a_number_leaves_at_once_and_takes_the_rest_along(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "GATHER_S", LONG_S)
    assert said_of(HEARTBEAT, REPORT) == [FromProxy((HEARTBEAT, REPORT))]


def test_a_node_that_has_just_connected_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "GATHER_S", LONG_S)
    assert said_of(Parcel(NODE, b"")) == [FromProxy((Parcel(NODE, b""),))]


def test_signs_of_life_are_named_once_in_the_next_frame_and_make_none_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(proxy, "GATHER_S", LONG_S)
    signs = [Parcel(node, SIGN_OF_LIFE) for node in (NODE, OTHER, NODE)]
    assert said_of(*signs) == []
    assert said_of(*signs, REPORT) == [FromProxy((REPORT,), alive=(NODE, OTHER))]
