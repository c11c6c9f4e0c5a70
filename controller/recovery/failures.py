"""How often the processes of each node have failed: what the policy's `node.failures` is held against.

A failure is one of a process that the job still counted on. What a replaced process or a removed node says later
is none, and neither is the end of a process that was replaced: those reports are dropped before they come here.
"""

from collections.abc import Iterable

from ...policies.budgets import failures_by_node, worn_out
from ...policies.facts import NodeFailure
from .state import JobState


def count_failure(state: JobState, ranks: Iterable[int]) -> None:
    """Count a failure for the nodes of `ranks`.

    Processes of a node that fail together are one failure of the node, and so are those that follow in the same
    incident; a process that was started again in it and fails again is another one.
    """
    for rank in ranks:
        node = state.world.holders[rank].node
        state.incident, news = state.incident.failed(rank, node)
        if news:
            state.node_failures.append(NodeFailure(node, state.now))
    window_s = state.policy.node.window_s
    if window_s:
        state.node_failures = [each for each in state.node_failures if state.now - each.at_s < window_s]


def failure_counts(state: JobState, now: float) -> dict[str, int]:
    """Return how often each node has failed, as of `now`, for status."""
    return dict(failures_by_node(state.node_failures, state.policy.node, now))


def too_many(state: JobState, node: str, now: float) -> str | None:
    """Say that a node has failed too often to be used again; None when it has not."""
    return worn_out(node, failure_counts(state, now).get(node, 0), state.policy.node)
