"""The controller is cut off from its nodes"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from midstep.controller.recovery.events import DeadlinePassed
from midstep.policies.schema import HeartbeatPolicy
from midstep.protocol.messages import NodeHeartbeat, NodeJoined, NodeLost
from midstep.protocol.types import StoreEndpoint

from ..chaos.comparing import finish
from ..chaos.jobs import ROOMY, Job
from ..chaos.node_processes import agents_of
from ..contract.driver.conftest import HEARTBEAT_S, Peer, Rig
from .attack import attack

MISSED = 5
SILENCE_S = 2.0  # several times as long as it takes for a node to count as silent
LONG_SILENCES = [f"holding: 2 of 2 nodes silent for {seconds} s" for seconds in range(5, 60)]
STEPS, FAR_STEP, STEP_S = 90, 80, 0.1


@pytest.fixture
def rig() -> Iterator[Rig]:
    """A driver with its real sockets and journal; nodes are silent after half a second."""
    made = Rig()
    made.missed = MISSED
    try:
        yield made
    finally:
        made.close()


def joined(rig: Rig, *names: str) -> list[Peer]:
    peers = [rig.peer(f"node/{name}") for name in names]
    for peer, name in zip(peers, names, strict=True):
        peer.say(NodeJoined(name, "rack", StoreEndpoint("127.0.0.1", 1)))
    return peers


async def beat(peer: Peer, name: str) -> None:
    while True:
        peer.say(NodeHeartbeat(name, 0.0, ()), reliable=False)
        await asyncio.sleep(HEARTBEAT_S / 2)


@attack(
    "no heartbeat of any node arrives for a while",
    holds="no node is given up: it is more likely the controller that is cut off",
    reads="holding: 2 of 2 nodes silent for 1 s; the controller itself may be cut off, ...",
)
def test_the_silence_of_all_nodes_at_once_is_held(rig: Rig) -> None:
    """No node is given up, status says what is held, and nodes that talk again are watched as before."""

    async def scenario() -> None:
        async with rig.controller() as (driver, _):
            a, b = joined(rig, "a", "b")
            await rig.until(lambda: rig.machine.kinds().count("NodeJoined") == 2)
            await rig.quiet(SILENCE_S)
            assert "NodeLost" not in rig.machine.kinds()
            assert "holding: 2 of 2 nodes silent" in driver.status().holding
            talk = [asyncio.ensure_future(beat(a, "a")), asyncio.ensure_future(beat(b, "b"))]
            await rig.until(lambda: not driver.status().holding)
            talk.pop().cancel()
            await rig.until(lambda: "NodeLost" in rig.machine.kinds())
            assert [event.node for event, _ in rig.machine.events if isinstance(event, NodeLost)] == ["b"]
            talk.pop().cancel()

    asyncio.run(scenario())


@attack(
    "a deadline of a recovery passes while no node can answer",
    holds="no rank is blamed for an answer that could not arrive",
)
def test_a_deadline_that_passes_while_all_nodes_are_silent_is_put_off(rig: Rig) -> None:
    """It is acted on when the nodes are heard again, and have had the time to answer."""

    async def scenario() -> None:
        async with rig.controller():
            (a,) = joined(rig, "a")
            await rig.until(lambda: "NodeJoined" in rig.machine.kinds())
            rig.machine.deadline = rig.machine.events[-1][1] + 0.45
            await rig.quiet(SILENCE_S)
            assert "DeadlinePassed" not in rig.machine.kinds()
            rig.machine.answers[DeadlinePassed] = []
            talk = asyncio.ensure_future(beat(a, "a"))
            await rig.until(lambda: "DeadlinePassed" in rig.machine.kinds())
            talk.cancel()

    asyncio.run(scenario())


@attack(
    "more than half of the nodes are really gone, and nothing tells so but their silence",
    holds="they are given up when the hold is over, and the recovery begins",
    reads="2 of 2 nodes were silent together, held for 1.0 s: a, b given up after all",
)
def test_nodes_that_stay_silent_are_given_up_when_the_hold_is_over(rig: Rig) -> None:
    """A hold has an end."""
    rig.hold_s = 1.0

    async def scenario() -> None:
        async with rig.controller():
            joined(rig, "a", "b")
            await rig.until(lambda: rig.machine.kinds().count("NodeLost") == 2)
            assert rig.machine.kinds().index("HoldEnded") < rig.machine.kinds().index("NodeLost")

    asyncio.run(scenario())


@pytest.mark.soak
@pytest.mark.chaos
@pytest.mark.timeout(240)
@attack(
    "all agents stand still for 5 s, which looks like a network that is cut (SIGSTOP)",
    holds="training continues with the same processes, and no step is repeated",
    reads="held: 2 of 2 nodes silent for 2.2 s up to 12:00:05.250 UTC, none was given up for it",
)
def test_a_job_whose_agents_stand_still_for_a_while_trains_on(tmp_path: Path) -> None:
    """With the default heartbeat: same processes, training has moved on meanwhile, and the report tells of the hold."""
    heartbeat = HeartbeatPolicy()
    policy = {**ROOMY, "heartbeat": {"interval_s": heartbeat.interval_s, "missed": heartbeat.missed}}
    job = Job(tmp_path, ranks_per_node=1, steps=STEPS, step_s=STEP_S, policy=policy, gates=[FAR_STEP])
    try:
        before = job.until(lambda status: status.phase == "running" and status.committed > 5, "some steps")
        agents = agents_of(job.launcher.pid).values()
        assert len(agents) == 2
        for agent in agents:
            agent.suspend()
        try:
            job.until(lambda status: any(text in status.holding for text in LONG_SILENCES), "a hold")
        finally:
            for agent in agents:
                agent.resume()
        after = job.held_at(FAR_STEP)
        assert [rank.pid for rank in after.ranks] == [rank.pid for rank in before.ranks]
        assert after.generation == before.generation
        job.open_gate(FAR_STEP)
        report = finish(job)
        assert [incident["outcome"] for incident in report["incidents"] if incident["decisions"]] == []
        assert [hold["lost"] for hold in report["holds"]] == [[]]
    finally:
        job.close()
