"""What a process really holds, whatever it says of itself: the simulation judges by it.

A shard is played by one number, the count of updates in it, so that mixed-up state shows.
"""

from collections.abc import Iterable

GONE = -1  # the count of updates in a shard that was struck
TORN = -2  # in one whose update ended halfway
ARRIVING = -3  # and in one that is being overwritten by a repair


class Memory:
    """The shards of one process, its local state, and its gradients."""

    def __init__(self, shards: Iterable[str], *, connected: bool) -> None:
        """`seated`: it begins with the others; what a single newcomer begins with is worth nothing."""
        self.shards = dict.fromkeys(shards, 0)
        self.own = 0
        self.gradients: int | None = None  # of which update they are the final ones
        self._updates: int | None = 0 if connected else None

    @property
    def stands(self) -> int | None:
        """The count of updates in everything that is left here; None where that is of no one step."""
        whole = all(count in {self._updates, GONE, ARRIVING} for count in self.shards.values())
        return self._updates if whole else None

    @property
    def left(self) -> list[str]:
        """The shards that are neither lost nor on their way back."""
        return [shard for shard, count in self.shards.items() if count not in {GONE, ARRIVING}]

    @property
    def struck(self) -> list[str]:
        """The shards of which the device would say that they are lost."""
        return [shard for shard, count in self.shards.items() if count == GONE]

    def is_of(self, step: int) -> bool:
        """Whether everything is here, and of one step."""
        return self.own == step and set(self.shards.values()) == {step}

    def update(self) -> None:
        """The update is applied."""
        assert self._updates is not None
        self._updates = self.own = self._updates + 1
        self.shards = dict.fromkeys(self.shards, self._updates)
        self.gradients = None

    def tear(self) -> None:
        """The update ends halfway."""
        self.shards, self.gradients = dict.fromkeys(self.shards, TORN), None

    def strike(self) -> None:
        """What was here is gone."""
        self.shards, self.gradients = dict.fromkeys(self.shards, GONE), None

    def overwrite(self, shard: str) -> None:
        """A shard begins to arrive in the place of what was held: until all has come it is worth nothing."""
        self.shards[shard] = ARRIVING

    def load(self, step: int) -> None:
        """Read a checkpoint."""
        self.shards, self._updates = dict.fromkeys(self.shards, step), None

    def come_back(self, step: int) -> None:
        """The way back is over."""
        self._updates, self.gradients = step, None
