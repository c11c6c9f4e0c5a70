"""All that goes to a peer in one turn leaves in one frame, and each message in it is admitted by itself."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import cast

import msgspec
import pytest

from midstep.agent.relay import Relay
from midstep.controller.recovery.events import ControllerStarted, Send
from midstep.controller.routes import Routes
from midstep.controller.wire import UNCONFIRMED_LIMIT, UNCONFIRMED_PER_RANK, Wire
from midstep.protocol.codec import encode, envelopes_of, frame_of, pack
from midstep.protocol.link import ControllerLink
from midstep.protocol.mailbox import Mailbox, acknowledged_after
from midstep.protocol.messages import (
    Ack,
    CommandToRank,
    EndJob,
    Envelope,
    NodeHeartbeat,
    NodeJoined,
    NodeReport,
    OrderRanks,
    Quiesce,
    RankFinished,
    RankReport,
    RanksReported,
    StartProcess,
)
from midstep.protocol.transport import DealerSocket, Received, RouterSocket
from midstep.protocol.types import CONTROLLER, Rendezvous, StoreEndpoint, node_address, rank_address

A, B = "node/a", "node/b"
STORE = Rendezvous("127.0.0.1", 1, "secret")
RANKS_PER_NODE = 8
LARGE = 1000  # ranks


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


def wire_of(socket: Socket, world_size: int = 2 * RANKS_PER_NODE) -> Wire:
    """The controller's wire, after it has started eight ranks on each of two nodes."""
    routes = Routes()
    starts = [
        Send(node, StartProcess(rank, rank % RANKS_PER_NODE, 0, 1, 1, 0, True, STORE), 1)
        for node, first in ((A, 0), (B, RANKS_PER_NODE))
        for rank in range(first, first + RANKS_PER_NODE)
    ]
    routes.learn(ControllerStarted(1), starts)
    mailbox = Mailbox(job="j", address=CONTROLLER, session=1)
    return Wire(cast(RouterSocket, socket), mailbox, routes, world_size)


def finished(rank: int) -> RankReport:
    return RankReport(rank, 1, RankFinished(rank, 1, 1, 9))


def reported(*ranks: int, number: int = 1) -> Envelope:
    """What node a reports of ranks, in its message of that number."""
    mailbox = Mailbox(job="j", address=A, session=1)
    body = RanksReported("a", tuple(map(finished, ranks)))
    return [mailbox.post(body, CONTROLLER, 0.0) for _ in range(number)][-1]


def said(rank: int) -> Envelope:
    """What a rank tells its agent."""
    return Mailbox(job="j", address=rank_address(rank), session=1).post(RankFinished(rank, 1, 1, 9), CONTROLLER, 0.0)


def relay_of(socket: Socket, post: Callable[[NodeReport], int | None] = lambda _: None) -> Relay:
    """The relay of the agent of node a, with ranks 0 and 1."""
    return Relay(
        cast(RouterSocket, socket),
        job="j",
        node="a",
        session=1,
        oldest_session=lambda _: 1,
        ranks=lambda: (0, 1),
        post=post,
    )


def test_orders_and_acknowledgements_of_a_turn_leave_in_a_frame_for_each_node() -> None:
    """And the orders for all ranks of a node in one message."""
    socket = Socket(A, B)
    wire = wire_of(socket)
    messages = [encode(reported(*range(RANKS_PER_NODE))), encode(reported(0, number=2))]
    socket.arrived.append(Received(A, A, next(pack(messages))))
    for arrival in wire.receive(0.0):
        wire.acknowledge(arrival)
    for rank in range(2 * RANKS_PER_NODE):
        wire.send(rank_address(rank), Quiesce(rank, 2), 2, 0.0)
    assert socket.sent == []
    wire.flush()
    wire.flush()
    assert [(node, len(messages)) for node, messages in socket.sent] == [(A, 3), (B, 1)]
    assert [type(each.body) for each in socket.sent[0][1]] == [Ack, Ack, OrderRanks]
    [orders] = socket.sent[1][1]
    assert (orders.receiver, orders.generation) == (B, 2)
    assert orders.body == OrderRanks(tuple(CommandToRank(rank, 2, Quiesce(rank, 2)) for rank in range(8, 16)))


def test_in_a_large_job_an_acknowledgement_leaves_with_the_next_order_or_after_a_while() -> None:
    """A node that is ordered nothing gets it by itself, and the loop knows when; one that repeats itself, at once."""
    socket = Socket(A, B)
    wire = wire_of(socket, LARGE)
    socket.arrived.append(Received(A, A, frame_of(reported(0))))
    for arrival in wire.receive(10.0):
        wire.acknowledge(arrival)
    wire.flush()
    assert (socket.sent, wire.next_due()) == ([], 10.0 + acknowledged_after(LARGE))
    wire.send(rank_address(0), Quiesce(0, 2), 2, 10.0)
    wire.flush()
    assert [[type(each.body) for each in messages] for _, messages in socket.sent] == [[Ack, OrderRanks]]
    socket.arrived.append(Received(A, A, frame_of(reported(0, number=2))))
    for arrival in wire.receive(20.0):
        wire.acknowledge(arrival)
    wire.flush()
    wire.receive(20.0 + acknowledged_after(LARGE))
    wire.flush()
    assert [each.body for each in socket.sent[-1][1]] == [Ack(1, 2)]
    socket.arrived.append(Received(A, A, frame_of(reported(0, number=2))))
    assert wire.receive(21.0) == []
    wire.flush()
    assert [each.body for each in socket.sent[-1][1]] == [Ack(1, 2)]
    assert len(socket.sent) == 3


def test_in_a_large_job_a_nodes_acknowledgement_leaves_with_what_it_says_next_or_after_a_while() -> None:

    async def scenario() -> None:
        upward = Socket()
        agent = Mailbox(job="j", address=A, session=1)
        link = ControllerLink(
            agent, cast(DealerSocket, upward), on_command=lambda _: None, on_new_controller=lambda: None
        )
        link.expect_ranks(LARGE)
        controller = Mailbox(job="j", address=CONTROLLER, session=1)
        orders = [controller.post(EndJob(0, "done"), A, 0.0) for _ in range(2)]
        link._received([Received("", None, frame_of(orders[0]))])
        await asyncio.sleep(0)
        assert upward.sent == []
        link.post(RankFinished(5, 1, 1, 9), reliable=False)
        await asyncio.sleep(0)
        assert [[type(each.body) for each in messages] for _, messages in upward.sent] == [[Ack, RankFinished]]
        link._received([Received("", None, frame_of(orders[1]))])
        await asyncio.sleep(1.5 * acknowledged_after(LARGE))
        assert [each.body for each in upward.sent[1][1]] == [Ack(1, 2)]
        link.close()

    asyncio.run(scenario())


def test_each_message_of_a_frame_is_believed_or_refused_by_itself() -> None:
    """A rank of another node, a damaged message and a repetition are counted, and cost the others nothing."""
    socket = Socket(A, B)
    wire = wire_of(socket)
    messages = [reported(0), reported(RANKS_PER_NODE, 1, number=2), reported(0)]
    socket.arrived.append(Received(A, A, next(pack([*map(encode, messages), b"\x91\x05"]))))
    believed = [arrival.envelope.body for arrival in wire.receive(0.0)]
    assert believed == [RanksReported("a", (finished(0),)), RanksReported("a", (finished(1),))]
    counted = {"reported by an agent that does not have the rank": 1, "duplicate": 1, "MalformedMessage": 1}
    assert wire.refused == counted


def test_a_report_of_which_nothing_is_believed_is_acknowledged_and_goes_no_further() -> None:
    """Else the node would say it for as long as there is a controller."""
    socket = Socket(A, B)
    wire = wire_of(socket)
    socket.arrived.append(Received(A, A, frame_of(reported(RANKS_PER_NODE))))
    assert wire.receive(0.0) == []
    socket.arrived.append(Received(A, A, frame_of(reported(RANKS_PER_NODE))))
    assert wire.receive(1.0) == []
    wire.flush()
    assert [[each.body for each in messages] for _, messages in socket.sent] == [[Ack(1, 1), Ack(1, 1)]]


def test_a_turn_takes_a_bounded_number_of_messages() -> None:
    """What is left is there for the next turn."""
    socket = Socket(A, B)
    wire = wire_of(socket)
    full = next(pack([encode(reported(0, number=number)) for number in range(1, 101)]))
    socket.arrived = [Received(A, A, full)] * 100
    wire.receive(0.0)
    assert 0 < len(socket.arrived) < 100


@pytest.mark.parametrize("world_size", [LARGE, 7 * LARGE])
def test_what_the_ranks_of_a_job_say_at_its_start_is_taken_in_though_none_of_it_is_durable_yet(world_size: int) -> None:
    """In a small job so much is more than it has to say, and comes again later."""
    socket = Socket(A, B)
    wire = wire_of(socket, world_size)
    nodes, each = [f"n{number}" for number in range(7)], 2 * LARGE
    for node in nodes:
        mailbox = Mailbox(job="j", address=node_address(node), session=1)
        words = [
            encode(mailbox.post(NodeJoined(node, node, StoreEndpoint("127.0.0.1", 1), ()), CONTROLLER, 0.0))
            for _ in range(each)
        ]
        socket.arrived += [Received(mailbox.address, mailbox.address, frame) for frame in pack(words)]
    taken = 0
    while socket.arrived:
        taken += len(wire.receive(0.0))
    assert taken == max(UNCONFIRMED_LIMIT, UNCONFIRMED_PER_RANK * world_size)
    assert wire.refused.get("the journal is behind", 0) == len(nodes) * each - taken


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
    socket.arrived.append(Received(A, A, frame_of(reported(0))))
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
    ack = encode(agent.post(Ack(1, 1), CONTROLLER, 0.0, reliable=False))
    for messages, only_beats in (
        ([beat, beat], True),
        ([beat, ack], False),
        ([encode(reported(1))], False),
        ([], False),
    ):
        socket.arrived = [Received(A, A, frame) for frame in pack(messages)]
        wire.receive(0.0)
        assert wire.heard_only_beats is only_beats


def test_what_an_agent_and_its_ranks_say_in_a_turn_leaves_in_one_frame() -> None:
    """What ranks have said keeps its words, and its place before what their agent says later."""

    async def scenario() -> None:
        upward, downward = Socket(), Socket("rank/0", "rank/1")
        link = ControllerLink(
            Mailbox(job="j", address=A, session=1),
            cast(DealerSocket, upward),
            on_command=lambda _: None,
            on_new_controller=lambda: None,
        )
        relay = relay_of(downward, link.post)
        relay.received([Received(rank_address(rank), None, frame_of(said(rank))) for rank in range(2)])
        link.post(RankFinished(5, 1, 1, 9), reliable=False)
        relay.received([Received("rank/0", None, b"\x91\x05"), Received("rank/0", None, frame_of(said(1)))])
        assert upward.sent == []
        await asyncio.sleep(0)
        assert [[each.sender for each in messages] for _, messages in upward.sent] == [[A, A]]
        heard = upward.sent[0][1][0]
        assert isinstance(heard.body, RanksReported)
        assert [msgspec.structs.replace(each, age_s=0.0) for each in heard.body.reports] == [finished(0), finished(1)]
        assert all(0 <= each.age_s < 60 for each in heard.body.reports)
        assert relay.refused == {"malformed": 1, "sender is not the connected rank": 1}
        link.post(RankFinished(5, 1, 1, 9), reliable=False)
        link.close()
        relay.close()
        assert len(upward.sent) == 2  # what was said before the end leaves

    asyncio.run(scenario())


def test_what_arrives_for_a_rank_in_a_turn_is_handed_on_in_one_frame() -> None:
    """In the controller's name, and in its term."""

    async def scenario() -> None:
        downward = Socket("rank/0")
        relay = relay_of(downward)
        controller = Mailbox(job="j", address=CONTROLLER, session=7)
        controller.term = 3
        for generation, ranks in ((2, (0,)), (3, (0, 1))):
            orders = OrderRanks(tuple(CommandToRank(rank, generation, Quiesce(rank, generation)) for rank in ranks))
            relay.order(controller.post(orders, A, 0.0), orders)
        await asyncio.sleep(0)
        [(name, envelopes)] = downward.sent
        assert name == "rank/0"
        assert [(each.body, each.generation) for each in envelopes] == [(Quiesce(0, 2), 2), (Quiesce(0, 3), 3)]
        assert {(each.sender, each.receiver, each.term) for each in envelopes} == {(CONTROLLER, "rank/0", 3)}
        assert relay.refused == {"rank not connected": 1}  # it is sent again
        relay.close()

    asyncio.run(scenario())
