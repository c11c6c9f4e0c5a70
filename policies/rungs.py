"""The six rungs of the ladder, from the cheapest: when each fits, why it is right, what it replaces, leaves and costs.

A rung is a small class of pure functions of one question (`RungQuery`). The ladder walks over them without knowing any;
budgets, and what an incident has tried already, are its own business. A rung that replaces no process, leaves no node,
or always fits, inherits that from `RungRule`.

What is planned ahead of a fault is asked and worded here, too: the drain of a node that is not well (`recover` between
two steps), and a world that continues with fewer nodes or grows again (`reschedule_pod`).
"""

from collections.abc import Iterable, Sequence

import msgspec

from ..protocol.types import Decision, FaultKind, FaultReport, RestoreSource, Rung, SkippedRung
from ..protocol.wording import count, failed_script, faults_text, last_words, nodes_text, ranks_text
from .budgets import Facts, Spent
from .schema import Policy, SubHealthAction

_PASSING = frozenset({FaultKind.COMMUNICATION, FaultKind.LINK_UP, FaultKind.STALL})
_LEAVES_NOBODY = "a node that is not well is to be left, and this rung leaves none"


class Placement(msgspec.Struct, frozen=True):
    """Where the ranks at fault go: nowhere, as their process mends itself; back to their node; or away from it.

    One incident can have all three: `mended`, `in_place` and `moved` ranks, and the nodes to `leave`, each in order.

    `mended` are at fault and keep their process; `culprits` are at fault and lose it. `moved` are all ranks on the
    nodes of `leave`, healthy neighbours included. `misfits` say why a culprit cannot be restarted in place because of
    what is wrong with it, `obstacles` why the policy does not allow it, `unmended` why one that could mend itself may
    not. `broken` are the nodes of `leave` on which nothing may stay, whatever the rung; `closed` are these and those
    that only get no new process, for rungs that restart every process; `worn` are nodes that have failed too often
    and can be replaced. `homeless` are culprits whose node is not known. `to` is the spare that the ranks of each node
    of `leave` move to, as far as there are spares, and `built` are those of `moved` whose next process is built there.
    """

    culprits: tuple[int, ...] = ()
    mended: tuple[int, ...] = ()
    in_place: tuple[int, ...] = ()
    moved: tuple[int, ...] = ()
    leave: tuple[str, ...] = ()
    misfits: dict[int, str] = {}
    obstacles: dict[int, str] = {}
    unmended: dict[int, str] = {}
    broken: dict[str, str] = {}
    closed: dict[str, str] = {}
    worn: dict[str, str] = {}
    homeless: tuple[int, ...] = ()
    to: dict[str, str] = {}
    built: tuple[int, ...] = ()


class RungQuery(msgspec.Struct, frozen=True):
    """The question to a rung: the facts, where ranks would go, and the cheaper rungs refused so far."""

    facts: Facts
    placement: Placement
    skipped: tuple[SkippedRung, ...] = ()

    @property
    def kept(self) -> frozenset[int]:
        """The ranks whose process can stay: the healthy ones, and those that mend themselves."""
        return self.facts.healthy.difference(self.placement.culprits).union(self.placement.mended)

    @property
    def seen(self) -> str:
        """The fault in words."""
        return faults_text(self.facts.faults) or "no fault is left"

    def nothing_to_keep(self) -> str | None:
        """Say why no process can be kept alive, None when some can. Rungs that keep processes ask this first."""
        if not self.facts.resilient:
            return "no rank reached a resilient train function, so no process can be kept"
        return None if self.kept else "no healthy rank is left, so there is no process to keep"

    def mending_text(self) -> str:
        """Return a clause about the ranks that keep their process and mend their fault in it."""
        mended = self.placement.mended
        does = (
            "keeps its process and mends it there" if len(mended) == 1 else "keep their processes and mend them there"
        )
        return f", {ranks_text(mended)} {does}" if mended else ""


def charge(facts: Facts, rung: Rung, ranks: Iterable[int]) -> Spent:
    """Return what treating `ranks` by `rung` takes from its budgets."""
    ranks = tuple(sorted(set(ranks)))
    nodes = {facts.nodes[rank] for rank in ranks if rank in facts.nodes}
    return Spent(rung, facts.now, ranks, tuple(sorted(nodes)))


class RungRule:
    """A rung that always fits, replaces no process, leaves no node, and takes its name from the ladder."""

    rung: Rung

    def unfit(self, case: RungQuery) -> str | None:
        """Say in words why the rung cannot help here, None when it can. Budgets are counted elsewhere."""
        return None

    def why(self, case: RungQuery) -> str:
        """Say in words why the rung is the right one. Only asked when it fits."""
        raise NotImplementedError

    def replaces(self, case: RungQuery) -> tuple[int, ...]:
        """Return the ranks whose process is restarted when the rung is taken now, in order."""
        return ()

    def leaves(self, case: RungQuery) -> tuple[str, ...]:
        """Return the nodes that no rank stays on when the rung is taken now, in order of name."""
        return ()

    def cost(self, case: RungQuery) -> tuple[Spent, ...]:
        """Return what taking the rung now spends: of its own budgets first, then of other rungs' budgets.

        Once in the job's budget, and for each culprit and its node. Those that mend themselves beside others that are
        replaced cost what `retry_step` does.
        """
        own = charge(case.facts, self.rung, case.placement.culprits)
        mended = case.placement.mended
        return (own, charge(case.facts, Rung.RETRY_STEP, mended)) if mended else (own,)


class RetryStep(RungRule):
    """All processes stay alive; communicators are reconnected, and the step is repeated.

    For collectives that failed or hang, or links that did not come up, with no rank at fault: a network that hiccuped.
    And for faults that the process which has them can mend itself: it stays, and what it lost is brought from others.
    """

    rung = Rung.RETRY_STEP

    def unfit(self, case: RungQuery) -> str | None:
        """Return why it does not fit: it is for links and collectives, and for ranks that can mend their fault."""
        facts, placement = case.facts, case.placement
        if placement.culprits:
            reasons = list(dict.fromkeys(placement.unmended.values()))
            because = f" ({reasons[0]})" if reasons else ""
            return f"{ranks_text(placement.culprits)} must be replaced{because}, and this rung replaces no process"
        if placement.broken:
            return next(iter(placement.broken.values()))
        mended = set(placement.mended)
        lasting = [fault for fault in facts.faults if fault.kind not in _PASSING and fault.rank not in mended]
        return f"not a fault of links alone: {faults_text(lasting)}" if lasting else case.nothing_to_keep()

    def why(self, case: RungQuery) -> str:
        """Return what failed, which ranks mend themselves, and how many stay."""
        processes = count(len(case.kept), "process", "processes")
        whose = case.mending_text() or ", and no rank is at fault"
        return f"{case.seen}{whose}: the step is repeated, keeping {processes} alive"

    def cost(self, case: RungQuery) -> tuple[Spent, ...]:
        """Return one entry of the job's budget, and of each rank that mends itself and its node."""
        return (charge(case.facts, self.rung, case.placement.mended),)


class RecoverInPlace(RungRule):
    """Only the processes at fault are restarted, on the nodes where they were.

    For software faults, and for device faults of the levels RestartRequest and RestartBusiness. The healthy processes
    stay alive and hand over the state that was lost.
    """

    rung = Rung.RECOVER_IN_PLACE

    def unfit(self, case: RungQuery) -> str | None:
        """Return why it does not fit: each culprit's node starts its process again, and one healthy rank is needed."""
        placement = case.placement
        if not placement.culprits and not placement.broken:
            return "no rank is known to be at fault, so there is no process to restart"
        blocked = placement.misfits or placement.broken or placement.worn
        if blocked:
            reasons = list(dict.fromkeys(blocked.values()))
            return reasons[0] + (f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else "")
        return case.nothing_to_keep()

    def why(self, case: RungQuery) -> str:
        """Return what happened, which ranks are restarted where, and how many stay."""
        facts, culprits = case.facts, case.placement.culprits
        where = nodes_text({facts.nodes[rank] for rank in culprits})
        return (
            f"{faults_text(facts.faults)}: {ranks_text(culprits)} can be restarted on {where}{case.mending_text()}, "
            f"keeping {count(len(facts.healthy), 'healthy rank')} alive"
        )

    def replaces(self, case: RungQuery) -> tuple[int, ...]:
        """Return the culprits."""
        return case.placement.culprits


class Recover(RungRule):
    """The processes at fault are started on other nodes, and theirs are left and isolated.

    For lost nodes, device faults that a restart does not mend, and culprits that may not be restarted in place any
    more. Culprits whose node is sound are restarted there in the same recovery. The healthy processes elsewhere stay
    alive. Where no spare is there and the platform brings nodes, they are parked until one has come.
    """

    rung = Rung.RECOVER

    def unfit(self, case: RungQuery) -> str | None:
        """Return why it does not fit: it needs a healthy rank, and for every node to be left a spare or one to come."""
        facts, placement = case.facts, case.placement
        if not placement.culprits and not placement.broken:
            return "no rank is known to be at fault, so there is no node to leave"
        keeping = case.nothing_to_keep()
        if keeping is not None:
            return keeping
        if placement.homeless:
            return f"the node of {ranks_text(placement.homeless)} is not known, so it cannot be left"
        if not placement.leave:
            return "no node has to be left"
        if not case.kept.difference(placement.moved):
            return f"no healthy rank is left outside {nodes_text(placement.leave)}, so there is no process to keep"
        needed = len(placement.leave)
        return None if nodes_to_come(facts, needed) > 0 else nodes_missing(facts, needed)

    def why(self, case: RungQuery) -> str:
        """Return what happened, which ranks move where and why, and how many stay."""
        facts, placement = case.facts, case.placement
        spares = tuple(placement.to[node] for node in placement.leave if node in placement.to)
        coming = max(0, nodes_to_come(facts, len(placement.leave)))
        where = [f"to spare {nodes_text(spares)}"] if spares else []
        where += [f"to {count(coming, 'node')} that the platform brings"] if coming else []
        built = f", with {ranks_text(placement.built)} built ahead there" if placement.built else ""
        stay = len(facts.healthy.difference(placement.moved))
        reasons = (*placement.broken.values(), *placement.misfits.values(), *placement.obstacles.values())
        in_place = f", in place: {ranks_text(placement.in_place)}" if placement.in_place else ""
        return (
            f"{faults_text(facts.faults)}: {ranks_text(placement.moved)} move from {nodes_text(placement.leave)} "
            f"{' and '.join(where)}{built} ({reasons[0]}){in_place}{case.mending_text()}, "
            f"keeping {count(stay, 'healthy rank')} alive"
        )

    def replaces(self, case: RungQuery) -> tuple[int, ...]:
        """Return the culprits, and all other ranks on the nodes that are left."""
        placement = case.placement
        return tuple(sorted({*placement.in_place, *placement.moved, *placement.homeless}))

    def leaves(self, case: RungQuery) -> tuple[str, ...]:
        """Return the nodes on which the culprits cannot be restarted."""
        return case.placement.leave

    def cost(self, case: RungQuery) -> tuple[Spent, ...]:
        """Return one entry for each rank that moves, each node that is left, and the job.

        Culprits that are started in place meanwhile take the budget of `recover_in_place`.
        """
        facts, placement = case.facts, case.placement
        costs = [Spent(self.rung, facts.now, placement.moved, placement.leave)]
        costs += [charge(facts, Rung.RECOVER_IN_PLACE, placement.in_place)] if placement.in_place else []
        costs += [charge(facts, Rung.RETRY_STEP, placement.mended)] if placement.mended else []
        return tuple(costs)


class ReschedulePod(RungRule):
    """Every process is restarted from the checkpoint; only broken nodes are replaced.

    For a world that is not resilient, for one in which no healthy rank is left, and for what the rungs that keep
    processes could not mend. After a fault of software the node stays.
    """

    rung = Rung.RESCHEDULE_POD

    def unfit(self, case: RungQuery) -> str | None:
        """Return why it does not fit: each broken node has to be replaced, by a spare or by the platform."""
        if case.facts.can_create_nodes:
            return None
        missing = nodes_missing(case.facts, len(case.placement.closed))
        small = None if missing is None else too_small(case)
        return None if small is None else f"{missing}, the platform cannot create nodes, and {small}"

    def why(self, case: RungQuery) -> str:
        """Return what happened, why no process is kept, and which nodes are replaced."""
        gone = self.leaves(case)
        worn = [case.placement.worn[node] for node in gone if node in case.placement.worn]
        nodes = f"{nodes_text(gone)} replaced" if gone else "every node stays"
        nodes += f" ({worn[0]})" if worn else ""
        if shrinks(case):
            before = len(set(case.facts.nodes.values()))
            nodes = f"with {nodes_left(case)} of {count(before, 'node')}, as none takes the place of {nodes_text(gone)}"
        because = "; no rank reached a resilient train function, so no process can be kept"
        because = "" if case.facts.resilient else because
        return f"{case.seen}{because}: all processes are restarted from the checkpoint, {nodes}"

    def replaces(self, case: RungQuery) -> tuple[int, ...]:
        """Return all ranks."""
        return tuple(sorted(case.facts.nodes))

    def leaves(self, case: RungQuery) -> tuple[str, ...]:
        """Return the closed nodes, and those that failed too often if there are nodes for them, too."""
        placement, facts = case.placement, case.facts
        both = {*placement.closed, *placement.worn}
        enough = facts.can_create_nodes or len(both) <= len(facts.spare_nodes)
        return tuple(sorted(both if enough else placement.closed))

    def cost(self, case: RungQuery) -> tuple[Spent, ...]:
        """Return one entry of the job's budget, and of each culprit, its node, and each closed node."""
        spent = charge(case.facts, self.rung, case.placement.culprits)
        return (msgspec.structs.replace(spent, nodes=tuple(sorted({*spent.nodes, *case.placement.closed}))),)


class RescheduleJob(RungRule):
    """All nodes are given back and asked for again, and the job starts from the checkpoint.

    The last thing to try: it trusts nothing of the world in which the cheaper rungs failed.
    """

    rung = Rung.RESCHEDULE_JOB

    def unfit(self, case: RungQuery) -> str | None:
        """Return why it does not fit: the platform has to be able to create nodes."""
        if case.facts.can_create_nodes:
            return None
        return "the platform cannot create nodes, so nodes that are released would not come back"

    def why(self, case: RungQuery) -> str:
        """Return what happened."""
        return f"{case.seen}: all nodes are released and asked for again, and the job starts from the checkpoint"

    def replaces(self, case: RungQuery) -> tuple[int, ...]:
        """Return all ranks."""
        return tuple(sorted(case.facts.nodes))

    def leaves(self, case: RungQuery) -> tuple[str, ...]:
        """Return all nodes."""
        return tuple(sorted(set(case.facts.nodes.values())))

    def cost(self, case: RungQuery) -> tuple[Spent, ...]:
        """Return one entry of the job's budget; the culprits are kept for the record."""
        return (charge(case.facts, self.rung, case.placement.culprits),)


class Stop(RungRule):
    """The job ends with its reason. It always fits, so that every incident has an end."""

    rung = Rung.STOP

    def why(self, case: RungQuery) -> str:
        """Return what happened and why each cheaper rung was not possible, spent budgets included."""
        words = last_words(case.facts.faults)
        seen = failed_script(case.facts.faults) or case.seen + (f" ({words})" if words else "")
        if not case.skipped:
            return f"{seen}: the policy has no other rung"
        refused = ". ".join(f"{skipped.rung}: {skipped.reason}" for skipped in case.skipped)
        return f"{seen}: no other rung is possible. {refused}"

    def cost(self, case: RungQuery) -> tuple[Spent, ...]:
        """Return an entry for the record; no budget limits a stop."""
        return (Spent(self.rung, case.facts.now),)


RULES: dict[Rung, RungRule] = {
    rule.rung: rule for rule in (RetryStep(), RecoverInPlace(), Recover(), ReschedulePod(), RescheduleJob(), Stop())
}


# --- nodes that take the place of others --------------------------------------------------------------------------


def nodes_to_come(facts: Facts, needed: int) -> int:
    """Return how many of the `needed` nodes the spares leave open, and the platform brings; 0: it cannot bring all."""
    missing = needed - len(facts.spare_nodes)
    return missing if facts.can_create_nodes or missing <= facts.promised_nodes else 0


def nodes_missing(facts: Facts, needed: int) -> str | None:
    """Say how many of the `needed` nodes the spares leave open, None when there are enough."""
    spares = len(facts.spare_nodes)
    if needed <= spares:
        return None
    left = "no spare node" if spares == 0 else f"only {count(spares, 'spare node')}"
    return f"{count(needed, 'node')} to be left, and {left} to take the place"


def nodes_left(case: RungQuery) -> int:
    """Return how many nodes the world would have without those that cannot be used any more."""
    in_use = set(case.facts.nodes.values()) - case.placement.closed.keys()
    return len(in_use) + len(case.facts.spare_nodes)


def too_small(case: RungQuery) -> str | None:
    """Return why the world cannot continue with the nodes that are left; None when the policy lets it."""
    least, left = case.facts.min_nodes, nodes_left(case)
    if least is None:
        return "scale.min_nodes allows no smaller world"
    return None if left >= least else f"{count(left, 'node')} would be left, scale.min_nodes is {least}"


def shrinks(case: RungQuery) -> bool:
    """Return whether the world would continue with fewer nodes."""
    facts = case.facts
    return not facts.can_create_nodes and nodes_left(case) < len(set(facts.nodes.values()))


# --- what is planned ahead of a fault -----------------------------------------------------------------------------


def may_grow(now: float, nodes: dict[int, str]) -> Facts:
    """Return the facts by which the ladder is asked whether all ranks may restart, for a world that grows.

    Nodes that come are no failure, so it does not matter what faults have spent.
    """
    return Facts(now=now, nodes=nodes, healthy=frozenset(nodes), can_create_nodes=True)


def growth(before: int, after: int, asked: int, *, in_place: bool) -> Decision:
    """Return the decision to let the world grow from `before` to `after` nodes."""
    how = "write a checkpoint, and all processes are restarted from it"
    if in_place:
        how = "new ones join them, whose processes are ready; all others keep theirs"
    reason = (
        f"the world grows from {before} to {count(after, 'node')} of the {asked} that the job asked for: all ranks "
    )
    return Decision(Rung.RECOVER if in_place else Rung.RESCHEDULE_POD, f"{reason}stop between two steps and {how}")


def growth_given_up(nodes: Sequence[str], why_not: str) -> str:
    """Return that a growth turned out to be impossible after newcomers were started."""
    return f"the world does not grow by {nodes_text(nodes)}: {why_not}"


def may_drain(now: float, node: str, nodes: dict[int, str], spent: tuple[Spent, ...]) -> Facts:
    """Return the facts by which the ladder is asked whether the ranks of `node` may move: as if it were closed to them.

    `nodes` maps every rank to its node. A spare node is taken for granted: the drain waits for one.
    """
    ranks = tuple(sorted(rank for rank, where in nodes.items() if where == node))
    return Facts(
        now=now,
        culprits=ranks,
        nodes=nodes,
        healthy=frozenset(nodes).difference(ranks),
        isolated=frozenset({node}),
        spare_nodes=("",),
        spent=spent,
    )


def drain_obstacle(policy: Policy, refused: tuple[str, ...], spares: int, *, going: bool = False) -> str | None:
    """Say why a node is not drained now, None when it can be. `refused`: the ladder's reasons against `recover`.

    A drain is a `recover` ahead of a fault, so it takes that rung's budget. It is never forced: what speaks against it
    is written down, and the node stays in use. `going`: the platform takes the node away, which cannot be ignored.
    """
    if policy.sub_health is SubHealthAction.IGNORE and not going:
        return "sub_health is ignore: it stays in use"
    if RestoreSource.REPLICA not in policy.restore:
        return "restore is without replica, so all ranks would go back to a checkpoint: it stays in use"
    if refused:
        return f"recover cannot be taken: {'; '.join(refused)}: it stays in use"
    return None if spares else "no spare node to take its place: it is drained when one comes"


def drain(
    node: str, spare: str, ranks: tuple[int, ...], stay: int, report: FaultReport, *, what: str = "not well"
) -> Decision:
    """Return the decision to drain, in the words of the ladder. `what` is the matter with the node."""
    reason = (
        f"{nodes_text([node])} is {what} ({report.detail}): {ranks_text(ranks)} move to spare {nodes_text([spare])} "
        f"between two steps, where their new processes are ready, keeping {count(stay, 'healthy rank')} alive"
    )
    skipped = (Rung.RETRY_STEP, Rung.RECOVER_IN_PLACE)
    return Decision(Rung.RECOVER, reason, tuple(SkippedRung(rung, _LEAVES_NOBODY) for rung in skipped))


def move_all(node: str, spare: str, left: int, report: FaultReport, *, what: str) -> Decision:
    """Return the decision to restart all ranks without a node: with the spare one, or without any on the `left`."""
    why, instead = "its ranks cannot move alone", f"spare {nodes_text([spare])}"
    if not spare:
        why, instead = "no node can take its place", count(left, "node")
    reason = (
        f"{nodes_text([node])} is {what} ({report.detail}), and {why}: all ranks stop between two steps and write a "
        f"checkpoint, and all processes are restarted from it, with {instead}"
    )
    return Decision(Rung.RESCHEDULE_POD, reason)


def drain_given_up(node: str, why_not: str) -> str:
    """Return that a drain turned out to be impossible after newcomers were started."""
    return f"{nodes_text([node])} is not left: {why_not}; all ranks stay where they are"
