"""From a fault to a rung: collect the facts, ask the ladder, carry out its answer."""

import msgspec

from ..policies.facts import Facts, FailedRung
from ..protocol.types import FaultReport, Rung
from .detected import closed_nodes
from .ending import begin_stop
from .openings import (
    give_back_all_nodes,
    leave_node,
    open_generation,
    open_world,
    replace_node,
    stop_all_processes,
    wait_for_nodes,
)
from .state import JobState, Phase
from .world import NodeState

# A replacement that is lost once may have been struck by a second fault; twice, and the rung does not help.
SETBACKS_PER_RUNG = 2


def blame(state: JobState, report: FaultReport) -> None:
    """Hold a rank, or all ranks of a node, at fault; replacements that are lost again are their rung's failure."""
    ranks = [report.rank] if report.rank is not None else []
    if report.rank is None and report.node is not None:
        ranks = [holder.rank for holder in state.world.on(report.node)]
    rung = current_rung(state)
    # A script that is not resilient is restarted as often as --max-restarts says, whatever became of the last time.
    if rung is not None and state.ever_resilient and state.replaced.intersection(ranks):
        state.setbacks[rung] = state.setbacks.get(rung, 0) + 1
        if state.setbacks[rung] >= SETBACKS_PER_RUNG:
            reason = f"{report.kind} again in a rank that it had replaced: {first_line(report.detail)}"
            state.failures.setdefault(rung, reason)
    for rank in ranks:
        state.guilty.setdefault(rank, report)


def rung_failed(state: JobState, rung: Rung | None, reason: str, now: float, *, decide_now: bool = True) -> None:
    """Remember that a rung (None: the one under way) did not lead to a resume, and choose again."""
    failed = rung or current_rung(state)
    if failed is not None:
        state.failures.setdefault(failed, reason)
    if decide_now:
        decide(state, now)


def decide(state: JobState, now: float) -> None:
    """Ask the ladder, remember its answer, do it. Runs whenever an incident begins or takes a turn."""
    facts = gather(state, now)
    decision = state.ladder.decide(facts)
    state.history.decided(decision)
    state.spent += state.ladder.charges(facts, decision.rung)
    _carry_out(state, decision.rung, decision.reason, facts, now)


def gather(state: JobState, now: float) -> Facts:
    """Return what the ladder may look at."""
    world = state.world
    resilient = any(holder.resilient for holder in world.holders)
    incident = state.history.open
    return Facts(
        now=now,
        faults=tuple({id(f): f for f in (*state.guilty.values(), *state.suspicions)}.values()),
        culprits=tuple(sorted(state.guilty)),
        nodes={holder.rank: holder.node for holder in world.holders},
        healthy=frozenset(h.rank for h in world.holders if h.resilient and h.rank not in state.guilty),
        resilient=resilient,
        max_restarts=None if state.ever_resilient else state.job.max_restarts,
        nodes_lost=frozenset(world.named(NodeState.LOST)),
        isolated=frozenset(world.named(NodeState.ISOLATED)),
        closed=closed_nodes(state, now),
        spare_nodes=tuple(world.named(NodeState.SPARE)),
        can_create_nodes=state.can_create_nodes,
        taken=tuple(decision.rung for decision in incident.decisions) if incident else (),
        failed=tuple(FailedRung(rung, reason) for rung, reason in state.failures.items()),
        spent=tuple(state.spent),
    )


def current_rung(state: JobState) -> Rung | None:
    """Return the rung under way in the open incident."""
    return state.history.open.rung if state.history.open else None


def first_line(text: str) -> str:
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
    if rung in {Rung.RESCHEDULE_POD, Rung.RESCHEDULE_JOB}:
        _reschedule(state, rung, leave, now)
        return
    for name in leave:
        leave_node(state, name)
    open_generation(state, replace, now)


def _reschedule(state: JobState, rung: Rung, leave: tuple[str, ...], now: float) -> None:
    """Restart the world: on the nodes that stay and replacements for the others, or on new nodes only."""
    if rung is Rung.RESCHEDULE_POD:
        for name in leave:
            replace_node(state, name)
    else:
        give_back_all_nodes(state)
    state.replaced.update(range(state.world.size))
    if len(state.world.named(NodeState.ACTIVE, NodeState.SPARE)) * state.world.ranks_per_node >= state.world.size:
        open_world(state, now)
        return
    stop_all_processes(state)
    state.phase = Phase.RUNNING if state.phase is Phase.WAITING else state.phase
    wait_for_nodes(state, now)


def with_rank(report: FaultReport, rank: int, node: str, incarnation: int) -> FaultReport:
    """Return a suspicion as a fault of one rank."""
    return msgspec.structs.replace(report, rank=rank, node=node, incarnation=incarnation)
