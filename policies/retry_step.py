"""`retry_step`: everybody stays alive; new communicators, and the step once more.

For collectives that failed or hang, or links that did not come up, with nobody at fault: a network that
hiccuped. Nothing is lost, so nothing is restored.
"""

from ..protocol.types import FaultKind, Rung
from .facts import Spent
from .rule import Case, nothing_to_keep
from .wording import count, faults_text, ranks_text

_PASSING = frozenset({FaultKind.COMMUNICATION, FaultKind.LINK_UP, FaultKind.STALL})


def unfit(case: Case) -> str | None:
    """Fits when links or collectives failed, or hang, and no rank and no node is at fault."""
    facts = case.facts
    if facts.culprits:
        at_fault = ranks_text(facts.culprits)
        return f"{at_fault} must be replaced, and this rung replaces nobody"
    if case.placement.broken:
        return next(iter(case.placement.broken.values()))
    lasting = [fault for fault in facts.faults if fault.kind not in _PASSING]
    if lasting:
        return f"not a fault of links alone: {faults_text(lasting)}"
    return nothing_to_keep(facts)


def why(case: Case) -> str:
    """Name what failed and how many stay."""
    seen = faults_text(case.facts.faults) or "no fault is left"
    healthy = count(len(case.facts.healthy), "process", "processes")
    return f"{seen}, and nobody is at fault: the step is repeated, keeping {healthy} alive"


def cost(case: Case) -> Spent:
    """Once in the job's budget; no rank and no node is blamed."""
    return Spent(Rung.RETRY_STEP, case.facts.now)
