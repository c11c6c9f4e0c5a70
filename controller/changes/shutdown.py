"""How a job ends: well, with all processes released; or stopped, with an emergency checkpoint where there is state.

The same checkpoint is written before a world starts again, as that ends healthy processes. Survivors write it, parked
at one step: each its own state, and each shard by the lowest rank that holds it. The lowest of all comes last and
publishes. Whatever fails on the way is said and does not keep the job from ending, or the world from starting.
"""

import math
from collections.abc import Iterable

import msgspec

from ...devices.kinds import EXTERNAL
from ...protocol.messages import CheckpointSaved, EndJob, SaveCheckpoint
from ...protocol.types import PLATFORM, LocalStateCopy, RestoreSource, node_address, rank_address
from ...protocol.wording import ranks_text
from ..recovery.incident import Verdict
from ..recovery.repair import lost_shards
from ..recovery.state import JobState, Reschedule, Resize, Result
from ..recovery.world import GONE, PARKED, REACHABLE, Holder, RankState
from .generation import quiesce, restart
from .scaling import start_anew

# A process that stands here has not trained since the job last stood at the step that the controller knows.
UNTRAINED = frozenset({RankState.STARTING, RankState.JOINED, RankState.REJOINING, RankState.READY})


def begin_stop(state: JobState, reason: str, now: float, exit_code: int = 1) -> None:
    """Stop the job: park the survivors, save what they hold, end everything."""
    state.saving.then = Result(exit_code, reason)
    _save(state, now)


def save_first(state: JobState, now: float, goal: Resize | Reschedule) -> None:
    """Park the survivors and save what they hold, before the world starts again."""
    state.saving.then = goal
    _save(state, now)


def saves_first(state: JobState) -> bool:
    """Whether a checkpoint is written before all processes are restarted: not where no process would load it."""
    policy = state.policy
    loaded = RestoreSource.CHECKPOINT in policy.restore or _script_writes(state)
    wanted = policy.save_before_reschedule and loaded
    return wanted and state.ever_resilient


def conclude(state: JobState, remark: str, now: float) -> None:
    """The checkpoint is written, or cannot be: end the job, or start the world again, whatever it was for."""
    state.saving.outstanding.clear()
    goal, state.saving.then = state.saving.then, None
    if isinstance(goal, Resize):
        start_anew(state, now, remark, goal.leaving)
    elif isinstance(goal, Reschedule):
        restart(state, now, goal, remark)
    elif goal is not None:
        end(state, goal.exit_code, "; ".join(filter(None, (goal.reason, remark))), now)


def lost_while_saving(state: JobState, ranks: Iterable[int], detail: str, now: float) -> None:
    """Survivors died while the checkpoint was under way: the others may still hold everything, and begin again."""
    lost = sorted(ranks)
    for rank in lost:
        state.world.lose(state.world.holders[rank])
    if state.saving.outstanding.keys() & {*lost}:
        _save_again(state, f"{ranks_text(lost)} died while the checkpoint was written: {detail}", now)


def saving_overdue(state: JobState, now: float) -> None:
    """Some have not parked, or not written, in time: the others may hold everything."""
    if not state.saving.outstanding:
        save(state, now)
        return
    late = _outstanding_saves(state)
    for rank in late:
        state.world.holders[rank].report = None  # what it holds is out of reach
    _save_again(state, f"{ranks_text(late)} did not write the emergency checkpoint in time", now)


def _save_again(state: JobState, remark: str, now: float) -> None:
    """Begin the checkpoint again, apart from what has been written; each time with fewer ranks."""
    state.saving.outstanding.clear()
    state.fence()
    save(state, now, remark)


def _save(state: JobState, now: float) -> None:
    survivors = [each for each in state.world.holders if _is_survivor(state, each)]
    untrained = all(holder.state in UNTRAINED for holder in survivors)
    if not survivors or (untrained and (state.progress.committed == 0 or _all_is_on_disk(state, survivors))):
        nobody = not survivors and state.progress.committed > 0 and isinstance(state.saving.then, Reschedule)
        conclude(state, "no emergency checkpoint: no healthy process is left" if nobody else "", now)
        return
    state.fence()
    state.due.forget_replacements()
    quiesce(state, survivors)
    state.enter(now, state.policy.deadlines.quiesce_s)


def _all_is_on_disk(state: JobState, survivors: list[Holder]) -> bool:
    """Whether the world is starting as a whole, and has nothing but what it will load. It is on its way to a start."""
    started = all(holder.connected and holder.joined_generation == state.generation for holder in survivors)
    return started and isinstance(state.saving.then, Reschedule)


def _is_survivor(state: JobState, holder: Holder) -> bool:
    return holder.resilient and holder.state not in GONE and not _is_at_fault(state, holder)


def _is_at_fault(state: JobState, holder: Holder) -> bool:
    """Whether the process that holds a rank now is at fault: not for a fault of the one that it has replaced."""
    case = state.incident.cases.get(holder.rank)
    if case is None or case.verdict is not Verdict.CULPRIT:
        return False
    return not case.report.incarnation or case.report.incarnation == holder.incarnation


def all_parked(state: JobState) -> bool:
    """Whether all survivors have stopped, and none has been asked to save yet."""
    return not state.saving.outstanding and not _not_parked(state)


def save(state: JobState, now: float, remark: str = "") -> None:
    """Have those of the parked ranks save that stand at the newest committed step.

    `remark`: what went wrong before, for the record if there can be no checkpoint.
    """
    why_not = start_saving(state)
    if why_not is None:
        state.enter(now, state.policy.deadlines.save_s)
    else:
        conclude(state, "; ".join(filter(None, (remark, f"no emergency checkpoint: {why_not}"))), now)


def _not_parked(state: JobState) -> set[int]:
    """Return the survivors that have yet to stop; a rank at fault is not asked to."""
    holders = state.world.holders
    at_fault = {rank for rank in state.incident.cases if _is_at_fault(state, holders[rank])}
    return state.world.ranks(RankState.QUIESCING) - at_fault


def start_saving(state: JobState) -> str | None:
    """Ask the parked ranks to write a checkpoint of the newest step that is whole; return why there can be none."""
    found = _newest_whole_step(state)
    if isinstance(found, str):
        return found
    step, shares = found
    state.saving.outstanding = {rank: tuple(shares[rank]) for rank in shares}
    state.saving.outstanding |= dict.fromkeys(_local_state_writers(state, step, set(shares)), ())
    state.progress.committed = step
    for rank in _outstanding_saves(state):
        _ask_to_save(state, rank)
    _have_the_publisher_write(state)
    return None


def _have_the_publisher_write(state: JobState) -> None:
    """Where the script writes: have the rank that publishes, and is asked last, write beside the others."""
    outstanding = state.saving.outstanding
    if _script_writes(state) and len(outstanding) > 1:
        first = next(iter(outstanding))
        early = msgspec.structs.replace(save_command(state, first), answer=False)
        state.send(rank_address(first), early)


def _newest_whole_step(state: JobState) -> tuple[int, dict[int, list[str]]] | str:
    """Return the newest committed step of which survivors hold every shard, with what each writes; else why none.

    One of them may stand a step further than the others, with state that no one else has.
    """
    steps = _whole(state)
    if not steps:
        return "nobody holds clean state that can be trusted"
    why_not = ""
    for step in sorted(set(steps.values()) - {0}, reverse=True):
        shares = _shares(state, [rank for rank, committed in steps.items() if committed == step])
        lost = _needed(state).difference(*shares.values())
        if not lost:
            return step, shares
        why_not = why_not or f"no clean copy of {', '.join(sorted(lost))} is left"
    return why_not or "no step has been committed"


def _whole(state: JobState) -> dict[int, int]:
    """Return the step of each parked rank that has all that it should hold, none of it made of struck memory."""
    trusted = math.inf if state.incident.trusted_step is None else state.incident.trusted_step
    parked = ((holder.rank, holder.report) for holder in state.world.in_state(*PARKED))
    return {
        rank: report.committed
        for rank, report in parked
        if report is not None
        and report.clean
        and report.holds
        and not lost_shards(report)
        and report.committed <= trusted
    }


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


def _needed(state: JobState) -> set[str]:
    """Return all shards that the ranks are known to need; those of ranks that are lost, too."""
    return {need for holder in state.world.holders for need in holder.needs}


def _local_state_writers(state: JobState, step: int, others: set[int]) -> list[int]:
    """Return the ranks that only have their own state to add: they were about to commit `step`, or are new."""
    return [
        holder.rank
        for holder in state.world.in_state(*PARKED)
        if holder.rank not in others
        and holder.report is not None
        and LocalStateCopy(holder.rank, step) in holder.report.local_states
    ]


def on_checkpoint_saved(state: JobState, event: CheckpointSaved, now: float) -> None:
    """One rank has saved; the last one publishes, then the job ends, or starts again."""
    if not take_saved(state, event):
        return
    if event.error:
        conclude(state, f"the emergency checkpoint failed: {event.error}", now)
    elif not state.saving.outstanding:
        conclude(state, f"an emergency checkpoint of step {event.step} is at {event.path}", now)


def take_saved(state: JobState, event: CheckpointSaved) -> bool:
    """Note that a rank has saved, and ask the one that publishes when it is its turn; False: it is not waited for."""
    if event.generation != state.generation or event.rank not in state.saving.outstanding:
        state.ignore("checkpoint of another generation")
        return False
    del state.saving.outstanding[event.rank]
    if not event.error and len(state.saving.outstanding) == 1:
        (last,) = state.saving.outstanding
        _ask_to_save(state, last)
    return True


def _outstanding_saves(state: JobState) -> list[int]:
    """Return the ranks that have been asked to save and have not answered."""
    return [rank for rank in state.saving.outstanding if asked_to_save(state, rank)]


def asked_to_save(state: JobState, rank: int) -> bool:
    """Whether a rank has been asked to save and has not answered."""
    outstanding = state.saving.outstanding
    return rank in outstanding and (len(outstanding) == 1 or rank != next(iter(outstanding)))


def save_command(state: JobState, rank: int) -> SaveCheckpoint:
    """Return what a rank that is still to save has to do; the last one publishes."""
    outstanding = state.saving.outstanding
    publish = len(outstanding) == 1
    step = state.progress.committed
    return SaveCheckpoint(rank, state.generation, step, publish, shards=outstanding[rank], writers=_writers(state))


def _writers(state: JobState) -> tuple[int, ...]:
    """Return the ranks that write shards, where a script does: it needs to know the others."""
    if not _script_writes(state):
        return ()
    found = _newest_whole_step(state)
    return () if isinstance(found, str) else tuple(rank for rank, shards in found[1].items() if shards)


def _script_writes(state: JobState) -> bool:
    return state.policy.communicator.name == EXTERNAL


def _ask_to_save(state: JobState, rank: int) -> None:
    state.send(rank_address(rank), save_command(state, rank))


def end(state: JobState, exit_code: int, reason: str, now: float) -> None:
    """Tell all nodes and the platform that the job is over."""
    state.result = Result(exit_code, reason)
    state.history.stopped(now, state.world.pids(), reason)
    state.enter(now)
    state.due.forget_replacements()
    state.saving.then = None
    state.saving.outstanding.clear()
    for name in state.world.named(*REACHABLE):
        state.send(node_address(name), EndJob(exit_code, reason))
    state.send(PLATFORM, EndJob(exit_code, reason))
    state.finish()
