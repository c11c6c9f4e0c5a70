"""The nine rules of a recovery, held against every state and every action of an exploration."""

from collections.abc import Iterable, Iterator

from midstep.controller.actions import Action, Send
from midstep.controller.recovery.check import contradictions
from midstep.controller.recovery.state import Phase
from midstep.protocol.messages import Rejoin, Resume, StartProcess
from midstep.protocol.types import LocalStateCopy, RepairPart, RestoreSource, Rung

from .cluster import Cluster
from .process import SHARD, Process, Stage

PARKED = frozenset({Stage.JOINED, Stage.PARKED})
# Rungs that keep the processes that are well.
KEEPING = frozenset({Rung.RETRY_STEP, Rung.RECOVER_IN_PLACE, Rung.RECOVER})


def broken_by_state(cluster: Cluster) -> Iterator[str]:
    """Say which rules a state breaks, and where the machine's own contradicts itself."""
    yield from contradictions(cluster.machine.state)
    current = {holder.rank: holder.incarnation for holder in cluster.machine.state.world.holders}
    training = [p for p in cluster.processes if p.stage is Stage.TRAINING and current.get(p.rank) == p.incarnation]
    if len({process.generation for process in training if not process.complained and not process.faulty}) > 1:
        yield f"1 one generation: {[(p.name, p.generation) for p in training]} train"


def broken_by_actions(before: Cluster, after: Cluster, actions: Iterable[Action]) -> Iterator[str]:
    """Say which rules the actions break that followed an event."""
    actions = list(actions)
    bodies = [action.body for action in actions if isinstance(action, Send)]
    resumes = {body.step for body in bodies if isinstance(body, Resume)}
    if len(resumes) > 1:
        yield f"2 same step: ranks resume at {sorted(resumes)}"
    rejoins = {body.rank: body.part for body in bodies if isinstance(body, Rejoin)}
    if len(rejoins) == after.size.ranks:
        yield from _wrong_repair(after, rejoins)
    if after.machine.state.term == before.machine.state.term:
        yield from _killed_for_nothing(before, after, [body for body in bodies if isinstance(body, StartProcess)])
    if after.machine.state.spent != before.machine.state.spent:
        yield from _overspent(after)
    incident = after.machine.incidents[-1] if after.machine.incidents else None
    if incident is not None and any(not decision.reason for decision in incident.decisions):
        yield "9 every decision has a reason"


def _overspent(cluster: Cluster) -> Iterator[str]:
    state = cluster.machine.state
    for use in state.ladder.budgets(tuple(state.spent), cluster.now):
        if use.limit is not None and use.used > use.limit:
            yield f"6 budgets hold: {use.name} is {use.used} of {use.limit}"


def broken_at_the_end(cluster: Cluster) -> Iterator[str]:
    """Say which rules a state breaks after which nothing can happen any more."""
    state = cluster.machine.state
    if state.phase is not Phase.ENDED:
        yield f"5 always ends: nothing can happen any more in {state.phase}"
    elif state.history.open is not None:
        yield "5 always ends: the job has ended, and its incident has not"
    elif cluster.processes:
        yield f"5 always ends: the job has ended, and {[process.name for process in cluster.processes]} run"


def _wrong_repair(cluster: Cluster, parts: dict[int, RepairPart]) -> Iterator[str]:
    """Hold a plan of repair against what the parked processes really have."""
    held_by = {holder.rank: holder.incarnation for holder in cluster.machine.state.world.holders}
    # Who has died since it answered is found out later, and what is brought from there fails.
    alive = {p.rank: p for p in cluster.processes if p.incarnation == held_by.get(p.rank)}
    whole = [process for process in alive.values() if process.whole and process.stage in PARKED]
    survivors = [process for process in whole if process.stage is Stage.PARKED]
    (target,) = {part.target_step for part in parts.values()}
    if survivors and target < max(process.committed for process in survivors):
        yield f"3 nothing lost: all go to step {target}, and {[(p.name, p.committed) for p in survivors]} survive"
    if survivors and target < min(process.committed for process in survivors):
        yield f"2 same step: all go to {target}, before what every survivor has committed"
    for rank, process in alive.items():
        if process.stage in PARKED:
            yield from _wrong_part(cluster, process, parts[rank], alive, survivors=bool(survivors))


def _wrong_part(
    cluster: Cluster, process: Process, part: RepairPart, alive: dict[int, Process], *, survivors: bool
) -> Iterator[str]:
    at_target = process.whole and process.committed == part.target_step
    finishes = process.whole and process.ready and process.committed + 1 == part.target_step and part.finish_update
    into = [transfer for transfer in part.transfers if transfer.destination == process.rank]
    if part.restore is RestoreSource.REPLICA and not (at_target or finishes or into):
        yield f"4 same numbers: {process.name} is at {process.committed}, goes to {part.target_step}, and gets nothing"
    for transfer in into:
        source = alive.get(transfer.source)
        if source is None:
            continue
        if transfer.shard_id != SHARD or not source.whole:
            yield f"4 same numbers: {process.name} gets {transfer.shard_id} from rank {transfer.source}, which lacks it"
        elif source.committed != part.target_step and not (source.ready and source.committed + 1 == part.target_step):
            yield f"4 same numbers: {process.name} gets step {source.committed} for step {part.target_step}"
    for own in part.local_states:
        source = alive.get(own.source)
        copy = LocalStateCopy(own.rank, part.target_step)
        if own.rank == process.rank and source and copy not in source.local_states(cluster.size.ranks):
            yield f"4 same numbers: {process.name} gets its local state from rank {own.source}, which lacks it"
    if part.restore is RestoreSource.NOTHING and survivors and part.target_step > 0:
        yield f"3 nothing lost: {process.name} begins again with survivors"


def _killed_for_nothing(before: Cluster, after: Cluster, starts: list[StartProcess]) -> Iterator[str]:
    incident = after.machine.incidents[-1] if after.machine.incidents else None
    rung = incident.decisions[-1].rung if incident is not None and incident.decisions else None
    if rung not in KEEPING:
        return
    for start in starts:
        process = before.process(start.rank)
        at_fault = before.machine.state.world.holders[start.rank].incarnation != (process.incarnation if process else 0)
        if process is None or process.faulty or at_fault or process.stage is Stage.JOINED:
            continue
        moved = rung is Rung.RECOVER and after.machine.state.world.holders[start.rank].node != process.node
        blamed = any(report.rank == start.rank for report in incident.reports) if incident else False
        if not (moved or blamed):
            yield f"8 nobody is killed for nothing: {process.name} was well, and {rung} replaces it"
