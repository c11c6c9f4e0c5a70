"""Nodes are admitted to a job under a name and a session, or refused with a reason."""

from pathlib import Path

import pytest
from zmq.utils import z85

from midstep.controller import enrolment as enrolment_book
from midstep.controller.admission import refusal
from midstep.controller.endpoints.control_requests import Accepted, Refused, Reply
from midstep.controller.enroller import Enroller, HostsWire, agent_order
from midstep.controller.enrolment import COMES_UP_S, EnrolmentBook, Standing
from midstep.controller.routes import Routes
from midstep.controller.wire import Arrival
from midstep.protocol.codec import PROTOCOL_VERSION, decode, encode
from midstep.protocol.exits import ANOTHER_NODE
from midstep.protocol.identities import may_be
from midstep.protocol.keys import JobKeys, JoiningTerms
from midstep.protocol.messages import (
    ArmFault,
    CreateNode,
    DeleteNode,
    EndJob,
    EnrolmentRefused,
    EnrolmentRequested,
    Envelope,
    KillNode,
    Message,
    NodeEnrolled,
    NodeJoined,
    NodeLost,
    RefusedBecause,
)
from midstep.protocol.token import random_pair
from midstep.protocol.types import PLATFORM, FaultAction, StoreEndpoint

KEYS = [random_pair().public for _ in range(4)]


class Cluster:
    """A book, with what the rest of the controller knows laid down by the test."""

    def __init__(self) -> None:
        self.book = EnrolmentBook()
        self.alive: set[str] = set()
        self.given_back: set[str] = set()
        self.now = 100.0

    def ask(
        self,
        node: str = "host",
        key: int = 0,
        *,
        exact: bool = False,
        expires_s: int = 0,
        public: str | None = None,
        owner: str | None = None,
    ) -> NodeEnrolled | EnrolmentRefused:
        """Ask for admission, and make durable what was decided."""
        request = EnrolmentRequested(node, exact, KEYS[key] if public is None else public, "rack")
        standing = Standing(self.alive.__contains__, self.given_back.__contains__)
        decided = self.book.decide(request, standing, self.now, owner=owner, expires_s=expires_s, wall_s=1000.0)
        if isinstance(decided, NodeEnrolled):
            self.book.learn(decided, self.now)
        return decided

    def comes_up(self, node: str) -> None:
        """Have a node be heard."""
        self.alive.add(node)
        self.book.learn(NodeJoined(node, "rack", StoreEndpoint("127.0.0.1", 1), ()), self.now)

    def is_lost(self, node: str) -> None:
        """Have a node be given up."""
        self.alive.discard(node)
        self.book.learn(NodeLost(node, "gone", 0.0), self.now)

    def refused(self, reason: RefusedBecause, **request: object) -> str:
        """Ask, and return what the refusal says."""
        answer = self.ask(**request)  # type: ignore[arg-type]
        assert isinstance(answer, EnrolmentRefused)
        assert answer.reason is reason
        return answer.detail


def test_a_node_gets_the_name_that_it_wishes_for_and_the_first_session() -> None:
    assert Cluster().ask() == NodeEnrolled("host", 1, KEYS[0], "rack")


def test_names_of_one_host_are_made_different() -> None:
    cluster = Cluster()

    assert [cluster.ask(key=key).node for key in range(3)] == ["host", "host-2", "host-3"]  # type: ignore[union-attr]


def test_a_name_is_free_again_when_its_node_is_lost_and_the_session_counts_on() -> None:
    cluster = Cluster()
    cluster.ask(key=0)
    cluster.book.learn(NodeLost("host", "gone", 0.0), cluster.now)

    assert cluster.ask(key=1) == NodeEnrolled("host", 2, KEYS[1], "rack")


def test_a_name_is_free_again_when_its_node_never_came_up() -> None:
    cluster = Cluster()
    cluster.ask(key=0)
    cluster.now += COMES_UP_S

    assert cluster.ask(key=1) == NodeEnrolled("host", 2, KEYS[1], "rack")


def test_a_node_that_is_heard_keeps_its_name_however_long_ago_it_came() -> None:
    cluster = Cluster()
    cluster.ask(key=0)
    cluster.comes_up("host")
    cluster.now += 10 * COMES_UP_S

    assert cluster.ask(key=1).node == "host-2"  # type: ignore[union-attr]


def test_a_node_that_asks_again_before_it_is_heard_gets_the_same_answer() -> None:
    cluster = Cluster()
    admitted = cluster.ask(key=0)

    assert cluster.ask("other", key=0) == admitted


def test_a_node_that_asks_again_after_the_time_to_come_up_keeps_its_name() -> None:
    cluster = Cluster()
    cluster.ask(key=0)
    cluster.now += COMES_UP_S

    assert cluster.ask("other", key=0, owner="node/host") == NodeEnrolled("host", 2, KEYS[0], "rack")


def test_the_key_of_a_node_that_was_heard_admits_nobody_else() -> None:
    cluster = Cluster()
    cluster.ask(key=0)
    cluster.comes_up("host")

    cluster.refused(RefusedBecause.BAD_KEY, node="other", key=0)
    cluster.is_lost("host")
    cluster.refused(RefusedBecause.BAD_KEY, node="other", key=0)


@pytest.mark.parametrize("owner", ["joining/", "operator/viewer/", "detector/", "platform", "controller", "node/b"])
def test_a_key_that_is_anybodys_is_refused(owner: str) -> None:
    Cluster().refused(RefusedBecause.BAD_KEY, owner=owner)


def test_a_name_that_was_asked_for_and_is_in_use_is_refused() -> None:
    cluster = Cluster()
    cluster.ask(key=0)

    assert "choose another --node" in cluster.refused(RefusedBecause.NAME_IN_USE, key=1, exact=True)


def test_an_expired_token_admits_nobody_and_says_since_when() -> None:
    assert isinstance(Cluster().ask(expires_s=1001), NodeEnrolled)
    assert "expired at 1970-01-01 00:16:40 UTC" in Cluster().refused(RefusedBecause.EXPIRED, expires_s=1000)


def test_a_node_that_was_given_back_is_not_admitted_again_and_nobody_takes_its_name() -> None:
    cluster = Cluster()
    cluster.ask(key=0)
    cluster.given_back.add("host")
    cluster.now += COMES_UP_S

    assert "another node" in cluster.refused(RefusedBecause.GIVEN_BACK, key=0)
    assert cluster.ask(key=1).node == "host-2"  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["", "-a", "a/b", "a b", "a\nb", "x" * 64, "ä"])
def test_what_cannot_be_a_directory_is_no_node_name(name: str) -> None:
    assert "--node" in Cluster().refused(RefusedBecause.BAD_NAME, node=name)


def test_what_is_no_key_is_refused() -> None:
    Cluster().refused(RefusedBecause.BAD_KEY, public="~" * 40)


def test_the_number_of_names_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enrolment_book, "MOST_NODES", 2)
    cluster = Cluster()
    for key, node in enumerate("ab"):
        cluster.ask(node, key=key)
        cluster.comes_up(node)

    cluster.refused(RefusedBecause.TOO_MANY, node="c", key=2)


def test_names_that_were_never_heard_from_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enrolment_book, "MOST_NODES", 2)
    cluster = Cluster()
    cluster.ask("a", key=0)
    cluster.ask("b", key=1)
    cluster.refused(RefusedBecause.TOO_MANY, node="c", key=2)
    cluster.now += COMES_UP_S

    assert cluster.ask("c", key=2) == NodeEnrolled("c", 1, KEYS[2], "rack")
    assert set(cluster.book.nodes) == {"c"}
    assert cluster.ask("a", key=3) == NodeEnrolled("a", 2, KEYS[3], "rack")  # no session is given twice


def test_the_longest_lost_node_makes_room_where_all_names_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enrolment_book, "MOST_NODES", 2)
    cluster = Cluster()
    for key, node in enumerate("ab"):
        cluster.ask(node, key=key)
        cluster.comes_up(node)
    cluster.is_lost("b")

    assert cluster.ask("c", key=2) == NodeEnrolled("c", 1, KEYS[2], "rack")
    assert set(cluster.book.nodes) == {"a", "c"}


def test_who_joins_may_say_nothing_but_that() -> None:
    request = EnrolmentRequested("host", False, KEYS[0], "rack")

    assert _judged("joining/a", request) is None
    assert _judged("joining/a", request, number=1) == "numbered, and not to be acknowledged"
    assert _judged("joining/a", NodeLost("host", "gone", 0.0)) == "not for a joining node to say"
    assert _judged("node/a", request) == "not for an agent to say"


def _judged(sender: str, body: Message, number: int = 0) -> str | None:
    envelope = decode(encode(Envelope(PROTOCOL_VERSION, "j", sender, "controller", 0, 0, 1, number, body)))
    return refusal(sender, envelope, 4, Routes())


def test_a_key_that_several_have_stands_for_a_family_of_identities() -> None:
    assert may_be("joining/abc", "joining/")
    assert may_be("node/a", "node/a")
    assert not may_be("node/a", "joining/")
    assert not may_be("node/ab", "node/a")
    assert not may_be("node/a", None)


def test_what_a_platform_is_told_the_agent_of_the_node_is_told() -> None:
    leave, die = agent_order(DeleteNode("a")), agent_order(KillNode("a"))

    assert leave is not None
    assert leave.receiver == "node/a"
    assert isinstance(leave.body, EndJob)
    assert leave.body.exit_code == ANOTHER_NODE
    assert die is not None
    assert isinstance(die.body, ArmFault)
    assert die.body.fault.action is FaultAction.KILL_NODE
    assert agent_order(EndJob(0, "")) is None
    assert agent_order(CreateNode("a")) is None


def test_where_there_is_no_platform_what_brings_nodes_is_asked_for_them() -> None:
    """Else it is only said that one more is needed."""
    wire, wanted = HostsWire.__new__(HostsWire), list[str]()
    wire.send(PLATFORM, CreateNode("node2"), 1, 0.0)
    wire.bring = wanted.append
    wire.send(PLATFORM, CreateNode("node3"), 1, 0.0)
    assert wanted == ["node3"]


class _Wire:
    """Takes down what is answered."""

    def __init__(self) -> None:
        self.answers: list[object] = []
        self.refused: list[str] = []

    def answer(self, arrival: Arrival, body: object, now: float) -> None:
        self.answers.append(body)

    def refuse(self, reason: str, connection: str) -> None:
        self.refused.append(reason)


def _enroller(keys: Path, wire: _Wire, *, expires_s: int = 0) -> Enroller:
    JobKeys.create(keys, [])
    JobKeys.open_for_joining(keys, JoiningTerms(KEYS[3], expires_s))
    return Enroller(wire, Standing(lambda node: False, lambda node: False), keys)  # type: ignore[arg-type]


def _arrival(request: EnrolmentRequested, connection: str = "joining/a") -> Arrival:
    return Arrival(Envelope(PROTOCOL_VERSION, "j", connection, "controller", 0, 0, 1, 0, request), connection)


def test_two_nodes_that_ask_before_the_first_is_durable_get_two_names(tmp_path: Path) -> None:
    wire = _Wire()
    enroller = _enroller(tmp_path / "keys", wire)
    pended: list[NodeEnrolled] = []
    for key in range(2):
        request = EnrolmentRequested("host", False, KEYS[key], "rack")
        enroller.take(request, _arrival(request, f"joining/{key}"), 0.0, lambda event, answer: pended.append(event))

    assert [event.node for event in pended] == ["host", "host-2"]
    assert wire.answers == []


@pytest.mark.parametrize(("reply", "admitted"), [(Accepted("durable"), True), (Refused("no space"), False)])
def test_a_node_is_let_in_when_its_admission_is_durable(tmp_path: Path, reply: Reply, admitted: bool) -> None:
    keys, wire = tmp_path / "keys", _Wire()
    enroller = _enroller(keys, wire)
    request = EnrolmentRequested("host", False, KEYS[0], "rack")
    enroller.take(request, _arrival(request), 0.0, lambda event, answer: answer(reply))
    identity = JobKeys.load_server(keys).identity_of(z85.decode(KEYS[0]))

    assert identity == ("node/host" if admitted else None)
    assert bool(wire.answers) is admitted


def test_the_next_controller_lists_the_keys_of_nodes_that_an_earlier_one_has_admitted(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    enroller = _enroller(keys, _Wire())
    enroller.book.learn(NodeEnrolled("host", 1, KEYS[0], "rack"), 0.0)
    enroller.restore()

    assert JobKeys.load_server(keys).identity_of(z85.decode(KEYS[0])) == "node/host"


def test_the_next_controller_lists_no_key_of_a_node_that_is_not_known_any_more(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    enroller = _enroller(keys, _Wire())
    JobKeys.admit(keys, "node/host", KEYS[0])
    JobKeys.add(keys, "node/made-here")
    enroller.restore()

    assert JobKeys.load_server(keys).identity_of(z85.decode(KEYS[0])) is None
    assert [identity for _, identity in JobKeys.listed(keys, "node/")] == ["node/made-here"]


def test_an_admission_with_the_join_key_in_an_old_journal_leaves_that_key_what_it_is(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    enroller = _enroller(keys, _Wire())
    enroller.book.learn(NodeEnrolled("host", 1, KEYS[3], "rack"), 0.0)
    enroller.restore()

    assert JobKeys.load_server(keys).identity_of(z85.decode(KEYS[3])) == "joining/"


def test_a_refusal_is_answered_at_once_and_counted(tmp_path: Path) -> None:
    wire = _Wire()
    request = EnrolmentRequested("host", False, KEYS[0], "rack")
    _enroller(tmp_path / "keys", wire, expires_s=1).take(request, _arrival(request), 0.0, pytest.fail)

    assert wire.refused == ["enrolment: expired token"]
    assert isinstance(wire.answers[0], EnrolmentRefused)
