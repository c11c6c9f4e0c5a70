"""`recover_in_place`: only the processes at fault are started anew, on the nodes where they were.

For software faults, and for device faults of the levels RestartRequest and RestartBusiness. The healthy
processes stay alive and hand over the state that was lost.
"""

from ..protocol.types import Rung
from .facts import Spent
from .rule import Case, nothing_to_keep
from .wording import count, faults_text, nodes_text, ranks_text


def unfit(case: Case) -> str | None:
    """Fits when every culprit's node can start its process again, and somebody healthy is left."""
    facts, placement = case.facts, case.placement
    if not facts.culprits and not placement.broken:
        return "no rank is known to be at fault, so there is nobody to start anew"
    blocked = placement.misfits or placement.broken
    if blocked:
        reasons = list(dict.fromkeys(blocked.values()))
        more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
        return reasons[0] + more
    return nothing_to_keep(facts)


def why(case: Case) -> str:
    """Name what happened, who is started anew where, and how many stay."""
    facts = case.facts
    nodes = {facts.nodes[rank] for rank in facts.culprits}
    who, where = ranks_text(facts.culprits), nodes_text(nodes)
    return (
        f"{faults_text(facts.faults)}: {who} can be started anew on {where}, "
        f"keeping {count(len(facts.healthy), 'healthy rank')} alive"
    )


def cost(case: Case) -> Spent:
    """Once for each culprit, each culprit's node, and the job."""
    facts = case.facts
    nodes = {facts.nodes[rank] for rank in facts.culprits if rank in facts.nodes}
    return Spent(Rung.RECOVER_IN_PLACE, facts.now, tuple(sorted(set(facts.culprits))), tuple(sorted(nodes)))
