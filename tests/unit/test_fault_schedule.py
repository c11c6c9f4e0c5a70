"""Faults from a file: what is read, and what is refused with which words."""

from pathlib import Path

import pytest

from midstep.launch.rank_environment import load_schedule
from midstep.protocol.errors import ConfigurationError
from midstep.protocol.faults import ArmedFault, FaultAction, InjectionPoint


def load(tmp_path: Path, *entries: str) -> tuple[ArmedFault, ...]:
    path = tmp_path / "faults"
    path.write_text("faults:\n" + "".join(f"  - {{{entry}}}\n" for entry in entries))
    return load_schedule(path, nodes=2, ranks_per_node=2)


@pytest.mark.parametrize("key", ["incarnation", "life"])
def test_a_fault_of_a_rank_is_read(tmp_path: Path, key: str) -> None:
    """`life` is an older name of the key."""
    (fault,) = load(tmp_path, f"rank: 1, do: memory-persistent, at: backward, step: 40, {key}: 2")
    assert fault == ArmedFault(1, FaultAction.MEMORY_PERSISTENT, InjectionPoint.BACKWARD, 40, 2)


def test_a_fault_of_a_node_is_one_of_each_of_its_ranks(tmp_path: Path) -> None:
    faults = load(tmp_path, "node: node1, do: kill, at: update")
    assert [fault.rank for fault in faults] == [2, 3]


def test_a_fault_of_a_collective_names_operation_group_and_rate(tmp_path: Path) -> None:
    (fault,) = load(tmp_path, "rank: 0, do: link-down, operation: allreduce, group: [0, 2], rate: 0.5")
    assert fault == ArmedFault(
        0, FaultAction.LINK_DOWN, InjectionPoint.COLLECTIVE, operation="allreduce", group=(0, 2), rate=0.5
    )  # fmt: skip


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        ("do: kill", "either a rank or a node"),
        ("rank: 0, node: node0, do: kill", "either a rank or a node"),
        ("rank: 4, do: kill", "no rank 4; the job has 4"),
        ("node: node7, do: kill", "no rank starts on node7"),
        ("rank: 0, do: tickle", "tickle"),
        ("rank: 0, do: kill, at: lunch", "lunch"),
        ("rank: 0, do: kill, rate: 2", "rate"),
        ("rank: 0, do: kill, colour: red", "colour"),
        ("rank: 0, do: link-down, at: forward, operation: allreduce", "are of a collective"),
    ],
)
def test_a_mistake_is_named_with_its_file(tmp_path: Path, entry: str, complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint) as caught:
        load(tmp_path, entry)
    assert str(tmp_path) in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load_schedule(tmp_path / "nothing", 1, 1)
