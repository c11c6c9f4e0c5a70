"""What an exploration may do: how large the world is, and how much goes wrong in it."""

import msgspec

from midstep.policies.schema import Policy, default_policy

from .cluster import Budget, Cluster, Size
from .moves import new_cluster


class Bound(msgspec.Struct, frozen=True):
    """A world and what may happen to it."""

    name: str
    size: Size
    budget: Budget

    def start(self) -> Cluster:
        """Return the job before its first move."""
        return new_cluster(self.size, self.budget, without_checkpoints())


def with_more(budget: Budget, **more: int) -> Budget:
    """Return a budget for other things besides."""
    return msgspec.structs.replace(budget, **more)


TWO = Size(ranks=2, spares=1, steps=2)
TWO_AND_NO_SPARE = Size(ranks=2, spares=0, steps=2)
ONE_FAULT = Budget(kills=1, exceptions=1, broken_links=1, lost_nodes=1, faults=1)
TWO_FAULTS = Budget(kills=2, exceptions=2, broken_links=2, lost_nodes=2, faults=2)

# Together less than a minute: part of `make test`.
SMALL = (
    Bound("2 ranks, a spare, nothing goes wrong", TWO, Budget()),
    Bound("2 ranks, a spare, a message is lost", TWO, Budget(losses=1)),
    Bound("2 ranks, a spare, any one fault", TWO, ONE_FAULT),
    Bound("2 ranks, no spare, a node is lost", TWO_AND_NO_SPARE, Budget(lost_nodes=1, faults=1)),
    Bound("2 ranks, a spare, a deadline passes early", TWO, Budget(timeouts=1)),
    Bound("2 ranks, no spare, the controller dies", TWO_AND_NO_SPARE, Budget(crashes=1)),
)
# As long as it takes: `make prove`.
LARGE = (
    Bound("2 ranks, a spare, any two faults", TWO, TWO_FAULTS),
    Bound("2 ranks, a spare, any one fault and a lost message", TWO, with_more(ONE_FAULT, losses=1)),
    Bound("2 ranks, no spare, any one fault and a dead controller", TWO_AND_NO_SPARE, with_more(ONE_FAULT, crashes=1)),
    Bound("2 ranks, a spare, any one fault and an early deadline", TWO, with_more(ONE_FAULT, timeouts=1)),
    Bound("3 ranks, no spare, any one fault", Size(ranks=3, spares=0, steps=1), ONE_FAULT),
)


def without_checkpoints() -> Policy:
    """Return the default policy, in which all begin again where no copy of the state is left."""
    policy = default_policy()
    return msgspec.structs.replace(policy, checkpoint=msgspec.structs.replace(policy.checkpoint, every_steps=0))
