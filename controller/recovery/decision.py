"""TOPIC: what is done: by the ladder about a fault, or as a rule of the job's owner says.

*The ladder.* A decision is made whenever an incident begins or takes a turn: for a new fault, a deadline that was
missed, or a rung that failed. The facts are collected, the ladder is asked, its answer is carried out. Ranks that fail
while the attempt under way still gathers all ranks widen it; ranks that it has replaced already, and rungs that have
failed, call for another attempt.

*Rules.* They are about what the script reports, and lines that ranks print. A broken one has the step repeated, or a
batch left out. All ranks say at the commit barrier that a value breaks a rule, before any has applied the update, and
stop; of a line an agent tells. No rank is at fault, and the ladder is not asked: what the rule says is done, in a
generation of its own, in which every process lives on. It is an incident in the record. What the next repair has to
leave out stands until the step is committed, so that a fault on the way, or another controller, changes nothing about
it: the plan of each attempt says it again. Each rank hands its local state of the next step to its buddy before the
barrier. So each one's position behind the batches is known wherever its state is, and lost ranks go on there as the
others do.
"""

from collections.abc import Iterator

from msgspec.structs import replace

from ...policies.budgets import WORLD_RESTARTS, Facts, FailedRung
from ...policies.fault_codes import Treatment, closed_text
from ...policies.ladder import Choice
from ...protocol.rules import DO_NOT_REQUEUE, OUT_OF_MEMORY, JobRule, RuleAction, RuleTally, StandingRule
from ...protocol.types import DETECTOR_PREFIX, Decision, FaultReport, RestoreSource, Rung
from ...protocol.wording import count
from . import topic as do
from .incident import OpenIncident, Verdict
from .orders import leave_node, replace_node
from .state import OVER, JobState, Phase, Reschedule, Resize, Result
from .topic import Recs, Topic
from .world import NodeState

# What keeps a node in use from getting new processes.
_CLOSED = frozenset({Treatment.LEAVE, Treatment.CLOSE})
_RESTART = frozenset({Treatment.RESTART})
# All ranks are trained, or are on their way to barrier one, at which the repair is planned.
_HEARD = frozenset({Phase.RUNNING, Phase.PAUSING, Phase.SUSPECTING, Phase.RESUMING, Phase.QUIESCING, Phase.FINISHING})


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
        choice = state.ladder.choose(replace(facts, closed={**facts.closed, **going}))
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
        forbidden={each.rung: each.reason for each in state.controls.rungs if state.now < each.until_s},
    )


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


# --- rules on values and lines ----------------------------------------------------------------------------------------


def _rule_broken(state: JobState, rec: do.RuleBroken) -> Recs:
    """Do what a broken rule asks for: once, however many ranks say so."""
    report = rec.report
    rule = next((each for each in (OUT_OF_MEMORY, *state.policy.rules) if each.name == report.code), None)
    step, standing = report.trusted_step, state.rules.standing
    ends = rule is not None and rule.line is not None and rule.then is RuleAction.STOP  # at any time
    if rule is None or step is None or state.phase in OVER or not (ends or state.phase in _HEARD):
        state.ignore("broken rule that is not known" if rule is None else f"broken rule while {state.phase}")
        return None
    if rule.then is RuleAction.REPORT:
        last = state.rules.tallies.get(rule.name)
        news = last is None or abs(step - last.step) > 1  # else another rank has met the same
        _count(state, rule, report, step, times=int(news))
        if news:
            state.say(f"rule {rule.name}: {report.detail}, at step {step}, on rank {report.rank}")
        return None
    known = not ends and standing is not None and standing.generation >= report.generation
    overtaken = not ends and report.generation < state.generation
    if known and report.detail and state.history.open is not None:
        state.remember(report)  # the rank whose value it is speaks after another one
        _count(state, rule, report, step, times=0)
        return None
    if known or (overtaken and state.phase is not Phase.QUIESCING):
        state.ignore("broken rule of a step that is repeated already")
        return None
    _count(state, rule, report, step)
    return _act(state, rule, report, step, opens=not overtaken)


def _act(state: JobState, rule: JobRule, report: FaultReport, step: int, *, opens: bool) -> Recs:
    """Have the next repair do it; `opens`: in a generation that begins now, as no fault has opened one."""
    before, stands = state.rules.standing, StandingRule(step, report.generation)
    if before is not None and before.step == step:
        stands = replace(before, generation=report.generation)
    what, times = _asked_for(state, rule, stands)
    text = f"rule {rule.name} on {rule.subject} is broken at step {step}"
    if rule is OUT_OF_MEMORY:
        text = f"a rank is out of memory at step {step}"
    if rule.then is RuleAction.STOP or times > rule.at_most:
        state.remember(report)
        enough = f", as it is after {count(times - 1, 'time')} in a row of: {what}"
        return [do.StopNow(text if rule.then is RuleAction.STOP else text + enough, DO_NOT_REQUEUE)]
    rolled_back, trusted = state.rules.rolled_back, None
    if rule.then is RuleAction.REPEAT_STEP:
        stands = replace(stands, repeats=times)
    elif rule.then is RuleAction.SKIP_BATCH:
        stands = replace(stands, skips=times, unfinished=rule is OUT_OF_MEMORY)
    else:
        stands, rolled_back, trusted = replace(stands, back=times), (step, times), max(0, step - rule.steps)
    state.rules = replace(state.rules, standing=stands, rolled_back=rolled_back)
    return [do.RepeatAsRuled(report, Decision(Rung.RETRY_STEP, f"{text}: {what}"), trusted, opens)]


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


def _asked_for(state: JobState, rule: JobRule, stands: StandingRule) -> tuple[str, int]:
    """Return what a rule asks for in words, and how often in a row that is by now. `stands`: for the step so far."""
    if rule.line is not None:  # it may come again in the next step, as what was repeated was not to blame
        return "the step is repeated", state.rules.tallies[rule.name].row
    if rule.then is RuleAction.REPEAT_STEP:
        return "the step is repeated", 1 + stands.repeats
    if rule.then is RuleAction.SKIP_BATCH:
        return "its batch is left out on all ranks", 1 + stands.skips
    since, times = state.rules.rolled_back
    again = times if 0 < stands.step <= since else 0  # training has not come further than where it went back from
    return f"all go back {count(rule.steps, 'step')} at least, and leave out the data since then", 1 + again


def _count(state: JobState, rule: JobRule, report: FaultReport, step: int, *, times: int = 1) -> None:
    before = state.rules.tallies.get(rule.name)
    row = times + (before.row if before and before.step <= step <= before.step + 1 else 0)
    tally = RuleTally(times + (before.times if before else 0), step, state.now, report.detail, rule.then, row)
    state.rules = replace(state.rules, tallies={**state.rules.tallies, rule.name: tally})


def _cannot_go_back(state: JobState, rec: do.CannotGoBack) -> Recs:
    return [do.StopNow(f"a rule has all ranks go back, and there is nothing to go back to: {rec.why}", DO_NOT_REQUEUE)]


def _step_repeated(state: JobState, rec: do.StepRepeated) -> Recs:
    state.rules = state.rules.committed(rec.step)
    return None


def _nothing_left_out(state: JobState, _: do.NothingLeftOut) -> Recs:
    if state.rules.standing is not None:
        state.rules = replace(state.rules, standing=replace(state.rules.standing, skips=0, back=0))
    return None


# --- the topic --------------------------------------------------------------------------------------------------------


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
        do.RuleBroken: _rule_broken,
        do.RepeatAsRuled: _repeat_as_ruled,
        do.CannotGoBack: _cannot_go_back,
        do.StepRepeated: _step_repeated,
        do.NothingLeftOut: _nothing_left_out,
    },
    contradictions=_contradictions,
)
