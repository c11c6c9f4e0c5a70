"""A controller that does not lead says so to all that come, and where the leader is: real ports and keys."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from midstep.controller.endpoints.control_requests import Accepted, StatusReply, StatusRequest, StopJobRequest
from midstep.controller.endpoints.local_sockets import NoController, ask
from midstep.controller.endpoints.operator_client import ask_from_elsewhere
from midstep.controller.endpoints.standing_by import StandingBy
from midstep.launch.meeting import Wishes, admitted
from midstep.protocol.compat import within
from midstep.protocol.errors import ConfigurationError
from midstep.protocol.identities import Role
from midstep.protocol.incidents import ControllerPhase, ControllerStatus
from midstep.protocol.keys import JobKeys
from midstep.protocol.link import Absence, ControllerLink
from midstep.protocol.mailbox import Mailbox
from midstep.protocol.messages import ControllersListed, NodeHeartbeat
from midstep.protocol.token import new_token
from midstep.protocol.transport import DealerSocket

from .test_remote_operators import begun_with

if TYPE_CHECKING:
    from .conftest import Rig

LIMIT_S = 20.0
SOON_S = 1.0
LOADS_S = 2.5


def free_endpoint() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def leading(endpoint: str, phase: ControllerPhase = ControllerPhase.HOT) -> ControllerStatus:
    return ControllerStatus("a", 1, "m0", phase, 3, 0.0, endpoint)


@asynccontextmanager
async def cold(rig: "Rig", controllers: Sequence[ControllerStatus]) -> AsyncIterator[str]:
    """Have a controller stand by that knows of these others."""
    endpoint = free_endpoint()
    standing_by = StandingBy(endpoint, JobKeys.load_server(rig.keys), "demo")

    async def stand_by() -> None:
        while True:
            standing_by.answer(
                "b", [*controllers, ControllerStatus("b", 2, "m1", ControllerPhase.COLD, 0, 0.0, endpoint)]
            )
            await asyncio.sleep(0.02)

    task = asyncio.create_task(stand_by())
    try:
        yield endpoint
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        standing_by.close()


def test_an_operator_who_asks_one_that_stands_by_is_served_by_the_one_that_leads(rig: "Rig") -> None:
    """What is to be done is done once."""
    token = new_token()
    operator = token.for_role("demo", Role.OPERATOR)

    async def scenario() -> None:
        begun_with(rig, token)
        async with rig.controller(), cold(rig, [leading(rig.endpoint)]) as endpoint:
            stop = StopJobRequest("enough")
            reply = await asyncio.to_thread(ask_from_elsewhere, [endpoint], operator, stop, LIMIT_S)
            assert reply == Accepted("the job is being stopped")
            assert rig.journaled().count("StopRequested") == 1
            with pytest.raises(NoController, match=f"controller b is cold, and a leads at {rig.endpoint}"):
                await asyncio.to_thread(ask_from_elsewhere, [endpoint], operator, stop, SOON_S, follows=False)

    asyncio.run(scenario())


def test_an_operator_is_told_to_try_later_where_none_leads(rig: "Rig") -> None:
    token = new_token()
    viewer = token.for_role("demo", Role.VIEWER)

    async def scenario() -> None:
        begun_with(rig, token)
        async with cold(rig, []) as endpoint:
            with pytest.raises(NoController, match=r"b is cold, and no other one leads now: try again in some seconds"):
                await asyncio.to_thread(ask_from_elsewhere, [endpoint], viewer, StatusRequest(), SOON_S)

    asyncio.run(scenario())


def test_a_node_that_joins_at_one_that_stands_by_is_admitted_by_the_one_that_leads(rig: "Rig", tmp_path: Path) -> None:
    token = new_token()
    invitation = token.for_joining("demo").invitation("demo")

    async def scenario() -> None:
        begun_with(rig, token)
        async with rig.controller(), cold(rig, [leading(rig.endpoint)]) as endpoint:
            wishes = Wishes("c", "rack")
            options = await asyncio.to_thread(
                admitted, (endpoint,), invitation, wishes, tmp_path / "c", limit_s=LIMIT_S
            )
            assert (options.node, options.controller) == ("c", rig.endpoint)
        async with cold(rig, []) as endpoint:
            with pytest.raises(ConfigurationError, match=f"has led for 2 s: the one at {endpoint} stands by"):
                await asyncio.to_thread(admitted, (endpoint,), invitation, wishes, tmp_path / "d", limit_s=2.0)

    asyncio.run(scenario())


def test_an_agent_that_comes_to_one_that_stands_by_goes_to_the_one_that_leads(rig: "Rig") -> None:
    """To be connected with one that stands by is no sign of a controller; to be told of the leader is."""

    async def scenario() -> None:
        async with rig.controller(), cold(rig, [leading(rig.endpoint)]) as endpoint:
            keys = JobKeys.load_client(rig.keys, "node/a")
            link = ControllerLink(
                Mailbox(job="demo", address="node/a", session=1),
                DealerSocket(endpoint, identity="node/a", curve=keys),
                on_command=lambda envelope: None,
                on_new_controller=lambda: None,
            )
            absence = Absence(link, [endpoint])
            try:
                await rig.until(lambda: link.endpoint == rig.endpoint and link.connected)
                assert set(link.listed) == {rig.endpoint}
            finally:
                absence.close()
                link.close()

    asyncio.run(scenario())


def test_a_heartbeat_is_answered_with_the_list_of_controllers_again_when_that_has_changed(
    rig: "Rig", monkeypatch: pytest.MonkeyPatch
) -> None:
    controllers = [leading("tcp://m0:29400")]

    async def scenario() -> None:
        async with rig.controller() as (driver, _):
            monkeypatch.setattr(driver._switchover, "standing", lambda: (tuple(controllers), 0.0))
            monkeypatch.setattr(driver._told, "LOOK_S", 0.0)
            node = rig.peer("node/a")

            def told() -> list[ControllersListed]:
                node.say(NodeHeartbeat("a", 1.0, ()), reliable=False)
                return [each.body for each in node.heard if isinstance(each.body, ControllersListed)]

            await rig.until(told)
            for _ in range(20):
                assert len(told()) == 1
                await asyncio.sleep(0.01)
                node.listen()
            controllers.append(ControllerStatus("b", 2, "m1", ControllerPhase.COLD, 0, 0.0, "tcp://m1:29400"))
            await rig.until(lambda: len(told()) == 2)
            assert told()[1] == ControllersListed(
                ("tcp://m0:29400", "tcp://m1:29400"), serves=True, leads="tcp://m0:29400"
            )

    asyncio.run(scenario())


def test_one_that_loads_the_journal_says_try_later_and_then_serves(rig: "Rig", monkeypatch: pytest.MonkeyPatch) -> None:
    """Here and elsewhere; and what a node has said meanwhile is taken in afterwards."""
    token = new_token()
    viewer = token.for_role("demo", Role.VIEWER)

    def load_slowly(restore: object, beat):  # type: ignore[no-untyped-def]
        until_s = time.monotonic() + LOADS_S
        while time.monotonic() < until_s:
            beat()
            time.sleep(0.01)
        return iter(())

    async def scenario() -> None:
        begun_with(rig, token)
        async with rig.controller() as (driver, _):
            monkeypatch.setattr(driver._journal, "load", load_slowly)
            node = rig.peer("node/a")
            begin = partial(asyncio.get_running_loop().run_in_executor, None)  # at once: this loop is about to load
            here = begin(ask, rig.run_directory, StatusRequest(), SOON_S)
            elsewhere = begin(ask_from_elsewhere, [rig.endpoint], viewer, StatusRequest(), SOON_S)
            patient = begin(ask_from_elsewhere, [rig.endpoint], viewer, StatusRequest(), LIMIT_S)
            node.say(NodeHeartbeat("a", 1.0, ()), reliable=False)
            told = await within(LIMIT_S, asyncio.gather(here, elsewhere, patient, return_exceptions=True))
            for each in told[:2]:
                assert isinstance(each, NoController)
                assert "is loading the journal: try again in some seconds" in str(each)
            assert isinstance(told[2], StatusReply)

    asyncio.run(scenario())
