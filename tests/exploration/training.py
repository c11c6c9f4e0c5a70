"""Training processes act by themselves: they train, link up, and see that others are gone."""

from collections.abc import Iterator

from midstep.protocol.types import RestoreSource

from .cluster import Cluster, gone_on, parked_or_linking
from .inputs import Happened, Input, Linked, Voted, Wait, What
from .process import Process

TRAINING = frozenset({Wait.COLLECTIVES, Wait.BARRIER})
IN_TOUCH = frozenset({Wait.COLLECTIVES, Wait.BARRIER, Wait.LINKS})  # with the others


def trained(cluster: Cluster) -> Iterator[tuple[str, Cluster]]:
    """Return what each process can do next, in words, and the cluster after it."""
    for process in cluster.processes:
        if process.at.wait in IN_TOUCH and not process.hung and process is cluster.process(process.rank):
            given = _next_of(cluster, process)
            if given is not None:
                yield f"{process.name} {_said(given)}", happened(cluster, process, given)


def happened(cluster: Cluster, process: Process, given: Input, **changes: bool) -> Cluster:
    """Return the cluster after something has happened to a process."""
    return gone_on(cluster, process, cluster.memory.lives.after(process.at, given), **{"stalled": False, **changes})


def _said(given: Input) -> str:
    if isinstance(given, Voted):
        return "hears what all hold"
    return given.what.value if isinstance(given, Happened) else "is linked up, repaired and rolled back"


def _next_of(cluster: Cluster, process: Process) -> Input | None:
    others = [cluster.process(rank) for rank in range(_size(process)) if rank != process.rank]
    at = process.at
    if at.wait is Wait.LINKS:
        if all(other is not None and _links(other, at.generation) for other in others):
            return arrival(cluster, process)
        lost = any(other is None or not parked_or_linking(other, at.generation) for other in others)
        return Happened(What.BREAK) if lost else None
    if any(other is None or other.at.linked != at.generation for other in others):
        return Happened(What.BREAK)
    if at.wait is Wait.COLLECTIVES and all(other is not None and _meets(other, process) for other in others):
        return Happened(What.GRADIENTS)
    if at.wait is Wait.BARRIER and may_commit(cluster, process):
        return Voted(_ballots(cluster, process)) if cluster.size.votes else Happened(What.MET)
    return None


def may_commit(cluster: Cluster, process: Process) -> bool:
    """Whether all others have come to the commit barrier at which the process waits."""
    others = [cluster.process(rank) for rank in range(_size(process)) if rank != process.rank]
    return all(other is not None and _has_passed(other, process) for other in others)


def _ballots(cluster: Cluster, process: Process) -> tuple[bytes, ...]:
    """Return what the others hold; those that have passed the barrier already have found that all is equal."""
    others = (cluster.process(rank) for rank in range(_size(process)) if rank != process.rank)
    waiting = (other.at for other in others if other is not None and other.at.wait is Wait.BARRIER)
    return tuple(at.said for at in waiting if at.said is not None and at.count == process.at.count)


def arrival(cluster: Cluster, process: Process, *, cut: bool = False) -> Linked:
    """Return what reaches a process that has linked up with all others, by its part of the plan."""
    part = process.at.part
    shards: tuple[int, ...] = ()
    own = wrong = False
    if part is not None and part.restore is RestoreSource.REPLICA:
        into = [each for each in part.transfers if each.destination == process.rank]
        sources = [cluster.process(each.source) for each in into]
        shards = tuple(source.at.held for source in sources if source is not None)
        wrong = any(source.at.wrong for source in sources if source is not None)
        for move in part.local_states:
            source = cluster.process(move.source)
            if move.rank == process.rank and source is not None:
                own = own or (move.rank, part.target_step) in [(copy.rank, copy.step) for copy in source.at.box]
    return Linked(shards, own, cluster.checkpoints, cut, wrong)


def stalls(cluster: Cluster) -> Iterator[Process]:
    """Return the processes that wait in a step for ever, and of which that was not reported."""
    for process in cluster.processes:
        if process.at.wait in TRAINING and not process.stalled and process is cluster.process(process.rank):
            yield process


def _size(process: Process) -> int:
    return process.at.birth.order.world_size


def _links(other: Process, generation: int) -> bool:
    at = other.at
    waits = at.wait is Wait.LINKS and at.generation == generation and not other.hung
    return waits or at.linked == generation


def _meets(other: Process, process: Process) -> bool:
    at, count = other.at, process.at.count
    return at.count > count or (at.count == count and at.wait in TRAINING and not other.hung) or at.ready


def _has_passed(other: Process, process: Process) -> bool:
    at, count = other.at, process.at.count
    return at.count > count or (at.count == count and at.wait is Wait.BARRIER)
