"""TOPIC: ranks that were wrong in a vote on what all hold. One that is so again and again is moved to another node.

The ranks vote among themselves and say who is to blame (`processor/votes.py`). One that was wrong once may have met a
stray particle, and mends itself as any other that can. So each time is a strike against the rank on its node. With the
policy's number of strikes within its window, what the rank computes on is taken for broken: it is moved, and the node
is left, where a spare is there to move to.
"""

import msgspec

from ...policies.budgets import WrongVote
from ...protocol.faults import EACH_TIME
from ...protocol.types import Assertion, FaultLevel, FaultReport, IntegrityAction
from . import topic as do
from .state import JobState

MOST_STRIKES = 1000  # of a job that are remembered: the oldest goes


def _count_wrong(state: JobState, rec: do.CountWrong) -> do.Recs:
    """Count that a rank was wrong; recommend that it is moved if that was once too often."""
    report, policy = rec.report, state.policy.integrity
    holder = None if report.rank is None else state.world.holder(report.rank)
    if report.assertion is Assertion.RECOVER:
        return [do.SortOut(report)]
    if holder is None or report.incarnation != holder.incarnation:
        state.ignore("wrong vote of an earlier process")
        return None
    strikes = _times_wrong(state, holder.rank, holder.node)
    if report.code == EACH_TIME:  # it has had its second chance in the step itself
        strikes = max(strikes, policy.strikes)
    text = f"{report.detail}; strike {strikes} of {policy.strikes} on node {holder.node}"
    if policy.then is IntegrityAction.REPORT or strikes < policy.strikes:
        return [do.SortOut(msgspec.structs.replace(report, detail=text))]
    if not state.world.spares():
        return [do.SortOut(msgspec.structs.replace(report, detail=f"{text}, and no spare node is there"))]
    accounts = state.accounts
    accounts.strikes = [each for each in accounts.strikes if each.node != holder.node]
    return [do.SortOut(_of_broken(report, f"{text}: the node is left"))]


def _times_wrong(state: JobState, rank: int, node: str) -> int:
    """Enter one more, and return how many the rank has on its node within the window."""
    since_s = state.now - state.policy.integrity.window_s
    fresh = [each for each in state.accounts.strikes if each.at_s > since_s]
    strikes = [*fresh, WrongVote(rank, node, state.now)][-MOST_STRIKES:]
    state.accounts.strikes = strikes
    return sum((each.rank, each.node) == (rank, node) for each in strikes)


def _of_broken(report: FaultReport, detail: str) -> FaultReport:
    """Return the report as one of what the rank computes on: no process may be there, and its own cannot mend it."""
    return msgspec.structs.replace(
        report,
        detail=detail,
        level=FaultLevel.SEPARATE_NPU,
        mendable=False,
        code=None,
        fault_id=f"strikes of rank {report.rank}",
        assertion=Assertion.OCCUR,
    )


INTEGRITY = do.Topic(name="integrity", answers={do.CountWrong: _count_wrong})
