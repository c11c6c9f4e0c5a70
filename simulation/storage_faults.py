"""What happens to the checkpoints on the disk.

Drawn by a generator of its own, so that the faults of a seed are the same with it and without.
"""

import random
from typing import TYPE_CHECKING

from . import cluster_faults as cluster

if TYPE_CHECKING:
    from .world import World

SHARE = 0.15  # of all worlds


def plan(world: "World") -> None:
    """Draw what becomes of the checkpoints, and a reason to need them soon after."""
    chance = random.Random(f"{world.seed} storage")
    if chance.random() >= SHARE:
        return
    deed = chance.choice((damage_newest, damage_all, damage_all, hide_directory))
    for _ in range(chance.choice((2, 5, 9))):  # so that there is something by then
        world.strikes.when_well(lambda _world, _chance: "nothing happens")
    world.strikes.when_well(deed)
    for _ in range(2):
        world.strikes.when_well(cluster.kill_node)


def damage_newest(world: "World", chance: random.Random) -> str:
    """The newest checkpoint is damaged: an older one has to do."""
    newest = max(world.disk, default=0)
    world.saving.spoil({newest})
    return f"the checkpoint of step {newest} is damaged"


def damage_all(world: "World", chance: random.Random) -> str:
    """All checkpoints are damaged: where one is needed the job has to stop, and must not begin again."""
    world.saving.spoil(world.disk)
    return "all checkpoints are damaged"


def hide_directory(world: "World", chance: random.Random) -> str:
    """The directory cannot be listed any more, by any process, or can be again."""
    world.saving.unlisted = not world.saving.unlisted
    world.saving.spoiled = True
    return f"the checkpoint directory can {'not ' * world.saving.unlisted}be listed"
