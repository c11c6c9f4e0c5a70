"""Decide when a world continues with fewer nodes, and when it grows again."""

from ..protocol.types import Decision, Rung
from ..protocol.wording import count
from .facts import Facts, Spent
from .rule import RungQuery


def nodes_left(case: RungQuery) -> int:
    """Return how many nodes the world would have without those that cannot be used any more."""
    in_use = set(case.facts.nodes.values()) - case.placement.closed.keys()
    return len(in_use) + len(case.facts.usable_spares())


def too_small(case: RungQuery) -> str | None:
    """Return why the world cannot continue with the nodes that are left; None when the policy lets it."""
    least, left = case.facts.min_nodes, nodes_left(case)
    if least is None:
        return "scale.min_nodes allows no smaller world"
    return None if left >= least else f"{count(left, 'node')} would be left, scale.min_nodes is {least}"


def shrinks(case: RungQuery) -> bool:
    """Return whether the world would continue with fewer nodes."""
    facts = case.facts
    return not facts.can_create_nodes and nodes_left(case) < len(set(facts.nodes.values()))


def question(now: float, nodes: dict[int, str], spent: tuple[Spent, ...]) -> Facts:
    """Return the facts by which the ladder is asked whether all ranks may restart now, for a world that grows."""
    return Facts(now=now, nodes=nodes, healthy=frozenset(nodes), can_create_nodes=True, spent=spent)


def decide(before: int, after: int, asked: int) -> Decision:
    """Return the decision to let the world grow from `before` to `after` nodes."""
    reason = (
        f"the world grows from {before} to {count(after, 'node')} of the {asked} that the job asked for: all ranks "
        "stop between two steps and write a checkpoint, and all processes are restarted from it"
    )
    return Decision(Rung.RESCHEDULE_POD, reason)
