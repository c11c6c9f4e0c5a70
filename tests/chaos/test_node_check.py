"""Nodes are checked before they get ranks, by real processes."""

from pathlib import Path

import pytest

from .joined import JoinedJob

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

UNSOUND = Path(__file__).with_name("unsound")


def test_a_machine_that_fails_its_check_gets_no_rank_and_the_others_train_without_it(tmp_path: Path) -> None:
    job = JoinedJob(tmp_path, ranks_per_node=1, policy={"node_check": {"enabled": True}})
    try:
        job.gate(5).touch()
        job.start("--node", "a")
        job.start("--node", "b", PYTHONPATH=str(UNSOUND))
        job.start("--node", "c")
        job.held_at(5)
        status = job.until(lambda status: "isolated" in {node.state for node in status.nodes}, "the end of its check")
        job.gate(5).unlink()
        assert [job.wait(number) for number in range(3)] == [0, 0, 0], job.said()
    finally:
        job.close()
    nodes = {node.node: node for node in status.nodes}
    assert {name: node.state for name, node in nodes.items()} == {"a": "active", "b": "isolated", "c": "active"}
    assert "a matrix product failed: the process that checks the node has ended" in nodes["b"].note
