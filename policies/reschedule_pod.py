"""`reschedule_pod`: every process is restarted from the checkpoint; only broken nodes are replaced.

For a world that is not resilient, for one in which no healthy rank is left, and for what the rungs that
keep processes could not mend. After a fault of software the node stays.
"""

import msgspec

from ..protocol.types import Rung
from ..protocol.wording import count, faults_text, nodes_text
from .facts import Spent
from .placement import charge
from .rule import RungQuery, nodes_missing
from .scale import nodes_left, shrinks, too_small


def unfit(case: RungQuery) -> str | None:
    """Return why it does not fit: each broken node has to be replaced, by a spare or by the platform."""
    if case.facts.can_create_nodes:
        return None
    missing = nodes_missing(case.facts, len(case.placement.closed))
    small = None if missing is None else too_small(case)
    return None if small is None else f"{missing}, the platform cannot create nodes, and {small}"


def replaces(case: RungQuery) -> tuple[int, ...]:
    """Return all ranks."""
    return tuple(sorted(case.facts.nodes))


def leaves(case: RungQuery) -> tuple[str, ...]:
    """Return the closed nodes, and those that failed too often if there are nodes for them, too."""
    placement, facts = case.placement, case.facts
    both = {*placement.closed, *placement.worn}
    enough = facts.can_create_nodes or len(both) <= len(facts.usable_spares())
    return tuple(sorted(both if enough else placement.closed))


def why(case: RungQuery) -> str:
    """Return what happened, why no process is kept, and which nodes are replaced."""
    gone = leaves(case)
    worn = [case.placement.worn[node] for node in gone if node in case.placement.worn]
    nodes = f"{nodes_text(gone)} replaced" if gone else "every node stays"
    nodes += f" ({worn[0]})" if worn else ""
    if shrinks(case):
        before = len(set(case.facts.nodes.values()))
        nodes = f"with {nodes_left(case)} of {count(before, 'node')}, as none takes the place of {nodes_text(gone)}"
    seen = faults_text(case.facts.faults) or "no fault is left"
    because = "" if case.facts.resilient else "; no rank reached a resilient train function, so no process can be kept"
    return f"{seen}{because}: all processes are restarted from the checkpoint, {nodes}"


def cost(case: RungQuery) -> tuple[Spent, ...]:
    """Once for each culprit, its node, and the job."""
    spent = charge(case.facts, Rung.RESCHEDULE_POD, case.placement.culprits)
    return (msgspec.structs.replace(spent, nodes=tuple(sorted({*spent.nodes, *case.placement.closed}))),)
