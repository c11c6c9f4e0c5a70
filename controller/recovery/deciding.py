"""From a fault to a rung: collect the facts, ask the ladder, carry out its answer."""

import msgspec

from ...policies.facts import Facts, FailedRung, Spent
from ...policies.roles import WORLD_RESTARTS
from ...protocol.types import DETECTOR_PREFIX, Decision, FaultReport, Rung
from ..world import NodeState
from . import own_word
from .boundary import give_up
from .detected import closed_nodes
from .ending import begin_stop, save_first
from .failures import count_failure
from .openings import (
    give_back_all_nodes,
    leave_node,
    nodes_needed,
    open_generation,
    open_world,
    replace_node,
    stop_all_processes,
    wait_for_nodes,
)
from .scaling import least_nodes
from .state import JobState, Phase

# A replacement that is lost once may have been struck by a second fault; twice, and the rung does not help.
SETBACKS_PER_RUNG = 2


def blame(state: JobState, report: FaultReport) -> None:
    """Hold a rank, or all ranks of a node, at fault; replacements that are lost again are their rung's failure."""
    ranks = [report.rank] if report.rank is not None else []
    if report.rank is None and report.node is not None:
        ranks = [holder.rank for holder in state.world.on(report.node)]
    count_failure(state, ranks)
    if report.trusted_step is not None:
        known = report.trusted_step if state.trusted_step is None else state.trusted_step
        state.trusted_step = min(known, report.trusted_step)
    rung = current_rung(state)
    # A script that is not resilient is restarted as often as --max-restarts says, whatever became of the last time.
    if rung is not None and state.ever_resilient and state.replaced.intersection(ranks):
        state.setbacks[rung] = state.setbacks.get(rung, 0) + 1
        if state.setbacks[rung] >= SETBACKS_PER_RUNG:
            reason = f"{report.kind} again in a rank that it had replaced: {summary_line(report.detail)}"
            state.failures.setdefault(rung, reason)
    for rank in ranks:
        own_word.note(state, rank, report)
        if report.mendable and state.world.holders[rank].resilient and rank not in state.guilty:
            _blame_mendable(state, rank, report)
        else:
            state.mending.pop(rank, None)
            state.guilty.setdefault(rank, report)


def _blame_mendable(state: JobState, rank: int, report: FaultReport) -> None:
    """The rank keeps its process, unless it has tried to mend itself in this incident already."""
    if rank in state.mended:
        reason = f"{report.kind} again in rank {rank}, which had mended itself: {summary_line(report.detail)}"
        state.failures.setdefault(Rung.RETRY_STEP, reason)
    state.mending.setdefault(rank, report)


def rung_failed(state: JobState, rung: Rung | None, reason: str, now: float, *, decide_now: bool = True) -> None:
    """Remember that a rung (None: the attempt under way) did not lead to a resume, and choose again.

    Where nobody new is at fault, those whom the attempt was about are: the next rung is for them.
    """
    failed = [rung] if rung is not None else list(dict.fromkeys(state.attempt))
    for each in failed:
        state.failures.setdefault(each, reason)
    if rung is None and not state.guilty and not state.mending and not {*failed} & {*WORLD_RESTARTS}:
        state.guilty |= state.dealt
        if Rung.RECOVER in failed:
            reason = f"{Rung.RECOVER}, which does more, has failed: {reason}"
            state.failures.setdefault(Rung.RECOVER_IN_PLACE, reason)
    if decide_now:
        decide(state, now)


def decide(state: JobState, now: float) -> None:
    """Ask the ladder, remember its answer, do it. Runs whenever an incident begins or takes a turn."""
    give_up(state, "an incident came between", now)
    if not _widens(state):
        state.attempts += state.attempt
        state.attempt, state.charged = [], 0
        state.dealt.clear()
    facts = gather(state, now)
    decision = state.ladder.decide(facts)
    state.decided(decision)
    _charge(state, state.ladder.charges(facts, decision.rung))
    if decision.rung not in state.attempt:
        state.attempt.append(decision.rung)
    _carry_out(state, decision.rung, decision.reason, facts, now)


def stop_now(state: JobState, reason: str, now: float) -> None:
    """End the job for a reason that no rung can mend."""
    give_up(state, "the job stops", now)
    state.decided(Decision(Rung.STOP, reason))
    begin_stop(state, reason, now)


def blame_and_decide(state: JobState, reports: list[FaultReport], now: float) -> None:
    """Take faults for what they are: remember them, hold whom they name at fault, choose a rung. None: do nothing."""
    for report in reports:
        state.remember(report, now)
        blame(state, report)
    if reports:
        decide(state, now)


def _widens(state: JobState) -> bool:
    """Whether further ranks have failed while the attempt under way still gathers everybody: it takes them in.

    Ranks that it has replaced already, and rungs that have failed, call for another attempt.
    """
    return (
        state.phase is Phase.QUIESCING
        and bool(state.attempt)
        and not state.failures.keys() & {*state.attempt}
        and not state.replaced.intersection(state.guilty)
    )


def _charge(state: JobState, charges: tuple[Spent, ...]) -> None:
    """Enter what a decision costs. An attempt is charged once for each rung, whatever it is widened by."""
    before = len(state.spent) - state.charged
    own = {(spent.rung, spent.role): spent for spent in state.spent[before:]}
    for spent in charges:
        known = own.get((spent.rung, spent.role))
        if known is not None:
            ranks, nodes = {*known.ranks, *spent.ranks}, {*known.nodes, *spent.nodes}
            spent = msgspec.structs.replace(spent, ranks=tuple(sorted(ranks)), nodes=tuple(sorted(nodes)))  # noqa: PLW2901
        own[spent.rung, spent.role] = spent
    state.spent[before:] = own.values()
    state.charged = len(own)


def gather(state: JobState, now: float) -> Facts:
    """Return what the ladder may look at."""
    world = state.world
    resilient = any(holder.resilient for holder in world.holders)
    # Who could not be mended is the next rung's to treat.
    unmended = state.mended if Rung.RETRY_STEP in state.failures else {}
    mendable = {rank: report for rank, report in (unmended | state.mending).items() if rank not in state.guilty}
    at_fault = (*state.guilty.values(), *mendable.values(), *state.suspicions)
    # --max-restarts is for scripts that fail; what a detector saw is not the script's doing.
    hardware = any(fault.seen_by.startswith(DETECTOR_PREFIX) for fault in state.guilty.values())
    return Facts(
        now=now,
        faults=tuple({id(f): f for f in at_fault}.values()),
        culprits=tuple(sorted(state.guilty)),
        mendable=tuple(sorted(mendable)),
        nodes={holder.rank: holder.node for holder in world.holders},
        healthy=frozenset(
            h.rank for h in world.holders if h.resilient and h.rank not in state.guilty and h.rank not in mendable
        ),
        resilient=resilient,
        max_restarts=None if state.ever_resilient or hardware else state.job.max_restarts,
        nodes_lost=frozenset(world.named(NodeState.LOST)),
        isolated=frozenset(world.named(NodeState.ISOLATED)),
        closed=closed_nodes(state, now),
        spare_nodes=tuple(world.named(NodeState.SPARE)),
        can_create_nodes=state.can_create_nodes,
        taken=tuple(state.attempts),
        failed=tuple(FailedRung(rung, reason) for rung, reason in state.failures.items()),
        spent=tuple(state.spent[: len(state.spent) - state.charged]),
        node_failures=tuple(state.node_failures),
        min_nodes=least_nodes(state),
    )


def current_rung(state: JobState) -> Rung | None:
    """Return the rung under way in the open incident."""
    return state.history.open.rung if state.history.open else None


def summary_line(text: str) -> str:
    """Return the last line of a traceback, or the first of anything else."""
    lines = [line for line in text.strip().splitlines() if line.strip()]
    if not lines:
        return ""
    return lines[-1].strip() if lines[0].startswith("Traceback") else lines[0].strip()


def _carry_out(state: JobState, rung: Rung, reason: str, facts: Facts, now: float) -> None:
    if rung is Rung.STOP:
        begin_stop(state, reason, now)
        return
    leave = state.ladder.nodes_to_leave(facts, rung)
    replace = state.ladder.ranks_to_replace(facts, rung)
    faults = state.mended | state.mending | state.guilty
    state.dealt |= {rank: faults[rank] for rank in replace if rank in faults}
    state.mended |= {rank: report for rank, report in state.mending.items() if rank not in state.dealt}
    for rank in replace:
        state.mended.pop(rank, None)
    state.mending.clear()
    if rung in WORLD_RESTARTS:
        _reschedule(state, rung, leave, now)
        return
    for name in leave:
        leave_node(state, name)
    open_generation(state, replace, now)


def _reschedule(state: JobState, rung: Rung, leave: tuple[str, ...], now: float) -> None:
    """Restart the world: on the nodes that stay and replacements for the others, or on new nodes only."""
    state.replaced.update(range(state.world.size))
    if rung is not Rung.RESCHEDULE_POD:
        give_back_all_nodes(state)
    elif least_nodes(state) is not None and not _enough_nodes(state, apart_from=leave):
        _save_before_leaving(state, leave, now)
        return
    else:
        for name in leave:
            replace_node(state, name)
    if _enough_nodes(state):
        open_world(state, now)
        return
    stop_all_processes(state)
    state.phase = Phase.RUNNING if state.phase is Phase.WAITING else state.phase
    wait_for_nodes(state, now)


def _enough_nodes(state: JobState, apart_from: tuple[str, ...] = ()) -> bool:
    nodes = {*state.world.named(NodeState.ACTIVE, NodeState.SPARE)} - {*apart_from}
    return len(nodes) >= nodes_needed(state)


def _save_before_leaving(state: JobState, leave: tuple[str, ...], now: float) -> None:
    """The world may get smaller: healthy ranks save first, those on the nodes that go, too, so these go after that."""
    gone = [name for name in leave if state.world.nodes[name].state is NodeState.LOST]
    for name in gone:
        replace_node(state, name)
    state.leaving = tuple(name for name in leave if name not in gone)
    save_first(state, now)


def with_rank(report: FaultReport, rank: int, node: str, incarnation: int) -> FaultReport:
    """Return a suspicion as a fault of one rank."""
    return msgspec.structs.replace(report, rank=rank, node=node, incarnation=incarnation)
