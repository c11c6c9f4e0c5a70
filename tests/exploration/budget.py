"""How large an explored world is, and how much may go wrong in it."""

import msgspec

APART = frozenset({"losses", "timeouts", "crashes", "takeovers", "stops"})  # not counted among the faults


class Budget(msgspec.Struct, frozen=True):
    """How much more may go wrong."""

    kills: int = 0  # of a process
    exceptions: int = 0  # in a train function
    tears: int = 0  # of an update, halfway
    broken_links: int = 0  # a collective, a link-up or a repair that fails, with every process alive
    hangs: int = 0  # of a process, for ever
    lost_nodes: int = 0
    cut_nodes: int = 0  # that run on, and may be heard again
    flips: int = 0  # of a bit of what a process holds, with nothing raised
    devices: int = 0  # that break, so that their node must be left, or have something that is only to be noted
    losses: int = 0  # messages that are sent again, and overtaken
    timeouts: int = 0  # deadlines that pass while something else could still happen
    crashes: int = 0  # of the controller, with all that is on its way from it
    takeovers: int = 0  # one dies and the next one comes, and what is on its way from it arrives
    stops: int = 0  # requests of an operator; each but the first insists
    faults: int = 0  # those of the first lines together

    def less(self, what: str) -> "Budget":
        """Return what is left after one more."""
        left = {what: getattr(self, what) - 1}
        if what not in APART:
            left["faults"] = self.faults - 1
        return msgspec.structs.replace(self, **left)

    def allows(self, what: str) -> bool:
        """Whether one more may come."""
        return getattr(self, what) > 0 and (what in APART or self.faults > 0)


class Size(msgspec.Struct, frozen=True):
    """The job: so many ranks, spare nodes, and steps to train.

    `created`: so many nodes a platform makes; it refuses more. `every_steps`: a checkpoint is made; 0: never.
    `sharded`: each rank holds another shard, so that what is lost with a rank is lost.
    """

    ranks: int = 2
    ranks_per_node: int = 1
    spares: int = 1
    steps: int = 2
    created: int = 0
    every_steps: int = 0
    sharded: bool = False
    votes: bool = False  # in each step, on what the ranks hold
    keeps_all: bool = False  # so little is lost that a copy of each committed step survives
    counts_rungs: bool = False  # each time that one is taken is another state

    @property
    def nodes(self) -> int:
        """How many nodes the ranks take."""
        return -(-self.ranks // self.ranks_per_node)
