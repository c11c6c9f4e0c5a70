"""What operators and the controller itself ask for: injected faults, a stop, and going on after a restart."""

from ...protocol.messages import (
    ArmFault,
    Command,
    CreateNode,
    DeleteNode,
    EndJob,
    KillNode,
    ProbeProgress,
    Quiesce,
    Release,
    Resume,
    WelcomeNode,
)
from ...protocol.types import PLATFORM, Injury, node_address, rank_address
from ..events import ControllerStarted, InjectRequested, KillNodeRequested, StopRequested
from ..rank_states import RankState
from ..world import REACHABLE, Holder, NodeState
from .barriers import rejoin_command
from .draining import outstanding_starts
from .generation import given_back, start_command
from .shutdown import SAVE_S, asked_to_save, begin_stop, end, save_command
from .state import JobState, Phase

STOPPED_BY_REQUEST = 130  # what a shell reports for Ctrl-C

# Injuries that the agent can do from outside at once; the others, and all with a moment, need the processor.
FROM_OUTSIDE = frozenset({Injury.KILL, Injury.STOP})


def on_inject_requested(state: JobState, event: InjectRequested, now: float) -> None:
    """Hand a fault to whoever can cause it."""
    fault = event.fault
    if not 0 <= fault.rank < state.world.size:
        state.ignore("fault for a rank that is not there")
        return
    holder = state.world.holders[fault.rank]
    if fault.moment is None and fault.injury is Injury.KILL_NODE:
        state.send(PLATFORM, KillNode(holder.node))
    elif fault.moment is None and fault.injury in FROM_OUTSIDE:
        state.send(node_address(holder.node), ArmFault(fault))
    else:
        state.send(rank_address(fault.rank), ArmFault(fault))


def on_kill_node_requested(state: JobState, event: KillNodeRequested, now: float) -> None:
    """Have the platform kill a node."""
    state.send(PLATFORM, KillNode(event.node))


def on_stop_requested(state: JobState, event: StopRequested, now: float) -> None:
    """End the job on request; a second request does not wait for a checkpoint any more, if it insists.

    A job that is ending already, for a reason of its own, is left to save: the first request changes nothing about it.
    """
    asked_before, state.stop_requested = state.stop_requested, True
    if state.phase is Phase.SAVING and state.resizing:  # what is being saved is then for the end
        state.resizing, state.stop_reason, state.stop_code = False, event.reason, STOPPED_BY_REQUEST
    elif state.phase is Phase.SAVING and not (asked_before and event.insist):
        state.ignore("stop request while the job is saving")
    elif state.phase is Phase.SAVING:
        end(state, STOPPED_BY_REQUEST, f"{event.reason}; without a checkpoint, as it was asked for twice", now)
    else:
        begin_stop(state, event.reason, now, exit_code=STOPPED_BY_REQUEST)


def on_controller_started(state: JobState, event: ControllerStarted, now: float) -> None:
    """A controller has taken over: ask again for everything that may not have arrived.

    Commands are done at most once (by incarnation and generation), so asking twice does no harm. Deadlines that
    passed while nobody was looking start anew.
    """
    if state.generation > 0 and state.phase is not Phase.ENDED:
        _allow_time(state, now)
    state.term = event.term
    if state.phase is Phase.ENDED:
        _end_once_more(state)
        return
    for name in state.world.named(*REACHABLE):  # each answers with what runs there: strays are told to stop then
        state.send(node_address(name), WelcomeNode(state.job))
    for name in state.world.named(NodeState.REQUESTED):
        state.send(PLATFORM, CreateNode(name))
    for name in given_back(state):
        state.send(PLATFORM, DeleteNode(name))
    for name in sorted(state.awaiting_progress):
        state.send(node_address(name), ProbeProgress(state.probes))
    for node, start in outstanding_starts(state):
        state.send(node_address(node), start)
    for holder in state.world.holders:
        if holder.rank in state.held:
            continue
        if holder.state is RankState.STARTING:
            state.send(node_address(holder.node), start_command(state, holder))
        command = _outstanding(state, holder)
        if command is not None:
            state.send(rank_address(holder.rank), command)


def _end_once_more(state: JobState) -> None:
    order = EndJob(state.exit_code or 0, state.reason)
    for name in state.world.named(*REACHABLE):
        state.send(node_address(name), order)
    for name in given_back(state):
        state.send(PLATFORM, DeleteNode(name))
    state.send(PLATFORM, order)
    state.finish(order.exit_code, order.reason)


def _allow_time(state: JobState, now: float) -> None:
    limits = state.policy.deadlines
    fresh_s = {
        Phase.WAITING: limits.nodes_s,
        Phase.SUSPECTING: limits.suspect_s,
        Phase.QUIESCING: limits.quiesce_s,
        Phase.PAUSING: SAVE_S if state.saving else limits.quiesce_s,
        Phase.REJOINING: limits.rejoin_s,
        Phase.RESUMING: limits.first_step_s,
        Phase.SAVING: SAVE_S if state.saving else limits.quiesce_s,
    }.get(state.phase)
    if fresh_s is not None and state.due_s is not None:
        state.due_s = max(state.due_s, now + fresh_s)
    if state.newcomers_due_s is not None:
        state.newcomers_due_s = max(state.newcomers_due_s, now + limits.start_s)
    if state.devices_due_s is not None:
        state.devices_due_s = max(state.devices_due_s, now + limits.device_s)
    if state.plans.due_s is not None:
        state.plans.due_s = max(state.plans.due_s, now + limits.start_s)


def _outstanding(state: JobState, holder: Holder) -> Command | None:
    """Return the command that this rank's process may not have got."""
    rank, generation = holder.rank, state.generation
    if holder.state is RankState.QUIESCING or (holder.state is RankState.STARTING and holder.early):
        boundary = state.plans.current.after_step if state.phase is Phase.PAUSING and state.plans.current else None
        return Quiesce(rank, generation, boundary)
    if holder.state is RankState.REJOINING:
        return rejoin_command(state, holder)
    if holder.state is RankState.RESUMING and state.plan is not None:
        return Resume(rank, generation, state.plan.target_step)
    if holder.state is RankState.RELEASED:
        return Release(rank, generation)
    if asked_to_save(state, rank):
        return save_command(state, rank)
    return None
