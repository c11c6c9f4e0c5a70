"""What every rung's file provides, so that the ladder can walk over them without knowing any."""

from typing import Protocol

import msgspec

from ..protocol.types import Rung, SkippedRung
from ..protocol.wording import count, ranks_text
from .facts import Facts, Spent
from .placement import Placement, charge


class RungQuery(msgspec.Struct, frozen=True):
    """What a rung is asked about: the facts, where ranks would go, and the cheaper rungs refused so far."""

    facts: Facts
    placement: Placement
    skipped: tuple[SkippedRung, ...] = ()


class RungRule(Protocol):
    """A rung as pure functions: when it fits, why it is right, what it replaces, what it leaves, what it costs."""

    def unfit(self, case: RungQuery) -> str | None:
        """Say in words why the rung cannot help here, None when it can. Budgets are counted elsewhere."""
        ...

    def why(self, case: RungQuery) -> str:
        """Say in words why the rung is the right one. Only asked when it fits."""
        ...

    def replaces(self, case: RungQuery) -> tuple[int, ...]:
        """Return the ranks whose process is restarted when the rung is taken now, in order."""
        ...

    def leaves(self, case: RungQuery) -> tuple[str, ...]:
        """Return the nodes that no rank stays on when the rung is taken now, in order of name."""
        ...

    def cost(self, case: RungQuery) -> tuple[Spent, ...]:
        """Return what taking the rung now spends: of its own budgets first, then of other rungs' budgets."""
        ...


def kept(case: RungQuery) -> frozenset[int]:
    """Return the ranks whose process can stay: the healthy ones, and those that mend themselves."""
    return case.facts.healthy.difference(case.placement.culprits).union(case.placement.mended)


def nothing_to_keep(case: RungQuery) -> str | None:
    """Say why no process can be kept alive, None when some can. Rungs that keep processes ask this first."""
    if not case.facts.resilient:
        return "no rank reached a resilient train function, so no process can be kept"
    if not kept(case):
        return "no healthy rank is left, so there is no process to keep"
    return None


def mending_text(case: RungQuery) -> str:
    """Return a clause about the ranks that keep their process and mend their fault in it."""
    mended = case.placement.mended
    if not mended:
        return ""
    does = "keeps its process and mends it there" if len(mended) == 1 else "keep their processes and mend them there"
    return f", {ranks_text(mended)} {does}"


def mending_cost(case: RungQuery) -> tuple[Spent, ...]:
    """Return what those that mend themselves cost beside others that are replaced: it is what `retry_step` does."""
    mended = case.placement.mended
    return (charge(case.facts, Rung.RETRY_STEP, mended),) if mended else ()


def nodes_to_come(facts: Facts, needed: int) -> int:
    """Return how many of the `needed` nodes the spares leave open, and the platform brings; 0: it cannot bring all."""
    missing = needed - len(facts.usable_spares())
    return missing if facts.can_create_nodes or missing <= facts.promised_nodes else 0


def nodes_missing(facts: Facts, needed: int) -> str | None:
    """Say how many of the `needed` nodes the spares leave open, None when there are enough."""
    spares = len(facts.usable_spares())
    if needed <= spares:
        return None
    left = "no spare node" if spares == 0 else f"only {count(spares, 'spare node')}"
    return f"{count(needed, 'node')} to be left, and {left} to take the place"
