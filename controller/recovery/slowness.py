"""TOPIC: nodes whose ranks compute more slowly than others with equal work.

The controller finds them from what it hears of each rank's own time (`controller/slow_ranks.py`). Here it is decided
what is done: it is shown, or the node is drained as one that a detector calls not well. Each drain is one of few within
a time, whatever becomes of it: where it is not the node that is slow, the ranks would wander from one to the next. A
slow data loader is slow on another node, too: it is only shown.
"""

import msgspec

from ...policies.budgets import NodeFailure
from ...policies.schema import SlowAction
from ...protocol.types import Assertion, FaultKind, FaultLevel
from . import topic as do
from .state import JobState


def _judge_slowness(state: JobState, rec: do.JudgeSlowness) -> do.Recs:
    report, slow, level = rec.report, state.policy.slow, FaultLevel.NOT_HANDLE
    if report.assertion is Assertion.RECOVER:
        return [do.SortOut(msgspec.structs.replace(report, level=level))]
    if any(report.fault_id == fault.report.fault_id for fault in state.book.standing()):
        state.ignore("slow node that is known")
        return None
    detail, node = report.detail, report.node or ""
    if report.kind is FaultKind.SLOW and slow.then is SlowAction.DRAIN:
        past = [each for each in state.accounts.slow if state.now - each.at_s < slow.window_s]
        if len(past) < slow.nodes:
            level = FaultLevel.SUB_HEALTH
            state.accounts.slow = [*past, NodeFailure(node, state.now)]
        else:
            detail += f"; it stays, as slow.nodes within {slow.window_s:g} s is {slow.nodes}"
    state.say(f"node {node}: {detail}")
    return [do.SortOut(msgspec.structs.replace(report, level=level, detail=detail))]


SLOWNESS = do.Topic(name="slowness", answers={do.JudgeSlowness: _judge_slowness})
