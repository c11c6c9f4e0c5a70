"""Spares that were used or lost are asked for again, when nothing else is to be done.

A platform that has none now is asked again later, less and less often, and in the end not any more: a job trains on
without spares as well. Whatever node comes makes it worth asking again.
"""

from ..state.job_state import JobState
from ..state.world import NodeState
from .generation import request_node
from .promised_nodes import give_up_waiting
from .scaling import nodes_asked

TRIES = 6  # in a row that bring nothing
AGAIN_S = 60.0  # to the second try; each further one comes after twice as long


def refill(state: JobState, now: float) -> None:
    """Ask for as many spares as are missing. Runs when the job trains again, when it loses one, and when time is up."""
    arrivals, missing = state.arrivals, _missing(state)
    if missing <= 0 or arrivals.refill_due_s is not None or arrivals.refills >= TRIES:
        return
    for _ in range(missing):
        request_node(state)
    arrivals.refill_due_s = now + max(state.policy.deadlines.nodes_s, AGAIN_S * 2**arrivals.refills)
    arrivals.refills += 1


def refill_overdue(state: JobState, now: float) -> None:
    """What was asked for has come, was refused, or is not counted on any more: look again."""
    state.arrivals.refill_due_s = None
    give_up_waiting(state)
    refill(state, now)


def has_arrived(state: JobState) -> None:
    """A node has come: the platform has nodes to give."""
    state.arrivals.refills = 0
    if not state.world.named(NodeState.REQUESTED):
        state.arrivals.refill_due_s = None


def _missing(state: JobState) -> int:
    """Return how many spares are missing, once the job has had all that it was started with."""
    world, job = state.world, state.job
    if not state.arrivals.can_be_created or len(world.nodes) < nodes_asked(state) + job.spare_nodes:
        return 0
    have = set(world.named(NodeState.SPARE, NodeState.UNFIT, NodeState.REQUESTED)) - state.plans.going
    return job.spare_nodes - len(have)
