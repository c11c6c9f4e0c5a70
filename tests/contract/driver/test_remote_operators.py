"""Operators on other machines, over a real port with real keys: what they may do, and what they are told."""

import asyncio
import shutil
import socket
import time
from typing import TYPE_CHECKING, Any

import pytest
import zmq

from midstep.controller.endpoints.control_requests import (
    Accepted,
    IncidentsReply,
    IncidentsRequest,
    Refused,
    Reply,
    Request,
    StatusReply,
    StatusRequest,
    StopJobRequest,
)
from midstep.controller.endpoints.local_sockets import NoController
from midstep.controller.endpoints.operator_client import ask_from_elsewhere
from midstep.detectors.reporter import FaultReporter
from midstep.launch.job import let_nodes_join
from midstep.protocol.errors import NotAdmitted
from midstep.protocol.identities import Role, family_of
from midstep.protocol.keys import ClientKeys, JobKeys
from midstep.protocol.messages import FaultReported
from midstep.protocol.token import FullToken, RoleToken, new_token
from midstep.protocol.transport import DealerSocket
from midstep.protocol.types import Assertion, FaultKind, FaultReport

if TYPE_CHECKING:
    from .conftest import Rig

LIMIT_S = 20.0
STOP = StopJobRequest("enough")


def begun_with(rig: "Rig", token: FullToken) -> None:
    """Let the job have the keys that follow from a token."""
    shutil.rmtree(rig.keys)
    let_nodes_join(rig.keys, token, "demo")
    JobKeys.add(rig.keys, "node/a")


async def asked(rig: "Rig", token: RoleToken, request: Request) -> Reply:
    """Ask as the command line does, in a thread: it waits."""
    return await asyncio.to_thread(ask_from_elsewhere, [rig.endpoint], token, request, LIMIT_S)


def test_each_role_gets_what_is_its_own_and_what_is_refused_is_counted_and_not_durable(rig: "Rig") -> None:
    token = new_token()
    viewer, operator, admin = (token.for_role("demo", role) for role in Role)

    async def scenario() -> None:
        begun_with(rig, token)
        async with rig.controller():
            refused = await asked(rig, viewer, STOP)
            assert isinstance(refused, Refused)
            assert "that takes the role operator" in refused.reason
            assert "StopRequested" not in rig.journaled()

            told = await asked(rig, viewer, StatusRequest())
            assert isinstance(told, StatusReply)
            assert told.status.job == "demo"
            assert told.status.refused["operators: viewer may not stop the job"] == 1
            assert await asked(rig, viewer, IncidentsRequest(0)) == IncidentsReply((), False)

            assert await asked(rig, operator, STOP) == Accepted("the job is being stopped")
            assert await asked(rig, admin, STOP) == Accepted("the job is being stopped")
            assert rig.journaled().count("StopRequested") == 2

    asyncio.run(scenario())


def test_the_first_of_several_endpoints_that_leads_is_asked_once(rig: "Rig") -> None:
    """One refuses connections, one listens and says nothing, as a controller that is frozen does."""
    token = new_token()

    async def scenario() -> None:
        begun_with(rig, token)
        async with rig.controller():
            with socket.socket() as silent:
                silent.bind(("127.0.0.1", 0))
                silent.listen()
                endpoints = ["tcp://127.0.0.1:1", f"tcp://127.0.0.1:{silent.getsockname()[1]}", rig.endpoint]
                operator = token.for_role("demo", Role.OPERATOR)
                reply = await asyncio.to_thread(ask_from_elsewhere, endpoints, operator, STOP, LIMIT_S)
            assert reply == Accepted("the job is being stopped")
            assert rig.journaled().count("StopRequested") == 1

    asyncio.run(scenario())


def test_whoever_is_not_let_in_is_told_why(rig: "Rig") -> None:
    expired = new_token(expires_s=1)

    async def scenario() -> None:
        begun_with(rig, expired)
        async with rig.controller() as (driver, _):
            with pytest.raises(NotAdmitted, match=r"no longer: it expired at 1970-01-01"):
                await asked(rig, expired.for_role("demo", Role.VIEWER), StatusRequest())
            assert driver.status().refused["expired key"] == 1
            with pytest.raises(NotAdmitted, match="the token is not one of job demo"):
                await asked(rig, new_token().for_role("demo", Role.ADMIN), StatusRequest())

    asyncio.run(scenario())


def test_where_nobody_listens_or_nobody_answers_it_is_said_within_the_deadline() -> None:
    viewer = new_token().for_role("demo", Role.VIEWER)

    with pytest.raises(NoController, match=r"nothing listens at tcp://127.0.0.1:1: the job demo has ended"):
        ask_from_elsewhere(["tcp://127.0.0.1:1"], viewer, StatusRequest(), 0.3)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        endpoint = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(NoController, match="has not proven to be the controller of job demo within"):
            ask_from_elsewhere([endpoint], viewer, StatusRequest(), 2.0)


def test_a_connection_that_comes_about_at_once_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may let the other end answer before this thread goes on."""
    connect = zmq.Socket.connect

    def connect_and_wait(self: "zmq.Socket[bytes]", endpoint: str) -> Any:
        connecting = connect(self, endpoint)
        if endpoint.startswith("tcp://"):
            time.sleep(0.3)
        return connecting

    monkeypatch.setattr(zmq.Socket, "connect", connect_and_wait)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        endpoint = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(NoController, match="has not proven to be the controller of job demo within"):
            ask_from_elsewhere([endpoint], new_token().for_role("demo", Role.VIEWER), StatusRequest(), 0.6)


def test_nodes_are_heard_while_a_viewer_asks_without_end_and_sends_nonsense(rig: "Rig") -> None:
    """Nothing is lost: neither what a node says, nor the next good question of the same connection."""
    token = new_token()
    keys = token.for_role("demo", Role.VIEWER)
    identity = family_of(Role.VIEWER) + "greedy"
    curve = ClientKeys(identity, keys.keys.public, keys.keys.secret, keys.server_public)

    async def scenario() -> None:
        begun_with(rig, token)
        async with rig.controller() as (driver, _):
            viewer = DealerSocket(rig.endpoint, identity=identity, curve=curve)
            try:
                await rig.until(lambda: viewer.connected)
                for _ in range(200):
                    viewer.send(b"\xc1 nonsense")
                    viewer.send(b"\x81\xa4type\xadStatusRequest")
                node = rig.peer("node/a")
                node.say(FaultReported(FaultReport(FaultKind.NODE, 1.0, "node/a", "seen", node="a")))
                await rig.until(lambda: "FaultReported" in rig.journaled())
                await rig.until(lambda: len(node.acks) == 1)
                await rig.until(lambda: driver.status().refused.get("operators: no request of this version") == 200)
                assert isinstance(await asked(rig, token.for_role("demo", Role.ADMIN), StatusRequest()), StatusReply)
            finally:
                viewer.close()

    asyncio.run(scenario())


def test_an_operator_reports_as_a_detector_with_keys_that_follow_from_the_token(rig: "Rig") -> None:
    token = new_token()
    pair = token.detector_keys("demo")
    name = "files@m1"
    keys = ClientKeys(f"detector/{name}", pair.public, pair.secret, token.controller_keys("demo").public)
    report = FaultReport(
        FaultKind.DEVICE, 1000.0, keys.identity, "seen", node="a", device=1, code="C1", assertion=Assertion.OCCUR
    )

    async def scenario() -> None:
        begun_with(rig, token)
        async with rig.controller(), FaultReporter("demo", rig.endpoint, name, keys) as reporter:
            reporter.tell(report)
            await reporter.flush()
            (taken,) = [event.report for event, _ in rig.machine.events if isinstance(event, FaultReported)]
            assert taken.seen_by == keys.identity

    asyncio.run(scenario())
