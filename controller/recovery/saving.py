"""TOPIC: how a job is saved and stopped: with an emergency checkpoint, where there is state.

The same checkpoint is written before a world starts again, as that ends healthy processes. Survivors write it, parked
at one step: each its own state, and each shard by the lowest rank that holds it. The lowest of all comes last and
publishes. Whatever fails on the way is said and does not keep the job from ending, or the world from starting.

Ranks that leave their node at a step boundary write their part in the same way, and training continues
(`planned_change.py`).
"""

import math
from collections.abc import Iterator

import msgspec

from ...protocol import messages as m
from ...protocol.types import NO_EMERGENCY_CHECKPOINT, PLATFORM, LocalStateCopy, StepReport, node_address, rank_address
from ...protocol.wording import ranks_text
from . import topic as do
from .events import StopRequested
from .incident import Verdict
from .orders import quiesce
from .repair import lost_shards
from .state import JobState, Phase, Reschedule, Resize, Result
from .topic import ALIVE, Owed, PhaseLimit, Recs, Row, Rule, Topic, answer_limit_s
from .world import AT_WORK, GONE, PARKED, REACHABLE, Holder, RankState

STOPPED_BY_REQUEST = 130  # what a shell reports for Ctrl-C

# A process that stands here has not trained since the job last stood at the step that the controller knows.
UNTRAINED = frozenset({RankState.STARTING, RankState.JOINED, RankState.REJOINING, RankState.READY})


# --- the way to the checkpoint ----------------------------------------------------------------------------------------


def _on_stop_requested(state: JobState, event: StopRequested) -> Recs:
    """End the job on request; a second request does not wait for a checkpoint any more, if it insists.

    A job that is ending already, for a reason of its own, is left to save: the first request changes nothing about it.
    """
    asked_before, state.saving.stop_requested = state.saving.stop_requested, True
    if state.saving.before_a_start:  # what is being saved is then for the end
        state.saving.then = Result(STOPPED_BY_REQUEST, event.reason)
    elif state.phase is Phase.SAVING and not (asked_before and event.insist):
        state.ignore("stop request while the job is saving")
    elif state.phase is Phase.SAVING:
        reason = f"{event.reason}; without a checkpoint, as it was asked for twice"
        return _end(state, do.EndNow(STOPPED_BY_REQUEST, reason))
    else:
        return _save_first(state, do.SaveFirst(Result(STOPPED_BY_REQUEST, event.reason)))
    return None


def _save_first(state: JobState, rec: do.SaveFirst) -> Recs:
    """Park the survivors, and have them save what they hold."""
    if state.planned.current is not None:
        return [do.GiveUpChange("the job is saved, and its processes end"), rec]
    state.saving.then = rec.goal
    survivors = [each for each in state.world.holders if _is_survivor(state, each)]
    untrained = all(holder.state in UNTRAINED for holder in survivors)
    # The world is starting as a whole, and has nothing but what it will load.
    starting = all(each.connected and each.joined_generation == state.generation for each in survivors)
    loads = starting and isinstance(rec.goal, Reschedule)
    if not survivors or (untrained and (state.progress.committed == 0 or loads)):
        nobody = not survivors and state.progress.committed > 0 and isinstance(rec.goal, Reschedule)
        return _conclude(state, f"{NO_EMERGENCY_CHECKPOINT}: no healthy process is left" if nobody else "")
    state.fence()
    state.due.forget_replacements()
    quiesce(state, survivors)
    state.enter(state.policy.deadlines.quiesce_s)
    return None


def _is_survivor(state: JobState, holder: Holder) -> bool:
    return holder.resilient and holder.state not in GONE and not _is_at_fault(state, holder)


def _is_at_fault(state: JobState, holder: Holder) -> bool:
    """Return whether the process that holds a rank now is at fault: not for a fault of the one that it has replaced."""
    case = state.incident.cases.get(holder.rank)
    return case is not None and case.verdict is Verdict.CULPRIT and case.report.incarnation in {0, holder.incarnation}


def _lost_while_saving(state: JobState, rec: do.LostWhileSaving) -> Recs:
    """Survivors died while the checkpoint was under way: the others may still hold everything, and begin again."""
    lost = sorted(rec.ranks)
    for rank in lost:
        state.world.lose(state.world.holders[rank])
    if state.saving.outstanding.keys() & {*lost}:
        return _save_again(state, f"{ranks_text(lost)} died while the checkpoint was written: {rec.detail}")
    return None


def _overdue(state: JobState) -> Recs:
    """Some have not parked, or not written, in time: the others may hold everything."""
    if not state.saving.outstanding:
        return _save(state)
    late = [rank for rank in state.saving.outstanding if _is_asked(state, rank)]
    for rank in late:
        state.world.holders[rank].report = None  # what it holds is out of reach
    return _save_again(state, f"{ranks_text(late)} did not write the emergency checkpoint in time")


def _save_again(state: JobState, remark: str) -> Recs:
    """Begin the checkpoint again, apart from what has been written; each time with fewer ranks."""
    state.saving.drop()
    state.fence()
    return _save(state, remark)


def _all_parked(state: JobState) -> bool:
    """Return whether all survivors have stopped, and none has been asked to save yet. A rank at fault is not asked."""
    if state.saving.outstanding:
        return False
    holders = state.world.holders
    at_fault = {rank for rank in state.incident.cases if _is_at_fault(state, holders[rank])}
    return not state.world.ranks(RankState.QUIESCING) - at_fault


def _save(state: JobState, remark: str = "") -> Recs:
    """Have those of the parked ranks save that stand at the newest committed step.

    `remark`: what went wrong before, for the record if there can be no checkpoint.
    """
    why_not = _start_saving(state)
    if why_not:
        return _conclude(state, "; ".join(filter(None, (remark, f"{NO_EMERGENCY_CHECKPOINT}: {why_not}"))))
    state.enter(state.policy.deadlines.save_s)
    return None


# --- what is written, and by whom -------------------------------------------------------------------------------------


def _start_saving(state: JobState) -> str:
    """Ask the parked ranks to write a checkpoint of the newest step that is whole; return why there can be none."""
    found = _newest_whole_step(state)
    if isinstance(found, str):
        return found
    step, shares = found
    outstanding = {rank: tuple(shares[rank]) for rank in shares}
    outstanding |= dict.fromkeys(_local_state_writers(state, step, set(shares)), ())
    state.saving.outstanding = outstanding
    state.progress.saved(step)
    for rank in [rank for rank in outstanding if _is_asked(state, rank)]:
        state.send(rank_address(rank), _save_command(state, rank))
    if state.policy.script_writes and len(outstanding) > 1:
        # The rank that publishes is asked last; where the script writes, it writes beside the others.
        first = next(iter(outstanding))
        early = msgspec.structs.replace(_save_command(state, first), answer=False)
        state.send(rank_address(first), early)
    return ""


def _newest_whole_step(state: JobState) -> tuple[int, dict[int, list[str]]] | str:
    """Return the newest committed step of which survivors hold every shard, with what each writes; else why none.

    One of them may stand a step further than the others, with state that no one else has.
    """
    steps = _whole(state)
    if not steps:
        return "nobody holds clean state that can be trusted"
    why_not, needed = "", {need for holder in state.world.holders for need in holder.needs}  # by lost ranks, too
    for step in sorted(set(steps.values()) - {0}, reverse=True):
        shares = _shares(state, [rank for rank, committed in steps.items() if committed == step])
        lost = needed.difference(*shares.values())
        if not lost:
            return step, shares
        why_not = why_not or f"no clean copy of {', '.join(sorted(lost))} is left"
    return why_not or "no step has been committed"


def _whole(state: JobState) -> dict[int, int]:
    """Return the step of each parked rank that has all that it should hold, none of it made of struck memory."""
    trusted = math.inf if state.incident.trusted_step is None else state.incident.trusted_step
    return {
        rank: report.committed
        for rank, report in _parked(state).items()
        if report.clean and report.holds and not lost_shards(report) and report.committed <= trusted
    }


def _parked(state: JobState) -> dict[int, StepReport]:
    """Return what each parked rank has reported of itself."""
    return {each.rank: each.report for each in state.world.in_state(*PARKED) if each.report is not None}


def _shares(state: JobState, writers: list[int]) -> dict[int, list[str]]:
    """Return the shards that each rank writes, the lowest rank in front: a shard is for the lowest that holds it."""
    shares: dict[int, list[str]] = {rank: [] for rank in sorted(writers)}
    taken: set[str] = set()
    for rank, share in shares.items():
        report = state.world.holders[rank].report
        for hold in report.holds if report is not None else ():
            if hold.shard_id not in taken:
                taken.add(hold.shard_id)
                share.append(hold.shard_id)
    return shares


def _local_state_writers(state: JobState, step: int, others: set[int]) -> list[int]:
    """Return the ranks that only have their own state to add: they were about to commit `step`, or are new."""
    parked = _parked(state).items()
    return [rank for rank, each in parked if rank not in others and LocalStateCopy(rank, step) in each.local_states]


def _is_asked(state: JobState, rank: int) -> bool:
    """Return whether a rank has been asked to save and has not answered."""
    outstanding = state.saving.outstanding
    return rank in outstanding and (len(outstanding) == 1 or rank != next(iter(outstanding)))


def _save_command(state: JobState, rank: int) -> m.SaveCheckpoint:
    """Return what a rank that is still to save has to do; the last one publishes."""
    outstanding = state.saving.outstanding
    writers: tuple[int, ...] = ()
    if state.policy.script_writes:  # it needs to know the others that write shards
        found = _newest_whole_step(state)
        writers = () if isinstance(found, str) else tuple(rank for rank, shards in found[1].items() if shards)
    publish, step = len(outstanding) == 1, state.progress.committed
    return m.SaveCheckpoint(rank, state.generation, step, publish, shards=outstanding[rank], writers=writers)


def _on_checkpoint_saved(state: JobState, event: m.CheckpointSaved) -> Recs:
    """Take in that a rank has saved. The last one publishes; then the job ends, starts again, or trains on."""
    outstanding = state.saving.outstanding
    if state.phase is Phase.PAUSING and state.planned.current is None:
        return None
    if event.generation != state.generation or event.rank not in outstanding:
        state.ignore("checkpoint of another generation")
        return None
    del outstanding[event.rank]
    if not event.error and len(outstanding) == 1:
        (last,) = outstanding
        state.send(rank_address(last), _save_command(state, last))
    if state.phase is Phase.PAUSING:
        return [do.PartSaved(event.step, event.error)] if event.error or not outstanding else None
    if event.error:
        return _conclude(state, f"the emergency checkpoint failed: {event.error}")
    if not outstanding:
        return _conclude(state, f"an emergency checkpoint of step {event.step} is at {event.path}")
    return None


def _save_part(state: JobState, _: do.SavePart) -> Recs:
    """Have the parked ranks write a checkpoint at a boundary, where training continues."""
    why_not = _start_saving(state)
    if why_not:
        return [do.PartSaved(0, f"and no checkpoint can be written: {why_not}", begun=False)]
    state.limit(state.policy.deadlines.save_s)
    return None


# --- the end ----------------------------------------------------------------------------------------------------------


def _conclude(state: JobState, remark: str) -> Recs:
    """The checkpoint is written, or cannot be: end the job, or start the world again, whatever it was for."""
    state.saving.drop()
    goal, state.saving.then = state.saving.then, None
    if isinstance(goal, Resize):
        return [do.ChangeSize(goal, remark)]
    if isinstance(goal, Reschedule):
        return [do.Restart(goal, remark)]
    if goal is not None:
        return _end(state, do.EndNow(goal.exit_code, "; ".join(filter(None, (goal.reason, remark)))))
    return None


def _end(state: JobState, rec: do.EndNow) -> Recs:
    """Tell all nodes and the platform that the job is over."""
    state.result = Result(rec.exit_code, rec.reason)
    state.history.stopped(state.now, state.world.pids(), rec.reason)
    state.enter()
    state.due.forget_replacements()
    state.saving.then = None
    state.saving.drop()
    order = m.EndJob(rec.exit_code, rec.reason)
    for name in state.world.named(*REACHABLE):
        state.send(node_address(name), order)
    state.send(PLATFORM, order)
    state.finish()
    return None


# --- the topic --------------------------------------------------------------------------------------------------------


def _owes_rank(state: JobState, holder: Holder) -> Iterator[Owed]:
    if holder.state in PARKED and _is_asked(state, holder.rank):
        yield rank_address(holder.rank), _save_command(state, holder.rank)


def _contradictions(state: JobState) -> Iterator[str]:
    if state.saving.outstanding and state.phase not in {Phase.SAVING, Phase.PAUSING}:
        yield f"the job is {state.phase}, and ranks {sorted(state.saving.outstanding)} are to save"
    unasked = state.world.ranks(RankState.REJOINING, RankState.READY, *AT_WORK, RankState.FINISHED, RankState.RELEASED)
    if state.phase is Phase.SAVING and unasked - state.incident.culprits.keys():
        yield f"the job is saving, and ranks {sorted(unasked)} were not asked to stop"


SAVING = Topic(
    name="saving",
    takes=(
        Row((Phase.PAUSING, Phase.SAVING), m.CheckpointSaved, _on_checkpoint_saved),
        Row(ALIVE, StopRequested, _on_stop_requested),
    ),
    answers={
        do.SaveFirst: _save_first,
        do.SavePart: _save_part,
        do.LostWhileSaving: _lost_while_saving,
        do.EndNow: _end,
    },
    rules=(Rule(frozenset({Phase.SAVING}), _all_parked, _save),),
    limits={Phase.SAVING: PhaseLimit(_overdue, answer_limit_s)},
    owes_rank=_owes_rank,
    contradictions=_contradictions,
)
