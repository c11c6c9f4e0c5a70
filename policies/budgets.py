"""Counting: how often a rung was taken, and whether it may be taken once more.

A budget is a limit over a sliding window of the job's history. What an incident has already tried limits a
rung too: a rung that failed is not taken again in the same incident, and one that was cut short again and
again has an end.
"""

from collections import Counter
from collections.abc import Iterable

from ..protocol.incidents import BudgetUse
from ..protocol.types import Rung
from .facts import Facts, Spent
from .schema import Budget, RungPolicy
from .wording import count

WORLD_RESTARTS = (Rung.RESCHEDULE_POD, Rung.RESCHEDULE_JOB)


def tried(facts: Facts, rung: RungPolicy) -> list[str]:
    """Say why this incident's own history forbids `rung`; empty when it does not."""
    failures = [failed.reason for failed in facts.failed if failed.rung is rung.rung]
    if failures:
        return [f"failed before in this incident: {failures[-1]}"]
    if counts_restarts(facts) and rung.rung in WORLD_RESTARTS:
        return []
    times = facts.taken.count(rung.rung)
    if times >= rung.attempts:
        return [f"taken {count(times, 'time')} in this incident, attempts is {rung.attempts}"]
    return []


def spent_out(facts: Facts, rung: RungPolicy, cost: Spent) -> list[str]:
    """Name each budget of `rung` that has no room left for `cost`; empty when all have."""
    if counts_restarts(facts) and rung.rung in WORLD_RESTARTS:
        return _restarts_spent(facts)
    budget = rung.budget
    within = in_window(facts.spent, rung.rung, budget, facts.now)
    over = _over(budget, "per_job", budget.per_job, len(within))
    if budget.per_rank is not None:
        used = Counter(rank for entry in within for rank in set(entry.ranks))
        for rank in cost.ranks:
            over += _over(budget, f"per_rank of rank {rank}", budget.per_rank, used[rank])
    if budget.per_node is not None:
        used_on = Counter(node for entry in within for node in set(entry.nodes))
        for node in cost.nodes:
            over += _over(budget, f"per_node of node {node}", budget.per_node, used_on[node])
    return over


def counts_restarts(facts: Facts) -> bool:
    """Whether `--max-restarts` holds in place of the policy's limits on restarts of the world."""
    return not facts.resilient and facts.max_restarts is not None


def in_window(spent: Iterable[Spent], rung: Rung, budget: Budget, now: float) -> list[Spent]:
    """Return what of `spent` the budget of `rung` still counts at `now`."""
    return [
        entry for entry in spent if entry.rung is rung and (budget.window_s == 0 or now - entry.at_s < budget.window_s)
    ]


def budget_use(ladder: Iterable[RungPolicy], spent: tuple[Spent, ...], now: float) -> tuple[BudgetUse, ...]:
    """Return how much of each limit is spent; for limits per rank and per node, by whoever spent most."""
    uses = []
    for rung in ladder:
        within = in_window(spent, rung.rung, rung.budget, now)
        if rung.rung is Rung.STOP:
            continue
        if rung.budget.per_job is not None:
            uses.append(BudgetUse(f"{rung.rung} per job", len(within), rung.budget.per_job))
        if rung.budget.per_rank is not None:
            used = max(Counter(rank for entry in within for rank in set(entry.ranks)).values(), default=0)
            uses.append(BudgetUse(f"{rung.rung} per rank", used, rung.budget.per_rank))
        if rung.budget.per_node is not None:
            used = max(Counter(node for entry in within for node in set(entry.nodes)).values(), default=0)
            uses.append(BudgetUse(f"{rung.rung} per node", used, rung.budget.per_node))
    return tuple(uses)


def _over(budget: Budget, name: str, limit: int | None, used: int) -> list[str]:
    if limit is None or used < limit:
        return []
    window = "in this job" if budget.window_s == 0 else f"within {budget.window_s:g} s"
    return [f"budget {name} is spent: {used} of {limit} {window}"]


def _restarts_spent(facts: Facts) -> list[str]:
    limit = facts.max_restarts or 0
    used = sum(entry.rung in WORLD_RESTARTS for entry in facts.spent)
    return [] if used < limit else [f"budget max-restarts is spent: {used} of {limit} in this job"]
