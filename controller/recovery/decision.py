"""TOPIC: from a fault to a rung: collect the facts, ask the ladder, carry out its answer.

A decision is made whenever an incident begins or takes a turn: for a new fault, a deadline that was missed, or a rung
that failed. Ranks that fail while the attempt under way still gathers all ranks widen it; ranks that it has replaced
already, and rungs that have failed, call for another attempt.
"""

from collections.abc import Iterator

import msgspec

from ...policies.budgets import WORLD_RESTARTS, Facts, FailedRung
from ...policies.fault_codes import Treatment, closed_text
from ...policies.ladder import Choice
from ...protocol.types import DETECTOR_PREFIX, Decision, FaultReport, RestoreSource, Rung
from . import topic as do
from .incident import OpenIncident, Verdict
from .orders import leave_node, replace_node
from .state import JobState, Phase, Reschedule, Resize, Result
from .topic import Recs, Topic
from .world import NodeState

# What keeps a node in use from getting new processes.
_CLOSED = frozenset({Treatment.LEAVE, Treatment.CLOSE})
_RESTART = frozenset({Treatment.RESTART})


def _rung_failed(state: JobState, rec: do.RungFailed) -> Recs:
    """Remember that a rung did not lead to a resume, and choose again.

    Where no further rank is at fault, those whom the attempt was about are: the next rung is for them.
    """
    failed = (rec.rung,) if rec.rung is not None else state.incident.attempt.rungs
    for each in failed:
        state.incident = state.incident.rule_out(each, rec.reason)
    nobody_new = not state.incident.held(Verdict.CULPRIT, Verdict.MENDING)
    if rec.rung is None and nobody_new and not {*failed} & {*WORLD_RESTARTS}:
        state.incident = state.incident.return_replaced()
        if Rung.RECOVER in failed:
            reason = f"{Rung.RECOVER}, which does more, has failed: {rec.reason}"
            state.incident = state.incident.rule_out(Rung.RECOVER_IN_PLACE, reason)
    return [do.Decide()] if rec.decide else None


def _stop_now(state: JobState, rec: do.StopNow) -> Recs:
    if state.planned.current is not None:
        return [do.GiveUpChange("the job stops"), rec]
    state.decided(Decision(Rung.STOP, rec.reason))
    return [do.SaveFirst(Result(rec.exit_code, rec.reason))]


def _repeat_as_ruled(state: JobState, rec: do.RepeatAsRuled) -> Recs:
    """Repeat a step for a rule: no rank is at fault, so the ladder is not asked, and no budget is charged."""
    if state.planned.current is not None:
        return [do.GiveUpChange("a rule of the policy is broken"), rec]
    state.remember(rec.report)
    state.decided(rec.decision)
    if rec.trusted_step is not None:
        state.incident = state.incident.doubt(rec.trusted_step)
    if not rec.opens:
        return None
    state.clocks.forget()
    state.incident = state.incident.suspect_only()
    state.begin_attempt()
    return [do.OpenGeneration()]


def _decide(state: JobState, rec: do.Decide) -> Recs:
    """Ask the ladder, remember its answer, do it."""
    if state.planned.current is not None:
        return [do.GiveUpChange("an incident came between"), rec]
    incident = state.incident
    widens = (
        state.turn.came_in is Phase.QUIESCING
        and bool(incident.attempt.rungs)
        and not incident.ruled_out.keys() & {*incident.attempt.rungs}
        and not incident.replaced.intersection(incident.culprits)
    )
    # Its survivors know already that processes are replaced.
    gathers = widens and bool(incident.replaced)
    if not widens:
        state.begin_attempt()
    choice = _choose(state)
    if rec.hasty and choice.decision.rung is Rung.STOP:
        return [do.AskNodes()]
    state.decided(choice.decision)
    state.incident = state.incident.take(choice.decision.rung, choice.course.cost)
    rung, course = choice.decision.rung, choice.course
    if rung is Rung.STOP:
        return [do.SaveFirst(Result(1, choice.decision.reason))]
    state.incident = state.incident.treat(course.replace)
    if rung in WORLD_RESTARTS:
        return _reschedule(state, rung, course.leave)
    for name in course.leave:
        leave_node(state, name, course.to.get(name, ""))
    return [do.OpenGeneration(course.replace, widen=gathers, ask_for_nodes=True)]


def _choose(state: JobState) -> Choice:
    """Ask the ladder. A rank that fails on a node that is about to go moves at once, where a spare is ready for it.

    It is no reason to do more than that: where it cannot move alone, the ladder is asked as if the node stayed.
    """
    facts, planned = _gather(state), state.planned
    going = {
        name: f"node {name} is about to go: {planned.unwell[name].report.detail}"
        for name in planned.going.intersection(planned.unwell)
        if name not in facts.closed
    }
    if going and facts.spare_nodes:
        choice = state.ladder.choose(msgspec.structs.replace(facts, closed={**facts.closed, **going}))
        if choice.decision.rung is Rung.RECOVER:
            return choice
    return state.ladder.choose(facts)


def _gather(state: JobState) -> Facts:
    """Return what the ladder may look at."""
    world, incident = state.world, state.incident
    # Ranks that could not repair themselves are left to the next rung.
    unmended = (Verdict.MENDED,) if Rung.RETRY_STEP in incident.ruled_out else ()
    culprits, mendable = incident.culprits, incident.held(Verdict.MENDING, *unmended)
    at_fault = (*culprits.values(), *mendable.values(), *incident.suspicions)
    resilient = frozenset(holder.rank for holder in world.holders if holder.resilient)
    # --max-restarts is for scripts that fail; what a detector saw is not the script's doing.
    hardware = any(fault.seen_by.startswith(DETECTOR_PREFIX) for fault in culprits.values())
    return Facts(
        now=state.now,
        faults=tuple({id(fault): fault for fault in at_fault}.values()),
        culprits=tuple(sorted(culprits)),
        mendable=tuple(sorted(mendable)),
        nodes={holder.rank: holder.node for holder in world.holders},
        healthy=resilient.difference(culprits, mendable),
        resilient=bool(resilient),
        max_restarts=None if state.ever_resilient or hardware else state.job.max_restarts,
        nodes_lost=frozenset(world.named(NodeState.LOST)),
        isolated=frozenset(world.named(NodeState.ISOLATED)),
        closed=_closed_nodes(state) if state.book.faults else {},
        spare_nodes=tuple(world.spares()),
        built_ahead=world.built_ahead(),
        can_create_nodes=state.arrivals.can_be_created,
        promised_nodes=len(world.named(NodeState.REQUESTED)),
        taken=incident.taken,
        failed=tuple(FailedRung(rung, reason) for rung, reason in incident.ruled_out.items()),
        spent=tuple(state.accounts.paid),  # what the attempt under way has cost is widened, and not paid twice
        node_failures=tuple(state.accounts.node_failures),
        min_nodes=state.policy.scale.min_nodes,
        forbidden=_forbidden(state) if state.controls.rungs else {},
    )


def _forbidden(state: JobState) -> dict[Rung, str]:
    """Return the rungs that operators do not want taken now, each with the reason."""
    return {each.rung: each.reason for each in state.controls.rungs if state.now < each.until_s}


def _closed_nodes(state: JobState) -> dict[str, str]:
    """Return the nodes in use that are to get no new process, each with the reason."""
    closed: dict[str, str] = {}
    limit_s = state.policy.faults.in_place_age_s
    for name in state.world.named(NodeState.ACTIVE):
        for fault in state.book.on(name, _CLOSED):
            closed.setdefault(name, closed_text(name, fault.level, _what(fault)))
        for fault in state.book.on(name, _RESTART):
            stood_s = fault.age_s + state.now - fault.at_s
            if stood_s > limit_s:
                text = f"{fault.level} {_what(fault)} on node {name} has stood for {stood_s:.0f} s"
                closed.setdefault(name, f"{text}; up to {limit_s:g} s a restart in place can mend it")
    return closed


def _what(fault: FaultReport) -> str:
    code = f"{fault.code} " if fault.code else ""
    return f"{code}of device {fault.device}" if fault.device is not None else f"{code}of the node"


# --- the answer is carried out ----------------------------------------------------------------------------------------


def _reschedule(state: JobState, rung: Rung, leave: tuple[str, ...]) -> Recs:
    """Restart the world: on the nodes that stay and replacements for the others, or on new nodes only.

    Healthy ranks save first, those on the nodes that are left, too, so these go after that.
    """
    state.incident = state.incident.replaces_all(state.world.size)
    every_node = rung is not Rung.RESCHEDULE_POD
    if not every_node and state.policy.scale.min_nodes is not None:
        nodes = {*state.world.named(NodeState.ACTIVE, NodeState.SPARE)} - {*leave}
        if len(nodes) < state.nodes_needed:
            return [do.SaveFirst(Resize(_replace_lost(state, leave)))]
    goal = Reschedule(every_node=True) if every_node else Reschedule(_replace_lost(state, leave))
    return [do.SaveFirst(goal)] if _saves_first(state) else [do.Restart(goal)]


def _saves_first(state: JobState) -> bool:
    """Return whether a checkpoint is written before all processes are restarted: not where no process would load it."""
    policy = state.policy
    loaded = RestoreSource.CHECKPOINT in policy.restore or policy.script_writes
    return policy.save_before_reschedule and loaded and state.ever_resilient


def _replace_lost(state: JobState, leave: tuple[str, ...]) -> tuple[str, ...]:
    """Replace those of the nodes that are lost, on which nothing can be saved; return the others."""
    gone = [name for name in leave if state.world.nodes[name].state is NodeState.LOST]
    for name in gone:
        replace_node(state, name)
    return tuple(name for name in leave if name not in gone)


def _contradictions(state: JobState) -> Iterator[str]:
    if state.phase is Phase.RUNNING and state.incident != OpenIncident():
        yield f"the job is running, and something is wrong: {state.incident}"
    if state.incident.attempt.rungs and state.history.open is None and state.phase is not Phase.ENDED:
        yield f"{state.incident.attempt.rungs[-1]} is under way, and no incident is on record"


DECISION = Topic(
    name="decision",
    answers={
        do.Decide: _decide,
        do.RungFailed: _rung_failed,
        do.StopNow: _stop_now,
        do.RepeatAsRuled: _repeat_as_ruled,
    },
    contradictions=_contradictions,
)
