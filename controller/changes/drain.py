"""Nodes that work and are not well: their ranks move to a spare node between two steps.

First new processes are started on the spare node, while the old ones train. When all of them have reached their train
function, all ranks stop at a step boundary; the new processes take the ranks over, and get their state from the
replicas that the others hold. The old processes end only when it is sure that no other rank's state goes with them.
"""

import msgspec

from ...policies.budgets import Facts
from ...policies.fault_codes import Treatment
from ...policies.rungs import drain, drain_given_up, drain_obstacle, may_drain
from ...protocol.errors import StateLost
from ...protocol.messages import CheckpointSaved, NewcomerWaiting, Quiesce, StartProcess
from ...protocol.types import (
    FaultReport,
    RestoreSource,
    Rung,
    RunningProcess,
    StepReport,
    node_address,
    rank_address,
)
from ..recovery.repair import plan_repair
from ..recovery.state import AT_THE_BOUNDARY, JobState, Newcomer, Phase, Plan, Stage, Unwell
from ..recovery.world import NodeState, RankEvent
from .boundary import end_newcomers, give_up, read_clocks
from .generation import open_generation, request_node, start_command, vacate
from .node_checks import check, is_unfit
from .shutdown import start_saving, take_saved
from .spares import spare_for

FAILURES = 3  # drains of one node that may fail by themselves before it is left in peace


def take_sub_health(state: JobState, report: FaultReport, now: float) -> None:
    """A detector says that a node, or a device of it, is not well; the fault book has it."""
    name = report.node or ""
    if name not in state.world.nodes:
        state.ignore("sub-health of a node that is not there")
    elif not _not_well(state, name):
        state.ignore("sub-health that was a moment's")
    elif name in state.plans.unwell:
        state.ignore("sub-health that is known")
    else:
        state.plans.unwell[name] = Unwell(report)
        begin(state, now)
        _record(state, name, report, now)


def take_going(state: JobState, report: FaultReport, now: float) -> None:
    """The platform will take a node in use away; the fault book has it. A node is asked for, where none is spare."""
    name = report.node or ""
    state.plans.unwell.setdefault(name, Unwell(report)).report = report
    if state.arrivals.can_be_created and not state.world.named(NodeState.SPARE, NodeState.REQUESTED):
        request_node(state)
    begin(state, now)
    _record(state, name, report, now)


def well_again(state: JobState, name: str | None, now: float) -> None:
    """Something that stood on a node does not stand any more: a node that is well is not drained, and is used again."""
    if name is None or name not in state.plans.unwell or _not_well(state, name):
        return
    del state.plans.unwell[name]
    plan = state.plans.current
    if plan is not None and plan.node == name and plan.stage not in AT_THE_BOUNDARY:
        give_up(state, "it is well again", now)
        state.plans.due_s = None
        return
    node = state.world.nodes[name]
    if node.state is NodeState.ISOLATED and not node.given_back and not state.world.on(name):
        node.state = NodeState.SPARE
        check(state, name)
        node.state = NodeState.UNFIT if is_unfit(state, name) else NodeState.SPARE


def _not_well(state: JobState, name: str) -> bool:
    return bool(state.book.on(name, frozenset({Treatment.WATCH})))


def _record(state: JobState, name: str, report: FaultReport, now: float) -> None:
    """Write down what was seen, unless a drain is on its way and will tell of it."""
    if state.plans.current is not None and state.plans.current.node == name:
        return
    plans, note = state.plans, state.plans.unwell[name].note or "and has no ranks"
    if state.remember(report, now):
        state.history.dismissed(now, f"node {name} is {plans.what_is_wrong(name)}, {note}")


def begin(state: JobState, now: float) -> None:
    """Begin to drain a node that is not well, if one can be: start the processes that will take its ranks over."""
    spares = state.world.spares()
    for name, unwell in state.plans.unwell.items():
        ranks = tuple(holder.rank for holder in state.world.on(name))
        if not ranks or unwell.failures >= FAILURES:
            continue
        refused = state.ladder.refusals(_question(state, name, now), Rung.RECOVER)
        why_not = drain_obstacle(state.policy, refused, len(spares), going=name in state.plans.going)
        if why_not is None and state.phase is not Phase.RUNNING:
            why_not = "its ranks move when the job runs again"
        spare = spare_for(state, name)
        unwell.note = why_not or f"its ranks move to {spare}"
        if why_not is None and state.plans.current is None:
            _start_newcomers(state, name, spare, ranks, now)


def _question(state: JobState, name: str, now: float) -> Facts:
    spent = () if name in state.plans.going else state.spent
    return may_drain(now, name, {each.rank: each.node for each in state.world.holders}, spent)


def _start_newcomers(state: JobState, name: str, spare: str, ranks: tuple[int, ...], now: float) -> None:
    report, what = state.plans.unwell[name].report, state.plans.what_is_wrong(name)
    going = name in state.plans.going  # no failure, and so it takes no budget
    charges = () if going else state.ladder.course(_question(state, name, now), Rung.RECOVER).cost
    state.plans.current = Plan(
        node=name,
        spare=spare,
        report=report,
        decision=drain(name, spare, ranks, state.world.size - len(ranks), report, what=what),
        charges=charges,
        newcomers={rank: Newcomer(rank, state.world.holders[rank].next_incarnation()) for rank in ranks},
        awaiting=set(ranks),
    )
    state.plans.due_s = now + state.policy.deadlines.start_s
    for node, command in outstanding_starts(state):
        state.send(node_address(node), command)


def outstanding_starts(state: JobState) -> list[tuple[str, StartProcess]]:
    """Return the commands for the newcomers that have not reached their train function, each with its node."""
    plan = state.plans.current
    if plan is None:
        return []
    waited_for = [newcomer for rank, newcomer in sorted(plan.newcomers.items()) if rank in plan.awaiting]
    return [
        (plan.spare, start_command(state, state.world.holders[newcomer.rank], early=newcomer.incarnation))
        for newcomer in waited_for
    ]


def newcomer_of(state: JobState, rank: int | None, incarnation: int) -> Newcomer | None:
    """Return the newcomer that a report is about, None when it is about another process."""
    plan = state.plans.current
    newcomer = None if plan is None or rank is None else plan.newcomers.get(rank)
    return newcomer if newcomer is not None and newcomer.incarnation == incarnation else None


def newcomer_started(state: JobState, process: RunningProcess) -> bool:
    """Take in the start of a newcomer; False when it is another process."""
    newcomer = newcomer_of(state, process.rank, process.incarnation)
    if newcomer is not None:
        newcomer.pid = process.pid
    return newcomer is not None


def newcomer_failed(state: JobState, rank: int | None, incarnation: int, why: str, now: float) -> bool:
    """Take in that a newcomer could not be started, or has ended; False when it was another process."""
    plan, newcomer = state.plans.current, newcomer_of(state, rank, incarnation)
    if plan is None or newcomer is None:
        return False
    if plan.stage in AT_THE_BOUNDARY:
        del plan.newcomers[newcomer.rank]  # all stop anyhow: the rank is started anew on the spare node then
    else:
        give_up(state, f"the new process of rank {rank} on {plan.spare} failed: {why}", now, failed=True)
    return True


def on_newcomer_waiting(state: JobState, event: NewcomerWaiting, now: float) -> None:
    """A newcomer has reached its train function; when all have, the boundary is chosen."""
    plan = state.plans.current
    newcomer = newcomer_of(state, event.process.rank, event.process.incarnation)
    if plan is None or newcomer is None or newcomer.rank not in plan.awaiting:
        state.ignore("newcomer that is not waited for")
        return
    newcomer.pid = event.process.pid
    plan.awaiting.discard(newcomer.rank)
    if not plan.awaiting and plan.stage is Stage.PREPARING and state.phase is Phase.RUNNING:
        read_clocks(state, plan, now)


def stay(state: JobState, plan: Plan, why_not: str, now: float) -> None:
    """The ranks of the node cannot leave it after all: all ranks continue where they are."""
    give_up(state, why_not, now, failed=True)
    if plan.node in state.plans.unwell and spare_of(state, plan):
        state.plans.unwell[plan.node].failures = FAILURES  # who holds what does not change by waiting
    state.plans.remark = drain_given_up(plan.node, why_not)
    open_generation(state, (), now)


def switch(state: JobState, plan: Plan, now: float) -> None:
    """Nothing goes with the old processes: hand the ranks of the node to the newcomers, and open a generation."""
    moved = [holder.rank for holder in state.world.on(plan.node)]
    spare = spare_of(state, plan)
    if spare != plan.spare:
        end_newcomers(state, plan)
    state.plans.current, state.plans.due_s = None, None
    if plan.node in state.plans.unwell:
        state.plans.unwell[plan.node].note = f"its ranks have moved to {spare}"
    vacate(state, plan.node)
    state.world.move(plan.node, spare)
    for newcomer in plan.newcomers.values():
        holder = state.world.holders[newcomer.rank]
        holder.incarnation, holder.pid, holder.early = newcomer.incarnation, newcomer.pid, True
        state.world.take(holder, RankEvent.START_ORDERED)
        state.forget(newcomer.rank)
    open_generation(state, (), now, moved=moved)
    state.due.newcomers_s = now + state.policy.deadlines.start_s
    for rank in sorted(plan.newcomers):
        state.send(rank_address(rank), Quiesce(rank, state.generation, replaces=True))


def spare_of(state: JobState, plan: Plan) -> str:
    """Return the node that the newcomers are on, or another spare one if that is gone; empty: there is none."""
    spares = state.world.spares()
    return plan.spare if plan.spare in spares else next(iter(spares), "")


def kept_back(state: JobState, plan: Plan) -> str | None:
    """Say what would go with the old processes; None when the others, or a checkpoint of this step, have all of it."""
    reports = {holder.rank: holder.report for holder in state.world.holders if holder.report is not None}
    leaving = {holder.rank for holder in state.world.on(plan.node)}
    gone = {
        rank: StepReport(0, ready=False, clean=False, needs=report.needs, checkpoints=report.checkpoints)
        for rank, report in reports.items()
        if rank in leaving
    }
    places, restore = state.world.places(), state.policy.restore
    try:
        before = plan_repair(reports, places, restore)
        after = plan_repair({**reports, **gone}, places, restore)
    except StateLost as lost:
        return str(lost)
    return "; ".join(after.reasons) if after.target_step < before.target_step else None


# --- at the boundary ------------------------------------------------------------------------------------------


def leave_or_stay(state: JobState, plan: Plan, now: float) -> None:
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
    state.due.phase_s = now + state.policy.deadlines.save_s


def on_part_saved(state: JobState, event: CheckpointSaved, now: float) -> None:
    """One rank has written its part; when all have, the checkpoint is complete and the change is made."""
    plan = state.plans.current
    if plan is None or not take_saved(state, event):
        return
    if event.error:
        stay(state, plan, f"the checkpoint failed: {event.error}", now)
    elif not state.saving.outstanding and spare_of(state, plan):
        _note_checkpoint(state, event.step)
        said = f"a checkpoint of step {event.step} was written first"
        state.plans.remark = f"{said}, as only the processes that leave {plan.node} held all of it"
        switch(state, plan, now)
    elif not state.saving.outstanding:
        stay(state, plan, "the spare node is gone", now)


def _note_checkpoint(state: JobState, step: int) -> None:
    """Those that stay were asked what they can read before it was there."""
    for holder in state.world.holders:
        if holder.report is not None:
            readable = tuple(sorted({*holder.report.checkpoints, step}))
            holder.report = msgspec.structs.replace(holder.report, checkpoints=readable)


def part_save_overdue(state: JobState, now: float) -> bool:
    """The checkpoint was not written in time: go on without the change. False when none is being written."""
    plan = state.plans.current
    if plan is None or plan.stage is not Stage.HANDING_OVER:
        return False
    stay(state, plan, f"the checkpoint was not written within {state.policy.deadlines.save_s:g} s", now)
    return True
