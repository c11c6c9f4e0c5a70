"""Ranks that leave a node at a step boundary, and hold what nobody else does: everybody writes a checkpoint first.

All are parked at one step; what is written there is loaded by those that stay as well as by the newcomers. No process
ends before it is complete. Where the others hold copies of everything, as in plain data parallel training, none is
needed.
"""

import msgspec

from ...protocol.messages import CheckpointSaved
from ...protocol.types import RestoreSource
from .draining import kept_back, spare_of, stay, switch
from .ending import SAVE_S, start_saving, take_saved
from .planned import Plan, Stage
from .state import JobState


def leave(state: JobState, plan: Plan, now: float) -> None:
    """All ranks have stopped: make the change, write first what would be lost by it, or go on without it."""
    if not spare_of(state, plan):
        stay(state, plan, "the spare node is gone", now)
        return
    lost = kept_back(state, plan)
    if lost is None:
        switch(state, plan, now)
        return
    why_not = "restore is without checkpoint"
    if RestoreSource.CHECKPOINT in state.policy.restore:
        why_not = start_saving(state) or ""
    if why_not:
        stay(state, plan, f"{lost}; and no checkpoint can be written: {why_not}", now)
        return
    plan.stage = Stage.HANDING_OVER
    state.due_s = now + SAVE_S


def part_saved(state: JobState, event: CheckpointSaved, now: float) -> None:
    """One rank has written its part; when all have, the checkpoint is complete and the change is made."""
    plan = state.plans.current
    if plan is None or not take_saved(state, event):
        return
    if event.error:
        stay(state, plan, f"the checkpoint failed: {event.error}", now)
    elif not state.saving and spare_of(state, plan):
        _note_checkpoint(state, event.step)
        said = f"a checkpoint of step {event.step} was written first"
        state.plans.remark = f"{said}, as only the processes that leave {plan.node} held all of it"
        switch(state, plan, now)
    elif not state.saving:
        stay(state, plan, "the spare node is gone", now)


def _note_checkpoint(state: JobState, step: int) -> None:
    """Those that stay were asked what they can read before it was there."""
    for holder in state.world.holders:
        if holder.report is not None:
            readable = tuple(sorted({*holder.report.checkpoints, step}))
            holder.report = msgspec.structs.replace(holder.report, checkpoints=readable)


def overdue(state: JobState, now: float) -> bool:
    """The checkpoint was not written in time: go on without the change. False when none is being written."""
    plan = state.plans.current
    if plan is None or plan.stage is not Stage.HANDING_OVER:
        return False
    stay(state, plan, f"the checkpoint was not written within {SAVE_S:g} s", now)
    return True
