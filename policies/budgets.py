"""Budgets: how often a rung was taken, and whether it may be taken once more.

A budget is a limit over a sliding window of the job's history. What an incident has already tried limits a
rung too: a rung that failed is not taken again in the same incident, and one that was cut short again and
again has an end.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TypeVar

from ..protocol.incidents import BudgetUse
from ..protocol.types import Rung
from ..protocol.wording import count, nodes_text, ranks_text
from .facts import Facts, NodeFailure, Spent
from .roles import WORLD_RESTARTS
from .schema import Budget, NodePolicy, RungPolicy

_Who = TypeVar("_Who", int, str)


def failed_before(facts: Facts, rung: Rung) -> list[str]:
    """Say that `rung` has failed in this incident, or cannot help in it; empty when it has not."""
    failures = [failed.reason for failed in facts.failed if failed.rung is rung]
    if not failures:
        return []
    what = "failed before" if rung in facts.taken else "cannot help"
    return [f"{what} in this incident: {failures[-1]}"]


def tried(facts: Facts, entry: RungPolicy) -> list[str]:
    """Say why this incident's own history forbids the rung; empty when it does not."""
    failures = failed_before(facts, entry.rung)
    if failures:
        return failures
    if counts_restarts(facts) and entry.rung in WORLD_RESTARTS:
        return []
    times = facts.taken.count(entry.rung)
    if times >= entry.attempts:
        return [f"taken {count(times, 'time')} in this incident, attempts is {entry.attempts}"]
    return []


class Account:
    """What is spent of one rung's budgets, by one party (`role`; empty: the job), when the ladder is asked."""

    def __init__(self, facts: Facts, entry: RungPolicy, role: str = "") -> None:
        self._facts = facts
        self._entry = entry
        self._within = in_window(facts.spent, entry, facts.now, role)
        self._by_rank = Counter(rank for spent in self._within for rank in set(spent.ranks))
        self._by_node = Counter(node for spent in self._within for node in set(spent.nodes))

    def over(self, cost: Spent) -> list[str]:
        """Return each budget that has no room left for `cost`, with the ranks or nodes; empty when all have."""
        if counts_restarts(self._facts) and self._entry.rung in WORLD_RESTARTS:
            return _restarts_spent(self._facts)
        budget = self._entry.budget
        over = []
        if budget.per_job is not None and len(self._within) >= budget.per_job:
            over.append(_over(budget, "per_job", len(self._within), budget.per_job))
        for used, ranks in _used_up(cost.ranks, self._by_rank, budget.per_rank).items():
            over.append(_over(budget, f"per_rank of {ranks_text(ranks)}", used, budget.per_rank))
        for used, nodes in _used_up(cost.nodes, self._by_node, budget.per_node).items():
            over.append(_over(budget, f"per_node of {nodes_text(nodes)}", used, budget.per_node))
        return over


def counts_restarts(facts: Facts) -> bool:
    """Return whether `--max-restarts` holds in place of the policy's limits on restarts of the world."""
    return not facts.resilient and facts.max_restarts is not None


def in_window(spent: Iterable[Spent], entry: RungPolicy, now: float, role: str = "") -> list[Spent]:
    """Return what of `spent` the budget of a rung on a party's ladder still counts at `now`."""
    window_s = entry.budget.window_s
    return [
        each for each in spent if each.rung is entry.rung and each.role == role and _counts(each.at_s, window_s, now)
    ]


def still_counted(spent: Iterable[Spent], ladders: Mapping[str, Iterable[RungPolicy]], now: float) -> list[Spent]:
    """Return what of `spent` can count at `now` or later. `ladders`: by whose budgets they have (empty: the job's).

    A job of months has had thousands of incidents; what no budget will look at again need not be remembered. A restart
    of the world is: `--max-restarts` has no window.
    """
    entries = {(role, entry.rung): entry for role, ladder in ladders.items() for entry in ladder}
    return [
        each
        for each in spent
        if each.rung in WORLD_RESTARTS or _can_count(each, entries.get((each.role, each.rung)), now)
    ]


def _can_count(spent: Spent, entry: RungPolicy | None, now: float) -> bool:
    if entry is None:
        return False
    budget = entry.budget
    if budget.per_job is None and budget.per_rank is None and budget.per_node is None:
        return False
    return _counts(spent.at_s, budget.window_s, now)


def _counts(at_s: float, window_s: float, now: float) -> bool:
    """Say whether what happened at `at_s` is in a window at `now`. 0: the whole job."""
    return window_s == 0 or now - at_s < window_s


def budget_use(
    ladder: Iterable[RungPolicy], spent: tuple[Spent, ...], now: float, role: str = ""
) -> tuple[BudgetUse, ...]:
    """Return how much of each limit is spent; for limits per rank and per node, by the one that spent most."""
    uses = []
    prefix = f"role {role}: " if role else ""
    for rung in ladder:
        within = in_window(spent, rung, now, role)
        if rung.rung is Rung.STOP:
            continue
        if rung.budget.per_job is not None:
            uses.append(BudgetUse(f"{prefix}{rung.rung} per job", len(within), rung.budget.per_job))
        if rung.budget.per_rank is not None:
            used = max(Counter(rank for entry in within for rank in set(entry.ranks)).values(), default=0)
            uses.append(BudgetUse(f"{prefix}{rung.rung} per rank", used, rung.budget.per_rank))
        if rung.budget.per_node is not None:
            used = max(Counter(node for entry in within for node in set(entry.nodes)).values(), default=0)
            uses.append(BudgetUse(f"{prefix}{rung.rung} per node", used, rung.budget.per_node))
    return tuple(uses)


def failures_by_node(failures: Iterable[NodeFailure], policy: NodePolicy, now: float) -> Counter[str]:
    """Return how many failures each node has had within the window at `now`."""
    return Counter(each.node for each in failures if _counts(each.at_s, policy.window_s, now))


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


def _restarts_spent(facts: Facts) -> list[str]:
    limit = facts.max_restarts or 0
    used = sum(entry.rung in WORLD_RESTARTS for entry in facts.spent)
    return [] if used < limit else [f"budget max-restarts is spent: {used} of {limit} in this job"]
