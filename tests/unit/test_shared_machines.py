"""A machine that one role of a job has left is left by the others."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from midstep.controller.recovery.nodes import NODE_GOING
from midstep.controller.shared_machines import (
    FRESH_S,
    MachineLeft,
    SharedMachines,
    active_nodes,
    followed,
    left,
    place_among_roles,
)
from midstep.protocol.compat import within
from midstep.protocol.incidents import JobStatus, NodeStatus, StandingFault
from midstep.protocol.messages import GoingCause, NodeGoing, NodeStaying
from midstep.protocol.types import FaultKind, FaultReport

NOW_S = 1000.0
WAIT_S = 30.0
LEFT = MachineLeft("host1", "node1", "7 failures", NOW_S)
WHY = "role trainer has left machine host1: 7 failures"
GOING = {"trainer": (LEFT,)}


def job(*faults: FaultReport, notes: str = "", **nodes: str) -> JobStatus:
    """A job with these nodes, each on the host of its number."""
    known = tuple(
        NodeStatus(name, name.replace("node", "host"), state, (), note=notes) for name, state in nodes.items()
    )
    standing = tuple(StandingFault(fault, 0.0) for fault in faults)
    return JobStatus("demo", NOW_S, "running", 2, 1, 5, 0.1, (), known, (), (), faults=standing)


def going(node: str, cause: GoingCause) -> FaultReport:
    return FaultReport(
        FaultKind.NODE, 0.0, "platform", "it goes", node=node, code=NODE_GOING, fault_id=cause.fault_of(node)
    )


def test_a_machine_is_left_when_the_node_on_it_had_ranks_and_is_isolated() -> None:
    before = active_nodes(job(node0="active", node1="active", node2="spare", node3="unfit"))
    now = job(node0="active", node1="isolated", node2="active", node3="isolated", notes="7 failures")
    assert left((), before, now, NOW_S) == (LEFT,)
    assert left((LEFT,), before, now, NOW_S + 60) == (LEFT,)


def test_without_a_note_the_fault_says_why_it_was_left() -> None:
    fault = FaultReport(FaultKind.DEVICE, 0.0, "detector/files", "card drop", node="node1")
    (found,) = left((), frozenset({"node1"}), job(fault, node1="isolated"), NOW_S)
    assert found.why == "card drop"


@pytest.mark.parametrize("state", ["spare", "active", "unfit"])
def test_a_machine_that_is_used_again_is_left_no_longer(state: str) -> None:
    assert left((LEFT,), frozenset({"node1"}), job(node1=state), NOW_S) == ()


def test_a_machine_that_was_lost_is_not_told_of_unless_it_was_left_before() -> None:
    """Who has a node on a machine that is lost misses it by itself."""
    assert left((), frozenset({"node1"}), job(node1="lost"), NOW_S) == ()
    assert left((LEFT,), frozenset({"node1"}), job(node1="lost"), NOW_S) == (LEFT,)


def test_a_machine_that_is_left_because_another_role_did_is_not_told_of_again() -> None:
    assert left((), frozenset({"node1"}), job(going("node1", GoingCause.ROLE), node1="isolated"), NOW_S) == ()


@pytest.mark.parametrize("state", ["active", "spare", "unfit"])
def test_a_node_on_a_machine_that_another_role_has_left_is_left_whatever_it_is_used_for(state: str) -> None:
    assert followed(job(node0="active", node1=state), GOING, NOW_S) == (NodeGoing("node1", WHY, cause=GoingCause.ROLE),)


@pytest.mark.parametrize("state", ["isolated", "lost", "requested"])
def test_a_node_that_is_not_in_use_is_not_told_to_go(state: str) -> None:
    assert followed(job(node1=state), GOING, NOW_S) == ()


@pytest.mark.parametrize("cause", GoingCause)
def test_a_node_that_is_going_is_told_once(cause: GoingCause) -> None:
    assert followed(job(going("node1", cause), node1="active"), GOING, NOW_S) == ()


def test_a_node_that_came_long_after_the_machine_was_left_may_stay() -> None:
    assert followed(job(node1="active"), GOING, NOW_S + FRESH_S - 1)
    assert followed(job(node1="active"), GOING, NOW_S + FRESH_S) == ()


@pytest.mark.parametrize("state", ["active", "isolated", "unfit"])
def test_a_node_stays_when_the_other_role_uses_its_machine_again(state: str) -> None:
    assert followed(job(going("node1", GoingCause.ROLE), node1=state), {"trainer": ()}, NOW_S) == (
        NodeStaying("node1", GoingCause.ROLE),
    )


@pytest.mark.parametrize(("cause", "state"), [(GoingCause.PLATFORM, "active"), (GoingCause.ROLE, "lost")])
def test_a_node_that_its_platform_takes_or_that_is_lost_does_not_stay_for_that(cause: GoingCause, state: str) -> None:
    assert followed(job(going("node1", cause), node1=state), {}, NOW_S) == ()


def test_a_role_is_known_by_its_ranks_environment() -> None:
    known = {"MIDSTEP_ROLE": "a", "MIDSTEP_ROLE_ATTEMPT": "2", "MIDSTEP_ROLE_STORE": "/jobs/rl/store.json"}
    assert place_among_roles(known) == (Path("/jobs/rl"), "a", 2)
    assert place_among_roles({}) is None


async def until(holds: Callable[[], bool]) -> None:
    async def wait() -> None:
        while not holds():
            await asyncio.sleep(0.01)

    await within(WAIT_S, wait())


def test_what_one_roles_controller_writes_another_reads_and_a_later_attempt_does_not(tmp_path: Path) -> None:
    """The other role's node is told to go, and to stay when the machine is used again."""
    trainer = job(node0="active", node1="active", notes="7 failures")
    rollout = job(node1="active")
    told: dict[str, list[object]] = {"rollout.1": [], "rollout.2": [], "trainer.1": []}

    def tell(which: str) -> Callable[[object], None]:
        return told[which].append

    async def play() -> None:
        nonlocal trainer, rollout
        watched = [
            SharedMachines((tmp_path, "trainer", 1), lambda: trainer, tell("trainer.1"), look_s=0.01),
            SharedMachines((tmp_path, "rollout", 1), lambda: rollout, tell("rollout.1"), look_s=0.01),
            SharedMachines((tmp_path, "rollout", 2), lambda: job(node1="active"), tell("rollout.2"), look_s=0.01),
        ]
        tasks = [asyncio.create_task(each.run()) for each in watched]
        try:
            await asyncio.sleep(0.1)
            trainer = job(node0="active", node1="isolated", notes="7 failures")
            await until(lambda: bool(told["rollout.1"]))
            rollout = job(going("node1", GoingCause.ROLE), node1="isolated")
            watched[1]._told_s.clear()
            trainer = job(node0="active", node1="spare")
            await until(lambda: len(told["rollout.1"]) > 1)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    asyncio.run(play())
    assert told == {
        "rollout.1": [NodeGoing("node1", WHY, cause=GoingCause.ROLE), NodeStaying("node1", GoingCause.ROLE)],
        "rollout.2": [],
        "trainer.1": [],
    }


def test_a_controller_that_takes_over_goes_on_telling_what_the_one_before_did(tmp_path: Path) -> None:
    own = tmp_path / "machines" / "trainer.1.json"
    own.parent.mkdir()
    own.write_bytes(msgspec.json.encode((LEFT,)))

    async def play() -> None:
        told: list[object] = []
        status = job(node0="active", node1="isolated", node2="isolated")
        watched = SharedMachines((tmp_path, "trainer", 1), lambda: status, told.append, look_s=0.01)
        task = asyncio.create_task(watched.run())
        await asyncio.sleep(0.2)
        task.cancel()
        await asyncio.wait([task])
        assert told == []

    asyncio.run(play())
    assert msgspec.json.decode(own.read_bytes(), type=tuple[MachineLeft, ...]) == (LEFT,)


def test_what_cannot_be_read_is_said_once_and_nothing_is_left_for_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "machines" / "trainer.1.json"
    broken.parent.mkdir()
    broken.write_text('[{"machine": 1}]')

    async def play() -> None:
        told: list[object] = []
        watched = SharedMachines((tmp_path, "rollout", 1), lambda: job(node1="active"), told.append, look_s=0.01)
        task = asyncio.create_task(watched.run())
        await until(lambda: bool(caplog.records))
        await asyncio.sleep(0.1)
        assert not task.done()
        task.cancel()
        await asyncio.wait([task])
        assert told == []

    asyncio.run(play())
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [str(broken)]
