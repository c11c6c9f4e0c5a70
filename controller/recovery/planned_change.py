"""TOPIC: changes that wait for a step boundary, above all the drain of a node that is not well.

While a change is prepared training continues, and no incident is open. To drain a node, new processes are started on a
spare node, beside the old ones that train. When all of them have reached their train function the step clocks are read,
a step a little ahead is chosen, and every rank gets the order to stop before it, in the present generation. At the
boundary the new processes take the ranks over, and get their state from the replicas that the others hold; the old ones
end only when it is sure that no other rank's state goes with them. To grow, all write a checkpoint there, and start
again; or new processes get ready as for a drain, and join the others there (`start.py`). What operators ask for at a
boundary (`controls.py`) is a change as well: all ranks are held there, a checkpoint is written, or the process of a
rank is replaced.

Whatever comes between comes first: the change is given up, and looked at again later.
"""

from collections.abc import Iterator

import msgspec

from ...policies.budgets import Facts
from ...policies.fault_codes import Treatment
from ...policies.ladder import best_spare
from ...policies.rungs import drain, drain_given_up, drain_obstacle, growth_given_up, may_drain, may_grow, move_all
from ...policies.schema import SlowAction, SubHealthAction
from ...protocol.errors import StateLost
from ...protocol.messages import NewcomerWaiting, StartProcess, StopProcess
from ...protocol.types import (
    FaultKind,
    FaultReport,
    RestoreSource,
    Rung,
    StepReport,
    node_address,
)
from ...protocol.wording import nodes_text, ranks_text
from . import topic as do
from .orders import LOOK, hand_to, request_node, start_command, vacate
from .repair import plan_repair
from .state import AT_THE_BOUNDARY, JobState, Newcomer, Phase, PlannedChange, Reschedule, Resize, Stage, Unwell
from .topic import Deadline, Follow, Owed, Recs, Row, Rule, Topic
from .world import DONE, NOT_STOPPED, NodeState

READINGS = 6  # then the change is given up
AGAIN_S = 30.0  # after a change was given up
FAILURES = 3  # drains of one node that may fail by themselves before it is left in peace

# A planned change goes on in these; everything else is an incident, and comes first.
_QUIET = frozenset({Phase.RUNNING, Phase.PAUSING, Phase.SUSPECTING})


# --- nodes that are not well ------------------------------------------------------------------------------------------


def _not_well(state: JobState, rec: do.NotWell) -> Recs:
    """Take in that a node, or a device of it, is not well: begin to drain it."""
    name = rec.report.node or ""
    if name not in state.world.nodes:
        state.ignore("sub-health of a node that is not there")
    elif not _stands(state, name):
        state.ignore("sub-health that was a moment's")
    elif name in state.planned.unwell:
        state.ignore("sub-health that is known")
    else:
        state.planned.unwell[name] = Unwell(rec.report)
        _begin_drain(state)
        _record(state, name, rec.report)
    return None


def _going(state: JobState, rec: do.Going) -> Recs:
    """The platform will take a node in use away. A node is asked for, where none is spare."""
    name = rec.report.node or ""
    state.planned.unwell.setdefault(name, Unwell(rec.report)).report = rec.report
    if state.arrivals.can_be_created and not state.world.named(NodeState.SPARE, NodeState.REQUESTED):
        request_node(state)
    _begin_drain(state)
    _record(state, name, rec.report)
    return None


def _well_again(state: JobState, rec: do.WellAgain) -> Recs:
    """A node that is well is not drained, and is used again."""
    name, change = rec.node, state.planned.current
    if name not in state.planned.unwell or _stands(state, name):
        return None
    del state.planned.unwell[name]
    if change is not None and change.node == name and change.stage not in AT_THE_BOUNDARY:
        _give_up(state, "it is well again")
        _LOOK.drop(state)
        return None
    node = state.world.nodes[name]
    if node.state is NodeState.ISOLATED and not node.given_back and not state.world.on(name):
        return [do.UseAgain(name)]
    return None


def _stands(state: JobState, name: str) -> bool:
    return bool(state.book.on(name, frozenset({Treatment.WATCH})))


def _record(state: JobState, name: str, report: FaultReport) -> None:
    """Write down what was seen, unless a drain is on its way and will tell of it."""
    planned = state.planned
    if planned.current is not None and planned.current.node == name:
        return
    note = planned.unwell[name].note or "and has no ranks"
    if state.remember(report):
        state.history.dismissed(state.now, f"node {name} is {planned.what_is_wrong(name)}, {note}")


# --- a drain is prepared ----------------------------------------------------------------------------------------------


def _begin_drain(state: JobState) -> None:
    """Begin to drain a node that is not well, if one can be: start the processes that will take its ranks over.

    One that is going is left even where they could not get their state: all processes are restarted without it.
    """
    world, planned = state.world, state.planned
    spares = world.spares()
    for name, unwell in planned.unwell.items():
        ranks = tuple(holder.rank for holder in world.on(name))
        if not ranks or unwell.failures >= FAILURES:
            continue
        going = name in planned.going  # no failure, and so it takes no budget
        question = may_drain(
            state.now, name, {each.rank: each.node for each in world.holders}, () if going else state.spent
        )
        why_not = drain_obstacle(state.policy, state.ladder.refusals(question, Rung.RECOVER), len(spares), going=going)
        if why_not is None and state.phase is not Phase.RUNNING:
            why_not = "its ranks move when the job runs again"
        spare = best_spare(spares, ranks, world.built_ahead())
        shrinks = _may_shrink(state, name)
        restarts = why_not is not None and (shrinks or (going and bool(spares))) and _may_restart(state)
        leaves = "the world continues without it" if shrinks else f"its ranks move to {spare}"
        unwell.note = leaves if why_not is None or restarts else why_not
        if planned.current is None and restarts:
            what = planned.what_is_wrong(name)
            decision = move_all(name, spare, state.nodes_needed - 1, unwell.report, what=what)
            planned.current = PlannedChange(unwell.report, decision, (), name, spare, restarts=True)
        elif planned.current is None and why_not is None:
            _start_newcomers(state, name, spare, ranks, question, going=going)


def _may_shrink(state: JobState, name: str) -> bool:
    """Say whether the world may continue without a node that is going or slow, in whose place none can come."""
    policy, slow = state.policy, state.planned.unwell[name].report.kind in {FaultKind.SLOW, FaultKind.SLOW_LINK}
    shrinks = slow and policy.slow.then is SlowAction.SHRINK and policy.sub_health is not SubHealthAction.IGNORE
    if not shrinks and name not in state.planned.going:
        return False
    alone = not state.world.named(NodeState.SPARE, NodeState.REQUESTED) and not state.arrivals.can_be_created
    return alone and policy.scale.min_nodes is not None and policy.scale.min_nodes < state.nodes_needed


def _may_restart(state: JobState) -> bool:
    """Say whether all processes may be restarted from a checkpoint that they write at a step boundary."""
    if state.phase is not Phase.RUNNING or state.world.has(*DONE) or not state.ever_resilient:
        return False
    question = may_grow(state.now, {each.rank: each.node for each in state.world.holders})
    return RestoreSource.CHECKPOINT in state.policy.restore and not state.ladder.refusals(question, Rung.RESCHEDULE_POD)


def _start_newcomers(
    state: JobState, name: str, spare: str, ranks: tuple[int, ...], question: Facts, *, going: bool
) -> None:
    report, what = state.planned.unwell[name].report, state.planned.what_is_wrong(name)
    state.planned.current = PlannedChange(
        node=name,
        spare=spare,
        report=report,
        decision=drain(name, spare, ranks, state.world.size - len(ranks), report, what=what),
        charges=() if going else state.ladder.course(question, Rung.RECOVER).cost,
        newcomers={rank: Newcomer(rank, state.world.holders[rank].next_incarnation(), spare) for rank in ranks},
        awaiting=set(ranks),
    )
    _order_starts(state)


def _order_starts(state: JobState) -> None:
    _LOOK.within(state, state.policy.deadlines.start_s)
    for node, command in _outstanding_starts(state):
        state.send(node_address(node), command)


def _outstanding_starts(state: JobState) -> list[tuple[str, StartProcess]]:
    """Return the commands for the newcomers that have not reached their train function, each with its node."""
    change = state.planned.current
    if change is None:
        return []
    waited_for = [newcomer for rank, newcomer in sorted(change.newcomers.items()) if rank in change.awaiting]
    return [
        (each.node, start_command(state, state.world.to_be(each.rank), early=each.incarnation, nodes=change.nodes))
        for each in waited_for
    ]


def _newcomer_started(state: JobState, rec: do.NewcomerStarted) -> Recs:
    newcomer = state.planned.newcomer(rec.process.rank, rec.process.incarnation)
    if newcomer is not None:
        newcomer.pid = rec.process.pid
    return None


def _newcomer_failed(state: JobState, rec: do.NewcomerFailed) -> Recs:
    change = state.planned.current
    if change is None:
        return None
    if change.stage in AT_THE_BOUNDARY:
        _end_newcomers(state, change, rec.rank)  # all stop anyhow: then the rank is started once more there
    else:
        node = change.newcomers[rec.rank].node
        _give_up(state, f"the new process of rank {rec.rank} on {node} failed: {rec.why}", failed=True)
    return None


def _on_newcomer_waiting(state: JobState, event: NewcomerWaiting) -> Recs:
    """Take in that a newcomer has reached its train function; when all have, the boundary is chosen."""
    change = state.planned.current
    newcomer = state.planned.newcomer(event.process.rank, event.process.incarnation)
    if change is None or newcomer is None or newcomer.rank not in change.awaiting:
        state.ignore("newcomer that is not waited for")
        return None
    newcomer.pid = event.process.pid
    change.awaiting.discard(newcomer.rank)
    if not change.awaiting and change.stage is Stage.PREPARING and state.phase is Phase.RUNNING:
        return [do.ReadClocks()]
    return None


def _give_up(state: JobState, why: str, *, failed: bool = False) -> None:
    """Drop what is planned, if anything is; it is looked at again later. `failed`: by its own fault."""
    change, state.planned.current = state.planned.current, None
    if change is None:
        return
    _end_newcomers(state, change)
    state.saving.drop()
    if state.phase is not Phase.SUSPECTING:  # there the clocks are read to find who is at fault
        state.clocks.forget()
    _LOOK.within(state, AGAIN_S)
    if change.joins:
        state.say(growth_given_up(change.joins, why))
        for name in change.joins if failed else ():
            state.planned.unable[name] = state.planned.unable.get(name, 0) + 1
    unwell = state.planned.unwell.get(change.node)
    if unwell is not None:
        unwell.note = why
        unwell.failures += failed


def _end_newcomers(state: JobState, change: PlannedChange, *ranks: int) -> None:
    """End the processes that were to take these ranks over; all where none is named."""
    for newcomer in [change.newcomers.pop(rank) for rank in ranks or sorted(change.newcomers)]:
        node = state.world.nodes.get(newcomer.node)
        if node is not None and node.state is not NodeState.LOST:
            state.send(node_address(node.name), StopProcess(newcomer.rank, newcomer.incarnation, grace_s=0.0))


# --- at the boundary --------------------------------------------------------------------------------------------------


def _all_stopped(state: JobState) -> bool:
    """Return whether every rank stands at the boundary, and the change is still to be made."""
    change = state.planned.current
    return change is not None and change.stage is Stage.STOPPING and not state.world.has(*NOT_STOPPED)


def _make_change(state: JobState) -> Recs:
    """All ranks have stopped: make the change, write first what would be lost by it, or go on without it."""
    change = state.planned.current
    assert change is not None
    if change.holds or change.saves:
        change.stage = Stage.HOLDING if change.holds else Stage.HANDING_OVER
        return [do.HoldRanks() if change.holds else do.SavePart()]
    if change.spare and not _spare_of(state, change):
        return _stay(state, change, "the spare node is gone")
    if not {*change.joins} <= {*state.world.spares()}:
        return _stay(state, change, "a node of the new ranks is gone")
    if change.nodes or change.restarts:
        state.planned.current = None
        _LOOK.drop(state)
        if change.joins:
            return [do.Enlarge(change)]
        leaving = (change.node,) if change.restarts else ()
        return [do.SaveFirst(Reschedule(leaving) if change.spare else Resize(leaving))]
    lost = _kept_back(state, change)
    return _switch(state, change) if lost is None else _hand_over(state, change, lost)


def _hand_over(state: JobState, change: PlannedChange, lost: str) -> Recs:
    """Have a checkpoint written of what would go with the old processes, if one can be."""
    if RestoreSource.CHECKPOINT not in state.policy.restore:
        return _stay(state, change, f"{lost}; and no checkpoint can be written: restore is without checkpoint")
    change.stage = Stage.HANDING_OVER
    return [do.SavePart()]


def _part_saved(state: JobState, rec: do.PartSaved) -> Recs:
    """The checkpoint is complete and the change is made, or it cannot be written and all stay."""
    change = state.planned.current
    if change is None:
        return None
    if change.saves:
        return _go_on(state, change, rec.error or f"a checkpoint of step {rec.step} was written")
    if not rec.begun:
        return _stay(state, change, f"{_kept_back(state, change)}; {rec.error}")
    if rec.error:
        return _stay(state, change, f"the checkpoint failed: {rec.error}")
    if not change.ranks and not _spare_of(state, change):
        return _stay(state, change, "the spare node is gone")
    for holder in state.world.holders:  # those that stay were asked what they can read before it was there
        if holder.report is not None:
            readable = tuple(sorted({*holder.report.checkpoints, rec.step}))
            holder.report = msgspec.structs.replace(holder.report, checkpoints=readable)
    said = f"a checkpoint of step {rec.step} was written first"
    who = ranks_text(change.ranks) if change.ranks else f"the processes that leave {change.node}"
    state.note(f"{said}, as only {who} held all of it")
    return _switch(state, change)


def _stay(state: JobState, change: PlannedChange, why_not: str) -> Recs:
    """The ranks of the node cannot leave it after all: all ranks continue where they are."""
    if change.wish:
        return _go_on(state, change, f"not done: {why_not}")
    _give_up(state, why_not, failed=True)
    if change.node in state.planned.unwell and _spare_of(state, change):
        state.planned.unwell[change.node].failures = FAILURES  # who holds what does not change by waiting
    state.note(growth_given_up(change.joins, why_not) if change.joins else drain_given_up(change.node, why_not))
    return [do.OpenGeneration()]


def _stay_after_all(state: JobState, rec: do.Stay) -> Recs:
    change = state.planned.current
    return None if change is None else _stay(state, change, rec.why)


def _go_on(state: JobState, change: PlannedChange, outcome: str, replace: tuple[int, ...] = ()) -> Recs:
    """Operators had all ranks stop here: what they wished for is done, or cannot be, and all train on."""
    state.planned.current = None
    state.saving.drop()
    _LOOK.drop(state)
    done = [do.WishDone(change.wish, outcome)] if change.wish else []
    return [*done, do.OpenGeneration(replace)]


def _end_hold(state: JobState, _: do.EndHold) -> Recs:
    """Let all ranks go on; those that are on their way to the boundary go on from there."""
    change = state.planned.current
    if change is None or not change.holds:
        return None
    if change.stage is Stage.HOLDING:
        return _go_on(state, change, "")
    if change.stage not in AT_THE_BOUNDARY:
        _give_up(state, "the pause is over before it began")
        _LOOK.drop(state)
    return None


def _switch(state: JobState, change: PlannedChange) -> Recs:
    """Nothing goes with the old processes: hand the ranks of the node to the newcomers, and open a generation."""
    if change.ranks:
        return _go_on(state, change, "done", change.ranks)
    moved = tuple(holder.rank for holder in state.world.on(change.node))
    spare = _spare_of(state, change)
    if spare != change.spare:
        _end_newcomers(state, change)
    state.planned.current = None
    _LOOK.drop(state)
    if change.node in state.planned.unwell:
        state.planned.unwell[change.node].note = f"its ranks have moved to {spare}"
    vacate(state, change.node)
    state.world.move(change.node, spare)
    return [do.OpenGeneration(moved=moved), do.AskNewcomers(hand_to(state, change.newcomers))]


def _spare_of(state: JobState, change: PlannedChange) -> str:
    """Return the node that the newcomers are on, or another spare one if that is gone; empty: there is none."""
    spares = state.world.spares()
    return change.spare if change.spare in spares else next(iter(spares), "")


def _kept_back(state: JobState, change: PlannedChange) -> str | None:
    """Say what would go with the old processes; None when the others, or a checkpoint of this step, have all of it."""
    reports = {holder.rank: holder.report for holder in state.world.holders if holder.report is not None}
    leaving = {*change.ranks, *(holder.rank for holder in state.world.on(change.node))}
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


def _all_finished(state: JobState) -> Recs:
    """Training was over before the boundary was reached: nothing is left to be changed."""
    why = "training finished before the step at which it was to stop"
    _give_up(state, why)
    state.history.dismissed(state.now, why)
    state.enter()
    return None


# --- what is planned is followed --------------------------------------------------------------------------------------


def _follow(state: JobState) -> Recs:
    """Begin a change when the job can bear one, and give it up when something comes between.

    Runs after every event. Costs nothing while nothing is planned and every node is well.
    """
    planned = state.planned
    if planned.current is not None:
        return _watch(state, planned.current)
    if planned.unwell and state.phase is Phase.RUNNING and not state.world.has(*DONE) and _LOOK.due(state) is None:
        _begin_drain(state)
    return None


def _watch(state: JobState, change: PlannedChange) -> Recs:
    if state.phase not in _QUIET:
        _give_up(state, f"the job is {state.phase}")
    elif change.stage in AT_THE_BOUNDARY:
        return None
    elif state.world.has(*DONE):
        _give_up(state, "training is about to finish")
    elif gone := {*change.joins, *filter(None, [change.spare])} - {*state.world.named(NodeState.SPARE)}:
        _give_up(state, f"{nodes_text(gone)} is not spare any more")
    elif state.phase is Phase.RUNNING and change.stage is Stage.PREPARING and not change.awaiting:
        return [do.ReadClocks()]  # nobody is waited for, or it was put off by a suspicion that turned out to be none
    return None


def _look_again(state: JobState) -> Recs:
    """The change is too slow, or it is time to look again."""
    change = state.planned.current
    if change is None:
        return None
    if change.stage is Stage.PREPARING:
        late = ranks_text(change.awaiting)
        where = nodes_text(change.joins or [change.spare])
        _give_up(state, f"{late} did not reach its train function on {where} in time", failed=True)
    elif change.readings < READINGS:
        return [do.ReadClocks()]
    else:
        _give_up(state, "the step clocks could not be read", failed=True)
    return None


def _given_up(state: JobState, rec: do.GiveUpChange) -> Recs:
    _give_up(state, rec.why)
    return None


def _plan(state: JobState, rec: do.Plan) -> Recs:
    """Plan a change, unless another one is planned: begin to prepare it, if it needs that."""
    if state.planned.current is not None:
        return None
    state.planned.current = rec.change
    if not rec.change.awaiting:
        return [do.ReadClocks()]
    _order_starts(state)
    return None


def _owes(state: JobState) -> Iterator[Owed]:
    for name, command in _outstanding_starts(state):
        yield node_address(name), command


# When the change that is planned is late, and when to look again after one was given up.
_LOOK = Deadline(LOOK, _look_again, lambda state: state.policy.deadlines.start_s, ahead=True)

PLANNED = Topic(
    name="planned",
    takes=(Row((Phase.RUNNING, Phase.SUSPECTING), NewcomerWaiting, _on_newcomer_waiting),),
    answers={
        do.NotWell: _not_well,
        do.Going: _going,
        do.WellAgain: _well_again,
        do.NewcomerStarted: _newcomer_started,
        do.NewcomerFailed: _newcomer_failed,
        do.Stay: _stay_after_all,
        do.Plan: _plan,
        do.EndHold: _end_hold,
        do.PartSaved: _part_saved,
        do.GiveUpChange: _given_up,
    },
    rules=(
        Rule(frozenset({Phase.PAUSING}), lambda state: state.world.count(*DONE) == state.world.size, _all_finished),
        Rule(frozenset({Phase.PAUSING}), _all_stopped, _make_change),
    ),
    follows=Follow(frozenset(Phase), _follow),
    deadlines=(_LOOK,),
    owes=_owes,
)
