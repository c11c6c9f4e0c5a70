"""The world starts again in its size: on the nodes that stay and others in the place of those that go, or on new ones.

What the survivors hold is on disk by then, or cannot be (`shutdown.py`).
"""

from ..recovery.events import Log
from ..recovery.state import JobState, Reschedule
from ..recovery.world import NodeState
from .generation import give_back_all_nodes, open_world_or_wait, replace_node


def restart(state: JobState, now: float, goal: Reschedule, remark: str = "") -> None:
    """Start every process again, as soon as there are nodes. `remark`: what became of the checkpoint."""
    if remark:
        state.plans.remark = remark
        state.turn.actions.append(Log(remark))
    if goal.every_node:
        give_back_all_nodes(state)
    else:
        _replace_nodes(state, goal.leaving)
    open_world_or_wait(state, now)


def _replace_nodes(state: JobState, leaving: tuple[str, ...]) -> None:
    """Replace the nodes that are to be left, and those that were lost, or refused, while the checkpoint was written."""
    nodes = state.world.nodes
    lost = [name for name in state.world.group_nodes() if nodes[name].state is NodeState.LOST]
    for name in dict.fromkeys((*leaving, *lost)):
        if not nodes[name].given_back:
            replace_node(state, name)
