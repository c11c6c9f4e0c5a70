"""`reschedule_job`: all nodes are given back and asked for again, and the job starts from the checkpoint.

The last thing to try: it trusts nothing of the world in which the cheaper rungs failed.
"""

from ..protocol.types import Rung
from ..protocol.wording import faults_text
from .facts import Spent
from .placement import charge
from .rule import RungQuery


def unfit(case: RungQuery) -> str | None:
    """Return why it does not fit: the platform has to be able to create nodes."""
    if case.facts.can_create_nodes:
        return None
    return "the platform cannot create nodes, so nodes that are released would not come back"


def why(case: RungQuery) -> str:
    """Return what happened."""
    seen = faults_text(case.facts.faults) or "no fault is left"
    return f"{seen}: all nodes are released and asked for again, and the job starts from the checkpoint"


def replaces(case: RungQuery) -> tuple[int, ...]:
    """Return all ranks."""
    return tuple(sorted(case.facts.nodes))


def leaves(case: RungQuery) -> tuple[str, ...]:
    """Return all nodes."""
    return tuple(sorted(set(case.facts.nodes.values())))


def cost(case: RungQuery) -> tuple[Spent, ...]:
    """Once in the job's budget; the culprits are kept for the record."""
    return (charge(case.facts, Rung.RESCHEDULE_JOB, case.placement.culprits),)
