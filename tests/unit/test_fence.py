"""The mark in a checkpoint directory: the world that was led into training last has it."""

from pathlib import Path

import pytest

from midstep.processor.checkpoints.files import MARK
from midstep.processor.checkpoints.writer import Fence
from midstep.protocol.errors import CheckpointError


def taken(directory: Path, *, job: str = "gpt", generation: int = 1, node: str = "node0") -> Fence:
    """Return the fence of a world that has just taken the directory."""
    fence = Fence(directory)
    fence.take(job, generation, node)
    return fence


def test_a_world_that_nobody_has_replaced_keeps_the_directory(tmp_path: Path) -> None:
    """Also over its own recoveries, each of which marks the directory again."""
    fence = taken(tmp_path / "checkpoints")
    assert fence.lost_to() is None
    fence.take("gpt", 2, "node0")
    assert fence.lost_to() is None


def test_a_world_that_was_given_up_is_told_who_has_the_directory_now(tmp_path: Path) -> None:
    """The new one is of a later generation, on another node."""
    old = taken(tmp_path, generation=4)
    new = taken(tmp_path, generation=5, node="node7")
    found = old.lost_to()
    assert found is not None
    assert (found.generation, found.node) == (5, "node7")
    assert str(found).startswith("generation 5 of job gpt (process ")
    assert new.lost_to() is None


def test_the_later_of_two_jobs_has_the_directory_whatever_their_names_and_generations(tmp_path: Path) -> None:
    """A job that is started again has the name of the earlier one, and counts from generation 1."""
    earlier = taken(tmp_path, generation=9)
    later = taken(tmp_path, generation=1)
    assert earlier.lost_to() is not None
    assert later.lost_to() is None


def test_a_mark_that_somebody_has_removed_is_set_again(tmp_path: Path) -> None:
    """Clearing the directory takes nothing from the world that trains."""
    fence = taken(tmp_path)
    (tmp_path / MARK).unlink()
    assert fence.lost_to() is None
    assert (tmp_path / MARK).exists()


def test_a_mark_that_could_not_be_written_is_tried_again(tmp_path: Path) -> None:
    """The disk may have been full when the world came up, and has room when its first checkpoint is complete."""
    blocked = tmp_path / "checkpoints"
    blocked.write_text("a file where the directory should be")
    fence = Fence(blocked)
    with pytest.raises(CheckpointError, match="cannot write"):
        fence.take("gpt", 1, "node0")
    with pytest.raises(CheckpointError, match="cannot write"):
        fence.lost_to()
    blocked.unlink()
    assert fence.lost_to() is None
    assert (blocked / MARK).exists()


def test_a_damaged_mark_is_named_with_what_to_do(tmp_path: Path) -> None:
    """It is written whole or not at all, so this was somebody else; nothing is made complete on a guess."""
    fence = taken(tmp_path)
    (tmp_path / MARK).write_text("{}")
    with pytest.raises(CheckpointError, match=r"world\.json is damaged.*Remove it"):
        fence.lost_to()
