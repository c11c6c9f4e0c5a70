"""A node speaks once for all its ranks: what is gathered, acknowledged, handed on, repeated, and dropped."""

import asyncio
import math
import random
from collections import Counter
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from midstep.agent.relay import AGAIN_S
from midstep.controller.recovery.events import ControllerStarted, Send
from midstep.controller.routes import UNROUTED_LIMIT, WEIGHT_LIMIT, Routes, TurnOrders
from midstep.protocol.bounds import MOST_OF_A_NODE
from midstep.protocol.codec import decode, encode, frame_of
from midstep.protocol.mailbox import RETRY_S, Mailbox
from midstep.protocol.messages import (
    Ack,
    ArmFault,
    CommandToRank,
    CreateNode,
    Envelope,
    NodeJoined,
    NodeReport,
    OrderRanks,
    ProcessesStarted,
    ProcessStarted,
    Quiesce,
    RankFinished,
    RankReport,
    RanksReported,
    Resume,
    SaveCheckpoint,
    StartProcess,
    StartProcesses,
    StopProcess,
)
from midstep.protocol.rank_relay import (
    GATHER_MAX_S,
    MOST_OF_A_REPORT_BYTES,
    MOST_TOGETHER,
    MOST_TOGETHER_BYTES,
    NOT_A_REPORT,
    STARTS_WAIT,
    TOO_LARGE,
    RankRelay,
    gathering_of,
)
from midstep.protocol.transport import Received
from midstep.protocol.types import (
    CONTROLLER,
    ArmedFault,
    FaultAction,
    Rendezvous,
    RunningProcess,
    node_address,
    rank_address,
)

from .test_frames_of_a_turn import Socket, relay_of

NODE = node_address("a")
STORE = Rendezvous("127.0.0.1", 1, "secret")


def rank_mailbox(rank: int, session: int = 1) -> Mailbox:
    return Mailbox(job="j", address=rank_address(rank), session=session)


def said(rank: int, number: int = 1, session: int = 1) -> Envelope:
    """What a rank tells its agent in its message of that number."""
    first = rank_mailbox(rank, session).post(RankFinished(rank, 1, session, number), CONTROLLER, 0.0)
    return replace(first, number=number)


def quiesce(rank: int, generation: int) -> CommandToRank:
    return CommandToRank(rank, generation, Quiesce(rank, generation))


def start(rank: int) -> StartProcess:
    return StartProcess(rank, rank % 2, 0, 2, 3, 1, False, STORE)


def start_of(rank: int) -> ProcessStarted:
    return ProcessStarted("a", RunningProcess(rank, 100 + rank, 1, 1), warm=True)


def relay() -> RankRelay:
    return RankRelay(job="j", node="a", session=7)


class Posted:
    """Stands for the agent's mailbox: takes `room` messages, and numbers them."""

    def __init__(self, room: int = 1000) -> None:
        self.messages: list[RanksReported] = []
        self.started: list[ProcessesStarted] = []
        self.order: list[type] = []
        self.room = room

    def __call__(self, message: NodeReport) -> int | None:
        if len(self.order) >= self.room:
            return None
        self.order.append(type(message))
        if isinstance(message, ProcessesStarted):
            self.started.append(message)
        else:
            self.messages.append(message)
        return len(self.order)

    def ranks(self) -> list[list[int]]:
        return [[report.rank for report in message.reports] for message in self.messages]


# --- up ---------------------------------------------------------------------------------------------------------------


def test_processes_that_were_started_are_one_message_before_what_they_say() -> None:
    words, posted = relay(), Posted()
    words.started(start_of(0))
    words.hear(said(0), 100, 0.0)
    words.started(start_of(1))
    assert words.has_gathered
    words.leave(posted, 0.0)
    assert posted.order == [ProcessesStarted, RanksReported]
    assert posted.started == [ProcessesStarted("a", (start_of(0), start_of(1)))]
    assert not words.has_gathered


def test_starts_that_cannot_be_posted_stay_gathered_and_so_does_all_behind_them() -> None:
    words = relay()
    words.started(start_of(0))
    words.hear(said(0), 100, 0.0)
    words.leave(Posted(room=0), 0.0)
    posted = Posted(room=1)
    words.leave(posted, 0.0)
    assert posted.order == [ProcessesStarted]
    words.leave(posted := Posted(), 0.0)
    assert posted.order == [RanksReported]


def test_an_agent_tells_of_starts_together_and_at_once_before_anything_else() -> None:
    """Nothing waits for them, so they may be a while; a rank that speaks meanwhile does not wait for that."""

    async def scenario() -> None:
        posted = Posted()
        agent = relay_of(Socket(), posted)
        agent.expect_ranks(1_000_000)
        agent.started(start_of(0))
        agent.started(start_of(1))
        assert posted.order == []
        await asyncio.sleep(2 * STARTS_WAIT * GATHER_MAX_S)
        assert posted.started == [ProcessesStarted("a", (start_of(0), start_of(1)))]
        agent.started(start_of(2))
        agent.leave()
        assert posted.started[1:] == [ProcessesStarted("a", (start_of(2),))]
        agent.received([Received("rank/0", "rank/0", frame_of(said(0)))])
        agent.started(start_of(3))
        assert posted.order[2:] == [RanksReported]  # it was first, and has left
        agent.received([Received("rank/1", "rank/1", frame_of(said(1)))])
        await asyncio.sleep(2 * GATHER_MAX_S)
        assert posted.order[3:] == [ProcessesStarted, RanksReported]
        agent.close()

    asyncio.run(scenario())


def test_reports_are_gathered_until_all_ranks_of_the_node_have_spoken() -> None:
    words = relay()
    for rank in range(3):
        assert not words.is_due(range(3))
        assert words.hear(said(rank), 100, 0.0) is None
    assert words.is_due(range(3))
    posted = Posted()
    words.leave(posted, 0.0)
    assert posted.ranks() == [[0, 1, 2]]
    assert not words.has_gathered
    assert not words.is_due(range(3))


def test_what_is_gathered_leaves_when_the_time_is_over_with_its_age() -> None:
    words, posted = relay(), Posted()
    words.hear(replace(said(0), age_s=2.0), 100, 10.0)
    words.hear(said(1), 100, 10.5)
    words.leave(posted, 11.0)
    [message] = posted.messages
    assert message.node == "a"
    assert message.reports == (
        RankReport(0, 1, RankFinished(0, 1, 1, 1), 3.0),
        RankReport(1, 1, RankFinished(1, 1, 1, 1), 0.5),
    )


@pytest.mark.parametrize("age_s", [math.inf, 1e300, math.nan, -math.inf])
def test_an_age_that_is_none_does_not_spoil_what_other_ranks_have_said(age_s: float) -> None:
    words, posted = relay(), Posted()
    words.hear(replace(said(0), age_s=age_s), 100, 0.0)
    words.hear(said(1), 100, 0.0)
    words.leave(posted, 1.0)
    [message] = posted.messages
    agent = Mailbox(job="j", address=NODE, session=7)
    assert decode(encode(agent.post(message, CONTROLLER, 0.0))).body == message


@pytest.mark.parametrize(("ranks", "seconds"), [(1, 0.000005), (8, 0.00004), (1000, 0.005), (100_000, GATHER_MAX_S)])
def test_a_small_job_gathers_for_a_moment_only(ranks: int, seconds: float) -> None:
    assert gathering_of(ranks) == pytest.approx(seconds)


def test_a_message_has_a_bounded_number_of_reports_and_a_full_one_is_due() -> None:
    words, posted = relay(), Posted()
    for number in range(1, MOST_TOGETHER + 3):
        words.hear(said(0, number), 10, 0.0)
    assert words.is_due(range(8))
    words.leave(posted, 0.0)
    assert [len(message.reports) for message in posted.messages] == [MOST_TOGETHER, 2]
    assert [r.word.committed for m in posted.messages for r in m.reports if isinstance(r.word, RankFinished)] == [
        *range(1, MOST_TOGETHER + 3)
    ]


def test_a_message_has_a_bounded_size_unless_one_report_has_more() -> None:
    words, posted = relay(), Posted()
    half = MOST_TOGETHER_BYTES // 2
    for rank, size_bytes in enumerate((half, half, 1, 3 * MOST_TOGETHER_BYTES, 1)):
        words.hear(said(rank), size_bytes, 0.0)
    words.leave(posted, 0.0)
    assert posted.ranks() == [[0, 1], [2], [3], [4]]


def test_a_report_is_acknowledged_to_its_rank_after_the_controllers_acknowledgement() -> None:
    words, posted, rank = relay(), Posted(), rank_mailbox(0)
    report = rank.post(RankFinished(0, 1, 1, 5), CONTROLLER, 0.0)
    assert words.hear(report, 100, 0.0) is None
    assert words.acknowledged(1) == []
    words.leave(posted, 0.0)
    [answer] = words.acknowledged(1)
    assert (answer.sender, answer.receiver, answer.body) == (CONTROLLER, "rank/0", Ack(1, 1))
    rank.take(answer, 0.0)
    assert rank.next_due() is None
    assert words.acknowledged(1) == []


def test_a_repeated_report_is_sent_once_and_answered_only_when_it_is_durable() -> None:
    words, posted = relay(), Posted()
    assert words.hear(said(0), 100, 0.0) is None
    assert words.hear(said(0), 100, 0.5) is None  # gathered
    words.leave(posted, 1.0)
    assert words.hear(said(0), 100, 1.5) is None  # on its way
    assert not words.has_gathered
    answers = words.acknowledged(1)
    assert [words.hear(said(0), 100, 2.0)] == answers
    assert posted.ranks() == [[0]]


def test_what_the_agents_mailbox_does_not_take_stays_gathered() -> None:
    words, posted = relay(), Posted(room=1)
    for rank in range(3):
        words.hear(said(rank), MOST_TOGETHER_BYTES, 0.0)
    words.leave(posted, 0.0)
    assert (posted.ranks(), words.has_gathered) == ([[0]], True)
    assert not words.is_due(range(3))  # rank 0 may speak again
    words.hear(said(0, 2), 1, 0.0)
    assert words.is_due(range(3))
    posted.room = 9
    words.leave(posted, 1.0)
    assert posted.ranks() == [[0], [1], [2], [0]]
    assert [answer.receiver for number in (1, 2, 3) for answer in words.acknowledged(number)] == [
        "rank/0",
        "rank/1",
        "rank/2",
    ]


def test_the_next_process_of_a_rank_is_heard_from_its_first_number_on() -> None:
    words, posted = relay(), Posted()
    for session in (1, 2, 1):
        words.hear(said(0, 1, session), 100, 0.0)
    words.leave(posted, 0.0)
    assert [report.incarnation for report in posted.messages[0].reports] == [1, 2]
    assert words.refused == {"stale session": 1}


def test_a_rank_says_nothing_but_reports_of_ranks() -> None:
    words = relay()
    for body in (NodeJoined("a", "a", None), Quiesce(0, 1)):  # type: ignore[arg-type]
        words.hear(replace(said(0), body=body), 100, 0.0)
    assert not words.has_gathered
    assert words.refused == {NOT_A_REPORT: 2}


# --- the agent's socket -----------------------------------------------------------------------------------------------


def test_the_agent_waits_a_moment_for_the_other_ranks_and_not_when_all_have_spoken() -> None:
    async def scenario() -> None:
        posted = Posted()
        carried = relay_of(Socket("rank/0", "rank/1"), posted)
        carried.expect_ranks(100_000)
        carried.received([Received("rank/0", None, frame_of(said(0)))])
        assert posted.ranks() == []
        await asyncio.sleep(10 * GATHER_MAX_S)
        assert posted.ranks() == [[0]]
        carried.received([Received(f"rank/{rank}", None, frame_of(said(rank, 2))) for rank in (1, 0)])
        assert posted.ranks() == [[0], [1, 0]]
        carried.close()

    asyncio.run(scenario())


def test_the_agent_says_what_is_gathered_before_anything_else_and_nothing_after_its_end() -> None:
    async def scenario() -> None:
        posted = Posted()
        carried = relay_of(Socket("rank/0", "rank/1"), posted)
        carried.expect_ranks(100_000)
        carried.received([Received("rank/0", None, frame_of(said(0)))])
        carried.leave()
        assert posted.ranks() == [[0]]
        carried.received([Received("rank/0", None, frame_of(said(0, 2)))])
        carried.close()
        carried.leave()
        await asyncio.sleep(10 * GATHER_MAX_S)
        assert posted.ranks() == [[0]]

    asyncio.run(scenario())


def test_the_agent_tries_again_when_its_mailbox_was_full() -> None:
    async def scenario() -> None:
        posted = Posted(room=0)
        carried = relay_of(Socket("rank/0", "rank/1"), posted)
        carried.received([Received(f"rank/{rank}", None, frame_of(said(rank))) for rank in (0, 1)])
        assert posted.ranks() == []
        posted.room = 9
        await asyncio.sleep(3 * AGAIN_S)
        assert posted.ranks() == [[0, 1]]
        carried.close()

    asyncio.run(scenario())


def test_the_agent_tells_ranks_what_is_durable_and_repeats_what_they_have_not_taken_in() -> None:
    """A rank that was not connected gets its command later, and one that answers is left alone."""

    async def scenario() -> None:
        socket, posted = Socket("rank/0"), Posted()
        carried = relay_of(socket, posted)
        carried.received([Received(f"rank/{rank}", None, frame_of(said(rank))) for rank in (0, 1)])
        carried.acknowledged(1)
        body = OrderRanks((quiesce(0, 2), quiesce(1, 2)))
        carried.order(Mailbox(job="j", address=CONTROLLER, session=1).post(body, NODE, 0.0), body)
        await asyncio.sleep(0)
        [(_, first)] = socket.sent
        assert [each.body for each in first] == [Ack(1, 1), Quiesce(0, 2)]
        assert carried.refused == {"rank not connected": 1}
        carried.received([Received("rank/0", None, frame_of(rank_mailbox(0).acknowledge(first[1])))])
        socket.connected.add("rank/1")
        await asyncio.sleep(2 * RETRY_S)
        assert [(name, each.body) for name, frame in socket.sent[1:] for each in frame] == [("rank/1", Quiesce(1, 2))]
        carried.close()

    asyncio.run(scenario())


# --- down -------------------------------------------------------------------------------------------------------------


def test_a_command_is_repeated_until_its_rank_has_taken_it_in() -> None:
    words, rank = relay(), rank_mailbox(0)
    [command] = words.order(OrderRanks((quiesce(0, 2),)), 3, 0.0)
    assert (command.sender, command.receiver, command.session, command.term) == (CONTROLLER, "rank/0", 7, 3)
    due_s = words.next_due()
    assert due_s is not None
    [again] = words.due(due_s)
    assert replace(again, age_s=0.0) == command
    assert rank.take(again, 0.0).deliver
    words.hear(rank.acknowledge(again), 10, 1.0)
    assert words.next_due() is None
    assert words.due(100.0) == []


def test_commands_are_forgotten_with_the_process_that_was_to_hear_them() -> None:
    words = relay()
    words.order(OrderRanks((quiesce(0, 2), quiesce(1, 2))), 1, 0.0)
    words.forget(0)
    assert [each.receiver for each in words.due(1.0)] == ["rank/1"]


def test_commands_are_dropped_when_another_controller_leads() -> None:
    words, rank = relay(), rank_mailbox(0)
    [earlier] = words.order(OrderRanks((quiesce(0, 2),)), 1, 0.0)
    words.follow(2)
    assert words.next_due() is None
    [later] = words.order(OrderRanks((quiesce(0, 3),)), 2, 0.0)
    assert rank.take(later, 0.0).deliver
    assert rank.take(earlier, 0.0).refused == "old term"
    assert later.number == earlier.number + 1


def test_a_command_of_a_later_generation_replaces_those_for_its_rank_that_wait() -> None:
    words = relay()
    fault = CommandToRank(0, 2, ArmFault(ArmedFault(0, FaultAction.RAISE)))
    words.order(OrderRanks((quiesce(0, 2), quiesce(1, 2), fault)), 1, 0.0)
    words.order(OrderRanks((quiesce(0, 3),)), 1, 0.0)
    assert sorted((each.receiver, each.number) for each in words.due(1.0)) == [
        ("rank/0", 2),
        ("rank/0", 3),
        ("rank/1", 1),
    ]


# --- the controller's orders ------------------------------------------------------------------------------------------


def orders_in(message: OrderRanks | StartProcesses) -> tuple[CommandToRank, ...]:
    assert isinstance(message, OrderRanks)
    return message.orders


def started(routes: Routes, node: str, *ranks: int, incarnation: int = 1) -> None:
    """Have the controller order processes to start on a node."""
    starts = [
        Send(node_address(node), StartProcess(rank, rank, 0, incarnation, 1, 0, True, STORE), 1) for rank in ranks
    ]
    routes.learn(ControllerStarted(1), starts)


def test_orders_of_a_turn_are_one_message_for_each_node_in_the_order_given() -> None:
    routes = Routes()
    started(routes, "a", 0, 1)
    started(routes, "b", 2)
    orders = TurnOrders(routes)
    for order in (quiesce(1, 2), quiesce(2, 2), quiesce(0, 2), CommandToRank(1, 2, Resume(1, 2, 4))):
        orders.add(order)
    assert dict(orders.flush()) == {
        "node/a": OrderRanks((quiesce(1, 2), quiesce(0, 2), CommandToRank(1, 2, Resume(1, 2, 4)))),
        "node/b": OrderRanks((quiesce(2, 2),)),
    }
    assert list(orders.flush()) == []


def test_what_a_node_was_ordered_for_ranks_comes_before_what_it_is_ordered_next() -> None:
    """Its message is closed, and what follows for ranks goes into another one."""
    routes = Routes()
    started(routes, "a", 0)
    started(routes, "b", 2)
    orders = TurnOrders(routes)
    orders.add(quiesce(0, 2))
    orders.add(quiesce(2, 2))
    assert list(orders.close("node/a")) == [OrderRanks((quiesce(0, 2),))]
    orders.add(quiesce(0, 3))
    assert list(orders.flush()) == [
        ("node/b", OrderRanks((quiesce(2, 2),))),
        ("node/a", OrderRanks((quiesce(0, 3),))),
    ]


def test_all_that_a_node_is_to_start_in_a_turn_is_one_message() -> None:
    """It stands where it was ordered: behind what ranks there were ordered before, in front of what comes after."""
    routes = Routes()
    started(routes, "a", 0)
    orders = TurnOrders(routes)
    for receiver, body in (
        ("rank/0", Quiesce(0, 2)),
        ("node/b", start(2)),
        ("node/a", start(1)),
        ("node/b", start(3)),
        ("rank/0", Quiesce(0, 3)),
    ):
        assert orders.take(receiver, body, body.generation)
    assert list(orders.flush()) == [
        ("node/a", OrderRanks((quiesce(0, 2),))),
        ("node/a", StartProcesses((start(1),))),
        ("node/a", OrderRanks((quiesce(0, 3),))),
        ("node/b", StartProcesses((start(2), start(3)))),
    ]


def test_orders_that_are_for_a_node_alone_leave_by_themselves() -> None:
    assert not TurnOrders(Routes()).take("node/a", StopProcess(0, 1, 0.0), 1)
    assert not TurnOrders(Routes()).take("platform", CreateNode("b"), 1)


def test_a_rank_is_forgotten_without_the_start_of_its_next_process() -> None:
    routes = Routes()
    started(routes, "a", 0)
    orders = TurnOrders(routes)
    orders.add(quiesce(0, 2))
    orders.take("node/a", start(0), 3)
    orders.forget(0)
    assert list(orders.flush()) == [("node/a", StartProcesses((start(0),)))]


def test_a_node_that_is_gone_is_not_to_start_anything() -> None:
    orders = TurnOrders(Routes())
    orders.take("node/a", start(0), 3)
    orders.take("node/b", start(2), 3)
    orders.forget_node("node/a")
    assert list(orders.flush()) == [("node/b", StartProcesses((start(2),)))]


def test_orders_for_a_rank_without_a_node_wait_and_are_bounded() -> None:
    routes = Routes()
    orders = TurnOrders(routes)
    for generation in range(UNROUTED_LIMIT + 9):
        orders.add(quiesce(0, generation))
    assert list(orders.flush()) == []
    started(routes, "a", 0)
    [(node, message)] = orders.flush()
    assert node == "node/a"
    assert [order.generation for order in orders_in(message)] == [*range(9, UNROUTED_LIMIT + 9)]
    assert list(orders.flush()) == []


def test_what_has_waited_for_a_node_comes_before_newer_orders() -> None:
    routes = Routes()
    orders = TurnOrders(routes)
    orders.add(quiesce(0, 2))
    started(routes, "a", 0)
    orders.add(quiesce(0, 3))
    assert list(orders.flush()) == [("node/a", OrderRanks((quiesce(0, 2), quiesce(0, 3))))]


def test_a_message_has_no_more_orders_than_an_agent_takes() -> None:
    routes = Routes()
    started(routes, "a", 0)
    orders = TurnOrders(routes)
    for generation in range(MOST_OF_A_NODE + 1):
        orders.add(quiesce(0, generation))
    assert [len(orders_in(message)) for _, message in orders.flush()] == [MOST_OF_A_NODE, 1]


def test_what_is_for_a_forgotten_rank_is_not_sent() -> None:
    routes = Routes()
    started(routes, "a", 0, 1)
    orders = TurnOrders(routes)
    for rank in (0, 1, 5):
        orders.add(quiesce(rank, 2))
    for rank in (0, 5):
        orders.forget(rank)
    started(routes, "a", 5)
    assert list(orders.flush()) == [("node/a", OrderRanks((quiesce(1, 2),)))]


def test_a_message_of_orders_has_a_bounded_size() -> None:
    routes = Routes()
    started(routes, "a", 0)
    orders = TurnOrders(routes)
    shards = tuple(map(str, range(WEIGHT_LIMIT // 2)))
    for publish in (False, False, True):
        orders.add(CommandToRank(0, 2, SaveCheckpoint(0, 2, 9, publish, shards)))
    assert [len(orders_in(message)) for _, message in orders.flush()] == [1, 1, 1]


def test_orders_of_an_earlier_generation_are_outdated_in_the_mailbox() -> None:
    """Where all of a message are, and each of its ranks has been ordered something else since."""
    controller = Mailbox(job="j", address=CONTROLLER, session=1)
    fault = CommandToRank(0, 2, ArmFault(ArmedFault(0, FaultAction.RAISE)))
    sent = []
    for generation, orders in (
        (2, (quiesce(0, 2),)),
        (2, (quiesce(0, 2), quiesce(1, 2))),
        (2, (quiesce(0, 2), fault)),
        (3, (quiesce(0, 3),)),
    ):
        controller.generation = generation
        sent.append(controller.post(OrderRanks(orders), NODE, 0.0))
    assert [each.number for each in controller.due(1.0)] == [2, 3, 4]


def test_an_order_outdates_none_of_its_own_generation() -> None:
    """It may be sent in a turn in which the next generation is opened."""
    controller = Mailbox(job="j", address=CONTROLLER, session=1)
    controller.generation = 5
    controller.post(OrderRanks((quiesce(0, 5),)), NODE, 0.0)
    controller.generation = 6
    controller.post(OrderRanks((CommandToRank(0, 5, Resume(0, 5, 1)),)), NODE, 0.0)
    assert [each.number for each in controller.due(1.0)] == [1, 2]


def test_a_report_that_no_message_of_a_node_can_hold_is_refused() -> None:
    relay = RankRelay(job="j", node="a", session=1)
    assert relay.hear(said(0), MOST_OF_A_REPORT_BYTES + 1, 0.0) is None
    assert not relay.has_gathered
    assert relay.refused == {TOO_LARGE: 1}


# --- both hops --------------------------------------------------------------------------------------------------------


class Channel:
    """Loses, doubles and reorders what is put into it, by chance."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._waiting: list[Envelope] = []
        self.calm = False

    def put(self, envelope: Envelope) -> None:
        copies = 1 if self.calm else self._chance.choice((0, 1, 1, 2))
        self._waiting += [envelope] * copies

    def carry(self, take: Callable[[Envelope], None]) -> None:
        """Deliver some of what waits, in any order."""
        self._chance.shuffle(self._waiting)
        count = len(self._waiting) if self.calm else self._chance.randint(0, len(self._waiting))
        arrived, self._waiting = self._waiting[:count], self._waiting[count:]
        for envelope in arrived:
            take(envelope)


class Job:
    """A controller, a node's agent and its ranks; the ways between controller and agent, and agent and ranks, fail."""

    def __init__(self, seed: int, ranks: int) -> None:
        self.chance = random.Random(seed)
        self.now = 0.0
        self.up, self.down = Channel(self.chance), Channel(self.chance)
        self.from_ranks, self.to_ranks = Channel(self.chance), Channel(self.chance)
        self.controller = Mailbox(job="j", address=CONTROLLER, session=1)
        self.agent = Mailbox(job="j", address=NODE, session=7)
        self.relay = relay()
        self.ranks = {rank_address(rank): rank_mailbox(rank) for rank in range(ranks)}
        self.taken_in: Counter[tuple[int, int]] = Counter()
        self.heard: Counter[tuple[str, int]] = Counter()
        self.obeyed: set[tuple[str, int]] = set()
        self.undurable: list[Envelope] = []
        self.told: set[tuple[str, int]] = set()

    def report(self, rank: int, committed: int) -> None:
        box = self.ranks[rank_address(rank)]
        self.from_ranks.put(box.post(RankFinished(rank, 1, 1, committed), CONTROLLER, self.now))

    def order(self, rank: int, step: int) -> None:
        orders = OrderRanks((CommandToRank(rank, 1, Resume(rank, 1, step)),))
        self.down.put(self.controller.post(orders, NODE, self.now))

    def turn(self) -> None:
        self.now += 0.3
        self.from_ranks.carry(self._to_agent_from_rank)
        self.down.carry(self._to_agent)
        self.up.carry(self._to_controller)
        self.to_ranks.carry(self._to_rank)
        if self.chance.random() < 0.7:
            self.relay.leave(self._post, self.now)
        if self.chance.random() < 0.7:
            self._make_durable()
        for box in self.ranks.values():
            for envelope in box.due(self.now):
                self.from_ranks.put(envelope)
        for envelope in self.agent.due(self.now):
            self.up.put(envelope)
        for envelope in self.controller.due(self.now):
            self.down.put(envelope)
        for envelope in self.relay.due(self.now):
            self.to_ranks.put(envelope)

    @property
    def is_quiet(self) -> bool:
        boxes = [self.controller, self.agent, *self.ranks.values()]
        return all(box.next_due() is None for box in boxes) and self.relay.next_due() is None

    def _post(self, body: NodeReport) -> int | None:
        envelope = self.agent.post(body, CONTROLLER, self.now)
        self.up.put(envelope)
        return envelope.number

    def _to_agent_from_rank(self, envelope: Envelope) -> None:
        answer = self.relay.hear(envelope, 100, self.now)
        if answer is not None:
            self.to_ranks.put(answer)

    def _to_agent(self, envelope: Envelope) -> None:
        taken = self.agent.take(envelope, self.now)
        if taken.reply is not None:
            self.up.put(taken.reply)
        if isinstance(envelope.body, Ack) and taken.refused is None:
            for answer in self.relay.acknowledged(envelope.body.number):
                self.to_ranks.put(answer)
        if taken.deliver and isinstance(envelope.body, OrderRanks):
            self.up.put(self.agent.acknowledge(envelope))
            for command in self.relay.order(envelope.body, envelope.term, self.now):
                self.to_ranks.put(command)

    def _to_controller(self, envelope: Envelope) -> None:
        taken = self.controller.take(envelope, self.now)
        if taken.reply is not None:
            self.down.put(taken.reply)
        if taken.deliver:
            self.undurable.append(envelope)

    def _make_durable(self) -> None:
        for envelope in self.undurable:
            assert isinstance(envelope.body, RanksReported)
            for report in envelope.body.reports:
                assert isinstance(report.word, RankFinished)
                self.taken_in[report.rank, report.word.committed] += 1
            self.down.put(self.controller.acknowledge(envelope))
        self.undurable.clear()

    def _to_rank(self, envelope: Envelope) -> None:
        box = self.ranks[envelope.receiver]
        taken = box.take(envelope, self.now)
        if isinstance(envelope.body, Ack):  # number n of a rank is its n-th report
            assert self.taken_in[int(envelope.receiver.removeprefix("rank/")), envelope.body.number]
        if taken.reply is not None:
            self.from_ranks.put(taken.reply)
        if taken.deliver and isinstance(envelope.body, Resume):
            self.heard[envelope.receiver, envelope.number] += 1
            self.obeyed.add((envelope.receiver, envelope.body.step))
            self.from_ranks.put(box.acknowledge(envelope))


@pytest.mark.parametrize("seed", range(20))
def test_each_report_is_taken_in_once_and_each_order_heard_once_however_the_ways_fail(seed: int) -> None:
    """And no rank is told that a report is durable before it is."""
    job, ranks, rounds = Job(seed, 4), range(4), range(1, 13)
    for number in rounds:
        for rank in ranks:
            job.report(rank, number)
            job.order(rank, number)
        job.turn()
    for _ in range(60):
        job.turn()
    for channel in (job.up, job.down, job.from_ranks, job.to_ranks):
        channel.calm = True
    for _ in range(100):
        job.turn()
    assert job.taken_in == Counter({(rank, number): 1 for rank in ranks for number in rounds})
    assert set(job.heard.values()) == {1}
    assert job.obeyed == {(rank_address(rank), number) for rank in ranks for number in rounds}
    assert job.is_quiet
