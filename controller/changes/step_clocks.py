"""The reading of all step clocks: how far each rank is, and what it does.

A suspicion is judged by it, and a step boundary is chosen by it. Each request empties what was read before; what
follows when every node has answered is in `barriers.py`.
"""

from ...protocol.messages import ProbeProgress, ProgressReported
from ...protocol.types import RankProgress, node_address
from ..recovery.state import JobState


def ask(state: JobState) -> None:
    """Ask every node for the step clocks of its ranks."""
    clocks = state.clocks
    forget(state)
    clocks.probe += 1
    clocks.awaited = set(state.world.group_nodes())
    for name in sorted(clocks.awaited):
        state.send(node_address(name), ProbeProgress(clocks.probe))


def on_progress_reported(state: JobState, event: ProgressReported, now: float) -> None:
    """A node has read its step clocks."""
    clocks = state.clocks
    if event.probe != clocks.probe or event.node not in clocks.awaited:
        state.ignore("progress of an earlier probe")
        return
    clocks.awaited.discard(event.node)
    for clock in event.ranks:
        holder = state.world.holder(clock.rank)
        if holder is not None and clock.incarnation == holder.incarnation:
            clocks.read[clock.rank] = clock
        state.progress.heard(clock.step)
    clocks.complete = not clocks.awaited


def take(state: JobState) -> dict[int, RankProgress]:
    """Return what was read, by rank, and end the reading."""
    read = dict(state.clocks.read)
    forget(state)
    return read


def forget(state: JobState) -> None:
    """End the reading that is under way, if there is one."""
    state.clocks.complete = False
    state.clocks.awaited.clear()
    state.clocks.read.clear()
