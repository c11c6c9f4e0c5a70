"""The ladder: from what is known of an incident to the rung that is taken, with the reasons for and against.

Pure, and without memory of its own: what was taken and what failed comes in with the facts. The recovery
machine asks at the beginning of an incident and after every new fault or missed deadline in it.

An incident that touches several roles takes the cheapest rung that all of their ladders allow.
"""

from collections.abc import Iterable

import msgspec

from ..protocol.incidents import BudgetUse
from ..protocol.types import Decision, Rung, SkippedRung
from ..protocol.wording import count
from .budgets import (
    WORLD_RESTARTS,
    Account,
    Facts,
    Party,
    Roles,
    Spent,
    budget_use,
    counts_restarts,
    failed_before,
    still_counted,
    tried,
)
from .placement import Placement, place
from .rungs import RULES, RungQuery
from .schema import Policy


class Course(msgspec.Struct, frozen=True):
    """A rung that could be taken, with what it replaces, leaves and costs.

    `replace`: the ranks whose process is restarted; `leave`: the nodes that no rank stays on; `cost`: what it adds
    to `Facts.spent`; `to`: the spare that takes the place of each node, as far as there are spares.
    """

    replace: tuple[int, ...]
    leave: tuple[str, ...]
    cost: tuple[Spent, ...]
    to: dict[str, str] = {}


class Choice(msgspec.Struct, frozen=True):
    """The ladder's answer: the rung with its reasons, in words for the record, and what it comes to."""

    decision: Decision
    course: Course


class Ladder:
    """A policy's rungs, walked from the cheapest."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.roles = Roles(policy)

    def choose(self, facts: Facts) -> Choice:
        """Return the cheapest rung that fits, why, why each cheaper one was skipped, and what it does. Never raises."""
        placement, parties = self.placement(facts), self._parties(facts)
        names = tuple(party.role for party in parties if party.role)
        skipped: list[SkippedRung] = []
        for rung in self._rungs(parties):
            case = RungQuery(facts, placement, tuple(skipped))
            refused = self._refusals(case, rung, parties)
            if not refused:
                return self._choice(case, rung, parties, names)
            skipped.append(SkippedRung(rung, "; ".join(refused)))
        return self._choice(RungQuery(facts, placement, tuple(skipped)), Rung.STOP, parties, names)

    def decide(self, facts: Facts) -> Decision:
        """Return the decision alone: what an operator reads."""
        return self.choose(facts).decision

    def placement(self, facts: Facts) -> Placement:
        """Return which ranks mend themselves, may restart in place, or would move, and which nodes are left."""
        return place(facts, self.roles, self.policy.node)

    def course(self, facts: Facts, rung: Rung) -> Course:
        """Return what taking `rung` now comes to, for what is planned."""
        return self._course(RungQuery(facts, self.placement(facts)), rung, self._parties(facts))

    def refusals(self, facts: Facts, rung: Rung) -> tuple[str, ...]:
        """Return every reason against `rung` now, for what is planned and can wait; empty when it can be taken."""
        return tuple(self._refusals(RungQuery(facts, self.placement(facts)), rung, self._parties(facts)))

    def budgets(self, spent: tuple[Spent, ...], now: float) -> tuple[BudgetUse, ...]:
        """Return how much of every limit is spent at `now`, for status."""
        uses = budget_use(self.policy.ladder, spent, now)
        for party in self.roles.named:
            uses += () if party.with_job else budget_use(party.ladder, spent, now, party.role)
        return uses

    def still_counted(self, spent: Iterable[Spent], now: float) -> list[Spent]:
        """Return what of `spent` a decision at `now` or later can depend on."""
        ladders = {party.role: party.ladder for party in (self.roles.job, *self.roles.named) if not party.with_job}
        return still_counted(spent, ladders, now)

    def _choice(self, case: RungQuery, rung: Rung, parties: tuple[Party, ...], names: tuple[str, ...]) -> Choice:
        decision = Decision(rung, _of_roles(names) + RULES[rung].why(case), case.skipped, names)
        return Choice(decision, self._course(case, rung, parties))

    def _course(self, case: RungQuery, rung: Rung, parties: tuple[Party, ...]) -> Course:
        """Return the course of a rung: each role pays for its own ranks, and the job for a restart of the world."""
        rule = RULES[rung]
        cost: list[Spent] = []
        for spent in rule.cost(case):
            cost += self._divided(spent, parties if spent.rung is rung else self.roles.parties(spent.ranks))
        if rung in WORLD_RESTARTS and not any(spent.role == "" for spent in cost):
            cost.append(Spent(rung, case.facts.now))
        return Course(rule.replaces(case), rule.leaves(case), tuple(cost), case.placement.to)

    def _parties(self, facts: Facts) -> tuple[Party, ...]:
        return self.roles.parties(dict.fromkeys((*facts.culprits, *facts.mendable)))

    @staticmethod
    def _rungs(parties: Iterable[Party]) -> list[Rung]:
        """Return the rungs of all parties' ladders, from the cheapest; the stop is on all of them."""
        listed = {entry.rung for party in parties for entry in party.ladder}
        return [rung for rung in Rung if rung in listed and rung is not Rung.STOP]

    def _refusals(self, case: RungQuery, rung: Rung, parties: tuple[Party, ...]) -> list[str]:
        """Return every reason against `rung`: what was tried, whether it fits, what its budgets leave."""
        facts = case.facts
        missing = [party.missing(rung) for party in parties if party.entry(rung) is None]
        if missing:
            return missing
        refused = []
        limit = self.policy.incident.max_attempts
        unlimited = counts_restarts(facts) and rung in WORLD_RESTARTS
        if facts.attempts >= limit and not unlimited:
            taken = count(facts.attempts, "attempt")
            refused.append(f"{taken} made in this incident, incident.max_attempts is {limit}")
        failed = failed_before(facts, rung)
        refused += failed
        entries = [(party, entry) for party in parties if (entry := party.entry(rung)) is not None]
        if not failed:
            refused += [party.prefix + reason for party, entry in entries for reason in tried(facts, entry)]
        rule = RULES[rung]
        misfit = rule.unfit(case)
        if misfit is not None:
            refused.append(misfit)
        return refused + self._spent(case, rung, parties)

    def _spent(self, case: RungQuery, rung: Rung, parties: tuple[Party, ...]) -> list[str]:
        """Return each budget of `rung`, of any party, that has no room left."""
        own, *_ = RULES[rung].cost(case)
        costs = {spent.role: spent for spent in self._divided(own, parties)}
        if rung in WORLD_RESTARTS and "" not in costs:
            costs[""] = Spent(rung, case.facts.now)
        refused = []
        for party in (self.roles.job, *self.roles.named):
            entry = party.entry(rung)
            cost = None if party.with_job else costs.get(party.role)
            if entry is not None and cost is not None:
                over = Account(case.facts, entry, party.charged).over(cost)
                refused += [reason if counts_restarts(case.facts) else party.prefix + reason for reason in over]
        return list(dict.fromkeys(refused))

    def _divided(self, cost: Spent, parties: tuple[Party, ...]) -> list[Spent]:
        """Divide a cost among parties: each pays for its own ranks, the first one for healthy neighbours."""
        payers = list(dict.fromkeys(party.charged for party in parties))
        if len(payers) == 1:
            return [msgspec.structs.replace(cost, role=payers[0])]
        ranks: dict[str, list[int]] = {payer: [] for payer in payers}
        for party, members in self.roles.divide(cost.ranks):
            ranks.get(party.charged, ranks[payers[0]]).extend(members)
        return [
            msgspec.structs.replace(cost, role=payer, ranks=tuple(sorted(members))) for payer, members in ranks.items()
        ]


def _of_roles(names: tuple[str, ...]) -> str:
    if not names:
        return ""
    return f"role {names[0]}: " if len(names) == 1 else f"roles {', '.join(names)}: "
