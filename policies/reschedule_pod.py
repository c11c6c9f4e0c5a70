"""`reschedule_pod`: every process is started anew from the checkpoint; only broken nodes are replaced.

For a world that is not resilient, for one in which nobody healthy is left, and for whatever the rungs that
keep processes could not mend. After a fault of software the node stays.
"""

from ..protocol.types import Rung
from .facts import Spent
from .rule import Case, nodes_missing
from .wording import faults_text, nodes_text


def unfit(case: Case) -> str | None:
    """Fits when each broken node can be replaced, by a spare or by the platform."""
    if case.facts.can_create_nodes:
        return None
    missing = nodes_missing(case.facts, len(case.placement.closed))
    return None if missing is None else f"{missing}, and the platform cannot create nodes"


def why(case: Case) -> str:
    """Name what happened, why nobody is kept, and which nodes go."""
    closed = case.placement.closed
    nodes = f"{nodes_text(closed)} replaced" if closed else "every node stays"
    seen = faults_text(case.facts.faults) or "no fault is left"
    because = "" if case.facts.resilient else "; no rank reached a resilient train function, so no process can be kept"
    return f"{seen}{because}: all processes are started anew from the checkpoint, {nodes}"


def cost(case: Case) -> Spent:
    """Once for each culprit, its node, and the job."""
    facts = case.facts
    nodes = {facts.nodes[rank] for rank in facts.culprits if rank in facts.nodes} | set(case.placement.closed)
    return Spent(Rung.RESCHEDULE_POD, facts.now, tuple(sorted(set(facts.culprits))), tuple(sorted(nodes)))
