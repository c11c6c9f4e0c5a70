"""The ladder: from what is known of an incident to the rung that is taken, with the reasons for and against.

Pure, and without memory of its own: what was taken and what failed comes in with the facts. The recovery
machine asks at the beginning of an incident and after every new fault or missed deadline in it.

An incident that touches several roles takes the cheapest rung that all of their ladders allow.

Before any rung is asked, `place` says where the ranks at fault go: what is wrong with a node or a device comes first,
then what the policy still allows.
"""

from collections.abc import Iterable, Mapping

import msgspec

from ..protocol.incidents import BudgetUse
from ..protocol.types import Decision, FaultKind, FaultReport, Rung, SkippedRung
from ..protocol.wording import count
from .budgets import WORLD_RESTARTS, Account, Facts, Party, Roles, Spent, failures_by_node, tried, worn_out
from .fault_codes import TREATMENTS, Treatment
from .rungs import RULES, Placement, RungQuery, charge
from .schema import NodePolicy, Policy

# What a new process on the same device mends. NotHandleFault asks for nothing, so it bars nothing.
_IN_PLACE = frozenset({Treatment.RESTART, Treatment.NOTE})


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
        case, parties = self._question(facts)
        names = tuple(party.role for party in parties if party.role)
        listed = {entry.rung for party in parties for entry in party.ladder}
        taken = Rung.STOP  # which is on every ladder
        for rung in [rung for rung in Rung if rung in listed and rung is not Rung.STOP]:
            refused = self._refusals(case, rung, parties)
            if not refused:
                taken = rung
                break
            skipped = (*case.skipped, SkippedRung(rung, "; ".join(refused)))
            case = msgspec.structs.replace(case, skipped=skipped)
        whose = f"role{'' if len(names) == 1 else 's'} {', '.join(names)}: " if names else ""
        decision = Decision(taken, whose + RULES[taken].why(case), case.skipped, names)
        return Choice(decision, self._course(case, taken, parties))

    def decide(self, facts: Facts) -> Decision:
        """Return the decision alone: what an operator reads."""
        return self.choose(facts).decision

    def course(self, facts: Facts, rung: Rung) -> Course:
        """Return what taking `rung` now comes to, for what is planned."""
        case, parties = self._question(facts)
        return self._course(case, rung, parties)

    def refusals(self, facts: Facts, rung: Rung) -> tuple[str, ...]:
        """Return every reason against `rung` now, for what is planned and can wait; empty when it can be taken."""
        case, parties = self._question(facts)
        return tuple(self._refusals(case, rung, parties))

    def budgets(self, spent: tuple[Spent, ...], now: float) -> tuple[BudgetUse, ...]:
        """Return how much of every limit is spent at `now`, for status."""
        facts = Facts(now=now, spent=spent)
        return tuple(
            use
            for party in (self.roles.job, *self.roles.named)
            for entry in (party.ladder if not party.with_job else ())
            if entry.rung is not Rung.STOP
            for use in Account(facts, entry, party.charged).uses(party.prefix)
        )

    def _question(self, facts: Facts) -> tuple[RungQuery, tuple[Party, ...]]:
        """Return what each rung is asked, and the parties whose ladders are walked."""
        parties = self.roles.parties(dict.fromkeys((*facts.culprits, *facts.mendable)))
        return RungQuery(facts, place(facts, self.roles, self.policy.node)), parties

    def _course(self, case: RungQuery, rung: Rung, parties: tuple[Party, ...]) -> Course:
        """Return the course of a rung: each role pays for its own ranks, and the job for a restart of the world."""
        rule = RULES[rung]
        cost: list[Spent] = []
        for spent in rule.cost(case):
            cost += self._divided(spent, parties if spent.rung is rung else self.roles.parties(spent.ranks))
        if rung in WORLD_RESTARTS and not any(spent.role == "" for spent in cost):
            cost.append(Spent(rung, case.facts.now))
        return Course(rule.replaces(case), rule.leaves(case), tuple(cost), case.placement.to)

    def _refusals(self, case: RungQuery, rung: Rung, parties: tuple[Party, ...]) -> list[str]:
        """Return every reason against `rung`: what was tried, whether it fits, what its budgets leave."""
        facts = case.facts
        missing = [party.missing(rung) for party in parties if rung not in party.entries]
        if missing:
            return missing
        refused = []
        limit, attempts = self.policy.incident.max_attempts, len(facts.taken)
        if attempts >= limit and not (facts.max_restarts is not None and rung in WORLD_RESTARTS):
            taken = count(attempts, "attempt")
            refused.append(f"{taken} made in this incident, incident.max_attempts is {limit}")
        for party in parties:
            refused += tried(facts, party.entries[rung], party.prefix)
        misfit = RULES[rung].unfit(case)
        refused += [] if misfit is None else [misfit]
        own, *_ = RULES[rung].cost(case)
        costs = {spent.role: spent for spent in self._divided(own, parties)}
        if rung in WORLD_RESTARTS and "" not in costs:
            costs[""] = Spent(rung, facts.now)
        for party in (self.roles.job, *self.roles.named):
            entry = party.entries.get(rung)
            cost = None if party.with_job else costs.get(party.role)
            if entry is not None and cost is not None:
                prefix = "" if facts.max_restarts is not None else party.prefix
                refused += [prefix + reason for reason in Account(facts, entry, party.charged).over(cost)]
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


# --- where the ranks at fault go --------------------------------------------------------------------------------------


def place(facts: Facts, roles: Roles, node_policy: NodePolicy) -> Placement:
    """Say for each rank at fault whether it mends itself, restarts in place or moves, by its party's ladder."""
    in_use = set(facts.nodes.values())
    broken = _broken_nodes(facts, in_use)
    worn = _worn_nodes(facts, roles, node_policy, broken)
    at_fault = set(facts.culprits)
    mendable = [rank for rank in facts.mendable if rank not in at_fault]
    unmended = _unfit_for(Rung.RETRY_STEP, facts, roles, worn | broken, mendable)
    culprits = sorted({*at_fault, *unmended})
    barred = {**facts.closed, **broken}
    misfits = {}
    for rank in culprits:
        node = facts.nodes.get(rank)
        if node is None or node in barred:
            misfits[rank] = f"the node of rank {rank} is not known" if node is None else barred[node]
    obstacles = _unfit_for(Rung.RECOVER_IN_PLACE, facts, roles, worn, [r for r in culprits if r not in misfits])
    homeless = [rank for rank in culprits if rank not in facts.nodes]
    leave = {*broken, *(facts.nodes[rank] for rank in {*misfits, *obstacles}.difference(homeless))}
    moved = [rank for rank, node in facts.nodes.items() if node in leave] if leave else []
    away = {*moved, *homeless}
    to = _spares_for(facts, sorted(leave)) if leave else {}
    staying = {*culprits, *away}
    return Placement(
        culprits=tuple(culprits),
        mended=tuple(sorted(rank for rank in set(facts.mendable) if rank not in staying)),
        in_place=tuple(rank for rank in culprits if rank not in away),
        moved=tuple(sorted(moved)),
        leave=tuple(sorted(leave)),
        misfits=misfits,
        obstacles=obstacles,
        unmended=unmended,
        broken=broken,
        closed={node: why for node, why in facts.closed.items() if node in in_use} | broken,
        worn=worn,
        homeless=tuple(homeless),
        to=to,
        built=tuple(sorted(rank for rank in moved if rank in facts.built_ahead.get(to.get(facts.nodes[rank], ""), ()))),
    )


def _broken_nodes(facts: Facts, in_use: set[str]) -> dict[str, str]:
    """Return the nodes of the world on which no process may be started any more, with the reason for each."""
    broken = {node: f"node {node} is lost" for node in sorted(facts.nodes_lost & in_use)}
    for node in sorted(facts.isolated & in_use):
        broken.setdefault(node, f"node {node} is isolated")
    for fault in facts.faults:
        # A report that names its node is believed: ranks move.
        where = fault.node if fault.node is not None or fault.rank is None else facts.nodes.get(fault.rank)
        beyond_restart = fault.kind is FaultKind.NODE_LOST or TREATMENTS[fault.level] not in _IN_PLACE
        if where in in_use and beyond_restart:
            broken.setdefault(where, _hardware_reason(fault, where))
    return broken


def _hardware_reason(fault: FaultReport, node: str) -> str:
    if fault.kind is FaultKind.NODE_LOST:
        return f"node {node} is lost"
    where = f"node {node}" if fault.rank is None else f"rank {fault.rank} on node {node}"
    code = "" if fault.code is None else f" (code {fault.code})"
    return f"{where} has a fault of level {fault.level}{code}, which no restart in place mends"


def _worn_nodes(facts: Facts, roles: Roles, policy: NodePolicy, broken: dict[str, str]) -> dict[str, str]:
    """Return the nodes at fault that have failed too often, where another could take their place."""
    at_fault = (*facts.culprits, *facts.mendable)
    replaceable = facts.can_create_nodes or facts.spare_nodes
    if policy.failures is None or not replaceable:
        return {}
    leave_nodes = {Rung.RECOVER, *WORLD_RESTARTS}
    if any(leave_nodes.isdisjoint(party.entries) for party in roles.parties(at_fault)):
        return {}
    failures = failures_by_node(facts.node_failures, policy, facts.now)
    nodes = sorted({facts.nodes[rank] for rank in at_fault if rank in facts.nodes} - broken.keys())
    reasons = {node: worn_out(node, failures[node], policy) for node in nodes}
    return {node: reason for node, reason in reasons.items() if reason is not None}


def _unfit_for(rung: Rung, facts: Facts, roles: Roles, spoiled: dict[str, str], ranks: list[int]) -> dict[int, str]:
    """Say for each of `ranks` why it may not be treated by `rung`: its node is spoiled, or its party's ladder forbids.

    `spoiled`: nodes, each with what speaks against it.
    """
    refused: dict[int, str] = {}
    for party, members in roles.divide(ranks):
        entry = party.entries.get(rung)
        if entry is None:
            refused |= dict.fromkeys(members, party.missing(rung))
            continue
        account = Account(facts, entry, party.charged)
        everywhere = tried(facts, entry) + account.over(Spent(rung, facts.now))
        for rank in members:
            reasons = everywhere or account.over(charge(facts, rung, (rank,)))
            if reasons:
                refused[rank] = f"{party.prefix}{rung}: {'; '.join(reasons)}"
    return refused | {rank: spoiled[facts.nodes[rank]] for rank in ranks if facts.nodes.get(rank, "") in spoiled}


def _spares_for(facts: Facts, leave: list[str]) -> dict[str, str]:
    """Give each node that is left a spare: one that has built its ranks, or else the one that has waited longest."""
    spares, to = list(facts.spare_nodes), {}
    for node in leave if facts.built_ahead else ():
        ranks = [rank for rank, where in facts.nodes.items() if where == node]
        best = best_spare(spares, ranks, facts.built_ahead)
        if not set(ranks).isdisjoint(facts.built_ahead.get(best, ())):
            to[node] = best
            spares.remove(best)
    left = [node for node in leave if node not in to]
    return to | dict(zip(left, spares, strict=False))


def best_spare(spares: Iterable[str], ranks: Iterable[int], built_ahead: Mapping[str, Iterable[int]]) -> str:
    """Return the spare for the ranks of a node: the one that has built most of them, or else the first.

    `built_ahead`: by spare, the ranks that are built there. Empty: there is no spare.
    """
    wanted = set(ranks)
    return max(spares, key=lambda spare: len(wanted.intersection(built_ahead.get(spare, ()))), default="")
