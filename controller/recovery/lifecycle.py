"""TOPIC: the way of all ranks through a generation: quiesce, rejoin, resume, train, finish; both barriers.

A generation is opened for ranks that get another process: survivors quiesce, newcomers start. Barrier one closes when
every survivor has quiesced and every newcomer has joined; then the repair is planned and all rejoin. Barrier two closes
when all stand at one step; then all resume, and the incident ends when each has committed the first new step.

Handlers only note what each rank answers. What follows is said by rules on how the ranks stand together, so that a
suspicion that is dismissed, or an order in which answers come, needs no rule of its own.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

from msgspec.structs import replace

from ...protocol import messages as m
from ...protocol.errors import StateLost
from ...protocol.messages import Quiesce, Rejoin, Release, Resume, StopProcess
from ...protocol.rules import LeaveOut, StandingRule
from ...protocol.types import (
    CONTROLLER,
    FaultKind,
    FaultReport,
    LocalStateCopy,
    RepairPlan,
    RestoreSource,
    Rung,
    StepReport,
    first_step_s,
    node_address,
    rank_address,
)
from ...protocol.wording import ranks_text
from . import topic as do
from .orders import (
    NEWCOMERS,
    NODES,
    await_newcomers,
    fault_of,
    faults_of,
    next_generation,
    quiesce,
    request_missing,
    start,
    start_command,
)
from .repair import choose_links, plan_repair, uses_devices, why_not_begin
from .state import OVER, JobState, Phase
from .topic import ALIVE, Owed, PhaseLimit, Recs, Row, Rule, Topic
from .world import DONE, GONE, NOT_STOPPED, PARKED, Holder, RankEvent, RankState, World

# Rungs that keep processes alive, and so depend on state that can be had from them.
KEEPING = (Rung.RETRY_STEP, Rung.RECOVER_IN_PLACE, Rung.RECOVER)


# --- a generation is opened -------------------------------------------------------------------------------------------


def _open_generation(state: JobState, rec: do.OpenGeneration) -> Recs:
    """Have survivors quiesce, and give the others a new process; where none would survive, start the whole world.

    Newcomers of an earlier attempt that are still on their way, and ranks that are parked already, stay as they are.
    Further ranks that fail while the generation gathers widen it, and its survivors need not hear of it: many nodes
    that go at once are lost one after the other, and were each to open a generation, each would be ordered to all.
    """
    world = state.world
    replaced = {*rec.replace, *world.ranks(RankState.ABSENT, RankState.EXITED)}
    replaced |= {rank for rank in world.ranks(RankState.STARTING) if world.holders[rank].connected}
    survivors = [holder for holder in world.holders if holder.rank not in replaced and holder.resilient]
    if not survivors:
        return [do.StartWorld()]
    if rec.widen:
        state.incident = state.incident.opened(replaced)
        state.history.replaced(replaced)
    else:
        next_generation(state, {*replaced, *rec.moved})
        quiesce(state, survivors)
    for rank in sorted(replaced):
        start(state, world.holders[rank], connected=False)
    joining = world.ranks(RankState.STARTING) - state.due.unplaced
    if replaced or not joining:
        await_newcomers(state, some=bool(joining))
    if not rec.widen:
        state.enter(state.policy.deadlines.quiesce_s)
    if state.due.unplaced and rec.ask_for_nodes:
        request_missing(state)
    return None


def _ask_newcomers(state: JobState, rec: do.AskNewcomers) -> Recs:
    await_newcomers(state)
    for rank in rec.ranks:
        state.send(rank_address(rank), Quiesce(rank, state.generation, replaces=True))
    return None


def _gone(state: JobState, rec: do.Gone) -> Recs:
    for rank in rec.ranks:
        holder = state.world.holder(rank)
        if holder is not None and rec.incarnation in {None, holder.incarnation}:
            state.world.lose(holder)
    return None


# --- newcomers ------------------------------------------------------------------------------------------------------


def _tidy(state: JobState) -> None:
    """Wait for no process that is not on the way any more."""
    if NEWCOMERS in state.due.incident and not state.world.has(RankState.STARTING):
        await_newcomers(state, some=False)
    if not state.due.unplaced:
        state.due.incident.pop(NODES, None)


def _blame_all(state: JobState, ranks: Iterable[int], kind: FaultKind, what: str) -> Recs:
    faults = faults_of(state, ranks, kind, what)
    return [*map(do.Blame, faults), do.Decide()] if faults else None


# --- what ranks answer ------------------------------------------------------------------------------------------------


def _current(state: JobState, rank: int, incarnation: int) -> Holder | None:
    """Return the holder of a rank if the report comes from its present process."""
    holder = state.world.holder(rank)
    return holder if holder is not None and holder.incarnation == incarnation else None


def _on_process_started(state: JobState, event: m.ProcessStarted) -> Recs:
    process = event.process
    if state.planned.newcomer(process.rank, process.incarnation) is not None:
        return [do.NewcomerStarted(process)]
    holder = _current(state, process.rank, process.incarnation)
    if holder is None or holder.state in GONE:
        state.ignore("start of an earlier process")  # the order to end it may have come before the one to start it
        state.send(node_address(event.node), StopProcess(process.rank, process.incarnation, grace_s=0.0))
    else:
        holder.heard(process.pid, state.now)
    return None


def _on_rank_joined(state: JobState, event: m.RankJoined) -> Recs:
    """Note that a new process has reached its train function."""
    holder = _current(state, event.rank, event.incarnation)
    if holder is None or holder.state is not RankState.STARTING:
        state.ignore("joined twice or too late")
        return None
    state.world.take(holder, RankEvent.JOINED)
    holder.resilient = True
    holder.heard(event.pid, state.now)
    holder.reported(event.report)
    holder.joined_generation = event.generation
    state.ever_resilient = True
    state.history.rank_phases(state.generation, event.rank, {"join": event.join_s})
    if NEWCOMERS not in state.due.incident and state.phase is Phase.STARTING:
        await_newcomers(state)
    return None


def _on_rank_quiesced(state: JobState, event: m.RankQuiesced) -> Recs:
    """Note that a survivor has stopped and cleaned."""
    holder = _current(state, event.rank, event.incarnation)
    if holder is None or event.generation != state.generation or holder.state is not RankState.QUIESCING:
        state.ignore("quiesced in another generation")
        return None
    pausing = state.turn.came_in is Phase.PAUSING
    if pausing and state.planned.before_boundary(event.report.committed):
        state.ignore("quiesced before the boundary")
        return None
    state.world.take(holder, RankEvent.QUIESCED)
    holder.reported(event.report)
    holder.committed = max(holder.committed, event.report.committed)
    state.progress.heard(event.report.committed)
    state.history.rank_phases(state.generation, event.rank, event.phases_s)
    return [do.StoppedAtBoundary()] if pausing else None


def _on_rank_ready(state: JobState, event: m.RankReady) -> Recs:
    """Note that a rank is rebuilt, repaired and rolled back; one that is not where it was ordered to go is at fault."""
    holder = _current(state, event.rank, event.incarnation)
    if holder is None or event.generation != state.generation or holder.state is not RankState.REJOINING:
        state.ignore("ready in another generation")
        return None
    assert state.repair is not None
    if event.step != state.repair.target_step:
        what = f"it came back at step {event.step}, all others go to {state.repair.target_step}"
        return [do.Blame(fault_of(state, holder, FaultKind.CORRUPTION, what)), do.Decide()]
    state.world.take(holder, RankEvent.READY)
    holder.committed = event.step
    state.history.rank_phases(state.generation, event.rank, event.phases_s)
    state.history.moved(event.bytes_received, over_devices=event.bytes_over_devices)
    return None


def _on_step_committed(state: JobState, event: m.StepCommitted) -> Recs:
    """Note that a rank has committed its first step since the resume."""
    holder = _current(state, event.rank, event.incarnation)
    if holder is None or event.generation != state.generation:
        state.ignore("step of another generation")
        return None
    if holder.state is RankState.RESUMING:  # else it is said once more, perhaps after the incident has ended
        state.progress.first_step(event.committed, event.median_step_s, event.at_s)
    state.world.take(holder, RankEvent.STEP_COMMITTED)
    return None


def _on_rank_finished(state: JobState, event: m.RankFinished) -> Recs:
    """Note that a rank's train function has returned; its process stays until all have."""
    holder = _current(state, event.rank, event.incarnation)
    if holder is None or event.generation != state.generation:
        state.ignore("finished in another generation")
        return None
    state.world.take(holder, RankEvent.FINISHED)
    holder.committed = max(holder.committed, event.committed)
    state.progress.finished(event.committed, state.now)
    return None


# --- barrier one ------------------------------------------------------------------------------------------------------


def _some_have_left(state: JobState) -> bool:
    waits = state.world.has(RankState.JOINED, RankState.QUIESCING, RankState.QUIESCED)
    return waits and state.world.has(RankState.EXITED)


def _blame_those_that_left(state: JobState) -> Recs:
    what = "ended with status 0 before it reached its train function, in front of which others wait for it"
    return _blame_all(state, state.world.ranks(RankState.EXITED), FaultKind.EXIT, what)


def _plan_repair(state: JobState) -> Recs:
    """Barrier one has closed: plan the repair, and have all ranks rejoin."""
    world = state.world
    reports = {holder.rank: holder.report for holder in world.holders if holder.report is not None}
    try:
        new = {holder.rank for holder in world.holders if holder.is_new}
        plan = plan_repair(reports, world.places(), state.policy.restore, state.incident.trusted_step, new)
        if state.device_links:
            plan = choose_links(plan, state.policy.communicator.repair_links, tried=state.incident.over_devices)
        _refuse_remains(world, plan)
    except StateLost as lost:
        if state.rules.standing is not None and state.rules.standing.back:
            return [do.CannotGoBack(str(lost))]
        return [do.RungFailed(rung, str(lost), decide=rung is KEEPING[-1]) for rung in KEEPING]
    if plan.target_step == 0 and (refused := _why_not_begin(state, reports)):
        return [do.StopNow(refused)]
    left_out = True
    if state.rules.standing is not None and state.rules.standing.times:
        plan, left_out = _leaving_out(plan, reports, state.rules.standing)
    state.repair = plan
    if uses_devices(plan):
        state.incident = state.incident.repair_over_devices()
    remark = state.take_remark()
    reasons = (remark, *plan.reasons) if remark else plan.reasons
    progress = state.progress
    state.history.planned(plan.restore, reasons, plan.target_step, progress.committed, is_current=progress.is_current)
    for holder in world.holders:
        world.take(holder, RankEvent.REJOIN_ORDERED)
        state.send(rank_address(holder.rank), _rejoin_command(state, holder, plan))
    state.enter(state.policy.deadlines.rejoin_s)
    return None if left_out else [do.NothingLeftOut()]


def _leaving_out(
    plan: RepairPlan, reports: Mapping[int, StepReport], standing: StandingRule
) -> tuple[RepairPlan, bool]:
    """Return the plan with the batches that a rule has left out, and whether it can be so.

    Copies that others hold of an earlier step are what a way back has come to so far. A stored one is older than that.
    """
    order, target = (
        LeaveOut(standing.times, 0 if standing.unfinished and not standing.back else standing.step + 1),
        plan.target_step,
    )
    without = [rank for rank, report in reports.items() if not _knows_position(rank, report, order, target)]
    stored = plan.restore in {RestoreSource.HOST_COPY, RestoreSource.CHECKPOINT}
    fits = plan.restore is RestoreSource.REPLICA or (bool(standing.back) and stored and not without)
    if not fits or target > standing.step:
        lost = f", as the position of {ranks_text(without)} in it is lost" if standing.back and without else ""
        return replace(plan, reasons=(*plan.reasons, f"no batch is left out: the data is repeated{lost}")), False
    parts = {rank: replace(part, leave_out=order) for rank, part in plan.parts.items()}
    what = f"the data of steps {target} to {standing.step}" if standing.back else f"the batch of step {target}"
    return replace(plan, parts=parts, reasons=(*plan.reasons, f"{what} is left out on all ranks")), True


def _knows_position(rank: int, report: StepReport, order: LeaveOut, target: int) -> bool:
    """Return whether a rank has its own position behind the data that is left out, or has gone there already."""
    return not {LocalStateCopy(rank, order.data_step), LocalStateCopy(rank, target)}.isdisjoint(report.local_states)


def _why_not_begin(state: JobState, reports: Mapping[int, StepReport]) -> str:
    survivors = state.world.in_state(RankState.QUIESCED)  # whose step 0 is then repeated, and is that of this training
    return why_not_begin(
        reports,
        restore=state.policy.restore,
        trusted_step=state.incident.trusted_step,
        begin_again=state.policy.checkpoint.begin_again,
        marked_before=state.progress.committed > 0 and state.policy.checkpoint.every_steps > 0 and not survivors,
    )


def _refuse_remains(world: World, plan: RepairPlan) -> None:
    """Training begins again only in processes that hold what their script made: no half of a repair may remain."""
    remains = [h.rank for h in world.in_state(RankState.QUIESCED) if h.report is not None and not h.report.clean]
    if plan.restore is RestoreSource.NOTHING and remains:
        raise StateLost(
            f"no state is left but the half-repaired one of {ranks_text(remains)}; nothing may begin from that"
        )


def _rejoin_command(state: JobState, holder: Holder, plan: RepairPlan) -> Rejoin:
    """Return a rank's own part of the plan, as a command."""
    return Rejoin(
        rank=holder.rank,
        generation=state.generation,
        store=state.meeting.rendezvous(state.world, state.job.job, state.generation),
        connected=holder.connected and holder.joined_generation == state.generation,
        part=plan.parts[holder.rank],
    )


# --- barrier two, and the end -----------------------------------------------------------------------------------------


def _resume(state: JobState) -> Recs:
    """Barrier two has closed: all train on."""
    assert state.repair is not None
    state.meeting.linked_up(state.world)
    step = state.repair.target_step
    for each in state.world.holders:
        state.world.take(each, RankEvent.RESUME_ORDERED)
        state.send(rank_address(each.rank), Resume(each.rank, state.generation, step))
    # No longer than the policy says, and less where the usual step is known.
    limit_s, median_s = state.policy.deadlines.first_step_s, state.progress.median_step_s
    state.progress.resumed(step)
    state.enter(min(limit_s, first_step_s(median_s)) if median_s > 0 else limit_s)
    return None


def _close(state: JobState) -> Recs:
    """Each rank has committed its first step: the incident is over."""
    state.history.resumed(state.progress.first_steps_at_s, state.world.pids(), state.progress.median_step_s)
    state.close_incident()
    repaired, state.repair = state.repair, None
    state.enter()
    if state.rules.standing is not None and repaired is not None:
        return [do.StepRepeated(repaired.target_step)]
    return None


def _limit_finish(state: JobState) -> Recs:
    """Some have finished: limit how long the others may take."""
    state.limit(state.policy.deadlines.finish_s)
    return None


def _release(state: JobState) -> Recs:
    """All have finished: let their processes end."""
    for each in state.world.holders:
        state.world.take(each, RankEvent.RELEASE_ORDERED)
        state.send(rank_address(each.rank), Release(each.rank, state.generation))
    state.enter(state.policy.deadlines.finish_s)
    return None


def _all(*states: RankState) -> Callable[[JobState], bool]:
    return lambda state: state.world.count(*states) == state.world.size


# --- phases that are over time ----------------------------------------------------------------------------------------


def _not_quiesced(state: JobState) -> Recs:
    return _blame_all(state, state.world.ranks(*NOT_STOPPED), FaultKind.UNRESPONSIVE, "did not quiesce")


def _not_ready(state: JobState) -> Recs:
    state.meeting.link_up_failed(state.world)
    late, limit_s = state.world.count(RankState.REJOINING), state.policy.deadlines.rejoin_s
    return _over_time(state, f"{late} ranks not ready after {limit_s:g} s")


def _no_first_step(state: JobState) -> Recs:
    late, limit_s = state.world.count(RankState.RESUMING), state.policy.deadlines.first_step_s
    return _over_time(state, f"no first step from {late} ranks in {limit_s:g} s")


def _over_time(state: JobState, detail: str) -> Recs:
    """A phase in which ranks wait for each other is over time: find out who holds it up."""
    report = FaultReport(FaultKind.STALL, state.now, CONTROLLER, detail, generation=state.generation)
    state.remember(report)
    return [do.Suspect(report)]


def _not_finished(state: JobState) -> Recs:
    unfinished = set(range(state.world.size)) - state.world.ranks(*DONE)
    limit_s = state.policy.deadlines.finish_s
    return [do.EndNow(1, f"{ranks_text(unfinished)} did not finish within {limit_s:g} s of the others")]


# --- the topic --------------------------------------------------------------------------------------------------------


def _owes_rank(state: JobState, holder: Holder) -> Iterator[Owed]:
    rank, generation, address = holder.rank, state.generation, rank_address(holder.rank)
    if rank in state.due.held or rank in state.due.unplaced:
        return
    if holder.state is RankState.STARTING:
        yield node_address(holder.node), start_command(state, holder)
    if holder.state is RankState.QUIESCING or (holder.state is RankState.STARTING and holder.early):
        change = state.planned.current
        boundary = change.after_step if change is not None and state.phase is Phase.PAUSING else None
        yield address, Quiesce(rank, generation, boundary, replaces=bool(state.incident.replaced))
    elif holder.state is RankState.REJOINING and state.repair is not None:
        yield address, _rejoin_command(state, holder, state.repair)
    elif holder.state is RankState.RESUMING and state.repair is not None:
        yield address, Resume(rank, generation, state.repair.target_step)
    elif holder.state is RankState.RELEASED:
        yield address, Release(rank, generation)


_TO_BARRIER_ONE = frozenset({Phase.STARTING, Phase.QUIESCING})
P = Phase

LIFECYCLE = Topic(
    name="lifecycle",
    takes=(
        Row(ALIVE, m.ProcessStarted, _on_process_started),
        Row((P.STARTING, P.QUIESCING), m.RankJoined, _on_rank_joined),
        Row((P.QUIESCING, P.PAUSING, P.SAVING), m.RankQuiesced, _on_rank_quiesced),
        Row((P.REJOINING,), m.RankReady, _on_rank_ready),
        Row((P.RESUMING, P.RUNNING, P.SUSPECTING), m.StepCommitted, _on_step_committed),
        Row((P.RESUMING, P.RUNNING, P.PAUSING, P.SUSPECTING), m.RankFinished, _on_rank_finished),
    ),
    answers={
        do.OpenGeneration: _open_generation,
        do.AskNewcomers: _ask_newcomers,
        do.Gone: _gone,
    },
    rules=(
        Rule(_TO_BARRIER_ONE, _some_have_left, _blame_those_that_left),
        Rule(_TO_BARRIER_ONE, _all(*PARKED), _plan_repair),
        Rule(frozenset({P.REJOINING}), _all(RankState.READY), _resume),
        Rule(frozenset({P.RESUMING}), lambda state: not state.world.has(RankState.RESUMING), _close),
        Rule(frozenset({P.RUNNING}), _all(*DONE), _release),
        Rule(frozenset({P.RUNNING}), lambda state: state.due.phase_s is None and state.world.has(*DONE), _limit_finish),
        Rule(frozenset(P) - OVER, _all(RankState.EXITED), lambda state: [do.EndNow(0, "all ranks have finished")]),
    ),
    limits={
        P.QUIESCING: PhaseLimit(_not_quiesced, lambda state: state.policy.deadlines.quiesce_s),
        P.REJOINING: PhaseLimit(_not_ready, lambda state: state.policy.deadlines.rejoin_s),
        P.RESUMING: PhaseLimit(_no_first_step, lambda state: state.policy.deadlines.first_step_s),
        P.RUNNING: PhaseLimit(_not_finished),
        P.FINISHING: PhaseLimit(_not_finished),
    },
    tidies=_tidy,
    owes_rank=_owes_rank,
)
