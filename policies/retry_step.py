"""`retry_step`: all processes stay alive; communicators are reconnected, and the step is repeated.

For collectives that failed or hang, or links that did not come up, with no rank at fault: a network that
hiccuped. And for faults that the process which has them can mend itself: it stays, and what it lost is brought from
others. Nothing else is restored.
"""

from ..protocol.types import FaultKind, Rung
from ..protocol.wording import count, faults_text, ranks_text
from .facts import Spent
from .placement import charge
from .rule import RungQuery, kept, mending_text, nothing_to_keep

_PASSING = frozenset({FaultKind.COMMUNICATION, FaultKind.LINK_UP, FaultKind.STALL})


def unfit(case: RungQuery) -> str | None:
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
    if lasting:
        return f"not a fault of links alone: {faults_text(lasting)}"
    return nothing_to_keep(case)


def why(case: RungQuery) -> str:
    """Return what failed, which ranks mend themselves, and how many stay."""
    seen = faults_text(case.facts.faults) or "no fault is left"
    processes = count(len(kept(case)), "process", "processes")
    whose = mending_text(case) or ", and no rank is at fault"
    return f"{seen}{whose}: the step is repeated, keeping {processes} alive"


def replaces(case: RungQuery) -> tuple[int, ...]:
    """Return none: all processes stay."""
    del case
    return ()


def leaves(case: RungQuery) -> tuple[str, ...]:
    """Return none: all nodes stay."""
    del case
    return ()


def cost(case: RungQuery) -> tuple[Spent, ...]:
    """Once in the job's budget, and for each rank that mends itself and its node."""
    return (charge(case.facts, Rung.RETRY_STEP, case.placement.mended),)
