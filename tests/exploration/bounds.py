"""The bounds of an exploration: how large the world is, and how much goes wrong in it."""

import msgspec

from midstep.policies.schema import Budget as RungBudget
from midstep.policies.schema import IntegrityPolicy, Policy, RungPolicy, default_policy
from midstep.protocol.types import RestoreSource, Rung

from .budget import Budget, Size
from .cluster import Cluster
from .moves import new_cluster


class Bound(msgspec.Struct, frozen=True):
    """A world and what may happen to it."""

    name: str
    size: Size
    budget: Budget
    policy: Policy

    def start(self) -> Cluster:
        """Return the job before its first move."""
        return new_cluster(self.size, self.budget, self.policy)


def with_more(budget: Budget, **more: int) -> Budget:
    """Return a budget for other things besides."""
    return msgspec.structs.replace(budget, **more)


def _policy(**changes: object) -> Policy:
    return msgspec.structs.replace(default_policy(), **changes)


_CHECKPOINTS = default_policy().checkpoint
# All begin at the first step where no copy of the state is left.
PLAIN = _policy(checkpoint=msgspec.structs.replace(_CHECKPOINTS, every_steps=0))
SAVING = _policy(checkpoint=msgspec.structs.replace(_CHECKPOINTS, every_steps=1))
REPLICAS = msgspec.structs.replace(SAVING, restore=(RestoreSource.REPLICA,))
SCALING = msgspec.structs.replace(
    SAVING, scale=msgspec.structs.replace(default_policy().scale, min_nodes=1, min_interval_s=0.0)
)
VOTING = msgspec.structs.replace(PLAIN, integrity=IntegrityPolicy(every_steps=1))
VOTING_AND_SAVING = msgspec.structs.replace(SAVING, integrity=IntegrityPolicy(every_steps=1))
TIGHT = msgspec.structs.replace(
    PLAIN,
    ladder=(
        RungPolicy(Rung.RECOVER_IN_PLACE, attempts=3, budget=RungBudget(per_job=1)),
        RungPolicy(Rung.STOP),
    ),
)

TWO = Size(ranks=2, spares=1, steps=2)
ALONE = Size(ranks=2, spares=0, steps=2)
SHORT = Size(ranks=2, spares=0, steps=1)
SHORT_AND_SPARE = Size(ranks=2, spares=1, steps=1)
THREE = Size(ranks=3, ranks_per_node=2, spares=1, steps=1)
ONE_FAULT = Budget(kills=1, exceptions=1, tears=1, broken_links=1, lost_nodes=1, faults=1)
TWO_FAULTS = Budget(kills=2, exceptions=2, tears=2, broken_links=2, lost_nodes=2, faults=2)

# Together less than a minute: part of `make test`.
SMALL = (
    Bound("2 ranks, a spare, nothing goes wrong", TWO, Budget(), PLAIN),
    Bound("2 ranks, a spare, a message is lost", TWO, Budget(losses=1), PLAIN),
    Bound("2 ranks, a spare, any one fault", TWO, ONE_FAULT, PLAIN),
    Bound("2 ranks, no spare, a node is lost", ALONE, Budget(lost_nodes=1, faults=1), PLAIN),
    Bound("2 ranks, a spare, a deadline passes early", TWO, Budget(timeouts=1), PLAIN),
    Bound("2 ranks, no spare, the controller dies", ALONE, Budget(crashes=1), PLAIN),
    Bound("2 ranks, no spare, another controller takes over", ALONE, Budget(takeovers=1), PLAIN),
    Bound("2 ranks, no spare, the job is asked to stop, twice", ALONE, Budget(stops=2), PLAIN),
    Bound("2 ranks, no spare, a stop and a kill", SHORT, Budget(stops=1, kills=1, faults=1), PLAIN),
    Bound("2 ranks, no spare, a stop and a hang", SHORT, Budget(stops=1, hangs=1, faults=1), PLAIN),
    Bound("2 ranks, a spare, a process hangs", TWO, Budget(hangs=1, faults=1), PLAIN),
    Bound(
        "2 ranks, a spare, a node is cut off and may come back", SHORT_AND_SPARE, Budget(cut_nodes=1, faults=1), PLAIN
    ),
    Bound("2 ranks, a spare, a device breaks", SHORT_AND_SPARE, Budget(devices=1, faults=1), PLAIN),
    Bound(
        "2 ranks, a node is created, a node is lost",
        Size(ranks=2, spares=0, steps=1, created=1),
        Budget(lost_nodes=1, faults=1),
        PLAIN,
    ),
    Bound(
        "2 ranks with checkpoints, no spare, a node is lost",
        Size(ranks=2, spares=0, steps=2, every_steps=1),
        Budget(lost_nodes=1, faults=1),
        SAVING,
    ),
    Bound(
        "2 ranks with a shard each, checkpoints, a kill",
        Size(ranks=2, spares=0, steps=2, every_steps=1, sharded=True),
        Budget(kills=1, faults=1),
        SAVING,
    ),
    Bound(
        "2 ranks, a world that may get smaller, a node is lost",
        Size(ranks=2, spares=0, steps=2, keeps_all=True),
        Budget(lost_nodes=1, faults=1),
        SCALING,
    ),
    Bound(
        "2 ranks, one restart in place, two kills",
        Size(ranks=2, spares=0, steps=1, counts_rungs=True),
        Budget(kills=2, faults=2),
        TIGHT,
    ),
    Bound(
        "2 ranks with a shard each, checkpoints that are not to be restored, a kill",
        Size(ranks=2, spares=0, steps=2, every_steps=1, sharded=True),
        Budget(kills=1, faults=1),
        REPLICAS,
    ),
    Bound(
        "2 ranks, no spare, a kill and a broken link",
        SHORT,
        Budget(kills=1, broken_links=1, faults=2),
        PLAIN,
    ),
    Bound(
        "3 ranks that vote, no spare, a bit flips",
        Size(ranks=3, spares=0, steps=4, votes=True),
        Budget(flips=1, faults=1),
        VOTING,
    ),
    Bound(
        "2 ranks that vote, with checkpoints, no spare, a bit flips",
        Size(ranks=2, spares=0, steps=5, every_steps=1, votes=True),
        Budget(flips=1, faults=1),
        VOTING_AND_SAVING,
    ),
)
# As long as it takes: `make test SUITE=prove`.
LARGE = (
    Bound("3 ranks on 2 nodes, a spare, any one fault", THREE, ONE_FAULT, PLAIN),
    Bound("2 ranks, a spare, any one fault and a lost message", SHORT_AND_SPARE, with_more(ONE_FAULT, losses=1), PLAIN),
    Bound("2 ranks, no spare, any one fault and a dead controller", SHORT, with_more(ONE_FAULT, crashes=1), PLAIN),
    Bound("2 ranks, no spare, any one fault and a takeover", SHORT, with_more(ONE_FAULT, takeovers=1), PLAIN),
    Bound("2 ranks, no spare, any one fault and an early deadline", SHORT, with_more(ONE_FAULT, timeouts=1), PLAIN),
    Bound("2 ranks, no spare, any two faults", SHORT, TWO_FAULTS, PLAIN),
    Bound(
        "3 ranks on 2 nodes, no spare, two kills",
        Size(ranks=3, ranks_per_node=2, spares=0, steps=1),
        Budget(kills=2, faults=2),
        PLAIN,
    ),
)
