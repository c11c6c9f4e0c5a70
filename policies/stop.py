"""`stop`: the job ends with its reason. It always fits, so that every incident has an end."""

from ..protocol.types import Rung
from ..protocol.wording import faults_text, last_words
from .facts import Spent
from .rule import RungQuery


def unfit(case: RungQuery) -> str | None:
    """Return None: stopping is always possible."""
    del case
    return None


def why(case: RungQuery) -> str:
    """Return what happened and why each cheaper rung was not possible, spent budgets included."""
    seen = faults_text(case.facts.faults) or "no fault is left"
    words = last_words(case.facts.faults)
    seen += f" ({words})" if words else ""
    if not case.skipped:
        return f"{seen}: the policy has no other rung"
    refused = ". ".join(f"{skipped.rung}: {skipped.reason}" for skipped in case.skipped)
    return f"{seen}: no other rung is possible. {refused}"


def replaces(case: RungQuery) -> tuple[int, ...]:
    """Return none: all processes stay."""
    del case
    return ()


def leaves(case: RungQuery) -> tuple[str, ...]:
    """Return none: all nodes stay."""
    del case
    return ()


def cost(case: RungQuery) -> tuple[Spent, ...]:
    """Return an entry for the record; no budget limits a stop."""
    return (Spent(Rung.STOP, case.facts.now),)
