"""`recover`: the processes at fault are started on other nodes, and theirs are left and isolated.

For lost nodes, device faults that a restart does not mend, and culprits that may not be restarted in place
any more. Culprits whose node is sound are restarted there in the same recovery. The healthy processes
elsewhere stay alive. Where no spare is there and the platform brings nodes, they are parked until one has come.
"""

from ..protocol.types import Rung
from ..protocol.wording import count, faults_text, nodes_text, ranks_text
from .facts import Spent
from .placement import charge
from .rule import RungQuery, kept, mending_cost, mending_text, nodes_missing, nodes_to_come, nothing_to_keep


def unfit(case: RungQuery) -> str | None:
    """Return why it does not fit: it needs a healthy rank, and for every node to be left a spare or one to come."""
    facts, placement = case.facts, case.placement
    if not placement.culprits and not placement.broken:
        return "no rank is known to be at fault, so there is no node to leave"
    keeping = nothing_to_keep(case)
    if keeping is not None:
        return keeping
    if placement.homeless:
        return f"the node of {ranks_text(placement.homeless)} is not known, so it cannot be left"
    if not placement.leave:
        return "no node has to be left"
    if not kept(case).difference(placement.moved):
        return f"no healthy rank is left outside {nodes_text(placement.leave)}, so there is no process to keep"
    needed = len(placement.leave)
    return None if nodes_to_come(facts, needed) > 0 else nodes_missing(facts, needed)


def why(case: RungQuery) -> str:
    """Return what happened, which ranks move where and why, and how many stay."""
    facts, placement = case.facts, case.placement
    spares = tuple(placement.to[node] for node in placement.leave if node in placement.to)
    coming = max(0, nodes_to_come(facts, len(placement.leave)))
    where = [f"to spare {nodes_text(spares)}"] if spares else []
    where += [f"to {count(coming, 'node')} that the platform brings"] if coming else []
    built = f", with {ranks_text(placement.built)} built ahead there" if placement.built else ""
    stay = len(facts.healthy.difference(placement.moved))
    reasons = dict.fromkeys((*placement.broken.values(), *placement.misfits.values(), *placement.obstacles.values()))
    in_place = f", in place: {ranks_text(placement.in_place)}" if placement.in_place else ""
    in_place += mending_text(case)
    return (
        f"{faults_text(facts.faults)}: {ranks_text(placement.moved)} move from {nodes_text(placement.leave)} "
        f"{' and '.join(where)}{built} ({next(iter(reasons))}){in_place}, "
        f"keeping {count(stay, 'healthy rank')} alive"
    )


def replaces(case: RungQuery) -> tuple[int, ...]:
    """Return the culprits, and all other ranks on the nodes that are left."""
    placement = case.placement
    return tuple(sorted({*placement.in_place, *placement.moved, *placement.homeless}))


def leaves(case: RungQuery) -> tuple[str, ...]:
    """Return the nodes on which the culprits cannot be restarted."""
    return case.placement.leave


def cost(case: RungQuery) -> tuple[Spent, ...]:
    """Once for each rank that moves, each node that is left, and the job.

    Culprits that are started in place meanwhile take the budget of `recover_in_place`.
    """
    facts, placement = case.facts, case.placement
    in_place = (charge(facts, Rung.RECOVER_IN_PLACE, placement.in_place),) if placement.in_place else ()
    return (Spent(Rung.RECOVER, facts.now, placement.moved, placement.leave), *in_place, *mending_cost(case))
