"""The facts from which the ladder chooses: everything it may look at, and nothing else.

The recovery machine fills a `Facts` from its world and its fault book each time that an incident needs a
decision: at its beginning, and again after every new fault or missed deadline in it. The answer depends on
these values alone, so a decision can be repeated, explained and tested without a cluster.
"""

import msgspec

from ..protocol.types import FaultReport, Rung


class Spent(msgspec.Struct, frozen=True):
    """A rung that was taken, as its budget counts it.

    `at_s` is on the clock of `Facts.now`. `ranks` are the ranks whose processes it replaced because they, or
    their nodes, were at fault; `nodes` are the nodes that these were on. `role`: the role whose budgets it counts
    against; empty: the job's.
    """

    rung: Rung
    at_s: float
    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    role: str = ""


class NodeFailure(msgspec.Struct, frozen=True):
    """A process of `node` failed at `at_s` (on the clock of `Facts.now`). Processes that fail together count once."""

    node: str
    at_s: float


class FailedRung(msgspec.Struct, frozen=True):
    """A rung that was taken in this incident and did not lead to a resume, with what went wrong in words."""

    rung: Rung
    reason: str


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """An incident and its world at `now` (seconds; any clock, the same as in `spent`).

    `faults` are those that are still to be dealt with, `culprits` the ranks at fault by them (all ranks of a
    lost node are). `mendable` are ranks at fault whose process lives and can mend its fault itself, without being
    replaced. `nodes` maps every rank of the world to its node. `healthy` are the ranks alive in a resilient train
    function and not at fault. `node_failures` are those of all nodes, the ones that led here included.

    `resilient`: at least one rank of the running world has reached a resilient train function; without one no
    process can be kept. `max_restarts`: limit for restarts of a world that is not resilient (torchrun's
    flag); it takes the place of the budgets of `reschedule_pod` and `reschedule_job`. None: the policy's
    budgets hold. A job that was resilient once, and is caught while it starts, gets None; so does a fault of
    hardware, which is not the script's doing.

    `closed`: nodes in use on which no new process is to be started, with the reason; what runs there stays.

    `built_ahead`: by spare, the ranks whose next process is built there. `promised_nodes`: how many nodes the platform
    has been asked for, and has not brought yet.

    `min_nodes`: with how few nodes the world may continue where lost ones cannot be replaced; None: with no fewer.

    `taken`: the rungs taken so far in this incident, in order; `failed`: those of them that failed by
    themselves (a rung that another rank's fault cut short has not failed). `spent`: what was taken in the
    whole job.
    """

    now: float
    faults: tuple[FaultReport, ...] = ()
    culprits: tuple[int, ...] = ()
    mendable: tuple[int, ...] = ()
    nodes: dict[int, str] = {}
    healthy: frozenset[int] = frozenset()
    resilient: bool = True
    max_restarts: int | None = None
    nodes_lost: frozenset[str] = frozenset()
    isolated: frozenset[str] = frozenset()
    closed: dict[str, str] = {}
    spare_nodes: tuple[str, ...] = ()
    built_ahead: dict[str, tuple[int, ...]] = {}
    can_create_nodes: bool = False
    promised_nodes: int = 0
    taken: tuple[Rung, ...] = ()
    failed: tuple[FailedRung, ...] = ()
    spent: tuple[Spent, ...] = ()
    node_failures: tuple[NodeFailure, ...] = ()
    min_nodes: int | None = None

    @property
    def attempts(self) -> int:
        """How many rungs were taken in this incident."""
        return len(self.taken)

    def usable_spares(self) -> tuple[str, ...]:
        """Return the spare nodes that are neither lost nor isolated, in their order."""
        return tuple(node for node in self.spare_nodes if node not in self.nodes_lost and node not in self.isolated)
