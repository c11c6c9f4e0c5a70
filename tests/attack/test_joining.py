"""The admission of nodes, attacked by a holder of a join token"""

from pathlib import Path

import pytest
from zmq.utils import z85

from midstep.controller.admission import refusal
from midstep.controller.endpoints.control_requests import Accepted
from midstep.controller.enroller import Enroller
from midstep.controller.enrolment import MOST_NODES, Standing
from midstep.controller.routes import Routes
from midstep.controller.wire import Arrival
from midstep.launch.job import Start, let_nodes_join
from midstep.launch.joining import prepare
from midstep.launch.meeting import RendezvousPoint, Wishes
from midstep.protocol.codec import PROTOCOL_VERSION
from midstep.protocol.identities import Role
from midstep.protocol.keys import JobKeys
from midstep.protocol.messages import (
    EnrolmentRefused,
    EnrolmentRequested,
    Envelope,
    NodeEnrolled,
    NodeJoined,
    RefusedBecause,
)
from midstep.protocol.token import new_token, parse_token, random_pair
from midstep.protocol.types import StoreEndpoint

from .attack import attack

JOB = "j"
TOKEN = new_token()
ROUND_S = 0.25
FLOOD_ROUNDS = 240  # a minute
CROWD = 100  # connections that ask each round


class Controller:
    """The admission of a job with a token, with answers by connection."""

    def __init__(self, keys: Path) -> None:
        self.keys = keys
        let_nodes_join(keys, TOKEN, JOB)
        self.answers: dict[str, EnrolmentRefused | NodeEnrolled] = {}
        self.refused: list[str] = []
        self.alive: set[str] = set()
        self.enroller = Enroller(self, Standing(self.alive.__contains__, lambda node: False), keys)  # type: ignore[arg-type]

    def answer(self, arrival: Arrival, body: EnrolmentRefused | NodeEnrolled, now: float) -> None:
        self.answers[arrival.connection] = body

    def refuse(self, reason: str, connection: str) -> None:
        self.refused.append(reason)

    def ask(self, public: str, *, node: str = "host", connection: str = "joining/a", now: float = 0.0) -> object:
        """Ask for admission, which is durable at once; return the answer."""
        request = EnrolmentRequested(node, False, public, "rack")
        arrival = Arrival(Envelope(PROTOCOL_VERSION, JOB, connection, "controller", 0, 0, 1, 0, request), connection)
        self.answers.pop(connection, None)
        self.enroller.take(request, arrival, now, lambda event, answer: answer(Accepted("durable")))
        return self.answers.get(connection)

    def come_up(self, node: str, now: float) -> None:
        """Have an admitted node be heard."""
        self.alive.add(node)
        self.enroller.book.learn(NodeJoined(node, "rack", StoreEndpoint("127.0.0.1", 1), ()), now)


def foreign_keys(keys: Path) -> dict[str, str]:
    """Return the public keys of others in the job, by the identities that they stand for."""
    families = {f"operator/{role.value}/": TOKEN.operator_keys(JOB, role).public for role in Role}
    return {
        **families,
        "joining/": TOKEN.invitation(JOB).join.public,
        "detector/": TOKEN.detector_keys(JOB).public,
        "platform": TOKEN.platform_keys(JOB).public,
        "node/made-here": JobKeys.load_client(keys, "node/made-here").public,
    }


@attack(
    "somebody with a join token asks for admission with a key that is not his: the join key's own public half, a "
    "viewer's, the platform's, another node's",
    holds="the request is refused, and the key stands for whom it stood for: nodes can join, operators connect",
    reads="refused: enrolment: key of another identity",
)
def test_a_key_that_is_anybodys_admits_nobody_else(tmp_path: Path) -> None:
    """Each known key is refused, also the controller's own, and that of a node which was admitted and heard."""
    controller = Controller(tmp_path / "keys")
    JobKeys.add(controller.keys, "node/made-here")
    known = foreign_keys(controller.keys)
    own = random_pair().public
    assert isinstance(controller.ask(own, node="first", now=1.0), NodeEnrolled)
    controller.come_up("first", 1.0)
    known["node/first"] = own
    asked = [*known.values(), JobKeys.load_server(controller.keys).public]
    for number, public in enumerate(asked):
        answer = controller.ask(public, connection=f"joining/{number}", now=2.0)
        assert isinstance(answer, EnrolmentRefused)
        assert answer.reason is RefusedBecause.BAD_KEY
    assert controller.refused == ["enrolment: key of another identity"] * len(asked)
    server = JobKeys.load_server(controller.keys)
    assert {server.identity_of(z85.decode(public)): public for public in known.values()} == known
    assert isinstance(controller.ask(random_pair().public, now=3.0), NodeEnrolled)


@attack(
    "somebody with a token of before `midstep token --renew` has its keys admitted as those of nodes",
    holds="they are refused: a key of a replaced token stands for nobody else",
    reads="refused: enrolment: key of another identity",
)
def test_a_key_of_a_replaced_token_admits_nobody(tmp_path: Path) -> None:
    """After a renewal the old join key is asked for with the new one."""
    controller = Controller(tmp_path / "keys")
    let_nodes_join(controller.keys, TOKEN.renewed(), JOB)
    answer = controller.ask(TOKEN.invitation(JOB).join.public)
    assert isinstance(answer, EnrolmentRefused)
    assert answer.reason is RefusedBecause.BAD_KEY


@attack(
    "somebody with a join token asks for one name after another, to use up all that a job can give",
    holds="admissions are limited in rate, names never heard from are forgotten, and a node gets in meanwhile",
    reads="refused: enrolment: too many at once",
)
def test_names_cannot_be_used_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred connections ask four times a second for a minute; then a real node is admitted, and again later."""
    monkeypatch.setattr("midstep.protocol.private_files.os.fsync", lambda descriptor: None)
    controller = Controller(tmp_path / "keys")
    keys = [random_pair().public for _ in range(CROWD)]
    fresh = iter(z85.encode(number.to_bytes(32, "big")).decode() for number in range(1, 1 << 20))
    now, most = 0.0, 0
    for turn in range(FLOOD_ROUNDS):
        now += ROUND_S
        for number in range(CROWD):
            controller.ask(next(fresh), node=f"n{turn}-{number}", connection=f"joining/{number}", now=now)
        most = max(most, len(controller.enroller.book.nodes))
    assert most < MOST_NODES / 2
    assert "enrolment: asked too often" in controller.refused
    assert "enrolment: too many at once" in controller.refused
    tries = 0
    while not isinstance(controller.ask(keys[0], node="real", connection="joining/real", now=now), NodeEnrolled):
        tries, now = tries + 1, now + 1.0
    assert tries < 2
    controller.come_up("real", now)
    now += 61.0
    assert isinstance(controller.ask(keys[1], node="later", connection="joining/later", now=now), NodeEnrolled)
    assert set(controller.enroller.book.nodes) == {"real", "later"}
    assert len(JobKeys.listed(controller.keys, "node/")) == 2


@attack(
    "somebody with a join token numbers its requests, so that the controller waits to make each of them durable",
    holds="a numbered request is refused, so what others say is taken as before",
    reads="refused: numbered, and not to be acknowledged",
)
def test_a_numbered_request_is_not_taken() -> None:
    """What joins asks without a number: a message with one waits for an acknowledgement that never comes."""

    request = EnrolmentRequested("host", False, random_pair().public, "rack")
    envelope = Envelope(PROTOCOL_VERSION, JOB, "joining/a", "controller", 0, 0, 1, 5, request)
    assert refusal("joining/a", envelope, 4, Routes()) == "numbered, and not to be acknowledged"


@attack(
    "the environment of a machine's agent is read: `MIDSTEP_TOKEN`",
    holds="it is a join token, which gives no right to be the controller. None is in the environment of its ranks "
    "(`tests/chaos/test_joined_machines.py`: `test_who_has_no_right_to_join_is_told_why_and_disturbs_nobody`), of "
    "`on_node_relaunch` (`tests/unit/test_relaunch_hook.py`: "
    "`test_the_program_has_the_nodes_in_its_environment_and_the_whole_on_its_stdin`) and of `watch --on-change` "
    "(`tests/unit/test_watching.py`: "
    "`test_a_command_is_run_on_each_change_with_what_is_known_and_without_the_token`)",
)
def test_the_agent_of_a_machine_gets_a_token_with_which_it_can_only_join(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the whole one, whoever reads its environment could be the controller."""
    monkeypatch.setenv("MIDSTEP_HOME", str(tmp_path))
    script = tmp_path / "train.py"
    script.touch()
    token = new_token(job="demo")
    point = RendezvousPoint("192.0.2.1", 29_400, "demo", False, 600.0, "")
    machine = prepare(point, token, Start(command=(str(script),)), Wishes())
    machine.held.remove()
    assert parse_token(machine.token, "the environment") == token.for_joining("demo")
