"""The ladder: from what is known of an incident to the rung that is taken, with the reasons for and against.

Pure, and without memory of its own: what was taken and what failed comes in with the facts. The recovery
machine asks at the beginning of an incident and after every new fault or missed deadline in it.
"""

from collections.abc import Callable

from ..protocol.incidents import BudgetUse
from ..protocol.types import Decision, Rung, SkippedRung
from . import recover, recover_in_place, reschedule_job, reschedule_pod, retry_step, stop
from .budgets import WORLD_RESTARTS, budget_use, counts_restarts, spent_out, tried
from .facts import Facts, Spent
from .placement import Placement, in_place_cost, place
from .rule import Case, Rule
from .schema import Policy, RungPolicy
from .wording import count

RULES: dict[Rung, Rule] = {
    Rung.RETRY_STEP: retry_step,
    Rung.RECOVER_IN_PLACE: recover_in_place,
    Rung.RECOVER: recover,
    Rung.RESCHEDULE_POD: reschedule_pod,
    Rung.RESCHEDULE_JOB: reschedule_job,
    Rung.STOP: stop,
}


class Ladder:
    """A policy's rungs, walked from the cheapest."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def decide(self, facts: Facts) -> Decision:
        """Return the cheapest rung that fits, why, and why each cheaper one was skipped. Never raises."""
        placement = self.placement(facts)
        skipped: list[SkippedRung] = []
        for rung in self._policy.ladder:
            case = Case(facts, placement, tuple(skipped))
            refused = [] if rung.rung is Rung.STOP else self._refusals(case, rung)
            if not refused:
                return Decision(rung.rung, RULES[rung.rung].why(case), tuple(skipped))
            skipped.append(SkippedRung(rung.rung, "; ".join(refused)))
        case = Case(facts, placement, tuple(skipped))
        return Decision(Rung.STOP, stop.why(case), tuple(skipped))

    def placement(self, facts: Facts) -> Placement:
        """Return which culprits may restart in place, which ranks would move, which nodes be left."""
        return place(facts, self._policy.rung(Rung.RECOVER_IN_PLACE))

    def nodes_to_leave(self, facts: Facts, rung: Rung) -> tuple[str, ...]:
        """Return the nodes that no rank stays on when `rung` is taken now, in order of name."""
        return _LEFT[rung](facts, self.placement(facts))

    def ranks_to_replace(self, facts: Facts, rung: Rung) -> tuple[int, ...]:
        """Return the ranks whose process is started anew when `rung` is taken now, in order."""
        return _REPLACED[rung](facts, self.placement(facts))

    def charges(self, facts: Facts, rung: Rung) -> tuple[Spent, ...]:
        """Return what taking `rung` now adds to `Facts.spent`.

        A `recover` that also restarts ranks in place pays for these from the budget of `recover_in_place`.
        """
        case = Case(facts, self.placement(facts))
        charges = [RULES[rung].cost(case)]
        in_place = self._policy.rung(Rung.RECOVER_IN_PLACE)
        if rung is Rung.RECOVER and in_place is not None and case.placement.in_place:
            charges.append(in_place_cost(facts, in_place, case.placement.in_place))
        return tuple(charges)

    def budgets(self, spent: tuple[Spent, ...], now: float) -> tuple[BudgetUse, ...]:
        """Return how much of every limit is spent at `now`, for status."""
        return budget_use(self._policy.ladder, spent, now)

    def _refusals(self, case: Case, rung: RungPolicy) -> list[str]:
        """Return every reason against `rung`: what was tried, whether it fits, what its budgets leave."""
        refused = []
        limit = self._policy.incident.max_attempts
        unlimited = counts_restarts(case.facts) and rung.rung in WORLD_RESTARTS
        if case.facts.attempts >= limit and not unlimited:
            taken = count(case.facts.attempts, "attempt")
            refused.append(f"{taken} made in this incident, incident.max_attempts is {limit}")
        refused += tried(case.facts, rung)
        rule = RULES[rung.rung]
        misfit = rule.unfit(case)
        if misfit is not None:
            refused.append(misfit)
        return refused + spent_out(case.facts, rung, rule.cost(case))


_Nodes = Callable[[Facts, Placement], tuple[str, ...]]
_Ranks = Callable[[Facts, Placement], tuple[int, ...]]

_LEFT: dict[Rung, _Nodes] = {
    Rung.RETRY_STEP: lambda facts, placement: (),
    Rung.RECOVER_IN_PLACE: lambda facts, placement: (),
    Rung.RECOVER: lambda facts, placement: placement.leave,
    Rung.RESCHEDULE_POD: lambda facts, placement: tuple(sorted(placement.closed)),
    Rung.RESCHEDULE_JOB: lambda facts, placement: tuple(sorted(set(facts.nodes.values()))),
    Rung.STOP: lambda facts, placement: (),
}

_REPLACED: dict[Rung, _Ranks] = {
    Rung.RETRY_STEP: lambda facts, placement: (),
    Rung.RECOVER_IN_PLACE: lambda facts, placement: tuple(sorted(set(facts.culprits))),
    Rung.RECOVER: lambda facts, placement: tuple(sorted({*placement.in_place, *placement.moved, *placement.homeless})),
    Rung.RESCHEDULE_POD: lambda facts, placement: tuple(sorted(facts.nodes)),
    Rung.RESCHEDULE_JOB: lambda facts, placement: tuple(sorted(facts.nodes)),
    Rung.STOP: lambda facts, placement: (),
}
