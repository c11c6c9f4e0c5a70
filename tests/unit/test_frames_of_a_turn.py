"""All that goes to a peer in one turn leaves in one frame, and each message in it is admitted by itself."""

import asyncio
from collections import Counter
from typing import cast

import msgspec

from midstep.agent.relay import Relay
from midstep.controller.recovery.events import ControllerStarted, Send
from midstep.controller.routes import Routes
from midstep.controller.wire import Wire
from midstep.protocol.codec import encode, envelopes_of, frame_of, pack
from midstep.protocol.link import ControllerLink
from midstep.protocol.mailbox import Mailbox
from midstep.protocol.messages import Ack, Envelope, NodeHeartbeat, Quiesce, RankFinished, StartProcess
from midstep.protocol.transport import DealerSocket, Received, RouterSocket
from midstep.protocol.types import CONTROLLER, Rendezvous, rank_address

A, B = "node/a", "node/b"
STORE = Rendezvous("127.0.0.1", 1, "secret")
RANKS_PER_NODE = 8


class Socket:
    """Stands for a router or a dealer: what has been sent, and what arrives."""

    endpoint = ""

    def __init__(self, *connected: str) -> None:
        self.connected = set(connected)
        self.sent: list[tuple[str, list[Envelope]]] = []
        self.arrived: list[Received] = []
        self.refused: Counter[str] = Counter()

    @property
    def pending(self) -> bool:
        return bool(self.arrived)

    def knows(self, identity: str) -> bool:
        return identity in self.connected

    def receive(self, limit: int) -> list[Received]:
        arrived, self.arrived = self.arrived[:limit], self.arrived[limit:]
        return arrived

    def send(self, *to_and_data: str | bytes) -> bool:
        *to, data = to_and_data
        assert isinstance(data, bytes)
        name = str(to[0]) if to else ""
        if self.connected and name not in self.connected:
            return False
        self.sent.append((name, envelopes_of(data)))
        return True

    def attach(self, loop: asyncio.AbstractEventLoop, callback: object) -> None:
        """Nothing arrives by itself."""

    def close(self) -> None:
        """There is nothing to close."""


def wire_of(socket: Socket) -> Wire:
    """The controller's wire, after it has started eight ranks on each of two nodes."""
    routes = Routes()
    starts = [
        Send(node, StartProcess(rank, rank % RANKS_PER_NODE, 0, 1, 1, 0, True, STORE), 1)
        for node, first in ((A, 0), (B, RANKS_PER_NODE))
        for rank in range(first, first + RANKS_PER_NODE)
    ]
    routes.learn(ControllerStarted(1), starts)
    mailbox = Mailbox(job="j", address=CONTROLLER, session=1)
    return Wire(cast(RouterSocket, socket), mailbox, routes, 2 * RANKS_PER_NODE)


def said(rank: int, number: int = 1) -> Envelope:
    mailbox = Mailbox(job="j", address=rank_address(rank), session=1)
    return [mailbox.post(RankFinished(rank, 1, 1, 9), CONTROLLER, 0.0) for _ in range(number)][-1]


def test_orders_and_acknowledgements_of_a_turn_leave_in_a_frame_for_each_node() -> None:
    socket = Socket(A, B)
    wire = wire_of(socket)
    socket.arrived.append(Received(A, A, next(pack(encode(said(rank)) for rank in range(RANKS_PER_NODE)))))
    for arrival in wire.receive(0.0):
        wire.acknowledge(arrival)
    for rank in range(2 * RANKS_PER_NODE):
        wire.send(rank_address(rank), Quiesce(rank, 2), 2, 0.0)
    assert socket.sent == []
    wire.flush()
    wire.flush()
    assert [(node, len(messages)) for node, messages in socket.sent] == [(A, 2 * RANKS_PER_NODE), (B, RANKS_PER_NODE)]
    assert [type(each.body) for each in socket.sent[0][1]] == [Ack] * RANKS_PER_NODE + [Quiesce] * RANKS_PER_NODE
    assert [each.receiver for each in socket.sent[1][1]] == [rank_address(rank) for rank in range(8, 16)]


def test_each_message_of_a_frame_is_believed_or_refused_by_itself() -> None:
    """A rank of another node, a damaged message and a repetition are counted, and cost the others nothing."""
    socket = Socket(A, B)
    wire = wire_of(socket)
    messages = [said(0), said(RANKS_PER_NODE), said(1), said(0)]
    socket.arrived.append(Received(A, A, next(pack([*map(encode, messages), b"\x91\x05"]))))
    assert [arrival.envelope.sender for arrival in wire.receive(0.0)] == [rank_address(0), rank_address(1)]
    counted = {"relayed by an agent that does not have the rank": 1, "duplicate": 1, "MalformedMessage": 1}
    assert wire.refused == counted


def test_a_turn_takes_a_bounded_number_of_messages() -> None:
    """What is left is there for the next turn."""
    socket = Socket(A, B)
    wire = wire_of(socket)
    full = next(pack([encode(said(0, number)) for number in range(1, 101)]))
    socket.arrived = [Received(A, A, full)] * 100
    wire.receive(0.0)
    assert 0 < len(socket.arrived) < 100


def test_orders_for_a_node_that_is_not_there_yet_are_sent_when_it_is() -> None:
    socket = Socket(B)
    wire = wire_of(socket)
    wire.send(rank_address(0), Quiesce(0, 2), 2, 0.0)
    wire.flush()
    assert socket.sent == []
    socket.connected.add(A)
    wire.receive(0.0)
    wire.resend(0.0)
    wire.flush()
    assert [(node, len(messages)) for node, messages in socket.sent] == [(A, 1)]


def test_nothing_is_sent_again_while_the_answer_may_lie_unread() -> None:
    """For a second at most: there may always be something to read."""
    socket = Socket(A, B)
    wire = wire_of(socket)
    wire.send(rank_address(0), Quiesce(0, 2), 2, 0.0)
    wire.resend(0.0)
    wire.flush()
    socket.arrived.append(Received(A, A, frame_of(said(0))))
    for now, sent in ((0.6, 1), (0.9, 1), (1.1, 2)):
        wire.resend(now)
        wire.flush()
        assert len(socket.sent) == sent


def test_a_turn_with_nothing_but_heartbeats_is_known() -> None:
    """The next one may wait a little for more of them; one with a report or an acknowledgement in it may not."""
    socket = Socket(A, B)
    wire = wire_of(socket)
    agent = Mailbox(job="j", address=A, session=1)
    beat = encode(agent.post(NodeHeartbeat("a", 1.0, ()), CONTROLLER, 0.0, reliable=False))
    ack = encode(msgspec.structs.replace(said(0), number=0, body=Ack(1, 1)))
    for messages, only_beats in (([beat, beat], True), ([beat, ack], False), ([encode(said(1))], False), ([], False)):
        socket.arrived = [Received(A, A, frame) for frame in pack(messages)]
        wire.receive(0.0)
        assert wire.heard_only_beats is only_beats


def test_what_an_agent_and_its_ranks_say_in_a_turn_leaves_in_one_frame() -> None:
    """Relayed messages keep their bytes, and the order in which they were said."""

    async def scenario() -> None:
        upward, downward = Socket(), Socket("rank/0", "rank/1")
        link = ControllerLink(
            Mailbox(job="j", address=A, session=1),
            cast(DealerSocket, upward),
            on_command=lambda _: None,
            on_new_controller=lambda: None,
        )
        relay = Relay(cast(RouterSocket, downward), oldest_session=lambda _: 1, forward=link.forward)
        relay.received([Received(rank_address(rank), None, frame_of(said(rank))) for rank in range(2)])
        link.post(RankFinished(5, 1, 1, 9), reliable=False)
        relay.received([Received("rank/0", None, b"\x91\x05"), Received("rank/0", None, frame_of(said(1)))])
        assert upward.sent == []
        await asyncio.sleep(0)
        assert [[each.sender for each in messages] for _, messages in upward.sent] == [["rank/0", "rank/1", A]]
        assert upward.sent[0][1][:2] == [said(0), said(1)]
        assert relay.refused == {"malformed": 1, "sender is not the connected rank": 1}
        link.post(RankFinished(5, 1, 1, 9), reliable=False)
        link.close()
        assert len(upward.sent) == 2  # what was said before the end leaves

    asyncio.run(scenario())


def test_what_arrives_for_a_rank_in_a_turn_is_handed_on_in_one_frame() -> None:
    async def scenario() -> None:
        downward = Socket("rank/0")
        relay = Relay(cast(RouterSocket, downward), oldest_session=lambda _: 1, forward=lambda _: None)
        controller = Mailbox(job="j", address=CONTROLLER, session=1)
        orders = [controller.post(Quiesce(0, generation), "rank/0", 0.0) for generation in (2, 3)]
        orders.append(controller.post(Quiesce(1, 3), "rank/1", 0.0))
        for order in orders:
            relay.deliver(order, encode(order))
        await asyncio.sleep(0)
        assert downward.sent == [("rank/0", orders[:2])]
        assert relay.refused == {"rank not connected": 1}  # the controller sends it again
        relay.close()

    asyncio.run(scenario())
