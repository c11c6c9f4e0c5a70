"""What training processes do by themselves: train, come back from a repair, and see that others are gone."""

from collections.abc import Iterator

from midstep.protocol.messages import FaultReported, RankFinished, RankReady, StepCommitted
from midstep.protocol.types import FaultKind, FaultReport, rank_address

from .cluster import STEP_S, Cluster, changed, said
from .process import Process, Stage


def trained(cluster: Cluster) -> Iterator[tuple[str, Cluster]]:
    """Return what each process can do next, in words, and the cluster after it."""
    for process in cluster.processes:
        if process is cluster.process(process.rank) and not process.faulty:
            after = _next_of(cluster, process)
            if after is not None:
                yield f"{process.name} {after[0]}", after[1]


def _next_of(cluster: Cluster, process: Process) -> tuple[str, Cluster] | None:
    others = [cluster.process(rank) for rank in range(cluster.size.ranks) if rank != process.rank]
    head = (process.rank, process.generation, process.incarnation)
    if process.stage is Stage.REJOINING and process.part is not None:
        if all(other is not None and _is_linked(other, process.generation) for other in others):
            step = process.part.target_step
            back = process.change(stage=Stage.AT_BARRIER_TWO, committed=step, ready=False, whole=True, part=None)
            return "is repaired", said(
                changed(cluster, process, back), process.node, RankReady(*head, step, {"rebuild": 0.0})
            )
    elif process.stage is Stage.TRAINING and not process.complained:
        if process.committed >= cluster.size.steps:
            finished = process.change(stage=Stage.FINISHED, resumed=False)
            return "finishes", said(
                changed(cluster, process, finished), process.node, RankFinished(*head, process.committed)
            )
        if not process.ready and all(_meets(other, process) for other in others):
            return "has all gradients", changed(cluster, process, process.change(ready=True))
        if process.ready and all(_has_passed(other, process) for other in others):
            after = process.change(committed=process.committed + 1, ready=False, resumed=False)
            cluster = changed(cluster, process, after)
            if process.resumed:
                cluster = said(cluster, process.node, StepCommitted(*head, after.committed, cluster.now, STEP_S))
            return "commits", cluster
    stuck = process.stage in {Stage.TRAINING, Stage.REJOINING} and not process.complained
    if stuck and any(other is None or _is_stuck(other) or other.generation != process.generation for other in others):
        return "cannot reach the others", complaint(cluster, process)
    return None


def _is_linked(other: Process, generation: int) -> bool:
    linked = {Stage.REJOINING, Stage.AT_BARRIER_TWO, Stage.TRAINING}
    return other.generation == generation and other.stage in linked and not other.faulty


def _meets(other: Process | None, process: Process) -> bool:
    if other is None or other.generation != process.generation:
        return False
    return other.committed > process.committed or (other.stage is Stage.TRAINING and not _is_stuck(other))


def _is_stuck(other: Process) -> bool:
    return other.faulty or other.complained


def _has_passed(other: Process | None, process: Process) -> bool:
    if other is None or other.generation != process.generation:
        return False
    return other.committed > process.committed or other.ready


def complaint(cluster: Cluster, process: Process) -> Cluster:
    """Return the cluster after the process has seen a collective fail."""
    report = fault(process, FaultKind.COMMUNICATION, cluster.now)
    return said(changed(cluster, process, process.change(complained=True)), process.node, FaultReported(report))


def fault(process: Process, kind: FaultKind, now: float) -> FaultReport:
    return FaultReport(
        kind=kind,
        at_s=now,
        seen_by=rank_address(process.rank),
        detail="seen",
        rank=process.rank,
        node=process.node,
        generation=process.generation,
        incarnation=process.incarnation,
    )
