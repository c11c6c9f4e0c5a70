"""TOPIC: rules of the job's owner on what the script reports, and on lines that ranks print.

A broken one has the step repeated, or a batch left out. All ranks say at the commit barrier that a value breaks a rule,
before any has applied the update, and stop; of a line an agent tells. No rank is at fault, and the ladder is not asked:
what the rule says is done, in a generation of its own, in which every process
lives on. It is an incident in the record. What the next repair has to leave out stands until the step is committed, so
that a fault on the way, or another controller, changes nothing about it: the plan of each attempt says it again.

Each rank hands its local state of the next step to its buddy before the barrier. So each one's position behind the
batches is known wherever its state is, and lost ranks go on there as the others do.
"""

from msgspec.structs import replace

from ...protocol.rules import DO_NOT_REQUEUE, OUT_OF_MEMORY, JobRule, RuleAction, RuleTally, StandingRule
from ...protocol.types import Decision, FaultReport, Rung
from ...protocol.wording import count
from . import topic as do
from .state import OVER, JobState, Phase
from .topic import Recs, Topic

# All ranks are trained, or are on their way to barrier one, at which the repair is planned.
_HEARD = frozenset({Phase.RUNNING, Phase.PAUSING, Phase.SUSPECTING, Phase.RESUMING, Phase.QUIESCING, Phase.FINISHING})


def _broken(state: JobState, rec: do.RuleBroken) -> Recs:
    """Do what a broken rule asks for: once, however many ranks say so."""
    report = rec.report
    rule = next((each for each in (OUT_OF_MEMORY, *state.policy.rules) if each.name == report.code), None)
    step, standing = report.trusted_step, state.rules.standing
    ends = rule is not None and rule.line is not None and rule.then is RuleAction.STOP  # at any time
    if rule is None or step is None or state.phase in OVER or not (ends or state.phase in _HEARD):
        state.ignore("broken rule that is not known" if rule is None else f"broken rule while {state.phase}")
        return None
    if rule.then is RuleAction.REPORT:
        _count(state, rule, report, step)
        state.say(f"rule {rule.name}: {report.detail}, at step {step}, on rank {report.rank}")
        return None
    if ends:
        _count(state, rule, report, step)
        return _act(state, rule, report, step, opens=False)
    known = standing is not None and standing.generation >= report.generation
    overtaken = report.generation < state.generation
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
    what, times = _what(state, rule, step)
    text = f"rule {rule.name} on {rule.subject} is broken at step {step}"
    if rule is OUT_OF_MEMORY:
        text = f"a rank is out of memory at step {step}"
    if rule.then is RuleAction.STOP or times > rule.at_most:
        state.remember(report)
        enough = (
            "" if rule.then is RuleAction.STOP else f", as it is after {count(times - 1, 'time')} in a row of: {what}"
        )
        return [do.StopNow(f"{text}{enough}", DO_NOT_REQUEUE)]
    before = state.rules.standing
    if before is None or before.step != step:
        before = StandingRule(step, report.generation)
    stands, rolled_back, trusted = replace(before, generation=report.generation), state.rules.rolled_back, None
    if rule.then is RuleAction.REPEAT_STEP:
        stands = replace(stands, repeats=times)
    elif rule.then is RuleAction.SKIP_BATCH:
        stands = replace(stands, skips=times, unfinished=rule is OUT_OF_MEMORY)
    else:
        stands, rolled_back, trusted = replace(stands, back=times), (step, times), max(0, step - rule.steps)
    state.rules = replace(state.rules, standing=stands, rolled_back=rolled_back)
    return [do.RepeatAsRuled(report, Decision(Rung.RETRY_STEP, f"{text}: {what}"), trusted, opens)]


def _what(state: JobState, rule: JobRule, step: int) -> tuple[str, int]:
    """Return what a rule asks for in words, and how often in a row that is by now."""
    standing = state.rules.standing
    same = standing if standing is not None and standing.step == step else None
    if rule.line is not None:  # it may come again in the next step, as what was repeated was not to blame
        return "the step is repeated", state.rules.tallies[rule.name].row
    if rule.then is RuleAction.REPEAT_STEP:
        return "the step is repeated", 1 + (same.repeats if same else 0)
    if rule.then is RuleAction.SKIP_BATCH:
        return "its batch is left out on all ranks", 1 + (same.skips if same else 0)
    since, times = state.rules.rolled_back
    again = times if 0 < step <= since else 0  # training has not come further than where it went back from
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


RULES = Topic(
    name="rules",
    answers={
        do.RuleBroken: _broken,
        do.CannotGoBack: _cannot_go_back,
        do.StepRepeated: _step_repeated,
        do.NothingLeftOut: _nothing_left_out,
    },
)
