"""What operators and the controller itself ask for: injected faults, a stop, and going on after a restart."""

from ...protocol.messages import ArmFault, KillNode
from ...protocol.types import PLATFORM, ArmedFault, FaultAction, node_address, rank_address
from ..changes.shutdown import begin_stop, end
from ..recovery.events import ControllerStarted, InjectRequested, KillNodeRequested, StopRequested
from ..recovery.state import JobState, Phase, Result
from ..recovery.suspicion import answer_limit_s
from .reconcile import owed

STOPPED_BY_REQUEST = 130  # what a shell reports for Ctrl-C

# Injuries that the agent can do from outside at once; the others, and all with a moment, need the processor.
FROM_OUTSIDE = frozenset({FaultAction.KILL, FaultAction.STOP})


def on_inject_requested(state: JobState, event: InjectRequested, now: float) -> None:
    """Hand a fault to the agent or process that can cause it."""
    fault = event.fault
    if not 0 <= fault.rank < state.world.size:
        state.ignore("fault for a rank that is not there")
        return
    holder = state.world.holders[fault.rank]
    if fault.point is None and fault.action is FaultAction.KILL_NODE:
        _kill(state, holder.node)
    elif fault.point is None and fault.action in FROM_OUTSIDE:
        state.send(node_address(holder.node), ArmFault(fault))
    else:
        state.send(rank_address(fault.rank), ArmFault(fault))


def on_kill_node_requested(state: JobState, event: KillNodeRequested, now: float) -> None:
    """Have a node killed, by the platform or, where that cannot, by the node's own agent."""
    _kill(state, event.node)


def _kill(state: JobState, node: str) -> None:
    if state.arrivals.can_be_killed:
        state.send(PLATFORM, KillNode(node))
    else:
        state.send(node_address(node), ArmFault(ArmedFault(rank=0, action=FaultAction.KILL_NODE)))


def on_stop_requested(state: JobState, event: StopRequested, now: float) -> None:
    """End the job on request; a second request does not wait for a checkpoint any more, if it insists.

    A job that is ending already, for a reason of its own, is left to save: the first request changes nothing about it.
    """
    asked_before, state.saving.stop_requested = state.saving.stop_requested, True
    if state.saving.before_a_start:  # what is being saved is then for the end
        state.saving.then = Result(STOPPED_BY_REQUEST, event.reason)
    elif state.phase is Phase.SAVING and not (asked_before and event.insist):
        state.ignore("stop request while the job is saving")
    elif state.phase is Phase.SAVING:
        end(state, STOPPED_BY_REQUEST, f"{event.reason}; without a checkpoint, as it was asked for twice", now)
    else:
        begin_stop(state, event.reason, now, exit_code=STOPPED_BY_REQUEST)


def on_controller_started(state: JobState, event: ControllerStarted, now: float) -> None:
    """A controller has taken over: send what is owed. Deadlines that passed without a controller start again."""
    if state.generation > 0 and state.phase is not Phase.ENDED:
        _allow_time(state, now)
    state.term = event.term
    for receiver, command in owed(state):
        state.send(receiver, command)
    if state.phase is Phase.ENDED:
        state.finish()


def _allow_time(state: JobState, now: float) -> None:
    limits = state.policy.deadlines
    fresh_s = {
        Phase.WAITING: limits.nodes_s,
        Phase.SUSPECTING: answer_limit_s(state),
        Phase.QUIESCING: limits.quiesce_s,
        Phase.PAUSING: limits.save_s if state.saving.outstanding else limits.quiesce_s,
        Phase.REJOINING: limits.rejoin_s,
        Phase.RESUMING: limits.first_step_s,
        Phase.SAVING: limits.save_s if state.saving.outstanding else limits.quiesce_s,
    }.get(state.phase)
    if fresh_s is not None and state.due.phase_s is not None:
        state.due.phase_s = max(state.due.phase_s, now + fresh_s)
    if state.due.newcomers_s is not None:
        state.due.newcomers_s = max(state.due.newcomers_s, now + limits.start_s)
    if state.due.devices_s is not None:
        state.due.devices_s = max(state.due.devices_s, now + limits.device_s)
    if state.due.nodes_s is not None:
        state.due.nodes_s = max(state.due.nodes_s, now + limits.nodes_s)
    if state.plans.due_s is not None:
        state.plans.due_s = max(state.plans.due_s, now + limits.start_s)
