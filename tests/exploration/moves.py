"""Every move that a job can make next: messages that arrive or are lost, steps, faults, deadlines."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import TypeVar

import msgspec

from midstep.controller.actions import Action
from midstep.controller.events import ControllerStarted, DeadlinePassed
from midstep.controller.machine import RecoveryMachine
from midstep.controller.recovery.state import Phase
from midstep.policies.schema import Policy
from midstep.protocol.messages import FaultReported, NodeJoined, NodeLost
from midstep.protocol.types import CONTROLLER, FaultKind, JobSettings, JobSpec, RunningProcess, StoreEndpoint

from .cluster import KILLED, Budget, Cluster, Down, Size, Up, changed, ended_process, fed, said, without_node
from .obedience import obeyed
from .process import Process, Stage
from .training import complaint, fault, trained

Way = TypeVar("Way", Up, Down)


class Move(msgspec.Struct, frozen=True):
    """Something that can happen next: its name, what it makes of the cluster, and the actions that it caused."""

    name: str
    make: Callable[[], tuple[Cluster, list[Action]]]


def new_cluster(size: Size, budget: Budget, policy: Policy) -> Cluster:
    """Return a job whose agents are about to join."""
    spec = JobSpec(
        job="explored",
        command=("train.py",),
        is_module=False,
        no_python=False,
        environment={},
        working_directory="/",
        job_directory="/",
        world_size=size.ranks,
        ranks_per_node=1,
        nodes=size.ranks,
        spare_nodes=size.spares,
        max_restarts=0,
        settings=JobSettings(),
    )
    machine = RecoveryMachine(policy, spec)
    nodes = tuple(f"node{number}" for number in range(size.ranks + size.spares))
    now = 1000.0
    for node in nodes:  # that nodes come in another order is another job with other names
        machine.handle(joined(node, ()), now)
    start, _ = fed(Cluster(size, machine, b"", budget, nodes, now), ControllerStarted(1))
    return start


def joined(node: str, processes: Iterable[Process]) -> NodeJoined:
    """Return what an agent says to a controller that is new to it."""
    running = tuple(RunningProcess(p.rank, p.pid, p.incarnation, p.generation) for p in processes if p.node == node)
    return NodeJoined(node, node, StoreEndpoint("127.0.0.1", 1), running)


def moves(cluster: Cluster) -> Iterator[Move]:
    """Return everything that can happen next."""
    training = [Move(name, partial(_told, after)) for name, after in trained(cluster)]
    usual = [*_messages(cluster), *training]
    yield from usual
    if cluster.machine.phase is not Phase.ENDED:
        yield from _faults(cluster)
        due_s = cluster.machine.next_deadline()
        if due_s is not None:
            free = not usual or due_s <= cluster.now
            if free or cluster.budget.allows("timeouts"):
                budget = cluster.budget if free else cluster.budget.less("timeouts")
                later = replace(cluster, now=max(cluster.now, due_s), budget=budget)
                yield Move(f"deadline at +{due_s - 1000:g} s passes", partial(fed, later, DeadlinePassed()))


def _messages(cluster: Cluster) -> Iterator[Move]:
    for up in _arriving(cluster.ups):
        rest = replace(cluster, ups=_without(cluster.ups, up))
        yield Move(f"from {up.node}: {up.report}", partial(fed, rest, up.report))
    arriving = _arriving(cluster.downs)
    for down in arriving[:1] if cluster.machine.phase is Phase.ENDED else arriving:
        after = replace(cluster, downs=_without(cluster.downs, down))
        name = f"{down.receiver} gets {type(down.command).__name__}"
        yield Move(name, partial(_obeyed, after, down))
    if cluster.budget.allows("losses"):
        less = replace(cluster, budget=cluster.budget.less("losses"))
        for up in _arriving(cluster.ups):
            if not up.late and sum(each.node == up.node for each in cluster.ups) > 1:
                lost = replace(less, ups=_late(cluster.ups, up))
                yield Move(f"lost for now, from {up.node}: {type(up.report).__name__}", partial(_told, lost))
        for down in _arriving(cluster.downs):
            if not down.late and sum(each.node == down.node for each in cluster.downs) > 1:
                lost = replace(less, downs=_late(cluster.downs, down))
                yield Move(f"lost for now, to {down.receiver}: {type(down.command).__name__}", partial(_told, lost))


def _arriving(ways: tuple[Way, ...]) -> list[Way]:
    """Return what can arrive next: the first of each node, and what is late."""
    first = {way.node: way for way in reversed(ways) if not way.late}
    return [way for way in ways if way.late or way is first[way.node]]


def _without(ways: tuple[Way, ...], one: Way) -> tuple[Way, ...]:
    return tuple(way for way in ways if way is not one)


def _late(ways: tuple[Way, ...], one: Way) -> tuple[Way, ...]:
    return tuple(msgspec.structs.replace(way, late=True) if way is one else way for way in ways)


def _obeyed(cluster: Cluster, down: Down) -> tuple[Cluster, list[Action]]:
    return obeyed(cluster, down), []


def _told(cluster: Cluster) -> tuple[Cluster, list[Action]]:
    return cluster, []


def _faults(cluster: Cluster) -> Iterator[Move]:
    budget = cluster.budget
    for process in cluster.processes:
        if budget.allows("kills"):
            less = replace(cluster, budget=budget.less("kills"))
            killed = partial(ended_process, less, process, KILLED, expected=False)
            yield Move(f"{process.name} is killed", partial(_made, killed))
        if process.stage is Stage.TRAINING and not process.faulty:
            if budget.allows("exceptions"):
                less = replace(cluster, budget=budget.less("exceptions"))
                yield Move(f"{process.name} raises", partial(_made, partial(_raised, less, process)))
            if budget.allows("broken_links") and not process.complained:
                less = replace(cluster, budget=budget.less("broken_links"))
                yield Move(f"{process.name} sees a collective fail", partial(_made, partial(complaint, less, process)))
    if budget.allows("lost_nodes"):
        for node in cluster.nodes:
            less = replace(cluster, budget=budget.less("lost_nodes"))
            yield Move(f"{node} is lost", partial(_made, partial(_lost, less, node)))
    if budget.allows("crashes"):
        yield Move("the controller dies, another one starts", partial(_restarted, cluster))


def _made(make: Callable[[], Cluster]) -> tuple[Cluster, list[Action]]:
    return make(), []


def _raised(cluster: Cluster, process: Process) -> Cluster:
    report = fault(process, FaultKind.EXCEPTION, cluster.now)
    return said(changed(cluster, process, process.change(faulty=True)), process.node, FaultReported(report))


def _lost(cluster: Cluster, node: str) -> Cluster:
    return said(without_node(cluster, node), CONTROLLER, NodeLost(node, "it is silent", cluster.now))


def _restarted(cluster: Cluster) -> tuple[Cluster, list[Action]]:
    """Return the cluster with the next controller: it has the journal, and nothing of what was on its way down."""
    term = cluster.machine.state.term + 1
    known = {up.node for up in cluster.ups if isinstance(up.report, NodeJoined)}
    alive = replace(cluster, downs=(), budget=cluster.budget.less("crashes"))
    for node in alive.nodes:
        if node not in known:
            alive = said(alive, node, joined(node, alive.processes))
    return fed(alive, ControllerStarted(term))
