"""TOPIC: what operators have a job do while it runs, in their name and for their reason.

Each control is an event of its own. It changes at once what is wanted of the job (`Controls`), and is answered with
what follows from that, or with why it is refused. What needs a step boundary waits there until the job trains
undisturbed, and then becomes a planned change (`planned_change.py`): a pause, a checkpoint, a new process for a rank.
An incident that comes between goes first. What was wanted still stands after it, and under each later controller.

While ranks are held they are told so again and again, as a process that hears no controller for long ends by itself.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec

from ...policies.ladder import Ladder
from ...policies.schema import changes, obstacle
from ...protocol import controls as c
from ...protocol.messages import ActionEnded, CallAction, Quiesce
from ...protocol.types import CONTROLLER, OPERATOR, Assertion, Decision, FaultKind, FaultReport, Rung, rank_address
from . import topic as do
from .events import ControlRequested, PolicyApplied
from .state import OVER, JobState, Phase, PlannedChange
from .topic import ALIVE, Follow, Owed, Recs, Row, Topic
from .world import DONE, NodeState

WISH_S = 1800.0  # what could not be done at a boundary for so long is not wished for any more
MOST_TOLD = 12  # changed keys in the record; the event has all
HOLD_SHARE = 3.0  # held ranks are told so as often within the time after which they would leave


class Answered(NamedTuple):
    """The answer to a control in words, and what is to be done. `refused`: nothing, and why."""

    text: str
    recs: Recs = None
    refused: bool = False


def _on_control_requested(state: JobState, event: ControlRequested) -> Recs:
    """Do what an operator asks for, write it down, and answer."""
    outcome = _CONTROLS[type(event.control)](state, event.control, event.asked)
    state.answer(outcome.text, refused=outcome.refused)
    if outcome.refused:
        state.ignore("control that is refused")
        return None
    _keep(state, event.asked, c.words_of(event.control), outcome.text)
    if isinstance(event.control, c.Acknowledge):
        _want(state, acknowledged=state.controls.records[-1])
    return outcome.recs


def _want(state: JobState, **fields: Any) -> None:
    state.controls = msgspec.structs.replace(state.controls, **fields)


def _keep(state: JobState, asked: c.Asked, what: str, outcome: str) -> None:
    """Write down what an operator has asked for, and what came of it; say so in the log."""
    records = (*state.controls.records, c.ControlRecord(state.now, asked, what, outcome))[-c.MOST_RECORDS :]
    _want(state, records=records, counted=state.controls.counted + 1)
    state.say(f"{asked.by} ({asked.role}) asks to {what}: {asked.why}")


# --- another policy ---------------------------------------------------------------------------------------------------


def _on_policy_applied(state: JobState, event: PolicyApplied) -> Recs:
    """Go by another policy from the next decision on, if the job can while it runs."""
    found = changes(state.policy, event.policy)
    why_not = obstacle(found)
    if event.number != applied_number(state) + 1:
        why_not = "the policy was changed meanwhile: look at it again"
    if why_not is not None:
        state.answer(why_not, refused=True)
        state.ignore("policy that is refused")
        return None
    state.applied = event
    put_in_force(state)
    what = f"change the policy: {'; '.join(change.text for change in found[:MOST_TOLD])}"
    what += f"; and {len(found) - MOST_TOLD} more" if len(found) > MOST_TOLD else ""
    state.answer(f"in force from the next decision, as change {event.number} of the policy", refused=False)
    _keep(state, event.asked, what, f"in force as change {event.number}")
    return None


def applied_number(state: JobState) -> int:
    """Return how often the policy was changed."""
    return 0 if state.applied is None else state.applied.number


def put_in_force(state: JobState) -> None:
    """Go by the policy that was applied last, if one was: when it is applied, and when a memory is restored."""
    if state.applied is not None:
        state.ladder = Ladder(state.applied.policy)
        state.policy = state.applied.policy


# --- at a step boundary -----------------------------------------------------------------------------------------------


def _no_boundary(state: JobState) -> str | None:
    """Say why the ranks cannot be stopped between two steps; None: they can be, now or later."""
    if state.phase in OVER or state.phase is Phase.FINISHING or state.world.has(*DONE):
        return "the job is about to end"
    if not state.ever_resilient:
        return (
            "its ranks cannot be stopped between two steps: none has reached a resilient train function yet. A plain "
            "script never does (docs/training-loop.md)"
        )
    return None


def _pause(state: JobState, control: c.PauseTraining, asked: c.Asked) -> Answered:
    why_not = _no_boundary(state)
    if why_not is not None:
        return Answered(why_not, refused=True)
    before, until_s = state.controls.pause, state.now + control.for_s
    _want(state, pause=c.StandingPause(until_s, asked))
    if before is not None:
        return Answered(f"the pause ends by itself in {control.for_s:g} s from now on")
    return Answered(
        f"all ranks stop at the next step boundary, and train on after {control.for_s:g} s, or when they are told to"
    )


def _end_pause(state: JobState, control: c.EndPause, asked: c.Asked) -> Answered:
    if state.controls.pause is None:
        return Answered("the job is not paused", refused=True)
    if state.controls.action is not None and state.controls.action.waiting:
        return Answered("ranks perform an action, which ends first: see `midstep status`", refused=True)
    _want(state, pause=None)
    return Answered("all ranks train on", [do.EndHold()])


def _wish(state: JobState, control: c.SaveNow | c.RestartRank, asked: c.Asked) -> Answered:
    why_not = _no_boundary(state)
    if why_not is None and isinstance(control, c.RestartRank) and state.world.holder(control.rank) is None:
        why_not = f"there is no rank {control.rank}: the world has ranks 0 to {state.world.size - 1}"
    if why_not is None and any(each.control == control for each in state.controls.wishes):
        why_not = "that is wished for already, and done at the next step boundary"
    if why_not is not None:
        return Answered(why_not, refused=True)
    wish = c.Wish(state.controls.counted + 1, control, asked, state.now + WISH_S)
    _want(state, wishes=(*state.controls.wishes, wish))
    what = "a checkpoint is written" if isinstance(control, c.SaveNow) else f"rank {control.rank} gets another process"
    when = "when the pause is over" if state.controls.pause is not None else "at the next step boundary"
    return Answered(f"{what} {when}")


def _follow(state: JobState) -> Recs:
    """Plan what is wanted at a boundary, while the job trains undisturbed. Costs nothing while nothing is wanted."""
    wanted = state.controls
    if (wanted.pause is None and not wanted.wishes) or state.world.has(*DONE):
        return None
    if wanted.action is not None and wanted.action.waiting:
        _end_action(state, wanted.action, "a fault came between")
    if wanted.pause is not None and wanted.pause.until_s <= state.now:
        _want(state, pause=None)
        return [do.EndHold()]
    if wanted.wishes and wanted.wishes[0].until_s <= state.now:
        return _wish_done(state, do.WishDone(wanted.wishes[0].number, f"not done within {WISH_S:g} s"))
    return [do.Plan(_change_for(state, wanted))]


def _change_for(state: JobState, wanted: c.Controls) -> PlannedChange:
    wish = wanted.wishes[0] if wanted.wishes else None
    if wish is None:
        assert wanted.pause is not None
        asked, what = wanted.pause.asked, "all ranks stand still between two steps"
    elif isinstance(wish.control, c.SaveNow):
        asked, what = wish.asked, "all ranks write a checkpoint between two steps"
    else:
        asked, what = wish.asked, f"rank {wish.control.rank} is restarted between two steps"
    rank = wish.control.rank if wish is not None and isinstance(wish.control, c.RestartRank) else None
    return PlannedChange(
        report=FaultReport(FaultKind.REQUESTED, state.now, CONTROLLER, asked.text, rank=rank),
        decision=Decision(Rung.RETRY_STEP if rank is None else Rung.RECOVER_IN_PLACE, f"{what}, {asked.text}"),
        charges=(),  # no failure, and so it takes no budget
        holds=wish is None,
        saves=wish is not None and rank is None,
        ranks=() if rank is None else (rank,),
        wish=0 if wish is None else wish.number,
    )


def _hold(state: JobState, _: do.HoldRanks) -> Recs:
    """Hold the ranks, which all stand at the boundary, until the pause is over; tell them so in time."""
    pause, action = state.controls.pause, state.controls.action
    waited_for = action is not None and bool(action.waiting)
    if action is not None and waited_for and action.until_s <= state.now:
        _end_action(state, action, f"no answer within {action.control.within_s:g} s")
        waited_for = False
    if pause is None or pause.until_s <= state.now:
        _want(state, pause=None)
        return [do.EndHold()]
    for holder in state.world.holders:
        state.send(rank_address(holder.rank), Quiesce(holder.rank, state.generation))
    state.limit(min(pause.until_s - state.now, state.policy.deadlines.orders_s / HOLD_SHARE))
    if action is not None and waited_for:
        state.hurry(action.until_s)
    return None


def _wish_done(state: JobState, rec: do.WishDone) -> Recs:
    """Drop a wish, and write down what has become of it, if its record is still kept."""
    wanted = state.controls
    _want(state, wishes=tuple(each for each in wanted.wishes if each.number != rec.wish))
    _came_of(state, rec.wish, rec.outcome)
    return None


def _came_of(state: JobState, number: int, outcome: str) -> None:
    """Write down what has become of a control, if its record is still kept."""
    wanted = state.controls
    place = number - 1 - (wanted.counted - len(wanted.records))
    if place >= 0:
        done = msgspec.structs.replace(wanted.records[place], outcome=outcome)
        _want(state, records=(*wanted.records[:place], done, *wanted.records[place + 1 :]))
    state.say(f"what an operator wished for: {outcome}")


# --- actions of held ranks --------------------------------------------------------------------------------------------


def _perform(state: JobState, control: c.PerformAction, asked: c.Asked) -> Answered:
    """Have held ranks call an action; the pause lasts until all have answered, or the time for it is over."""
    pause, before = state.controls.pause, state.controls.action
    ranks = frozenset(control.ranks if control.ranks is not None else range(state.world.size))
    unknown = sorted(ranks - set(range(state.world.size)))
    if unknown:
        return Answered(f"there is no rank {unknown[0]}: the world has ranks 0 to {state.world.size - 1}", refused=True)
    if pause is None or not state.planned.holding:
        return Answered("the ranks do not stand still: `midstep pause` first, and wait until they do", refused=True)
    if before is not None and before.waiting:
        return Answered(f"{len(before.waiting)} ranks still perform {before.control.action}", refused=True)
    until_s = state.now + control.within_s
    action = c.StandingAction(state.controls.counted + 1, control, until_s, ranks)
    _want(state, action=action, pause=c.StandingPause(max(pause.until_s, until_s), pause.asked))
    for rank in sorted(ranks):
        state.send(rank_address(rank), _call_of(action))
    state.hurry(until_s)
    return Answered(f"{len(ranks)} ranks perform it, for {control.within_s:g} s at most")


def _call_of(action: c.StandingAction) -> CallAction:
    return CallAction(action.number, action.control.action, action.control.arguments)


def _on_action_ended(state: JobState, event: ActionEnded) -> Recs:
    action = state.controls.action
    if action is None or event.number != action.number or event.rank not in action.waiting:
        state.ignore("answer to an action that is over")
        return None
    result = c.ActionResult(event.rank, event.succeeded, event.text)
    _note(state, action, action.waiting - {event.rank}, (*action.results, result))
    return None


def _end_action(state: JobState, action: c.StandingAction, why: str) -> None:
    """Wait no longer for the ranks that have not answered."""
    failed = (c.ActionResult(rank, False, why) for rank in sorted(action.waiting))
    _note(state, action, frozenset(), (*action.results, *failed))


def _note(
    state: JobState, action: c.StandingAction, waiting: frozenset[int], results: tuple[c.ActionResult, ...]
) -> None:
    action = msgspec.structs.replace(action, waiting=waiting, results=results)
    _want(state, action=action)
    if not waiting:
        _came_of(state, action.number, action.outcome)


def _owes_calls(state: JobState) -> Iterator[Owed]:
    """Yield the calls that may not have arrived."""
    action = state.controls.action
    if action is not None:
        yield from ((rank_address(rank), _call_of(action)) for rank in sorted(action.waiting))


# --- nodes, rungs, and what was seen ----------------------------------------------------------------------------------


def _release(state: JobState, control: c.ReleaseNode, asked: c.Asked) -> Answered:
    """Take back what operators have said of a node, and use it again."""
    node = state.world.nodes.get(control.node)
    if node is None:
        return Answered(f"there is no node {control.node!r}: see `midstep status`", refused=True)
    if node.given_back or node.state is NodeState.LOST:
        return Answered(f"node {node.name} is gone, and cannot be used again", refused=True)
    standing = [each.report for each in state.book.standing() if each.report.node == node.name]
    others = [report for report in standing if report.seen_by != OPERATOR]
    mine = [report for report in standing if report.seen_by == OPERATOR]
    if others:
        what = f"{others[0].level}: {others[0].detail}" if others[0].detail else f"{others[0].level}"
        return Answered(f"node {node.name} is not well, as {others[0].seen_by} says ({what})", refused=True)
    idle = node.state in {NodeState.ISOLATED, NodeState.UNFIT} and not state.world.on(node.name)
    if not mine and not idle:
        return Answered(f"node {node.name} is {node.state}, and no operator has drained or isolated it", refused=True)
    over = [msgspec.structs.replace(report, assertion=Assertion.RECOVER, at_s=state.now) for report in mine]
    use = [do.UseAgain(node.name, asked=True)] if idle else []
    return Answered(f"node {node.name} may be used again", [*map(do.SortOut, over), *use])


def _forbid(state: JobState, control: c.ForbidRung, asked: c.Asked) -> Answered:
    if control.rung is Rung.STOP:
        return Answered("stop is the end of the ladder, and cannot be forbidden", refused=True)
    order = c.RungOrder(control.rung, state.now + control.for_s, asked)
    _want(state, rungs=(*(each for each in _in_force(state) if each.rung is not control.rung), order))
    return Answered(f"{control.rung} is not taken for {control.for_s:g} s; the next rung that fits is")


def _force(state: JobState, control: c.ForceRung, asked: c.Asked) -> Answered:
    if control.rung is Rung.STOP:
        return Answered("`midstep stop` ends a job", refused=True)
    if state.policy.rung(control.rung) is None:
        return Answered(f"the policy's ladder has no {control.rung}", refused=True)
    ladder, until_s = list(Rung), state.now + control.for_s
    cheaper = [c.RungOrder(rung, until_s, asked, control.rung) for rung in ladder[: ladder.index(control.rung)]]
    _want(state, rungs=tuple(cheaper))
    return Answered(f"each incident begins at {control.rung} for {control.for_s:g} s, or above where that does not fit")


def _allow(state: JobState, control: c.AllowRungs, asked: c.Asked) -> Answered:
    if not _in_force(state):
        return Answered("no rung is forbidden or forced", refused=True)
    _want(state, rungs=())
    return Answered("the policy's ladder is in force again as it is")


def _in_force(state: JobState) -> tuple[c.RungOrder, ...]:
    return tuple(each for each in state.controls.rungs if state.now < each.until_s)


def _inject(state: JobState, control: c.InjectFault, asked: c.Asked) -> Answered:
    if state.world.holder(control.fault.rank) is None or state.phase is Phase.WAITING:
        return Answered(f"rank {control.fault.rank} has no process: see `midstep status`", refused=True)
    return Answered("the fault is on its way", [do.CauseFault(control.fault)])


_CONTROLS: dict[type, Callable[[JobState, Any, c.Asked], Answered]] = {
    c.PauseTraining: _pause,
    c.EndPause: _end_pause,
    c.SaveNow: _wish,
    c.RestartRank: _wish,
    c.ReleaseNode: _release,
    c.ForbidRung: _forbid,
    c.ForceRung: _force,
    c.AllowRungs: _allow,
    c.Acknowledge: lambda state, control, asked: Answered("noted"),
    c.InjectFault: _inject,
    c.PerformAction: _perform,
    c.PromoteController: lambda state, control, asked: Answered("handed to the controllers"),
    c.PauseFailover: lambda state, control, asked: Answered("handed to the controllers"),
}

CONTROLS = Topic(
    name="controls",
    takes=(
        Row(ALIVE, ControlRequested, _on_control_requested),
        Row(ALIVE, PolicyApplied, _on_policy_applied),
        Row((Phase.PAUSING,), ActionEnded, _on_action_ended),
    ),
    answers={do.HoldRanks: _hold, do.WishDone: _wish_done},
    follows=Follow(frozenset({Phase.RUNNING}), _follow),
    owes=_owes_calls,
)
