"""Storage of a played process while state is brought back to it."""

from midstep.testing.simulation.process import Memory


def test_a_shard_on_its_way_counts_as_neither_held_nor_lost() -> None:
    """It arrives in the live tensors: should the repair break, nothing of it is worth anything; the rest stays."""
    memory = Memory(("parameters", "optimizer"), connected=True)
    memory.update()
    memory.overwrite("optimizer")
    assert memory.left == ["parameters"]
    assert memory.lost == []
    assert memory.stands == 1
    assert not memory.is_of(1)


def test_a_lost_shard_is_what_the_device_tells_of() -> None:
    """All that this process held was hit."""
    memory = Memory(("parameters", "optimizer"), connected=True)
    memory.lose()
    assert memory.lost == ["parameters", "optimizer"]
    assert memory.left == []
