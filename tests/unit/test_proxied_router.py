"""Nodes behind a proxy are to the controller as if they had connected by themselves."""

import os
from collections import Counter
from pathlib import Path
from typing import cast

import msgspec
import pytest

from midstep.controller.endpoints import proxied_router
from midstep.controller.endpoints.proxied_router import SETTLED_S, ProxiedRouter
from midstep.controller.routes import Routes
from midstep.controller.wire import Wire
from midstep.protocol.codec import MAX_FRAME_BYTES
from midstep.protocol.errors import MalformedMessage
from midstep.protocol.identities import PROXY_FAMILY
from midstep.protocol.incidents import ProxyStatus
from midstep.protocol.keys import JobKeys
from midstep.protocol.mailbox import Mailbox
from midstep.protocol.messages import JOINING_FAMILY
from midstep.protocol.proxied import (
    GRACE_S,
    SIGN_OF_LIFE,
    SILENT_S,
    FromProxy,
    Parcel,
    ToProxy,
    frame_of,
    is_proxied,
    said_in,
    together,
)
from midstep.protocol.token import random_pair
from midstep.protocol.transport import Received, RouterSocket
from midstep.protocol.types import CONTROLLER, PLATFORM

A, B, C = "node/a", "node/b", "node/c"
EAST, WEST = PROXY_FAMILY + "east", PROXY_FAMILY + "west"


class Socket:
    """A router without a network."""

    def __init__(self) -> None:
        self.arriving: list[Received] = []
        self.sent: list[tuple[str, bytes]] = []
        self.away: set[str] = set()
        self.direct: set[str] = set()
        self.refused: Counter[str] = Counter()
        self.pending = False

    def receive(self, limit: int = 0) -> list[Received]:
        arrived, self.arriving = self.arriving, []
        return arrived

    def send(self, identity: str, data: bytes) -> bool:
        if identity not in self.away:
            self.sent.append((identity, data))
        return identity not in self.away

    def knows(self, identity: str) -> bool:
        return identity in self.direct


class Rig:
    """The router under test, the socket below it, and a clock."""

    def __init__(self, root: Path) -> None:
        self.keys = root / "keys"
        JobKeys.create(self.keys, [A, B])
        self.now = 100.0
        self.socket = Socket()
        server = JobKeys.load_server(self.keys)
        self.router = ProxiedRouter(cast(RouterSocket, self.socket), server, lambda: self.now)

    def hear(self, proxy: str, *parcels: tuple[str, bytes], **further: object) -> list[Received]:
        """Have a proxy say something."""
        said = FromProxy(tuple(Parcel(*each) for each in parcels), **further)  # type: ignore[arg-type]
        self.socket.arriving.append(Received(proxy, PROXY_FAMILY, frame_of(said)))
        return self.router.receive()

    def hear_directly(self, node: str, data: bytes = b"x") -> list[Received]:
        self.socket.arriving.append(Received(node, node, data))
        return self.router.receive()

    def told(self) -> list[tuple[str, ToProxy]]:
        """Send what there is; return what proxies were told."""
        self.router.flush()
        sent, self.socket.sent = self.socket.sent, []
        return [(name, said_in(data, ToProxy)) for name, data in sent if is_proxied(data)]


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def parcels(told: list[tuple[str, ToProxy]]) -> list[tuple[str, str, bytes]]:
    return [(name, each.node, each.data) for name, said in told for each in said.parcels]


def keys(told: list[tuple[str, ToProxy]]) -> dict[str, str]:
    return {key: text for _, said in told for key, text in said.keys.items()}


def test_what_nodes_say_through_a_proxy_comes_as_theirs_and_one_frame_answers_all(rig: Rig) -> None:
    heard = rig.hear(EAST, (A, b"1"), (B, b"2"), begins=True)
    assert heard == [Received(A, A, b"1"), Received(B, B, b"2")]
    rig.told()
    assert rig.router.send(A, b"3")
    assert rig.router.send(B, b"4")
    told = rig.told()
    assert len(told) == 1
    assert parcels(told) == [(EAST, A, b"3"), (EAST, B, b"4")]


def test_a_node_that_has_only_connected_is_known_and_has_said_nothing(rig: Rig) -> None:
    assert rig.hear(EAST, (A, b"")) == []
    assert rig.router.knows(A)
    assert not rig.router.knows(B)


def test_signs_of_life_come_as_those_of_nodes_that_are_at_that_proxy(rig: Rig) -> None:
    """One that has gone another way meanwhile is heard there."""
    rig.hear(EAST, (A, b"1"), (B, b"2"))
    rig.hear(WEST, (B, b"3"))
    assert rig.hear(EAST, alive=(A, B, C)) == [Received(A, A, SIGN_OF_LIFE)]


def test_a_node_is_answered_on_the_way_on_which_it_was_heard_last(rig: Rig) -> None:
    rig.hear(EAST, (A, b"1"))
    rig.hear(WEST, (A, b"2"))
    rig.router.send(A, b"x")
    assert parcels(rig.told()) == [(WEST, A, b"x")]
    rig.hear_directly(A)
    rig.router.send(A, b"y")
    assert (A, b"y") in rig.socket.sent
    assert parcels(rig.told()) == []


def test_a_node_that_a_proxy_does_not_have_any_more_is_not_connected(rig: Rig) -> None:
    rig.hear(EAST, (A, b"1"))
    rig.hear(WEST, gone=(A,))
    assert rig.router.knows(A), "another proxy cannot say so"
    rig.hear(EAST, gone=(A,))
    assert not rig.router.knows(A)


@pytest.mark.parametrize("peer", [PLATFORM, "detector/x", "operator/admin/x", CONTROLLER, WEST, "rank/0"])
def test_a_proxy_speaks_for_nodes_and_for_those_that_join_and_for_no_others(rig: Rig, peer: str) -> None:
    joining = JOINING_FAMILY + "1"
    assert rig.hear(EAST, (peer, b"1"), (joining, b"2")) == [Received(joining, JOINING_FAMILY, b"2")]
    assert rig.router.refused["not for a proxy to hand on"] == 1
    assert not rig.router.knows(peer)


def test_a_frame_that_is_damaged_is_counted_and_the_next_one_is_heard(rig: Rig) -> None:
    rig.socket.arriving.append(Received(EAST, PROXY_FAMILY, b"\xc1\x93"))
    assert rig.router.receive() == []
    assert rig.router.refused["malformed frame of a proxy"] == 1
    assert rig.hear(EAST, (A, b"1")) != []


def test_a_proxy_learns_all_keys_at_first_then_what_changes_and_all_again_when_it_begins_again(rig: Rig) -> None:
    rig.hear(EAST, begins=True)
    told = rig.told()
    assert [(said.whole, said.serves) for _, said in told] == [(True, True)]
    assert set(keys(told).values()) == {A, B}
    assert rig.told() == []

    pair = random_pair()
    JobKeys.admit(rig.keys, C, pair.public)
    told = rig.told()
    assert list(keys(told).values()) == [C]
    assert not told[0][1].whole
    rig.now += 1.0
    JobKeys.withdraw(rig.keys, pair.public)
    assert list(keys(rig.told()).values()) == [""]

    rig.hear(EAST, begins=True)
    told = rig.told()
    assert told[0][1].whole
    assert set(keys(told).values()) == {A, B}


def test_the_keys_of_operators_platforms_and_proxies_are_not_told(rig: Rig) -> None:
    for identity in (PLATFORM, PROXY_FAMILY, "operator/viewer/"):
        JobKeys.admit(rig.keys, identity, random_pair().public)
    JobKeys.admit(rig.keys, JOINING_FAMILY, random_pair().public)
    rig.hear(EAST, begins=True)
    assert set(keys(rig.told()).values()) == {A, B, JOINING_FAMILY}


def test_a_key_is_told_before_what_is_for_its_node(rig: Rig) -> None:
    rig.hear(EAST, (JOINING_FAMILY + "1", b"1"), begins=True)
    rig.told()
    JobKeys.admit(rig.keys, C, random_pair().public)
    rig.router.send(JOINING_FAMILY + "1", b"admitted")
    (_, first), (_, second) = rig.told()
    assert list(first.keys.values()) == [C]
    assert second.parcels == (Parcel(JOINING_FAMILY + "1", b"admitted"),)


def test_two_keys_that_come_within_one_tick_of_the_kernel_are_both_told(rig: Rig) -> None:
    rig.hear(EAST, begins=True)
    rig.told()
    folder = Path(JobKeys.load_server(rig.keys).clients)
    JobKeys.admit(rig.keys, C, random_pair().public)
    rig.told()
    stamp = folder.stat()
    JobKeys.admit(rig.keys, "node/d", random_pair().public)
    os.utime(folder, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # as if nothing had been written since
    assert rig.told() == []
    rig.now += SETTLED_S
    assert list(keys(rig.told()).values()) == ["node/d"]


def test_a_proxy_that_cannot_be_told_is_told_all_keys_later(rig: Rig) -> None:
    rig.socket.away.add(EAST)
    rig.hear(EAST, (A, b"1"), begins=True)
    rig.router.send(A, b"x")
    assert rig.told() == []
    assert rig.router.refused["proxy not connected"] == 1
    rig.socket.away.clear()
    told = rig.told()
    assert told[0][1].whole
    assert set(keys(told).values()) == {A, B}


def test_the_silence_of_a_node_is_tolerated_while_its_proxy_is_silent_and_not_for_ever(rig: Rig) -> None:
    rig.hear(EAST, (A, b"1"))
    rig.hear_directly(B)
    assert not rig.router.tolerates_silence(A), "the proxy speaks, so it is the node's silence"
    rig.now += SILENT_S + 0.1
    assert rig.router.tolerates_silence(A)
    assert not rig.router.tolerates_silence(B)
    rig.now += GRACE_S
    assert not rig.router.tolerates_silence(A)


def test_a_status_tells_how_many_nodes_each_proxy_has_and_how_long_it_is_silent(rig: Rig) -> None:
    rig.hear(EAST, (A, b"1"))
    rig.now += 2.0
    rig.hear(WEST, (B, b"1"))
    assert rig.router.proxies() == (ProxyStatus("east", 1, 2.0), ProxyStatus("west", 1, 0.0))
    rig.hear_directly(A)
    rig.now += GRACE_S
    assert rig.router.proxies() == (ProxyStatus("west", 1, GRACE_S),)


@pytest.mark.parametrize("key", ["a" * 63, "a" * 63 + "\n", "../" + "a" * 61, "A" * 64])
def test_a_key_that_names_another_file_is_malformed(key: str) -> None:
    with pytest.raises(MalformedMessage):
        said_in(b"\xc1" + msgspec.msgpack.encode(((), {key: A}, False, False)), ToProxy)


def test_connections_that_ask_to_join_are_no_nodes_and_are_forgotten_after_many(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxied_router, "MAX_OF_FAMILIES", 2)
    joining = [f"{JOINING_FAMILY}{number}" for number in range(3)]
    for each in joining:
        rig.hear(EAST, (each, b"1"))
    assert [rig.router.knows(each) for each in joining] == [False, True, True]
    assert rig.router.proxies()[0].nodes == 0
    rig.now += GRACE_S + 1
    assert rig.router.proxies() == ()
    assert not rig.router.knows(joining[2])
    assert rig.router.send(joining[2], b"late")


def test_proxies_that_went_make_room_for_others(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxied_router, "MOST_PROXIES", 2)
    rig.hear(EAST, (A, b"1"))
    rig.hear(WEST)
    third = PROXY_FAMILY + "third"
    assert rig.hear(third, (B, b"1")) == []
    assert rig.router.refused["too many proxies"] == 1
    rig.now += GRACE_S + 1
    assert rig.hear(third, (B, b"1")) != []
    assert rig.router.knows(A), "a node that was not heard elsewhere stays with its proxy"


def test_where_the_policy_does_not_let_proxies_in_their_frames_are_refused() -> None:
    socket = Socket()
    wire = Wire(cast(RouterSocket, socket), Mailbox(job="j", address=CONTROLLER, session=1), Routes(), 2)
    said = FromProxy((Parcel(A, b"1"),), begins=True)
    socket.arriving.append(Received(EAST, PROXY_FAMILY, frame_of(said)))
    assert wire.receive(0.0) == []
    assert wire.refused["MalformedMessage"] == 1
    wire.flush()
    assert socket.sent == []


def test_parcels_share_frames_that_no_receiver_refuses() -> None:
    big = Parcel(A, bytes(MAX_FRAME_BYTES // 3))
    groups = list(together([big] * 4))
    assert [len(group) for group in groups] == [2, 2]
    assert all(len(frame_of(ToProxy(group))) <= MAX_FRAME_BYTES for group in groups)
    assert list(together([])) == []


def test_what_is_no_frame_of_a_proxy_is_malformed() -> None:
    for data in (b"\xc1", b"\xc1\x90\x90", b"\xc1" + b"\x93" * 100):
        with pytest.raises(MalformedMessage):
            said_in(data, FromProxy)
