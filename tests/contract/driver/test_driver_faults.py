"""The driver among liars, on full disks, and at the control socket: what is refused changes nothing."""

import asyncio
import os
import resource
import stat
from typing import TYPE_CHECKING

import msgspec
import pytest

from midstep.controller.endpoints.control_requests import (
    Accepted,
    InjectRequest,
    KillNodeRequest,
    Refused,
    StatusReply,
    StatusRequest,
    StopJobRequest,
)
from midstep.controller.endpoints.local_sockets import NoController, ask, socket_path
from midstep.controller.recovery.events import Finish, InjectRequested, KillNodeRequested, Send, StopRequested
from midstep.protocol import codec as frames
from midstep.protocol.compat import within
from midstep.protocol.errors import JournalError
from midstep.protocol.messages import (
    ArmFault,
    EndJob,
    FaultReported,
    KillNode,
    NodeJoined,
    NodeLost,
    ProcessesStarted,
    ProcessStarted,
    RankFinished,
    RankReport,
    RanksReported,
)
from midstep.protocol.transport import DealerSocket, wait
from midstep.protocol.types import (
    ArmedFault,
    FaultAction,
    FaultKind,
    FaultReport,
    InjectionPoint,
    RunningProcess,
    StoreEndpoint,
)

if TYPE_CHECKING:
    from tests.contract.driver.conftest import Rig

JOINED = NodeJoined("a", "rack", StoreEndpoint("127.0.0.1", 1))
FAULT = ArmedFault(2, FaultAction.RAISE, InjectionPoint.BACKWARD, 5)


def test_what_a_peer_may_not_say_is_refused_counted_and_not_journaled(rig: "Rig") -> None:
    async def scenario() -> None:
        async with rig.controller() as (driver, _):
            a, platform = rig.peer("node/a"), rig.peer("platform")
            a.say(JOINED, sender="node/b")
            a.say(msgspec.structs.replace(JOINED, node="b"))
            a.say(RankFinished(1, 1, 1, 1), sender="rank/2")
            a.say(RankFinished(99, 1, 1, 1), sender="rank/99")
            a.say(RankFinished(99, 1, 1, 1), sender="rank/2")
            for sender in ("rank/1", "rank/01", "rank/99"):  # their node speaks for them
                a.say_as(sender, RankFinished(1, 1, 1, 1))
            a.say(RanksReported("b", (RankReport(1, 1, RankFinished(1, 1, 1, 1)),)))
            a.say(ProcessesStarted("a", (ProcessStarted("a", RunningProcess(4, 1, 1, 1), warm=False),)))
            a.say(FaultReported(FaultReport(FaultKind.EXIT, 0.0, "a", "", rank=-1)))
            a.say(EndJob(0, "stop"))
            platform.say_as("rank/1", RankFinished(1, 1, 1, 1))
            platform.say(RanksReported("a", (RankReport(1, 1, RankFinished(1, 1, 1, 1)),)))
            platform.say(JOINED)
            envelope = a.mailbox("node/a").post(JOINED, "controller", 0.0)
            a.socket.send(frames.frame_of(msgspec.structs.replace(envelope, number=2**64 - 1)))
            a.socket.send(frames.frame_of(msgspec.structs.replace(envelope, job="another")))
            a.socket.send(b"")
            a.socket.send(b"\xc1" * 100)
            a.socket.send(os.urandom(1000))
            platform.say(NodeLost("c", "gone", 1.0))  # this one it may
            await rig.until(lambda: sum(driver.status().refused.values()) >= 19 and platform.acks)
            assert driver.status().refused == {
                "sender is not the connection's owner": 5,
                "about another node": 2,
                "about another rank": 1,
                "about no rank of this job": 2,
                "no such rank": 1,
                "not for an agent to say": 1,
                "not for a platform to say": 2,
                "wrong job": 1,
                "MalformedMessage": 4,
            }
            assert rig.journaled() == ["ControllerStarted", "NodeLost"]

    asyncio.run(scenario())


def test_while_the_journal_cannot_be_written_nothing_is_decided_and_operators_are_told(rig: "Rig") -> None:
    async def scenario() -> None:
        rig.machine.answers[NodeJoined] = [Send("node/a", EndJob(0, "x"), 1)]
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        async with rig.controller() as (driver, _):
            agent = rig.peer("node/a")
            await rig.until(lambda: rig.machine.events)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1, hard))
            try:
                envelope = agent.say(JOINED)
                await rig.until(lambda: "journal cannot be written" in driver.status().reason)
                agent.socket.send(frames.frame_of(envelope))
                await rig.quiet(0.5)
                assert (agent.acks, agent.heard, rig.machine.kinds()) == ([], [], ["ControllerStarted"])
                status = await rig.ask(StatusRequest())
                assert isinstance(status, StatusReply)
                assert "Look for a full" in status.status.reason
                refused = await rig.ask(InjectRequest(FAULT))
                assert isinstance(refused, Refused)
                assert "nothing was done" in refused.reason
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            await rig.until(lambda: agent.acks and agent.heard)
            assert rig.machine.kinds() == rig.journaled() == ["ControllerStarted", "NodeJoined"]
            assert driver.status().reason == ""

    asyncio.run(scenario())


def test_a_journal_that_stays_unwritable_ends_the_controller(rig: "Rig") -> None:
    async def scenario() -> None:
        rig.patience_s = 0.5
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        async with rig.controller() as (driver, task):
            await rig.until(lambda: rig.machine.events)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1, hard))
            try:
                driver.stop("x")
                with pytest.raises(JournalError, match=r"journal\.sqlite"):
                    await within(15, task)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    asyncio.run(scenario())


def test_an_injected_fault_is_journaled_sent_and_confirmed(rig: "Rig") -> None:
    async def scenario() -> None:
        rig.machine.answers[InjectRequested] = [Send("rank/2", ArmFault(FAULT), 1)]
        rig.machine.answers[KillNodeRequested] = [Send("platform", KillNode("a"), 1)]
        async with rig.controller():
            reply = await rig.ask(InjectRequest(FAULT))
            assert reply == Accepted("armed: raise rank 2 at backward of step 5; sent to rank/2")
            assert rig.journaled() == ["ControllerStarted", "InjectRequested"]
            reply = await rig.ask(KillNodeRequest("a"))
            assert isinstance(reply, Accepted)
            assert "sent to platform" in reply.text

    asyncio.run(scenario())


def test_an_order_that_can_have_no_effect_is_refused_with_the_reason(rig: "Rig") -> None:
    async def scenario() -> None:
        async with rig.controller():
            for request, reason in (
                (InjectRequest(ArmedFault(9, FaultAction.KILL)), "ranks 0 to 3"),
                (KillNodeRequest("zz"), "the job has a"),
                (InjectRequest(FAULT), "no fault was armed"),
            ):
                reply = await rig.ask(request)
                assert isinstance(reply, Refused)
                assert reason in reply.reason
            assert rig.journaled() == ["ControllerStarted", "InjectRequested"]

    asyncio.run(scenario())


def test_an_operator_can_stop_the_job(rig: "Rig") -> None:
    async def scenario() -> None:
        rig.machine.answers[StopRequested] = [Finish(130, "enough")]
        async with rig.controller() as (_, task):
            assert isinstance(await rig.ask(StopJobRequest("enough")), Accepted)
            assert await within(15, task) == 130
            assert rig.machine.events[-1][0] == StopRequested("enough")

    asyncio.run(scenario())


def test_garbage_at_the_control_socket_is_refused_and_the_next_one_is_served(rig: "Rig") -> None:
    def shout(data: bytes) -> bytes:
        dealer = DealerSocket(f"ipc://{socket_path(rig.run_directory)}", identity="shouter", curve=None)
        try:
            dealer.send(data)
            for _ in range(100):
                wait([dealer], (), 0.2)
                for received in dealer.receive():
                    return received.data
            return b""
        finally:
            dealer.close()

    async def scenario() -> None:
        async with rig.controller() as (driver, _):
            report = frames.frame_of(rig.peer("node/a").say(JOINED))
            for data in (b"\x00", b"\xc1" * 50, b"\x91" * 100_000, os.urandom(500), report):
                answer = await asyncio.to_thread(shout, data)
                assert isinstance(msgspec.msgpack.decode(answer, type=Refused), Refused)
            assert driver.status().refused["control request of another version"] == 5
            assert isinstance(await rig.ask(StatusRequest()), StatusReply)

    asyncio.run(scenario())


def test_the_control_socket_is_the_owners_alone_and_goes_away_with_the_controller(rig: "Rig") -> None:
    async def scenario() -> None:
        async with rig.controller():
            assert stat.S_IMODE(socket_path(rig.run_directory).stat().st_mode) == 0o600
        assert not socket_path(rig.run_directory).exists()
        with pytest.raises(NoController, match="there is no controller here"):
            ask(rig.run_directory, StatusRequest(), 0.5)
        socket_path(rig.run_directory).touch()  # as a killed controller leaves it
        with pytest.raises(NoController, match="no answer within"):
            ask(rig.run_directory, StatusRequest(), 0.5)
        async with rig.controller():
            assert isinstance(await rig.ask(StatusRequest()), StatusReply)

    asyncio.run(scenario())
