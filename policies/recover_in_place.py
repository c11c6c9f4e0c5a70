"""`recover_in_place`: only the processes at fault are restarted, on the nodes where they were.

For software faults, and for device faults of the levels RestartRequest and RestartBusiness. The healthy
processes stay alive and hand over the state that was lost.
"""

from ..protocol.types import Rung
from ..protocol.wording import count, faults_text, nodes_text, ranks_text
from .facts import Spent
from .placement import charge
from .rule import RungQuery, mending_cost, mending_text, nothing_to_keep


def unfit(case: RungQuery) -> str | None:
    """Return why it does not fit: each culprit's node has to start its process again, and a healthy rank to be left."""
    placement = case.placement
    if not placement.culprits and not placement.broken:
        return "no rank is known to be at fault, so there is no process to restart"
    blocked = placement.misfits or placement.broken or placement.worn
    if blocked:
        reasons = list(dict.fromkeys(blocked.values()))
        more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
        return reasons[0] + more
    return nothing_to_keep(case)


def why(case: RungQuery) -> str:
    """Return what happened, which ranks are restarted where, and how many stay."""
    facts, culprits = case.facts, case.placement.culprits
    nodes = {facts.nodes[rank] for rank in culprits}
    who, where = ranks_text(culprits), nodes_text(nodes)
    return (
        f"{faults_text(facts.faults)}: {who} can be restarted on {where}{mending_text(case)}, "
        f"keeping {count(len(facts.healthy), 'healthy rank')} alive"
    )


def replaces(case: RungQuery) -> tuple[int, ...]:
    """Return the culprits."""
    return case.placement.culprits


def leaves(case: RungQuery) -> tuple[str, ...]:
    """Return none: all nodes stay."""
    del case
    return ()


def cost(case: RungQuery) -> tuple[Spent, ...]:
    """Once for each culprit, each culprit's node, and the job."""
    return (charge(case.facts, Rung.RECOVER_IN_PLACE, case.placement.culprits), *mending_cost(case))
