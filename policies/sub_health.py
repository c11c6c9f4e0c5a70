"""When a node that is not well is drained: its ranks move to a spare node between two steps, and nothing is repeated.

A drain is a `recover` ahead of a fault, so it takes that rung's budget. It is never forced: what speaks
against it is written down, and the node stays in use.
"""

from ..protocol.types import Decision, FaultReport, RestoreSource, Rung, SkippedRung
from ..protocol.wording import count, nodes_text, ranks_text
from .facts import Facts, Spent
from .schema import Policy, SubHealthAction

_LEAVES_NOBODY = "a node that is not well is to be left, and this rung leaves none"


def question(now: float, node: str, nodes: dict[int, str], spent: tuple[Spent, ...]) -> Facts:
    """Return the facts by which the ladder is asked whether the ranks of `node` may move: as if it were closed to them.

    `nodes` maps every rank to its node. A spare node is taken for granted: the drain waits for one.
    """
    ranks = tuple(sorted(rank for rank, where in nodes.items() if where == node))
    return Facts(
        now=now,
        culprits=ranks,
        nodes=nodes,
        healthy=frozenset(nodes).difference(ranks),
        isolated=frozenset({node}),
        spare_nodes=("",),
        spent=spent,
    )


def obstacle(policy: Policy, refused: tuple[str, ...], spares: int, *, going: bool = False) -> str | None:
    """Say why a node is not drained now, None when it can be. `refused`: the ladder's reasons against `recover`.

    `going`: the platform takes the node away, which the job cannot ignore.
    """
    if policy.sub_health is SubHealthAction.IGNORE and not going:
        return "sub_health is ignore: it stays in use"
    if RestoreSource.REPLICA not in policy.restore:
        return "restore is without replica, so all ranks would go back to a checkpoint: it stays in use"
    if refused:
        return f"recover cannot be taken: {'; '.join(refused)}: it stays in use"
    return None if spares else "no spare node to take its place: it is drained when one comes"


def decide(
    node: str, spare: str, ranks: tuple[int, ...], stay: int, report: FaultReport, *, what: str = "not well"
) -> Decision:
    """Return the decision to drain, in the words of the ladder. `what` is the matter with the node."""
    reason = (
        f"{nodes_text([node])} is {what} ({report.detail}): {ranks_text(ranks)} move to spare {nodes_text([spare])} "
        f"between two steps, where their new processes are ready, keeping {count(stay, 'healthy rank')} alive"
    )
    skipped = (Rung.RETRY_STEP, Rung.RECOVER_IN_PLACE)
    return Decision(Rung.RECOVER, reason, tuple(SkippedRung(rung, _LEAVES_NOBODY) for rung in skipped))


def stays(node: str, why_not: str) -> str:
    """Return that a drain turned out to be impossible after newcomers were started."""
    return f"{nodes_text([node])} is not left: {why_not}; all ranks stay where they are"
