"""Every move that a job can make next: messages that arrive or are lost, steps, faults, deadlines."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from midstep.controller.recovery.events import Action, ControllerStarted, DeadlinePassed
from midstep.controller.recovery.machine import RecoveryMachine
from midstep.controller.recovery.state import Phase
from midstep.policies.schema import Policy
from midstep.protocol.messages import FaultReported, Rejoin
from midstep.protocol.types import PLATFORM, FaultKind, FaultLevel, FaultReport, JobSettings, JobSpec, node_address

from .budget import Budget, Size
from .cluster import Cluster, Down, Memory, Up, fed, said
from .controller import Controllers
from .faults import faults, in_office
from .obedience import joined, obeyed, process_at
from .process import Lives, Process
from .training import stalls, trained
from .wire import Wire

Way = TypeVar("Way", Up, Down)
BEGAN_S = 1000.0


class Move(msgspec.Struct, frozen=True):
    """Something that can happen next: its name, what it makes of the cluster, and the actions that it caused."""

    name: str
    make: Callable[[], tuple[Cluster, tuple[Action, ...]]]


def new_cluster(size: Size, budget: Budget, policy: Policy) -> Cluster:
    """Return a job whose agents have joined."""
    spec = JobSpec(
        job="explored",
        command=("train.py",),
        is_module=False,
        no_python=False,
        environment={},
        working_directory="/",
        job_directory="/",
        world_size=size.ranks,
        ranks_per_node=size.ranks_per_node,
        nodes=size.nodes,
        spare_nodes=size.spares,
        max_restarts=0,
        settings=JobSettings(),
    )
    machine = RecoveryMachine(policy, spec, can_create_nodes=size.created > 0)
    nodes = tuple(f"node{number}" for number in range(size.nodes + size.spares))
    for node in nodes:  # that nodes come in another order is another job with other names
        machine.handle(joined(node, ()), BEGAN_S)
    memory = Memory(Controllers(), Lives(), Wire(spec))
    start = Cluster(size, memory, memory.controllers.first(machine), budget, nodes, BEGAN_S)
    return fed(start, ControllerStarted(1))[0]


def moves(cluster: Cluster) -> Iterator[Move]:
    """Return everything that can happen next."""
    usual = [*_messages(cluster), *(Move(name, partial(_told, after)) for name, after in trained(cluster))]
    yield from usual
    if cluster.budget.allows("losses"):
        yield from _losses(cluster)
    for name, make in faults(cluster):
        yield Move(name, make)
    if cluster.controller.phase is Phase.ENDED:
        return
    if not usual:  # only now time goes by
        for process in stalls(cluster):
            yield Move(f"{process.name} stalls", partial(_told, _stalled(cluster, process)))
    due_s = cluster.controller.due_s
    if due_s is None:
        return
    free = not usual or due_s <= cluster.now
    if free or cluster.budget.allows("timeouts"):
        budget = cluster.budget if free else cluster.budget.less("timeouts")
        later = replace(cluster, now=max(cluster.now, due_s), budget=budget)
        yield Move(f"deadline at +{due_s - BEGAN_S:g} s passes", partial(fed, later, DeadlinePassed()))


def _messages(cluster: Cluster) -> Iterator[Move]:
    for up in _arriving(cluster.ups):
        if up.node not in cluster.cut:
            yield Move(f"from {up.node}: {up.report}", partial(_arrived, cluster, up))
    arriving = _arriving(cluster.downs)
    for down in arriving[:1] if cluster.controller.phase is Phase.ENDED else arriving:
        after = replace(cluster, downs=_without(cluster.downs, down), broken=())
        name = f"{down.receiver} gets {type(down.command).__name__}"
        yield Move(name, partial(_obeyed, after, down, torn=False))
        if _finishes(cluster, down) and cluster.budget.allows("tears"):
            less = replace(after, budget=cluster.budget.less("tears"))
            yield Move(f"{name}, and is struck in its update", partial(_obeyed, less, down, torn=True))


def _arrived(cluster: Cluster, up: Up) -> tuple[Cluster, tuple[Action, ...]]:
    rest = replace(cluster, ups=_without(cluster.ups, up))
    if isinstance(up.report, FaultReported) and up.report.report.level is FaultLevel.SEPARATE_NPU:
        rest = replace(rest, unsound=tuple(sorted({*rest.unsound, up.report.report.node or ""})))
    after, actions = fed(rest, up.report)
    if cluster.memory.wire.takes_twice:
        after = replace(after, broken=(*after.broken, f"7 one brain: {type(up.report).__name__} is taken twice"))
    return after, actions


def _finishes(cluster: Cluster, down: Down) -> bool:
    """Whether a process applies the update at whose barrier it was held, when this arrives."""
    if not isinstance(down.command, Rejoin) or not down.command.part.finish_update:
        return False
    process = process_at(cluster, down.command.rank, down.node)
    return process is not None and process.at.held_back and not process.hung


def _losses(cluster: Cluster) -> Iterator[Move]:
    less = replace(cluster, budget=cluster.budget.less("losses"), broken=())
    for up in _arriving(cluster.ups):
        if not up.late and sum(each.node == up.node for each in cluster.ups) > 1:
            lost = replace(less, ups=_late(cluster.ups, up))
            yield Move(f"lost for now, from {up.node}: {type(up.report).__name__}", partial(_told, lost))
    for down in _arriving(cluster.downs):
        if not down.late and down.node != PLATFORM:
            lost = replace(less, downs=_late(cluster.downs, down))
            yield Move(f"lost for now, to {down.receiver}: {type(down.command).__name__}", partial(_told, lost))


def _arriving(ways: tuple[Way, ...]) -> list[Way]:
    """Return what can arrive next: the first of each node, and what is late."""
    first: dict[str, Way] = {}
    for way in ways:
        if not way.late:
            first.setdefault(way.node, way)
    return [way for way in ways if way.late or way is first[way.node]]


def _without(ways: tuple[Way, ...], one: Way) -> tuple[Way, ...]:
    return tuple([way for way in ways if way is not one])


def _late(ways: tuple[Way, ...], one: Way) -> tuple[Way, ...]:
    return tuple([replace(way, late=True) if way is one else way for way in ways])


def _obeyed(cluster: Cluster, down: Down, *, torn: bool) -> tuple[Cluster, tuple[Action, ...]]:
    return obeyed(cluster, down, torn=torn), ()


def _told(cluster: Cluster) -> tuple[Cluster, tuple[Action, ...]]:
    return cluster, ()


def _stalled(cluster: Cluster, process: Process) -> Cluster:
    """Return the cluster after an agent has seen that a step takes too long."""
    report = FaultReport(
        kind=FaultKind.STALL,
        at_s=cluster.now,
        seen_by=node_address(process.node),
        detail="seen",
        rank=process.rank,
        node=process.node,
        generation=process.at.generation,
        incarnation=process.incarnation,
    )
    seen = tuple(replace(p, stalled=True) if p is process else p for p in cluster.processes)
    return said(replace(cluster, processes=seen, broken=()), process.node, FaultReported(report))


__all__ = ["Move", "in_office", "moves", "new_cluster"]
