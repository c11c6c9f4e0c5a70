"""The facts of an incident, who pays for it, and what the budgets leave.

`Facts` are all that the ladder may look at. Every rank belongs to one party: its role, or the ranks without a role,
which go by the job's ladder. A role that names no ladder fails over with the job: a fault of one of its ranks restarts
the whole world, by the job's ladder. A budget is a limit over a sliding window of the job's history. The incident's own
history limits a rung too: a rung that failed is not taken again in the same incident, and one that was cut short again
and again has an end.
"""

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

import msgspec

from ..protocol.incidents import BudgetUse
from ..protocol.types import FaultReport, Rung
from ..protocol.wording import count, nodes_text, ranks_text
from .schema import Budget, NodePolicy, Policy, RungPolicy


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


class WrongVote(msgspec.Struct, frozen=True):
    """A rank was wrong in a vote on what all ranks hold, while it was on this node: a strike."""

    rank: int
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

    `resilient`: at least one rank of the running world has reached a resilient train function; without one no process
    can be kept. `max_restarts`: limit for restarts of a world that is not resilient (torchrun's flag); it takes the
    place of the budgets of `reschedule_pod` and `reschedule_job`. None: the policy's budgets hold, as in every
    resilient world. A job that was resilient once, and is caught while it starts, gets None; so does a fault of
    hardware, which is not the script's doing.

    `closed`: nodes in use on which no new process is to be started, with the reason; what runs there stays.

    `spare_nodes`: those that can be used, in the order in which they are taken. `built_ahead`: by spare, the ranks
    whose next process is built there. `promised_nodes`: how many nodes the platform has been asked for, and has not
    brought yet.

    `min_nodes`: with how few nodes the world may continue where lost ones cannot be replaced; None: with no fewer.

    `taken`: the rungs taken so far in this incident, in order; `failed`: those of them that failed by
    themselves (a rung that another rank's fault cut short has not failed). `spent`: what was taken in the
    whole job.

    `forbidden`: rungs that an operator does not want taken now, with the reason.
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
    forbidden: dict[Rung, str] = {}


# Rungs after which every process has been restarted.
WORLD_RESTARTS = (Rung.RESCHEDULE_POD, Rung.RESCHEDULE_JOB)

_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)


class Party(msgspec.Struct, frozen=True):
    """Those that recover by one ladder. `role` is empty for the ranks without a role.

    `entries`: the rungs that it can take. `charged`: the owner of the budgets that it spends, its role or (empty) the
    job. `prefix`: the words before a reason that is this party's own. `with_job`: a role without a ladder. It has the
    job's, of which it can only take the rungs that restart the world.
    """

    role: str
    ladder: tuple[RungPolicy, ...]
    entries: dict[Rung, RungPolicy]
    charged: str
    prefix: str
    with_job: bool

    @classmethod
    def of(cls, role: str, own: tuple[RungPolicy, ...] | None, of_job: tuple[RungPolicy, ...]) -> "Party":
        """Make the party of a role with a ladder of its `own`, or None: with that of the job."""
        ladder = of_job if own is None else own
        taken = {*WORLD_RESTARTS, Rung.STOP} if own is None else {*Rung}
        entries = {entry.rung: entry for entry in ladder if entry.rung in taken}
        prefix = f"role {role}: " if role else ""
        return cls(role, ladder, entries, "" if own is None else role, prefix, own is None)

    def missing(self, rung: Rung) -> str:
        """Say why the party has no entry for `rung`."""
        if self.with_job and any(entry.rung is rung for entry in self.ladder):
            return f"role {self.role} has no ladder of its own, so it fails over with the job"
        return f"{self.prefix}{rung} is not on the ladder"


def parse_ranks(text: str) -> tuple[tuple[int, int], ...]:
    """Return the ranges, first and last rank, of text like `0-5,8`. Raises ValueError, in words, when it is not one."""
    ranges = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{part.strip()[:32]!r} is no rank and no range")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"the range {part.strip()} runs backwards")
        ranges.append((first, last))
    return tuple(sorted(ranges))


class Roles:
    """The role of each rank, and the party of each role. The policy has been checked."""

    def __init__(self, policy: Policy) -> None:
        spans = [(first, last, name) for name, role in policy.roles.items() for first, last in parse_ranks(role.ranks)]
        self._spans = sorted(spans)
        self._firsts = [first for first, _, _ in self._spans]
        self.job = Party.of("", policy.ladder, policy.ladder)  # the ranks without a role, and faults of no rank
        self.named = tuple(Party.of(name, role.ladder, policy.ladder) for name, role in policy.roles.items())

    @property
    def highest_rank(self) -> int:
        """The highest rank that has a role; -1 without roles."""
        return max((last for _, last, _ in self._spans), default=-1)

    def role_of(self, rank: int) -> str:
        """Return the role of a rank; empty for a rank without one."""
        index = bisect_right(self._firsts, rank) - 1
        return self._spans[index][2] if index >= 0 and rank <= self._spans[index][1] else ""

    def divide(self, ranks: Iterable[int]) -> tuple[tuple[Party, list[int]], ...]:
        """Return the parties of `ranks`, each with its ranks: those without a role first, then as the policy lists."""
        members: dict[str, list[int]] = {}
        for rank in ranks:
            members.setdefault(self.role_of(rank), []).append(rank)
        return tuple((party, members[party.role]) for party in (self.job, *self.named) if party.role in members)

    def parties(self, ranks: Iterable[int]) -> tuple[Party, ...]:
        """Return the parties of `ranks`. A fault of no rank is the job's."""
        return tuple(party for party, _ in self.divide(ranks)) or (self.job,)

    def still_counted(self, spent: Iterable[Spent], now: float) -> list[Spent]:
        """Return what of `spent` can count at `now` or later.

        A job of months has had thousands of incidents; what no budget will look at again need not be remembered. A
        restart of the world is: `--max-restarts` has no window.
        """
        parties = {party.role: party.entries for party in (self.job, *self.named) if not party.with_job}
        return [
            each
            for each in spent
            if each.rung in WORLD_RESTARTS or _can_count(each, parties.get(each.role, {}).get(each.rung), now)
        ]


def beyond(policy: Policy, world_size: int) -> str | None:
    """Say which role names a rank that a world of `world_size` does not have; None when all are in it."""
    for name, role in policy.roles.items():
        last = max(last for _, last in parse_ranks(role.ranks))
        if last >= world_size:
            return f"roles.{name}.ranks: there is no rank {last} in this job; allowed: 0 to {world_size - 1}"
    return None


_Who = TypeVar("_Who", int, str)


def tried(facts: Facts, entry: RungPolicy, prefix: str = "") -> list[str]:
    """Say why this incident's own history forbids the rung; empty when it does not.

    `prefix` stands before a limit, which is one party's own, and not before a failure, which is that of all parties.
    """
    if entry.rung in facts.forbidden:
        return [facts.forbidden[entry.rung]]
    failures = [failed.reason for failed in facts.failed if failed.rung is entry.rung]
    if failures:
        what = "failed before" if entry.rung in facts.taken else "cannot help"
        return [f"{what} in this incident: {failures[-1]}"]
    if facts.max_restarts is not None and entry.rung in WORLD_RESTARTS:
        return []
    times = facts.taken.count(entry.rung)
    if times >= entry.attempts:
        return [f"{prefix}taken {count(times, 'time')} in this incident, attempts is {entry.attempts}"]
    return []


class Account:
    """The share of one rung's budgets that one party (`role`; empty: the job) has spent when the ladder is asked."""

    def __init__(self, facts: Facts, entry: RungPolicy, role: str = "") -> None:
        self._facts = facts
        self._entry = entry
        now, window_s = facts.now, entry.budget.window_s
        self._within = [
            spent
            for spent in facts.spent
            if spent.rung is entry.rung and spent.role == role and in_window(spent.at_s, window_s, now)
        ]
        self._by_rank = Counter(rank for spent in self._within for rank in set(spent.ranks))
        self._by_node = Counter(node for spent in self._within for node in set(spent.nodes))

    def over(self, cost: Spent) -> list[str]:
        """Return each budget that has no room left for `cost`, with the ranks or nodes; empty when all have."""
        limit, budget, over = self._facts.max_restarts, self._entry.budget, []
        if limit is not None and self._entry.rung in WORLD_RESTARTS:
            used = sum(spent.rung in WORLD_RESTARTS for spent in self._facts.spent)
            return [] if used < limit else [f"budget max-restarts is spent: {used} of {limit} in this job"]
        if budget.per_job is not None and len(self._within) >= budget.per_job:
            over.append(_over(budget, "per_job", len(self._within), budget.per_job))
        for used, ranks in _used_up(cost.ranks, self._by_rank, budget.per_rank).items():
            over.append(_over(budget, f"per_rank of {ranks_text(ranks)}", used, budget.per_rank))
        for used, nodes in _used_up(cost.nodes, self._by_node, budget.per_node).items():
            over.append(_over(budget, f"per_node of {nodes_text(nodes)}", used, budget.per_node))
        return over

    def uses(self, prefix: str) -> Iterator[BudgetUse]:
        """Yield how much of each limit is spent; of limits per rank and per node, by the one that spent most."""
        budget, name = self._entry.budget, f"{prefix}{self._entry.rung}"
        if budget.per_job is not None:
            yield BudgetUse(f"{name} per job", len(self._within), budget.per_job)
        if budget.per_rank is not None:
            yield BudgetUse(f"{name} per rank", max(self._by_rank.values(), default=0), budget.per_rank)
        if budget.per_node is not None:
            yield BudgetUse(f"{name} per node", max(self._by_node.values(), default=0), budget.per_node)


def _can_count(spent: Spent, entry: RungPolicy | None, now: float) -> bool:
    if entry is None or {entry.budget.per_job, entry.budget.per_rank, entry.budget.per_node} == {None}:
        return False
    return in_window(spent.at_s, entry.budget.window_s, now)


def in_window(at_s: float, window_s: float, now: float) -> bool:
    """Say whether what happened at `at_s` is in a window at `now`. 0: the whole job."""
    return window_s == 0 or now - at_s < window_s


def failures_by_node(failures: Iterable[NodeFailure], policy: NodePolicy, now: float) -> Counter[str]:
    """Return how many failures each node has had within the window at `now`."""
    return Counter(each.node for each in failures if in_window(each.at_s, policy.window_s, now))


def worn_out(node: str, failures: int, policy: NodePolicy) -> str | None:
    """Return why a node is not used any longer: it has failed too often. None when it has not."""
    if policy.failures is None or failures <= policy.failures:
        return None
    window = _window(policy.window_s)
    return f"node {node} has had {count(failures, 'failure')} {window}, node.failures is {policy.failures}"


def _used_up(who: Iterable[_Who], used: Mapping[_Who, int], limit: int | None) -> dict[int, list[_Who]]:
    """Return the members of `who` that have used up `limit`, by how much they have used."""
    over: dict[int, list[_Who]] = {}
    for each in who if limit is not None else ():
        if limit is not None and used.get(each, 0) >= limit:
            over.setdefault(used[each], []).append(each)
    return over


def _over(budget: Budget, name: str, used: int, limit: int | None) -> str:
    return f"budget {name} is spent: {used} of {limit} {_window(budget.window_s)}"


def _window(window_s: float) -> str:
    return "in this job" if window_s == 0 else f"within {window_s:g} s"
