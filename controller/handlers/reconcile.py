"""What the state asks of others: every command that follows from it and may not have arrived.

A controller that takes over sends what is owed, and needs no other way back to work. Commands are done at most once, by
incarnation and generation, so that one which has arrived does no harm.
"""

from collections.abc import Iterator

from ...protocol.messages import (
    Command,
    CreateNode,
    DeleteNode,
    EndJob,
    ProbeProgress,
    Quiesce,
    Release,
    Resume,
    WelcomeNode,
)
from ...protocol.reports import builds_ahead
from ...protocol.types import PLATFORM, node_address, rank_address
from ..changes.drain import outstanding_starts
from ..changes.generation import given_back, start_command
from ..changes.node_checks import outstanding_checks
from ..changes.shutdown import asked_to_save, save_command
from ..changes.spares import ahead_command
from ..recovery.state import JobState, Phase
from ..recovery.world import REACHABLE, Holder, NodeState, RankState
from .barriers import rejoin_command

Owed = tuple[str, Command]  # who is to get it, and what


def owed(state: JobState) -> Iterator[Owed]:
    """Yield all that is owed, each command with its receiver, in the order in which it is sent."""
    if state.phase is Phase.ENDED:
        yield from _to_the_ended(state)
        return
    for name in state.world.named(*REACHABLE):  # each answers with what runs there: strays are told to stop then
        yield node_address(name), WelcomeNode(state.job)
    for name in state.world.named(NodeState.REQUESTED):
        yield PLATFORM, CreateNode(name)
    for name in given_back(state):
        yield PLATFORM, DeleteNode(name)
    for name, check in outstanding_checks(state):
        yield node_address(name), check
    for name in sorted(state.clocks.awaited):
        yield node_address(name), ProbeProgress(state.clocks.probe)
    for name, start in outstanding_starts(state):
        yield node_address(name), start
    if builds_ahead(state.job):
        for name in state.world.named(*REACHABLE):
            yield node_address(name), ahead_command(state, state.world.nodes[name])
    for holder in state.world.holders:
        yield from _to_a_rank(state, holder)


def _to_the_ended(state: JobState) -> Iterator[Owed]:
    assert state.result is not None
    order = EndJob(state.result.exit_code, state.result.reason)
    for name in state.world.named(*REACHABLE):
        yield node_address(name), order
    for name in given_back(state):
        yield PLATFORM, DeleteNode(name)
    yield PLATFORM, order


def _to_a_rank(state: JobState, holder: Holder) -> Iterator[Owed]:
    rank, generation, address = holder.rank, state.generation, rank_address(holder.rank)
    if rank in state.due.held or rank in state.due.unplaced:
        return
    if holder.state is RankState.STARTING:
        yield node_address(holder.node), start_command(state, holder)
    if holder.state is RankState.QUIESCING or (holder.state is RankState.STARTING and holder.early):
        boundary = state.plans.current.after_step if state.phase is Phase.PAUSING and state.plans.current else None
        yield address, Quiesce(rank, generation, boundary, replaces=bool(state.incident.replaced))
    elif holder.state is RankState.REJOINING:
        yield address, rejoin_command(state, holder)
    elif holder.state is RankState.RESUMING and state.plan is not None:
        yield address, Resume(rank, generation, state.plan.target_step)
    elif holder.state is RankState.RELEASED:
        yield address, Release(rank, generation)
    elif asked_to_save(state, rank):
        yield address, save_command(state, rank)
