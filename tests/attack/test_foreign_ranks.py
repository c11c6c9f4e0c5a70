"""Statements with one node's key about others' ranks"""

from collections import Counter
from collections.abc import Sequence
from typing import cast

import msgspec
import pytest

from midstep.controller.recovery.events import Action, ControllerStarted, Send
from midstep.controller.routes import Routes
from midstep.controller.wire import Arrival, Wire
from midstep.protocol import codec as frames
from midstep.protocol.mailbox import Mailbox
from midstep.protocol.messages import (
    Ack,
    CheckpointSaved,
    CreateNode,
    DeleteNode,
    FaultReported,
    Message,
    NewcomerWaiting,
    NodeHeartbeat,
    NodeJoined,
    NodeWords,
    ProcessesStarted,
    ProcessExited,
    ProcessStarted,
    ProgressReported,
    Quiesce,
    RankFinished,
    RankJoined,
    RankQuiesced,
    RankReady,
    RankReport,
    RanksReported,
    RankWord,
    StartProcess,
    StepCommitted,
    StopProcess,
)
from midstep.protocol.reports import RankWords, ReportedValues
from midstep.protocol.transport import Received, RouterSocket
from midstep.protocol.types import (
    Activity,
    FaultKind,
    FaultReport,
    RankProgress,
    Rendezvous,
    RunningProcess,
    StepReport,
    StoreEndpoint,
    rank_of,
)

from .attack import attack

A, B = "node/a", "node/b"  # a: ranks 0 and 1, b: ranks 2 and 3
STORE = StoreEndpoint("127.0.0.1", 1)
RENDEZVOUS = Rendezvous("127.0.0.1", 1, "secret")
STANDING = StepReport(7, ready=False, clean=True)
EXIT = FaultReport(FaultKind.EXIT, 1.0, A, "", rank=2, node="a", incarnation=1)


def start(rank: int, incarnation: int, address: str, *, early: bool = False) -> Send:
    """The order to start a process."""
    return Send(address, StartProcess(rank, rank % 2, 0, incarnation, 1, 0, True, RENDEZVOUS, early), 1)


def started(*processes: RunningProcess) -> ProcessesStarted:
    """Node a says that it has started these."""
    return ProcessesStarted("a", tuple(ProcessStarted("a", each, warm=True) for each in processes))


def clock(rank: int, incarnation: int = 1) -> RankProgress:
    """A step clock."""
    return RankProgress(rank, incarnation, 1, 9, Activity.UPDATING, 3, 0.1, 0.1, 0.5)


def process(rank: int, incarnation: int = 1) -> RunningProcess:
    """A process, as an agent names it."""
    return RunningProcess(rank, 4711, incarnation, 1)


class Router:
    """Stands for the socket: what has arrived, over the connection of which identity."""

    endpoint = ""
    pending = False

    def __init__(self) -> None:
        self.arrived: list[Received] = []
        self.refused: Counter[str] = Counter()

    def receive(self, limit: int) -> list[Received]:
        arrived, self.arrived = self.arrived[:limit], self.arrived[limit:]
        return arrived

    def knows(self, identity: str) -> bool:
        return True

    def send(self, identity: str, data: bytes) -> bool:
        return True


class Controller:
    """The controller's end of the wire, after it has started two ranks on each of two nodes."""

    def __init__(self) -> None:
        self.router, self.routes = Router(), Routes()
        self.mailbox = Mailbox(job="demo", address="controller", session=1)
        self.wire = Wire(cast(RouterSocket, self.router), self.mailbox, self.routes, 4)
        self.numbers = 0
        self.decide(*(start(rank, 1, A if rank < 2 else B) for rank in range(4)))

    def decide(self, *actions: Action) -> None:
        self.routes.learn(ControllerStarted(1), actions)

    def hear(self, identity: str, body: Message, sender: str = "", session: int = 1) -> bool:
        """Say whether a message over the connection of `identity` is believed.

        What a rank says is reported by the node. `session`: of the sender.
        """
        rank = rank_of(sender)
        if rank is None:
            return self.hear_as(sender or identity, identity, body, session)
        assert isinstance(body, RankWord)
        return self.hear(identity, RanksReported(identity.partition("/")[2], (RankReport(rank, session, body),)))

    def hear_as(self, sender: str, identity: str, body: Message, session: int = 1) -> bool:
        """Say whether a message in the name of a sender is believed over the connection of `identity`."""
        return bool(self.arrivals(identity, body, sender, session))

    def arrivals(self, identity: str, body: Message, sender: str = "", session: int = 1) -> list[Arrival]:
        """Return what is believed of a message."""
        self.numbers += 1
        mailbox = Mailbox(job="demo", address=sender or identity, session=session)
        envelope = msgspec.structs.replace(mailbox.post(body, "controller", 0.0), number=self.numbers)
        self.router.arrived.append(Received(identity, identity, frames.frame_of(envelope)))
        return self.wire.receive(0.0)

    def order(self, rank: int, incarnation: int) -> None:
        """Have something sent to a rank."""
        self.wire.send(f"rank/{rank}", Quiesce(rank, incarnation), 1, 0.0)
        self.wire.flush()


OF_RANKS: Sequence[RankWord] = (
    RankJoined(2, 1, 1, 4711, STANDING, 1.0),
    RankQuiesced(2, 1, 1, STANDING, {}),
    RankReady(2, 1, 1, 7, {}),
    StepCommitted(2, 1, 1, 8, 1.0, 0.1),
    RankFinished(2, 1, 1, 9),
    CheckpointSaved(2, 1, 7, "/tmp"),
    FaultReported(msgspec.structs.replace(EXIT, seen_by="rank/2", node="b")),
)
OF_AGENTS: Sequence[Message] = (
    NodeJoined("a", "a", STORE, (process(0), process(2))),
    started(process(2)),
    started(process(1), process(2)),
    started(process(1, 7)),  # which has not been ordered
    ProcessesStarted("a", (ProcessStarted("b", process(1), warm=True),)),
    NewcomerWaiting("a", process(2)),
    ProcessExited("a", process(2), -9, 1.0, expected=False),
    ProcessExited("a", process(1), -9, 1.0, expected=False, last=clock(2)),
    ProgressReported("a", 1, 1.0, (clock(0), clock(2))),
    NodeHeartbeat("a", 1.0, (clock(2),)),
    NodeHeartbeat("a", 1.0, (), ReportedValues(2, 1, 7, {"loss": 0.1})),
    NodeWords("a", "", (RankWords(2, 1, "not mine"),)),
    FaultReported(EXIT),
    FaultReported(msgspec.structs.replace(EXIT, incarnation=0)),
    FaultReported(msgspec.structs.replace(EXIT, rank=None, node="b")),
    FaultReported(msgspec.structs.replace(EXIT, rank=None, node=None)),
    FaultReported(msgspec.structs.replace(EXIT, rank=1, seen_by=B)),
)


def own(body: Message) -> Message:
    """The same of rank 1 and node a, where the agent may say it."""
    builtins = msgspec.to_builtins(body)

    def mended(value: object) -> object:
        if not isinstance(value, dict):
            return [mended(item) for item in value] if isinstance(value, list | tuple) else value
        changes = {"rank": 1, "node": "a", "incarnation": 1}
        return {key: changes.get(key, mended(item)) for key, item in value.items()}

    result: Message = msgspec.convert(mended(builtins), type(body))
    return result


@attack(
    "an agent with a stolen key speaks in the name of ranks on other nodes",
    holds="a rank is heard only through the node that its process was ordered to start on",
    reads="refused: reported by an agent that does not have the rank",
)
@pytest.mark.parametrize("body", OF_RANKS, ids=lambda body: type(body).__name__)
def test_a_rank_of_another_node_is_not_believed(body: RankWord) -> None:
    """What rank 2 says is believed over node b, and not over node a, whatever incarnation it claims."""
    controller = Controller()
    assert not any(controller.hear(A, body, "rank/2", session) for session in (1, 2, 10**9))
    assert controller.wire.refused == {"reported by an agent that does not have the rank": 3}
    assert controller.hear(B, body, "rank/2")


@attack(
    "an agent with a stolen key sends what another node would send, or what a rank would say itself",
    holds="only the owner of a connection is heard over it, and ranks have none",
    reads="refused: sender is not the connection's owner",
)
@pytest.mark.parametrize("body", OF_RANKS, ids=lambda body: type(body).__name__)
def test_nobody_is_heard_over_the_connection_of_another(body: RankWord) -> None:
    """Neither node b nor rank 2 nor a rank of node a itself, whatever session it claims."""
    controller = Controller()
    of_b = RanksReported("b", (RankReport(2, 1, body),))
    assert not any(controller.hear_as(B, A, of_b, session) for session in (1, 2, 10**9))
    assert not any(controller.hear_as("rank/2", A, body, session) for session in (1, 2, 10**9))
    assert not controller.hear_as("rank/1", A, own(body))
    assert controller.wire.refused == {"sender is not the connection's owner": 7}
    assert not controller.hear(A, of_b)
    assert controller.wire.refused["about another node"] == 1
    assert controller.hear(B, of_b)


@attack(
    "an agent reports ranks of other nodes among its own",
    holds="each report is believed by itself: those about other nodes are left out",
    reads="refused: reported by an agent that does not have the rank",
)
def test_what_is_foreign_in_a_report_is_left_out_and_the_rest_is_believed() -> None:
    """In the order in which it was reported."""
    controller = Controller()
    words = [RankReport(rank, 1, StepCommitted(rank, 1, 1, 8, 1.0, 0.1)) for rank in range(4)]
    pretended = RankReport(1, 1, StepCommitted(2, 1, 1, 9, 1.0, 0.1))
    [heard] = controller.arrivals(A, RanksReported("a", (words[2], words[1], pretended, words[3], words[0])))
    assert heard.envelope.body == RanksReported("a", (words[1], words[0]))
    assert controller.wire.refused == {
        "reported by an agent that does not have the rank": 2,
        "about another rank": 1,
    }


@attack(
    "an agent with a stolen key reports starts, exits, clocks and faults of processes on other nodes",
    holds="an agent is believed about its own node and the processes that it was told to start",
    reads="refused: about a process of another node",
)
@pytest.mark.parametrize("body", OF_AGENTS, ids=lambda body: type(body).__name__)
def test_an_agent_is_not_believed_about_processes_of_others(body: Message) -> None:
    """The report about a foreign process is refused, and the same report about an own one is taken."""
    controller = Controller()
    assert not controller.hear(A, body)
    if not isinstance(body, FaultReported):
        assert controller.hear(A, own(body))


@attack(
    "an agent acknowledges orders for ranks on other nodes, so that they are never sent again",
    holds="an order counts as received only where it was sent to",
    reads="refused: sender is not the connection's owner",
)
def test_an_order_for_another_node_cannot_be_acknowledged() -> None:
    """The order to rank 2 stays outstanding after node a acknowledges it, and not after node b does."""
    controller = Controller()
    controller.order(2, 1)
    for sender in (A, B, "rank/2"):
        controller.hear_as(sender, A, Ack(session=1, number=1))
    assert controller.wire.refused == {"sender is not the connection's owner": 2}
    assert controller.wire.next_due() is not None
    controller.hear(B, Ack(session=1, number=1))
    assert controller.wire.next_due() is None


@attack(
    "the node that a rank has left still speaks for it",
    holds="each life of a rank is believed where it was started, and nowhere else",
    reads="refused: about a process of another node",
)
def test_a_node_cannot_speak_for_the_next_life_of_a_rank() -> None:
    """After rank 2 has moved from b to a, node b cannot finish it, and cannot acknowledge its orders."""
    controller = Controller()
    controller.decide(start(2, 2, A))
    assert not controller.hear(B, RankFinished(2, 1, 2, 9), "rank/2", session=2)
    assert not controller.hear(B, RankFinished(2, 1, 2, 9), "rank/2", session=1)
    assert controller.wire.refused == {
        "reported by an agent that does not have the rank": 1,
        "about a process of another node": 1,
    }
    controller.order(2, 2)
    for sender in (A, B, "rank/2"):
        controller.hear_as(sender, B, Ack(session=1, number=1))
    assert controller.wire.next_due() is not None
    assert controller.hear(B, ProcessExited("b", process(2, 1), 0, 1.0, expected=True))  # this it has to say
    assert controller.hear(A, RankFinished(2, 1, 2, 9), "rank/2", session=2)


def test_a_process_that_is_started_early_is_believed_on_its_node() -> None:
    """A newcomer of a planned change and the process that still holds the rank are each heard over their own node."""
    controller = Controller()
    controller.decide(start(2, 2, A, early=True))
    assert controller.hear(A, started(process(2, 2)))
    assert controller.hear(A, NewcomerWaiting("a", process(2, 2)))
    assert controller.hear(B, StepCommitted(2, 1, 1, 8, 1.0, 0.1), "rank/2")
    controller.decide(Send(B, StopProcess(2, 1, 0.0), 1))
    assert controller.hear(A, RankJoined(2, 1, 2, 4711, STANDING, 1.0), "rank/2", session=2)


@attack(
    "the key of a node that was given back is used again",
    holds="such a node is heard only on what still runs there, until the platform is asked for it again",
    reads="refused: node was given back",
)
def test_a_node_that_was_given_back_has_no_say() -> None:
    """Its reports and those of its ranks are refused; what runs there is taken in, so that strays can be stopped."""
    controller = Controller()
    assert controller.hear(A, RankFinished(1, 1, 1, 9), "rank/1")
    controller.decide(Send("platform", DeleteNode("a"), 1))
    assert not controller.hear(A, RankFinished(1, 1, 1, 9), "rank/1")
    assert not controller.hear(A, ProcessExited("a", process(1), -9, 1.0, expected=False))
    assert not controller.hear(A, NodeHeartbeat("a", 1.0, ()))
    assert not controller.hear(A, NodeWords("a", "still here"))
    assert controller.hear(A, NodeJoined("a", "a", STORE, (process(1),)))
    assert controller.hear(A, started(process(1)))
    controller.decide(Send("platform", CreateNode("a"), 1))
    assert controller.hear(A, ProcessExited("a", process(1), -9, 1.0, expected=False))
