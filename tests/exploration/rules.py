"""The rules of a recovery, held against every state and every action of an exploration.

What a process says and does is held against what it holds in `life.py`; here is the controller's part.
"""

from collections.abc import Iterable, Iterator

from midstep.controller.recovery.events import Action, Send
from midstep.controller.recovery.state import Phase
from midstep.controller.recovery.world import NodeState, RankState
from midstep.processor.session import SessionStage
from midstep.protocol.messages import Rejoin, Resume, StartProcess
from midstep.protocol.types import FaultLevel, LocalStateCopy, RepairPart, RestoreSource, Rung
from midstep.testing.invariants import KEEPING

from .cluster import Cluster
from .inputs import Wait
from .process import Process
from .training import TRAINING


def broken_by_state(cluster: Cluster) -> Iterator[str]:
    """Say which rules a state breaks, and what the last move has broken: the machine's contradictions among it."""
    yield from cluster.broken
    world = cluster.controller.machine.state.world
    training = [p for p in cluster.processes if p.at.wait in TRAINING and not p.hung]
    if len({process.at.linked for process in training if _is_current(cluster, process)}) > 1:
        yield f"1 one generation: {[(p.name, p.at.linked) for p in training]} train"
    if (
        cluster.unsound
        and cluster.controller.phase is Phase.RUNNING
        and not cluster.controller.machine.state.book.put_off
    ):
        there = [holder.rank for holder in world.holders if holder.node in cluster.unsound]
        if there:
            yield f"8 sound nodes: ranks {there} run where a device must be left"
    if cluster.controller.phase is Phase.RUNNING and not cluster.ups and not cluster.downs:
        yield from _strays(cluster)
    if not cluster.taken:
        return
    limits = {entry.rung: entry.budget.per_job for entry in cluster.controller.machine.state.policy.ladder}
    for rung, times in cluster.taken:
        limit = limits.get(Rung(rung))
        if limit is not None and times > limit:
            yield f"6 budgets hold: {rung} was taken {times} times, {limit} are allowed"


def broken_by_actions(before: Cluster, after: Cluster, actions: Iterable[Action]) -> Iterator[str]:
    """Say which rules the actions break that followed an event."""
    if after.controller is before.controller:
        return  # it has heard nothing, and does nothing
    bodies = [action.body for action in actions if isinstance(action, Send)]
    resumes = {body.step for body in bodies if isinstance(body, Resume)}
    if len(resumes) > 1:
        yield f"2 same step: ranks resume at {sorted(resumes)}"
    rejoins = {body.rank: body.part for body in bodies if isinstance(body, Rejoin)}
    if len(rejoins) == after.controller.machine.state.world.size:
        yield from _wrong_repair(after, rejoins)
    starts = [body for body in bodies if isinstance(body, StartProcess)]
    if starts and after.controller.term == before.controller.term:
        yield from _killed_for_nothing(before, after, starts)
    if before.controller.phase is Phase.SAVING and after.controller.phase is Phase.ENDED and after.stops == 1:
        yield from _nothing_saved(after)
    state = after.controller.machine.state
    for use in state.ladder.budgets(tuple(state.spent), after.now) if bodies else ():
        if use.limit is not None and use.used > use.limit:
            yield f"6 budgets hold: {use.name} is {use.used} of {use.limit}"
    incidents = after.controller.machine.incidents
    if incidents and any(not decision.reason for decision in incidents[-1].decisions):
        yield "9 every decision has a reason"


def _nothing_saved(cluster: Cluster) -> Iterator[str]:
    """Say that a job has ended without its checkpoint, though those that are parked hold everything."""
    parked = [p for p in cluster.processes if p.parked and not p.hung and _is_current(cluster, p) and p.at.clean]
    newest = max((process.at.held for process in parked), default=0)
    if newest > 0 and newest not in cluster.checkpoints and not cluster.size.sharded:
        yield f"3 nothing lost: the job ends, and step {newest} is in no checkpoint"


def broken_at_the_end(cluster: Cluster) -> Iterator[str]:
    """Say which rules a state breaks after which nothing can happen any more."""
    machine = cluster.controller.machine
    if cluster.controller.phase is not Phase.ENDED:
        yield f"5 always ends: nothing can happen any more in {cluster.controller.phase}"
    elif machine.state.history.open is not None:
        yield "5 always ends: the job has ended, and its incident has not"
    lost = set(machine.state.world.named(NodeState.LOST))  # the platform ends these
    left = [process.name for process in cluster.processes if process.node not in lost]
    if cluster.controller.phase is Phase.ENDED and left:
        yield f"5 always ends: the job has ended, and {left} run"
    nodes = machine.state.world.nodes.values()
    kept = [node.name for node in nodes if node.given_back and node.name in cluster.nodes]
    if kept:
        yield f"5 always ends: nodes {kept} are given back, and the platform has kept them"


def _strays(cluster: Cluster) -> Iterator[str]:
    """Say which processes hold no rank any more, where nothing is under way that could end them."""
    lost = set(cluster.controller.machine.state.world.named(NodeState.LOST))
    for process in cluster.processes:
        if process.node not in lost and not _is_current(cluster, process):
            yield f"8 nothing is left behind: {process.name} runs on {process.node}, and holds no rank"


def _is_current(cluster: Cluster, process: Process) -> bool:
    holder = cluster.controller.machine.state.world.holder(process.rank)
    return holder is not None and (holder.incarnation, holder.node) == (process.incarnation, process.node)


def _wrong_repair(cluster: Cluster, parts: dict[int, RepairPart]) -> Iterator[str]:
    """Hold a plan of repair against what the parked processes really have."""
    # Who has died since it answered is found out later, and what is brought from there fails.
    alive = {p.rank: p for p in cluster.processes if _is_current(cluster, p)}
    ranks, shards = set(parts), {p.rank: p.at.birth.shard for p in alive.values()}
    # The newest step of which every shard is alive, and every own state of those that lack it.
    trusted = cluster.controller.machine.state.incident.trusted_step
    held = [p.at.held for p in alive.values() if p.parked and (trusted is None or p.at.held <= trusted)]
    newest = max(held, default=0)
    have = {p.rank for p in alive.values() if p.parked and newest in {p.at.held, p.at.gradients}}
    copies = {copy for p in alive.values() if p.parked for copy in p.at.box}
    sharded = cluster.size.sharded
    whole = (have == ranks if sharded else bool(have)) and all(
        LocalStateCopy(rank, newest) in copies for rank in ranks - have
    )
    part = next(iter(parts.values()))
    if whole and RestoreSource.REPLICA is not part.restore and newest > part.target_step:
        yield f"3 nothing lost: all go to step {part.target_step} from {part.restore}, and step {newest} is alive"
    if whole and newest > part.target_step and cluster.unsound == ():
        yield f"3 nothing lost: all go to step {part.target_step}, and step {newest} is alive on {sorted(have)}"
    committed = cluster.controller.machine.state.progress.committed
    if part.target_step == 0 and cluster.size.keeps_all and committed > 1:
        yield f"3 nothing lost: all begin at the first step, and step {committed} was committed"
    if part.restore is RestoreSource.NOTHING and cluster.checkpoints:
        yield f"3 nothing lost: all begin at the first step, and checkpoints {cluster.checkpoints} can be read"
    for rank, each in parts.items():
        process = alive.get(rank)
        if process is None or not process.parked or each.restore is not RestoreSource.REPLICA:
            continue
        at = process.at
        finishes = each.finish_update and at.gradients == each.target_step and at.held_back
        into = [transfer for transfer in each.transfers if transfer.destination == rank]
        if not (at.held == each.target_step or finishes or into):
            yield f"4 same numbers: {process.name} holds {at.held}, goes to {each.target_step}, and gets nothing"
        if any(transfer.shard_id != shards[rank] for transfer in into):
            yield f"4 same numbers: {process.name} gets a shard of another rank"


def _killed_for_nothing(before: Cluster, after: Cluster, starts: list[StartProcess]) -> Iterator[str]:
    machine = after.controller.machine
    incident = machine.incidents[-1] if machine.incidents else None
    rung = incident.decisions[-1].rung if incident is not None and incident.decisions else None
    if rung not in KEEPING:
        return
    for start in starts:
        process = before.process(start.rank)
        if process is None or start.early or process.hung or process.harmed or not _is_current(before, process):
            continue
        if process.node in after.cut + after.unsound or process.at.wait is Wait.NOTHING:
            continue
        if before.controller.machine.state.world.holders[start.rank].state is RankState.STARTING:
            continue  # a world that starts together links up together
        if process.at.stage is SessionStage.PARKED and not process.at.clean:
            continue  # a newcomer, or half repaired
        reports = incident.reports if incident else ()
        blamed = any(report.rank == start.rank and report.level is not FaultLevel.NOT_HANDLE for report in reports)
        if not blamed:
            yield f"8 nobody is killed for nothing: {process.name} was well, and {rung} replaces it"
