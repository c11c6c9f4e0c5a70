"""The driver: durable before handled, handled before acted on, each message once, also after a restart."""

import asyncio
import time
from typing import TYPE_CHECKING

import msgspec

from midstep.controller.endpoints.discovery_files import read_result
from midstep.controller.recovery.events import (
    Action,
    ControllerStarted,
    DeadlinePassed,
    Finish,
    Forget,
    Send,
    StopRequested,
)
from midstep.protocol import codec as frames
from midstep.protocol.compat import within
from midstep.protocol.discovery import read_endpoint
from midstep.protocol.messages import (
    CommandToRank,
    EndJob,
    NodeHeartbeat,
    NodeJoined,
    NodeLost,
    NodeWords,
    OrderRanks,
    ProcessesStarted,
    ProcessStarted,
    Quiesce,
    RankFinished,
    StartProcess,
)
from midstep.protocol.proxied import SIGN_OF_LIFE
from midstep.protocol.reports import RankWords
from midstep.protocol.types import Activity, RankProgress, Rendezvous, RunningProcess, StoreEndpoint

if TYPE_CHECKING:
    from tests.contract.driver.conftest import Peer, Rig

STORE = StoreEndpoint("127.0.0.1", 1)
RENDEZVOUS = Rendezvous("127.0.0.1", 1, "secret")
FINISHED = RankFinished(3, 1, 1, 7)


def joined(node: str, *ranks: int) -> NodeJoined:
    return NodeJoined(node, "rack", STORE, tuple(RunningProcess(rank, 100 + rank, 1, 1) for rank in ranks))


def heartbeat(node: str, rank: int, step: int) -> NodeHeartbeat:
    return NodeHeartbeat(node, 0.0, (RankProgress(rank, 1, 1, step, Activity.UPDATING, 3, 0.1, 0.1, 0.5),))


async def keep_alive(rig: "Rig", peer: "Peer", node: str) -> None:
    while True:
        peer.say(heartbeat(node, 0, 1), reliable=False)
        await asyncio.sleep(0.05)


def test_a_report_is_durable_then_handled_then_acknowledged_and_answered(rig: "Rig") -> None:
    async def scenario() -> None:
        rig.machine.answers[NodeJoined] = [Send("node/a", Quiesce(0, 4), 4)]
        async with rig.controller():
            agent = rig.peer("node/a")
            agent.say(joined("a"))
            await rig.until(lambda: agent.acks and agent.heard)
            assert rig.machine.kinds() == rig.journaled() == ["ControllerStarted", "NodeJoined"]
            assert agent.acks == [1]
            command = agent.heard[0]
            assert (command.body, command.term, command.generation, command.sender) == (
                Quiesce(0, 4),
                1,
                4,
                "controller",
            )

    asyncio.run(scenario())


def test_a_message_that_is_sent_again_is_handled_once_and_acknowledged_again(rig: "Rig") -> None:
    async def scenario() -> None:
        async with rig.controller():
            agent = rig.peer("node/a")
            envelope = agent.say(joined("a"))
            await rig.until(lambda: agent.acks == [1])
            agent.socket.send(frames.frame_of(envelope))
            await rig.until(lambda: agent.acks == [1, 1])
            assert rig.journaled().count("NodeJoined") == 1

    asyncio.run(scenario())


def test_a_command_is_repeated_until_it_is_acknowledged_or_forgotten(rig: "Rig") -> None:
    async def scenario() -> None:
        rig.machine.answers[NodeJoined] = [Send("node/a", Quiesce(0, 4), 4)]
        rig.machine.answers[StopRequested] = [Forget("node/a")]
        async with rig.controller() as (driver, _):
            agent = rig.peer("node/a", polite=False)
            agent.say(joined("a"))
            await rig.until(lambda: len(agent.heard) >= 3)
            assert {envelope.number for envelope in agent.heard} == {1}
            driver.stop("forget it")
            await rig.until(lambda: "StopRequested" in rig.machine.kinds())
            await rig.quiet(0.1)
            heard = len(agent.heard)
            await rig.quiet(1.0)
            assert len(agent.heard) == heard

    asyncio.run(scenario())


def test_ranks_are_reached_through_the_agent_that_hosts_them(rig: "Rig") -> None:
    async def scenario() -> None:
        start = StartProcess(3, 1, 1, 2, 5, 0, False, RENDEZVOUS)
        quiesce = Send("rank/3", Quiesce(3, 1), 1)
        rig.machine.answers[RankFinished] = [quiesce]
        rig.machine.answers[StopRequested] = [Send("node/b", start, 5), quiesce]
        async with rig.controller() as (driver, _):
            a, b = rig.peer("node/a"), rig.peer("node/b")
            b.say(joined("b"))
            a.say(joined("a", 3))
            a.say(FINISHED, sender="rank/3")
            await rig.until(lambda: a.commands() == [Quiesce(3, 1)])
            assert (a.heard[0].receiver, a.heard[0].body) == (
                "node/a",
                OrderRanks((CommandToRank(3, 1, Quiesce(3, 1)),)),
            )
            driver.stop("moved")
            await rig.until(lambda: b.commands() == [start, Quiesce(3, 1)])
            a.say(FINISHED, sender="rank/3")  # the old life does not take the route back
            await rig.until(lambda: b.commands() == [start, Quiesce(3, 1), Quiesce(3, 1)])
            a.life = 2  # nor does its node speak for the next one
            a.say(msgspec.structs.replace(FINISHED, incarnation=2), sender="rank/3")
            await rig.until(lambda: driver.status().refused.get("reported by an agent that does not have the rank"))
            driver.stop("again")
            await rig.until(lambda: b.commands() == [start, *[Quiesce(3, 1)] * 2, start, Quiesce(3, 1)])
            assert a.commands() == [Quiesce(3, 1)]

    asyncio.run(scenario())


def test_heartbeats_are_shown_and_not_journaled(rig: "Rig") -> None:
    async def scenario() -> None:
        async with rig.controller() as (driver, _):
            agent = rig.peer("node/a")
            agent.say(joined("a", 0))
            agent.say(heartbeat("a", 0, 41), reliable=False)
            await rig.until(lambda: driver.status().ranks[0].step == 41)
            status = driver.status()
            assert (status.ranks[0].activity, status.committed, status.median_step_s) == ("updating", 41, 0.5)
            assert "NodeHeartbeat" not in rig.journaled()

    asyncio.run(scenario())


def test_a_silent_node_is_reported_lost_once_with_its_last_words_and_a_talking_one_is_not(rig: "Rig") -> None:
    async def scenario() -> None:
        rig.missed = 5
        async with rig.controller():
            a, b = rig.peer("node/a"), rig.peer("node/b")
            a.say(joined("a"))
            b.say(joined("b"))
            a.say(NodeWords("b", "of another one"), reliable=False)
            b.say(NodeWords("b", "INFO up"), reliable=False)
            b.say(NodeWords("b", "INFO hot"), reliable=False)
            b.say(NodeWords("b", "of a rank elsewhere", (RankWords(2, 1, "no"),)), reliable=False)
            talk = asyncio.get_running_loop().create_task(keep_alive(rig, a, "a"))
            try:
                await rig.until(lambda: "NodeLost" in rig.machine.kinds())
                await rig.quiet(1.0)
            finally:
                talk.cancel()
            lost = [event for event, _ in rig.machine.events if isinstance(event, NodeLost)]
            assert [(event.node, event.output) for event in lost] == [("b", "[agent] INFO hot")]
            assert rig.journaled().count("NodeLost") == 1
            assert "NodeWords" not in rig.journaled()

    asyncio.run(scenario())


def test_a_node_that_gives_signs_of_life_alone_is_not_silent(rig: "Rig") -> None:
    """As most heartbeats of a large job are. What the connection has proven is whose sign it is."""

    async def scenario() -> None:
        rig.missed = 5
        async with rig.controller() as (driver, _):
            a, b = rig.peer("node/a"), rig.peer("node/b")
            a.say(joined("a"))
            b.say(joined("b"))
            await rig.until(lambda: rig.machine.kinds().count("NodeJoined") == 2)

            async def sign() -> None:
                while True:
                    a.socket.send(SIGN_OF_LIFE)
                    await asyncio.sleep(0.05)

            signs = asyncio.get_running_loop().create_task(sign())
            try:
                await rig.until(lambda: "NodeLost" in rig.machine.kinds())
                await rig.quiet(1.0)
            finally:
                signs.cancel()
            assert [event.node for event, _ in rig.machine.events if isinstance(event, NodeLost)] == ["b"]
            assert driver.status().refused == {}

    asyncio.run(scenario())


def test_a_passed_deadline_is_an_event_and_does_not_flood_the_journal(rig: "Rig") -> None:
    async def scenario() -> None:
        async with rig.controller():
            await rig.until(lambda: rig.machine.events)
            rig.machine.deadline = time.time() + 0.2
            began = time.monotonic()
            await rig.until(lambda: "DeadlinePassed" in rig.machine.kinds())
            at_s = next(at_s for event, at_s in rig.machine.events if isinstance(event, DeadlinePassed))
            assert at_s >= rig.machine.deadline
            await rig.quiet(1.0)  # the stub goes on naming the deadline that has passed
            assert rig.machine.kinds().count("DeadlinePassed") <= (time.monotonic() - began) / 0.02 + 2
            rig.machine.deadline = None

    asyncio.run(scenario())


def test_a_restarted_controller_replays_without_acting_and_takes_nothing_in_twice(rig: "Rig") -> None:
    async def scenario() -> None:
        first = rig.machine
        rig.machine.answers[NodeJoined] = [Send("node/a", Quiesce(0, 1), 1)]
        async with rig.controller():
            agent = rig.peer("node/a")
            said = agent.say(joined("a"))
            agent.say(ProcessesStarted("a", (ProcessStarted("a", RunningProcess(2, 102, 1, 1), warm=True),)))
            await rig.until(lambda: agent.acks == [1, 2] and agent.heard)
            endpoint = rig.endpoint
        second = type(first)(rig.machine._journal_file)
        second.answers = {NodeJoined: first.answers[NodeJoined], ControllerStarted: [Send("rank/2", Quiesce(2, 9), 9)]}
        heard = len(agent.heard)
        async with rig.controller(second):
            assert rig.endpoint == endpoint
            agent.socket.send(frames.frame_of(said))
            await rig.until(lambda: len(agent.acks) == 3 and len(agent.heard) > heard)
            assert second.events[: len(first.events)] == first.events
            assert second.kinds() == [*first.kinds(), "ControllerStarted"]
            started = second.events[-1][0]
            assert isinstance(started, ControllerStarted)
            assert started.term == 2
            new = agent.heard[heard:]
            orders = OrderRanks((CommandToRank(2, 9, Quiesce(2, 9)),))
            assert {(e.body, e.term, e.receiver) for e in new} == {(orders, 2, "node/a")}
        assert read_endpoint(rig.run_directory) == endpoint

    asyncio.run(scenario())


def test_the_end_of_the_job_is_delivered_written_down_and_returned(rig: "Rig") -> None:
    async def scenario() -> None:
        rig.machine.answers[StopRequested] = [Send("node/a", EndJob(3, "enough"), 1), Finish(3, "enough")]
        async with rig.controller() as (driver, task):
            agent = rig.peer("node/a")
            agent.say(joined("a"))
            await rig.until(lambda: agent.acks)
            driver.stop("enough")
            await rig.until(task.done)
            assert task.result() == 3
            assert agent.commands() == [EndJob(3, "enough")]
        result = read_result(rig.job_directory)
        assert result is not None
        assert (result.job, result.exit_code, result.reason, result.term) == ("demo", 3, "enough", 1)

    asyncio.run(scenario())


def test_an_agent_that_does_not_answer_holds_up_the_end_for_a_moment_only(rig: "Rig") -> None:
    async def scenario() -> None:
        rig.machine.answers[StopRequested] = [Send("node/a", EndJob(0, "done"), 1), Finish(0, "done")]
        async with rig.controller() as (driver, task):
            driver.stop("done")
            assert await within(15, task) == 0

    asyncio.run(scenario())


def test_a_controller_that_starts_after_the_end_returns_its_exit_code_again(rig: "Rig") -> None:
    async def scenario() -> None:
        answers: dict[type, list[Action]] = {StopRequested: [Finish(5, "over")]}
        rig.machine.answers.update(answers)
        async with rig.controller() as (driver, task):
            driver.stop("over")
            assert await within(15, task) == 5
        again = type(rig.machine)(rig.machine._journal_file)
        again.answers.update(answers)
        async with rig.controller(again) as (_, task):
            assert await within(15, task) == 5

    asyncio.run(scenario())
