"""A program is called when a node of the job was replaced, and the job waits for nothing of it."""

import asyncio
import json
import logging
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from midstep.controller.relaunch_hook import RelaunchHook, homes_of, relaunches
from midstep.policies.files import parse_policy
from midstep.protocol.compat import within
from midstep.protocol.errors import PolicyError
from midstep.protocol.incidents import JobStatus, NodeStatus, RankStatus

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
    hook = RelaunchHook(command, "demo", lambda: looks.pop(0) if len(looks) > 1 else looks[0], look_s=0.01)
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
        hook = RelaunchHook(command, "demo", lambda: looks.pop(0) if len(looks) > 1 else looks[0], look_s=0.01)
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
