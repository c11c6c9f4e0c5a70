"""Operators on other machines: which role may do what, what follows from its token, and whose turn it is."""

import itertools
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from zmq.utils import z85

from midstep.controller.endpoints import remote_operators
from midstep.controller.endpoints.control_requests import (
    RIGHTS,
    Accepted,
    IncidentsRequest,
    InjectRequest,
    Refused,
    Reply,
    Request,
    StatusRequest,
    StopJobRequest,
    refusal_of,
)
from midstep.controller.endpoints.remote_operators import RemoteOperators
from midstep.controller.endpoints.request_handler import page
from midstep.launch.job import let_nodes_join
from midstep.protocol.errors import ConfigurationError, KeyExpired
from midstep.protocol.identities import Role, family_of, may_be, role_of
from midstep.protocol.incidents import Incident
from midstep.protocol.keys import JobKeys
from midstep.protocol.token import (
    FullToken,
    RoleToken,
    full,
    joinable,
    new_token,
    operating,
    parse_token,
    token_text,
)
from midstep.protocol.transport import Received
from midstep.protocol.types import ArmedFault, FaultAction

STOP = StopJobRequest("enough")
KILL = InjectRequest(ArmedFault(1, FaultAction.KILL))


# --- roles --------------------------------------------------------------------------------------------------------


def test_every_request_names_the_role_that_it_takes() -> None:
    assert set(RIGHTS) == set(get_args(Request))


@pytest.mark.parametrize(
    ("role", "request_", "may"),
    [
        (Role.VIEWER, StatusRequest(), True),
        (Role.VIEWER, IncidentsRequest(0), True),
        (Role.VIEWER, STOP, False),
        (Role.VIEWER, KILL, False),
        (Role.OPERATOR, STOP, True),
        (Role.OPERATOR, KILL, True),
        (Role.ADMIN, STOP, True),
    ],
)
def test_a_role_may_do_what_it_covers(role: Role, request_: Request, may: bool) -> None:
    refused = refusal_of(role, request_)

    assert (refused is None) == may
    assert refused is None or "takes the role operator" in refused.reason


def test_only_an_admin_covers_all_roles() -> None:
    covered = {role: [least for least in Role if role.covers(least)] for role in Role}

    assert covered == {
        Role.VIEWER: [Role.VIEWER],
        Role.OPERATOR: [Role.VIEWER, Role.OPERATOR],
        Role.ADMIN: [Role.VIEWER, Role.OPERATOR, Role.ADMIN],
    }


# --- keys ---------------------------------------------------------------------------------------------------------


def secrets_of(token: RoleToken) -> set[str]:
    """Every secret key that somebody with this token has."""
    return {token.keys.secret} | ({token.detector.secret} if token.detector else set())


def test_what_a_viewer_has_is_no_part_of_what_any_other_has() -> None:
    """Neither keys of a node that joins, nor of another role, nor the controller's, nor of another job."""
    token = new_token()
    viewer, operator, admin = (token.for_role("a", role) for role in Role)
    others = {
        token.invitation("a").join.secret,
        token.controller_keys("a").secret,
        *secrets_of(operator),
        *secrets_of(admin),
        *secrets_of(token.for_role("b", Role.VIEWER)),
    }

    assert secrets_of(viewer) == {token.operator_keys("a", Role.VIEWER).secret}
    assert not secrets_of(viewer) & others
    assert not any(secret in str(msgspec.to_builtins(viewer)) for secret in others)


def test_a_key_of_a_role_gives_connections_of_that_role_only() -> None:
    viewer, operator = family_of(Role.VIEWER), family_of(Role.OPERATOR)

    assert may_be(viewer + "1", viewer)
    assert role_of(viewer + "1") is Role.VIEWER
    for identity in (operator + "1", "node/a", "joining/1", "detector/a", "platform", "operator/", "operator/viewer"):
        assert not may_be(identity, viewer)
    assert role_of("node/operator/admin/") is None


@pytest.mark.parametrize("role", Role)
def test_a_token_of_a_role_is_read_as_it_was_written_and_runs_nothing(role: Role) -> None:
    token = FullToken(bytes(range(32)), "j", 2**31).for_role("j", role)

    assert parse_token(token_text(token), "here") == token
    assert operating(token, "j") == token
    for use in (full, joinable):
        with pytest.raises(ConfigurationError, match=f"made with --role {role}"):
            use(token)


def test_the_full_token_is_an_admins_and_a_join_token_nobodys() -> None:
    token = new_token()

    assert operating(token, "a") == token.for_role("a", Role.ADMIN)
    with pytest.raises(ConfigurationError, match="made with --join-only"):
        operating(token.for_joining("a"), "a")


def test_the_controller_knows_the_key_of_each_role_until_the_token_expires(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    token = new_token()

    def identity_of(key: str) -> str | None:
        return JobKeys.load_server(keys).identity_of(z85.decode(key))

    let_nodes_join(keys, token, "a")
    for role in Role:
        assert identity_of(token.operator_keys("a", role).public) == family_of(role)
    assert identity_of(token.detector_keys("a").public) == "detector/"
    assert identity_of(token.operator_keys("b", Role.VIEWER).public) is None

    let_nodes_join(keys, msgspec.structs.replace(token, expires_s=1), "a")
    with pytest.raises(KeyExpired):
        identity_of(token.operator_keys("a", Role.ADMIN).public)
    assert identity_of(token.invitation("a").join.public) == "joining/"  # a node is told by the controller itself


# --- turns --------------------------------------------------------------------------------------------------------


class Wire:
    """What operators have sent, and what they are answered."""

    def __init__(self) -> None:
        self.sent: list[Received] = []
        self.answers: list[tuple[str, Reply]] = []

    def send(self, role: Role, number: int, request: Request | bytes) -> None:
        identity = f"{family_of(role)}{number}"
        data = request if isinstance(request, bytes) else msgspec.msgpack.encode(request)
        self.sent.append(Received(identity, family_of(role), data))

    def from_operators(self) -> list[Received]:
        sent, self.sent = self.sent, []
        return sent

    def answer_operator(self, connection: str, data: bytes) -> None:
        self.answers.append((connection, msgspec.msgpack.decode(data, type=Reply)))


class Clock:
    """A clock that stands still unless it is moved."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(remote_operators, "time", clock)
    return clock


def served(operators: RemoteOperators, clock: Clock, cost_s: float = 0.0) -> list[str]:
    """Let the loop turn once, in which a request costs so much; return who was served."""
    turn = []
    for asker, _ in operators.requests():
        clock.now_s += cost_s
        operators.answer(asker, Accepted("yes"))
        turn.append(asker.connection)
    return turn


def test_whoever_may_do_more_is_served_first_and_one_in_a_turn(clock: Clock) -> None:
    wire = Wire()
    operators = RemoteOperators(wire)
    for number, role in enumerate((Role.VIEWER, Role.VIEWER, Role.ADMIN, Role.OPERATOR)):
        wire.send(role, number, StatusRequest())

    turns = []
    for _ in range(5):
        turns.append(served(operators, clock))
        clock.now_s += 1.0

    assert turns == [["operator/admin/2"], ["operator/operator/3"], ["operator/viewer/0"], ["operator/viewer/1"], []]
    assert operators.next_s() is None


def test_operators_have_a_share_of_the_loops_time_and_the_rest_is_the_jobs(clock: Clock) -> None:
    """An answer that takes 50 ms is followed by 450 ms without one, however many wait."""
    wire = Wire()
    operators = RemoteOperators(wire)
    for number in range(10):
        wire.send(Role.VIEWER, number, StatusRequest())

    assert served(operators, clock, cost_s=0.05) == ["operator/viewer/0"]
    assert operators.next_s() == pytest.approx(0.45)
    assert served(operators, clock) == []
    clock.now_s += 0.46
    assert served(operators, clock) == ["operator/viewer/1"]


def test_more_requests_than_may_wait_are_refused_and_counted(clock: Clock) -> None:
    wire = Wire()
    operators = RemoteOperators(wire)
    for number in range(remote_operators.MOST_WAITING + 3):
        wire.send(Role.VIEWER, number, StatusRequest())
    wire.send(Role.OPERATOR, 0, STOP)

    assert served(operators, clock) == ["operator/operator/0"]  # viewers do not take its place
    assert [type(reply) for _, reply in wire.answers] == [Refused, Refused, Refused, Accepted]
    assert operators.refused == {"operators: too many requests": 3}


@pytest.mark.parametrize("data", [b"\xc1", b"x" * 100_000, b"\x81\xa4type\xa5Other", b"\x91" * 5000])
def test_what_is_no_request_is_answered_by_a_refusal_and_the_next_one_as_ever(clock: Clock, data: bytes) -> None:
    wire = Wire()
    operators = RemoteOperators(wire)
    wire.send(Role.VIEWER, 0, data)
    wire.send(Role.VIEWER, 0, StatusRequest())

    assert served(operators, clock) == ["operator/viewer/0"]
    assert [type(reply) for _, reply in wire.answers] == [Refused, Accepted]
    assert operators.refused == {"operators: no request of this version": 1}


def test_a_connection_that_was_answered_much_has_to_be_made_again(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So what is kept for one that does not read its answers is bounded."""
    monkeypatch.setattr(remote_operators, "ANSWERED_BYTES", 1)
    wire = Wire()
    operators = RemoteOperators(wire)
    for connection in (0, 0, 1):
        wire.send(Role.VIEWER, connection, StatusRequest())
        served(operators, clock)
        clock.now_s += 1.0

    assert [type(reply) for _, reply in wire.answers] == [Accepted, Refused, Accepted]


# --- pages --------------------------------------------------------------------------------------------------------


def incident(number: int, text: int = 10) -> Incident:
    return Incident(number, 0.0, ended_reason="x" * text)


def test_incidents_come_in_pages_of_bounded_size_and_each_once() -> None:
    incidents = tuple(incident(number, 300_000) for number in itertools.chain(range(3, 9), [12]))
    told: list[Incident] = []
    pages = 0
    while True:
        reply = page(incidents, told[-1].number if told else 0)
        pages += 1
        told.extend(reply.incidents)
        if not reply.more:
            break

    assert tuple(told) == incidents
    assert pages == 2
    assert page(incidents, 12).incidents == ()
