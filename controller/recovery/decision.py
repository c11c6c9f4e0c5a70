"""From a fault to a rung: collect the facts, ask the ladder, carry out its answer."""

from collections.abc import Iterable

import msgspec

from ...policies.budgets import WORLD_RESTARTS, Facts, FailedRung, NodeFailure, Spent, failures_by_node, worn_out
from ...policies.ladder import Choice
from ...protocol.types import DETECTOR_PREFIX, Decision, FaultReport, Rung
from ...protocol.wording import summary_line
from ..changes.boundary import give_up
from ..changes.generation import (
    leave_node,
    nodes_needed,
    open_generation,
    replace_node,
    request_missing,
    restart,
    widen_generation,
)
from ..changes.scaling import least_nodes
from ..changes.shutdown import begin_stop, save_first, saves_first
from ..changes.spares import built_on_spares
from . import memory_faults
from .hardware_faults import closed_nodes
from .incident import Verdict
from .state import JobState, Phase, Reschedule, Resize
from .world import NodeState


def blame(state: JobState, report: FaultReport) -> None:
    """Hold a rank, or all ranks of a node, at fault. A replacement that is lost again calls for another attempt."""
    ranks = [report.rank] if report.rank is not None else []
    if report.rank is None and report.node is not None:
        ranks = [holder.rank for holder in state.world.on(report.node)]
    count_failure(state, ranks)
    if report.trusted_step is not None:
        state.incident = state.incident.doubt(report.trusted_step)
    for rank in ranks:
        memory_faults.note(state, rank, report)
        verdict = state.incident.verdict(rank)
        if not report.mendable or not state.world.holders[rank].resilient or verdict is Verdict.CULPRIT:
            state.incident = state.incident.blame(rank, report)
            continue
        if verdict is Verdict.MENDED:
            reason = f"{report.kind} again in rank {rank}, which had mended itself: {summary_line(report.detail)}"
            state.incident = state.incident.rule_out(Rung.RETRY_STEP, reason)
        state.incident = state.incident.let_mend(rank, report)


def rung_failed(state: JobState, rung: Rung | None, reason: str, now: float, *, decide_now: bool = True) -> None:
    """Remember that a rung (None: the attempt under way) did not lead to a resume, and choose again.

    Where no further rank is at fault, those whom the attempt was about are: the next rung is for them.
    """
    failed = (rung,) if rung is not None else state.incident.attempt.rungs
    for each in failed:
        state.incident = state.incident.rule_out(each, reason)
    nobody_new = not state.incident.held(Verdict.CULPRIT, Verdict.MENDING)
    if rung is None and nobody_new and not {*failed} & {*WORLD_RESTARTS}:
        state.incident = state.incident.return_replaced()
        if Rung.RECOVER in failed:
            reason = f"{Rung.RECOVER}, which does more, has failed: {reason}"
            state.incident = state.incident.rule_out(Rung.RECOVER_IN_PLACE, reason)
    if decide_now:
        decide(state, now)


def decide(state: JobState, now: float) -> None:
    """Ask the ladder, remember its answer, do it. Runs whenever an incident begins or takes a turn."""
    give_up(state, "an incident came between", now)
    widens = _widens(state)
    # Its survivors know already that processes are replaced.
    gathers = widens and bool(state.incident.replaced)
    if not widens:
        state.begin_attempt()
    choice = state.ladder.choose(gather(state, now))
    state.decided(choice.decision)
    cost = _widened(state.incident.attempt.cost, choice.course.cost)
    state.incident = state.incident.take(choice.decision.rung, cost)
    _carry_out(state, choice, now, gathers=gathers)


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
    """Whether further ranks have failed while the attempt under way still gathers all ranks: it takes them in.

    Ranks that it has replaced already, and rungs that have failed, call for another attempt.
    """
    incident = state.incident
    return (
        state.turn.came_in is Phase.QUIESCING
        and bool(incident.attempt.rungs)
        and not incident.ruled_out.keys() & {*incident.attempt.rungs}
        and not incident.replaced.intersection(incident.culprits)
    )


def _widened(cost: tuple[Spent, ...], charges: tuple[Spent, ...]) -> tuple[Spent, ...]:
    """Return what an attempt costs with one decision more: each rung once, whatever it is widened by."""
    own = {(spent.rung, spent.role): spent for spent in cost}
    for spent in charges:
        known = own.get((spent.rung, spent.role))
        if known is not None:
            ranks, nodes = {*known.ranks, *spent.ranks}, {*known.nodes, *spent.nodes}
            spent = msgspec.structs.replace(spent, ranks=tuple(sorted(ranks)), nodes=tuple(sorted(nodes)))  # noqa: PLW2901
        own[spent.rung, spent.role] = spent
    return tuple(own.values())


def gather(state: JobState, now: float) -> Facts:
    """Return what the ladder may look at."""
    world, incident = state.world, state.incident
    resilient = any(holder.resilient for holder in world.holders)
    # Who could not be mended is the next rung's to treat.
    unmended = (Verdict.MENDED,) if Rung.RETRY_STEP in incident.ruled_out else ()
    culprits, mendable = incident.culprits, incident.held(Verdict.MENDING, *unmended)
    at_fault = (*culprits.values(), *mendable.values(), *incident.suspicions)
    # --max-restarts is for scripts that fail; what a detector saw is not the script's doing.
    hardware = any(fault.seen_by.startswith(DETECTOR_PREFIX) for fault in culprits.values())
    return Facts(
        now=now,
        faults=tuple({id(f): f for f in at_fault}.values()),
        culprits=tuple(sorted(culprits)),
        mendable=tuple(sorted(mendable)),
        nodes={holder.rank: holder.node for holder in world.holders},
        healthy=frozenset(
            h.rank for h in world.holders if h.resilient and h.rank not in culprits and h.rank not in mendable
        ),
        resilient=resilient,
        max_restarts=None if state.ever_resilient or hardware else state.job.max_restarts,
        nodes_lost=frozenset(world.named(NodeState.LOST)),
        isolated=frozenset(world.named(NodeState.ISOLATED)),
        closed=closed_nodes(state, now),
        spare_nodes=tuple(world.spares()),
        built_ahead=built_on_spares(state),
        can_create_nodes=state.arrivals.can_be_created,
        promised_nodes=len(world.named(NodeState.REQUESTED)),
        taken=incident.taken,
        failed=tuple(FailedRung(rung, reason) for rung, reason in incident.ruled_out.items()),
        spent=tuple(state.accounts.paid),
        node_failures=tuple(state.accounts.node_failures),
        min_nodes=least_nodes(state),
    )


def current_rung(state: JobState) -> Rung | None:
    """Return the rung under way in the open incident."""
    return state.history.open.rung if state.history.open else None


def _carry_out(state: JobState, choice: Choice, now: float, *, gathers: bool) -> None:
    """Do what the ladder has chosen; `gathers`: in the generation that gathers already."""
    rung, course = choice.decision.rung, choice.course
    if rung is Rung.STOP:
        begin_stop(state, choice.decision.reason, now)
        return
    state.incident = state.incident.treat(course.replace)
    if rung in WORLD_RESTARTS:
        _reschedule(state, rung, course.leave, now)
        return
    for name in course.leave:
        leave_node(state, name, course.to.get(name, ""))
    open_or_widen = widen_generation if gathers else open_generation
    open_or_widen(state, course.replace, now)
    if state.due.unplaced:
        request_missing(state)


def _reschedule(state: JobState, rung: Rung, leave: tuple[str, ...], now: float) -> None:
    """Restart the world: on the nodes that stay and replacements for the others, or on new nodes only.

    Healthy ranks save first, those on the nodes that are left, too, so these go after that.
    """
    state.incident = state.incident.replaces_all(state.world.size)
    every_node = rung is not Rung.RESCHEDULE_POD
    if not every_node and least_nodes(state) is not None and not _enough_nodes(state, apart_from=leave):
        save_first(state, now, Resize(_replace_lost(state, leave)))
        return
    goal = Reschedule(every_node=True) if every_node else Reschedule(_replace_lost(state, leave))
    if saves_first(state):
        save_first(state, now, goal)
    else:
        restart(state, now, goal)


def _enough_nodes(state: JobState, apart_from: tuple[str, ...]) -> bool:
    nodes = {*state.world.named(NodeState.ACTIVE, NodeState.SPARE)} - {*apart_from}
    return len(nodes) >= nodes_needed(state)


def _replace_lost(state: JobState, leave: tuple[str, ...]) -> tuple[str, ...]:
    """Replace those of the nodes that are lost, on which nothing can be saved; return the others."""
    gone = [name for name in leave if state.world.nodes[name].state is NodeState.LOST]
    for name in gone:
        replace_node(state, name)
    return tuple(name for name in leave if name not in gone)


def with_rank(report: FaultReport, rank: int, node: str, incarnation: int) -> FaultReport:
    """Return a suspicion as a fault of one rank."""
    return msgspec.structs.replace(report, rank=rank, node=node, incarnation=incarnation)


# --- how often nodes have failed: what the policy's `node.failures` is held against -------------------------------


def count_failure(state: JobState, ranks: Iterable[int]) -> None:
    """Count a failure for the nodes of `ranks`.

    Processes of a node that fail together are one failure of the node, and so are those that follow in the same
    incident; a process that was started again in it and fails again is another one.
    """
    for rank in ranks:
        node = state.world.holders[rank].node
        state.incident, news = state.incident.failed(rank, node)
        if news:
            state.accounts.node_failures.append(NodeFailure(node, state.turn.now))
    window_s = state.policy.node.window_s
    if window_s:
        accounts, now = state.accounts, state.turn.now
        accounts.node_failures = [each for each in accounts.node_failures if now - each.at_s < window_s]


def failure_counts(state: JobState, now: float) -> dict[str, int]:
    """Return how often each node has failed, as of `now`, for status."""
    return dict(failures_by_node(state.accounts.node_failures, state.policy.node, now))


def too_many(state: JobState, node: str, now: float) -> str | None:
    """Say that a node has failed too often to be used again; None when it has not."""
    return worn_out(node, failure_counts(state, now).get(node, 0), state.policy.node)
