"""A program is called when a node of the job was replaced, and the job waits for nothing of it; or it brings nodes."""

import asyncio
import json
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from midstep.controller import relaunch_hook
from midstep.controller.recovery.world import NodeState
from midstep.controller.relaunch_hook import HookCommand, NodeBringer, RelaunchHook, answered, homes_of, relaunches
from midstep.policies.files import parse_policy
from midstep.protocol.compat import within
from midstep.protocol.errors import PolicyError
from midstep.protocol.incidents import JobStatus, NodeStatus, RankStatus
from midstep.protocol.messages import CreateNode, NodeLost, NodeRefused, PlatformJoined
from midstep.testing.fake_cluster import FakeCluster, job, only

WAIT_S = 30.0


def placed(homes: Mapping[int, str], **states: str) -> JobStatus:
    """A job whose ranks are on these nodes."""
    ranks = tuple(RankStatus(rank, node, 1, 1, "training", 0, "") for rank, node in homes.items())
    nodes = tuple(NodeStatus(node, f"rack-{node}", state, (), note="silent") for node, state in states.items())
    return JobStatus("demo", 0.0, "running", 2, 1, 5, 0.1, ranks, nodes, (), ())


BEFORE = {0: "n0", 1: "n0", 2: "n1", 3: "n1"}


def test_a_node_whose_ranks_are_on_one_that_had_none_was_replaced() -> None:
    found = relaunches(BEFORE, placed({**BEFORE, 2: "n2", 3: "n2"}, n0="active", n1="lost", n2="active"))
    assert [(each.node, each.ranks, each.replaced_by, each.state, each.note) for each in found] == [
        ("n1", (2, 3), ("n2",), "lost", "silent")
    ]
    assert found[0].failure_domain == "rack-n1"


@pytest.mark.parametrize(
    "homes",
    [
        BEFORE,
        {0: "n0", 1: "n0"},  # the job got smaller
        {0: "n0", 1: "n0", 2: "", 3: ""},  # where they go is not known yet
        {0: "n0", 1: "n0", 2: "n0", 3: "n0"},  # no other node took its place
        {0: "n0", 1: "n0", 2: "n1", 3: "n2"},  # it still has one
    ],
)
def test_a_node_that_was_not_replaced_is_not_told_of(homes: dict[int, str]) -> None:
    assert relaunches(BEFORE, placed(homes)) == ()


def test_each_node_is_told_of_once_also_when_its_ranks_are_placed_one_after_the_other() -> None:
    first = placed({0: "n0", 1: "n0", 2: "n2", 3: ""})
    assert [each.node for each in relaunches(BEFORE, first)] == ["n1"]
    homes = {**BEFORE, **homes_of(first)}
    assert relaunches(homes, placed({0: "n0", 1: "n0", 2: "n2", 3: "n2"})) == ()


async def called(command: str, until: Path) -> None:
    """Run a hook while a node is replaced, until its program has left a file."""
    looks = [placed(BEFORE), placed({**BEFORE, 2: "n2", 3: "n2"}, n1="isolated")]
    hook = RelaunchHook(
        HookCommand(command, "demo", WAIT_S), "demo", lambda: looks.pop(0) if len(looks) > 1 else looks[0], look_s=0.01
    )
    running = asyncio.create_task(hook.run())
    try:

        async def there() -> None:
            while not until.exists():
                await asyncio.sleep(0.01)

        await within(WAIT_S, there())
    finally:
        running.cancel()
        await asyncio.wait([running])


def test_the_program_has_the_nodes_in_its_environment_and_the_whole_on_its_stdin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token of the job, which the controller has, is not in its environment."""
    monkeypatch.setenv("MIDSTEP_TOKEN", "secret")
    script = tmp_path / "hook.py"
    script.write_text(
        "import os, pathlib, sys\n"
        "assert 'MIDSTEP_TOKEN' not in os.environ\n"
        "place = pathlib.Path(sys.argv[1])\n"
        "text = '\\n'.join([os.environ['MIDSTEP_NODE'], os.environ['MIDSTEP_REPLACED_BY'], sys.stdin.read()])\n"
        "place.with_suffix('.new').write_text(text)\n"
        "place.with_suffix('.new').rename(place)\n"
    )
    asyncio.run(called(f"{sys.executable} {script} '{tmp_path / 'what was said'}'", tmp_path / "what was said"))
    node, by, line = (tmp_path / "what was said").read_text().split("\n", 2)
    assert (node, by) == ("n1", "n2")
    assert json.loads(line) == {
        "job": "demo",
        "generation": 2,
        "node": "n1",
        "failure_domain": "rack-n1",
        "state": "isolated",
        "note": "silent",
        "ranks": [2, 3],
        "replaced_by": ["n2"],
    }


def test_a_program_that_is_not_there_or_fails_is_reported_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    async def look(command: str) -> None:
        looks = [placed(BEFORE), placed({**BEFORE, 2: "n2", 3: "n2"})]
        hook = RelaunchHook(
            HookCommand(command, "demo", WAIT_S),
            "demo",
            lambda: looks.pop(0) if len(looks) > 1 else looks[0],
            look_s=0.01,
        )
        running = asyncio.create_task(hook.run())

        async def said() -> None:
            while not caplog.records:
                assert not running.done()
                await asyncio.sleep(0.01)

        await within(WAIT_S, said())
        running.cancel()
        await asyncio.wait([running])

    for command, words in (("/none/such now", "/none/such cannot be run"), ("false", "false ended with status 1")):
        caplog.clear()
        with caplog.at_level(logging.ERROR):
            asyncio.run(look(command))
        assert words in caplog.text


@pytest.mark.parametrize(("text", "words"), [("''", "found an empty command"), ('"./a \'b"', "No closing quotation")])
def test_a_command_that_is_none_is_refused(text: str, words: str) -> None:
    with pytest.raises(PolicyError, match=rf"on_node_relaunch: {words}"):
        parse_policy(f"on_node_relaunch: {text}", "job.yaml")


# --- where it brings nodes ------------------------------------------------------------------------------------------


def test_a_node_that_comes_under_the_name_that_was_wanted_is_awaited_already() -> None:
    assert answered("node2", ["node2"], placed(BEFORE, node2="requested")) == ()


def test_nodes_that_come_under_other_names_are_awaited_in_its_place() -> None:
    told = answered("node2", ["m8", "m9", "m8"], placed(BEFORE, n0="active", node2="requested"))
    assert told == (
        PlatformJoined(can_create=True, can_kill=False, nodes=("node2", "m8", "m9")),
        NodeRefused("node2", "on_node_relaunch brings m8, m9 in its place"),
    )


def test_a_node_that_has_joined_before_the_answer_is_one_that_comes() -> None:
    assert answered("node2", ["m8"], placed(BEFORE, m8="active", node2="requested")) == (
        NodeRefused("node2", "on_node_relaunch brings m8 in its place"),
    )


@pytest.mark.parametrize(
    ("names", "reason"), [([], "brings no node"), (["n0", "n1"], "names only nodes that the job has left: n0, n1")]
)
def test_an_answer_without_a_node_that_can_come_ends_the_wait(names: list[str], reason: str) -> None:
    (refused,) = answered("node2", names, placed(BEFORE, n0="lost", n1="isolated", node2="requested"))
    assert refused == NodeRefused("node2", f"on_node_relaunch {reason}")


async def brought(command: str, wanted: list[str], answers: int, *, within_s: float = WAIT_S) -> list[object]:
    """Have nodes brought for a job that has begun to run meanwhile; return what the machine was told."""
    told: list[object] = []
    begun = placed(BEFORE, n1="lost", node2="requested")
    looks = [msgspec.structs.replace(begun, phase="waiting", generation=0), begun]
    bringer = NodeBringer(
        HookCommand(command, "demo", within_s),
        "demo",
        lambda: looks.pop(0) if len(looks) > 1 else looks[0],
        told.append,
        look_s=0.01,
    )
    running = asyncio.create_task(bringer.run())
    try:
        for name in wanted:
            bringer.bring(name)

        async def all_told() -> None:
            while len(told) < answers:
                await asyncio.sleep(0.01)

        await within(WAIT_S, all_told())
        await asyncio.sleep(0.05)
    finally:
        running.cancel()
        await asyncio.wait([running])
    return told


THERE = PlatformJoined(can_create=True, can_kill=False, nodes=("node2",))


def test_it_is_asked_once_for_each_node_with_what_was_left_and_its_answer_is_waited_for(tmp_path: Path) -> None:
    script = tmp_path / "bring.py"
    script.write_text(
        "import json, os, sys, time\n"
        "facts = json.load(sys.stdin)\n"
        "assert facts == {'job': 'demo', 'generation': 2, 'wanted': 'node2',\n"
        "    'left': [{'node': 'n1', 'failure_domain': 'rack-n1', 'state': 'lost'}]}, facts\n"
        "assert os.environ['MIDSTEP_WANTED'] == 'node2'\n"
        "time.sleep(0.3)\n"
        "print(json.dumps({'nodes': ['m8']}))\n"
    )
    told = asyncio.run(brought(f"{sys.executable} {script}", ["node2", "node2"], 3))
    assert told == [
        THERE,
        PlatformJoined(can_create=True, can_kill=False, nodes=("node2", "m8")),
        NodeRefused("node2", "on_node_relaunch brings m8 in its place"),
    ]


@pytest.mark.parametrize(
    ("command", "within_s", "reason"),
    [
        ("false", WAIT_S, "false ended with status 1"),
        ("echo nonsense", WAIT_S, "its answer is not understood"),
        ("echo '{\"nodes\": []}'", WAIT_S, "brings no node"),
        ("sleep 60", 0.3, "sleep takes more than 0.3 s, and is killed"),
        ("/none/such", WAIT_S, "/none/such cannot be run"),
        (f"{sys.executable} -c \"print('x' * 1000000)\"", WAIT_S, "its answer is not understood"),
    ],
)
def test_a_command_that_brings_nothing_ends_the_wait_with_the_reason(
    command: str, within_s: float, reason: str
) -> None:
    there, refused = asyncio.run(brought(command, ["node2"], 2, within_s=within_s))
    assert there == THERE
    assert isinstance(refused, NodeRefused)
    assert refused.node == "node2"
    assert reason in refused.reason


def test_a_node_of_another_name_than_was_said_ends_the_wait_and_the_next_loss_is_asked_for() -> None:
    """As pods do that an operator makes again: the command has named the node that was wanted."""

    async def run() -> None:
        cluster, told = FakeCluster(job(spares=0)).start(), list[object]()

        def tell(news: Any) -> None:
            told.append(news)
            cluster.feed(news)

        def status() -> JobStatus:
            return cluster.machine.status(cluster.now)

        command = HookCommand('sh -c \'echo "{\\"nodes\\": [\\"$MIDSTEP_WANTED\\"]}"\'', "demo", WAIT_S)
        bringer = NodeBringer(command, "demo", status, tell, look_s=0.01)
        running = asyncio.create_task(bringer.run())

        async def until_told(count: int) -> None:
            while len(told) < count:
                await asyncio.sleep(0.01)

        try:
            await within(WAIT_S, until_told(1))
            for lost, comes in (("node1", "m8"), ("m8", "m9")):
                before = len(told)
                (asked,) = only(cluster.feed(NodeLost(lost, "gone", cluster.now)), CreateNode)
                bringer.bring(asked.node)
                cluster.feed(cluster.node(comes))
                await within(WAIT_S, until_told(before + 1))
                assert told[-1] == NodeRefused(asked.node, f"{comes} has come in its place")
                assert {cluster.holder(rank).node for rank in (2, 3)} == {comes}
                assert cluster.machine.state.world.named(NodeState.REQUESTED) == []
        finally:
            running.cancel()
            await asyncio.wait([running])

    asyncio.run(run())


def test_a_policy_whose_command_is_to_bring_nodes_names_one() -> None:
    with pytest.raises(PolicyError, match=r"node\.relaunch_brings: needs on_node_relaunch"):
        parse_policy("node: {relaunch_brings: true}", "job.yaml")
    assert parse_policy("on_node_relaunch: bring\nnode: {relaunch_brings: true}", "job.yaml").node.relaunch_brings


def test_ranks_wait_for_a_node_that_the_command_brings_and_the_rung_fails_with_its_reason() -> None:
    """As for one of a platform: what the machine is told by the command is what a platform tells."""
    for comes in (True, False):
        cluster = FakeCluster(job(spares=0)).start()
        cluster.feed(THERE)
        cluster.feed(NodeLost("node1", "gone", cluster.now))
        assert cluster.machine.state.due.unplaced == {2, 3}
        if comes:
            status = cluster.machine.status(cluster.now)
            cluster.feed(*answered("node2", ["m8"], status))
            assert cluster.machine.state.due.unplaced == {2, 3}
            cluster.feed(cluster.node("m8"))
            assert {cluster.holder(rank).node for rank in (2, 3)} == {"m8"}
        else:
            cluster.feed(*answered("node2", [], cluster.machine.status(cluster.now)))
            assert "on_node_relaunch brings no node" in str(cluster.machine.incidents[-1])


def test_a_node_for_which_there_is_no_room_is_refused_and_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks would wait for it until their deadline."""
    monkeypatch.setattr(relaunch_hook, "MOST_WANTED", 1)

    async def run() -> list[object]:
        told: list[object] = []
        bringer = NodeBringer(HookCommand("true", "demo", WAIT_S), "demo", lambda: placed(BEFORE), told.append)
        bringer.bring("node2")
        bringer.bring("node3")
        assert told == []
        await asyncio.sleep(0)
        return told

    assert asyncio.run(run()) == [NodeRefused("node3", "on_node_relaunch: 1 other nodes are waited for")]
