"""All that can go wrong: as many moves as the budget allows, at every point."""

from collections.abc import Callable, Iterator
from functools import partial

from msgspec.structs import replace

from midstep.controller.recovery.events import Action, ControllerStarted, NodeReturned, StopRequested
from midstep.controller.recovery.state import Phase
from midstep.protocol.messages import FaultReported, NodeJoined, NodeLost
from midstep.protocol.types import DETECTOR_PREFIX, PLATFORM, Assertion, FaultKind, FaultLevel, FaultReport

from .cluster import KILLED, Cluster, ended_process, fed, said, without_nodes
from .inputs import Happened, Wait, What
from .obedience import joined
from .process import Process
from .training import TRAINING, arrival, happened, may_commit

Made = tuple[Cluster, tuple[Action, ...]]
Fault = tuple[str, Callable[[], Made]]
DETECTOR = f"{DETECTOR_PREFIX}explored"


def faults(cluster: Cluster) -> Iterator[Fault]:
    """Return what can go wrong now, each in words and with what it makes of the cluster."""
    if cluster.controller.phase is Phase.ENDED:
        return
    if cluster.budget.faults > 0:
        for process in cluster.processes:
            yield from _of_a_process(cluster, process)
        yield from _of_nodes(cluster)
    for node in cluster.cut:
        yield f"{node} is heard again", partial(_heard_again, cluster, node)
    if cluster.budget.allows("stops"):
        yield "an operator asks to stop", partial(_asked, cluster)
    for what in ("crashes", "takeovers"):
        if cluster.budget.allows(what):
            yield f"the controller dies, another one starts ({what})", partial(in_office, cluster, what)


def _of_a_process(cluster: Cluster, process: Process) -> Iterator[Fault]:
    budget, at = cluster.budget, process.at

    def less(what: str) -> Cluster:
        return replace(cluster, budget=budget.less(what), broken=())

    if budget.allows("kills"):
        yield f"{process.name} is killed", _made(ended_process, less("kills"), process, KILLED, expected=False)
    if process.hung or process is not cluster.process(process.rank):
        return
    if budget.allows("flips") and at.proven and not at.wrong:
        flipped = Happened(What.FLIP)
        yield f"a bit of {process.name} flips", _made(happened, less("flips"), process, flipped, harmed=True)
    if budget.allows("hangs"):
        yield f"{process.name} hangs", _made(_hung, less("hangs"), process)
    if at.wait is Wait.COLLECTIVES and budget.allows("exceptions"):
        raised = Happened(What.RAISE)
        yield f"{process.name} raises", _made(happened, less("exceptions"), process, raised, harmed=True)
    if at.wait is Wait.BARRIER and budget.allows("tears") and may_commit(cluster, process):
        torn = Happened(What.TEAR)
        yield f"{process.name} is struck in its update", _made(happened, less("tears"), process, torn, harmed=True)
    if budget.allows("broken_links"):
        if at.wait in TRAINING:
            yield f"{process.name} sees a collective fail", _made(happened, less("broken_links"), process, _BREAK)
        elif at.wait is Wait.LINKS and at.part is not None and at.part.transfers:
            cut = arrival(cluster, process, cut=True)
            into = any(each.destination == process.rank for each in at.part.transfers)
            if into and len(cut.shards):
                yield f"{process.name} is cut off in its repair", _made(happened, less("broken_links"), process, cut)


_BREAK = Happened(What.BREAK)


def _of_nodes(cluster: Cluster) -> Iterator[Fault]:
    budget = cluster.budget
    for node in cluster.nodes:
        if budget.allows("lost_nodes"):
            less = replace(cluster, budget=budget.less("lost_nodes"), broken=())
            yield f"{node} is lost", _made(_lost, less, node)
        if budget.allows("cut_nodes") and node not in cluster.cut:
            less = replace(cluster, budget=budget.less("cut_nodes"), broken=())
            yield f"{node} is cut off from the controller", partial(_cut, less, node)
        if budget.allows("devices"):
            less = replace(cluster, budget=budget.less("devices"), broken=())
            for level in (FaultLevel.SEPARATE_NPU, FaultLevel.NOT_HANDLE):
                yield f"a device of {node} has {level}", _made(_device, less, node, level)
            for process in cluster.processes:
                if process.node == node and not process.hung and process.at.wait in TRAINING:
                    yield f"{process.name} finds its device broken", _made(_own_device, less, process)


def _made(make: Callable[..., Cluster], *given: object, **named: object) -> Callable[[], Made]:
    return lambda: (make(*given, **named), ())


def _hung(cluster: Cluster, process: Process) -> Cluster:
    hung = [replace(p, hung=True, harmed=True) if p is process else p for p in cluster.processes]
    return replace(cluster, processes=tuple(hung))


def _lost(cluster: Cluster, node: str) -> Cluster:
    return said(without_nodes(cluster, [node]), PLATFORM, NodeLost(node, "it is silent", cluster.now))


def _cut(cluster: Cluster, node: str) -> Made:
    cut = replace(
        cluster,
        cut=tuple(sorted({*cluster.cut, node})),
        downs=tuple(down for down in cluster.downs if down.node != node),
    )
    return fed(cut, NodeLost(node, "it is silent", cluster.now))


def _heard_again(cluster: Cluster, node: str) -> Made:
    back = replace(cluster, cut=tuple(each for each in cluster.cut if each != node))
    return fed(back, NodeReturned(node))


def _device(cluster: Cluster, node: str, level: FaultLevel) -> Cluster:
    report = FaultReport(
        kind=FaultKind.DEVICE,
        at_s=cluster.now,
        seen_by=DETECTOR,
        detail="seen",
        node=node,
        device=0,
        level=level,
        assertion=Assertion.OCCUR,
    )
    return said(cluster, DETECTOR, FaultReported(report))


def _own_device(cluster: Cluster, process: Process) -> Cluster:
    """Its process reports it, and goes on until it is told otherwise."""
    report = FaultReport(
        kind=FaultKind.DEVICE,
        at_s=cluster.now,
        seen_by=f"rank/{process.rank}",
        detail="seen",
        rank=process.rank,
        node=process.node,
        generation=process.at.generation,
        incarnation=process.incarnation,
        level=FaultLevel.SEPARATE_NPU,
        assertion=Assertion.OCCUR,
    )
    return said(cluster, process.node, FaultReported(report))


def _asked(cluster: Cluster) -> Made:
    less = replace(cluster, budget=cluster.budget.less("stops"), stops=cluster.stops + 1)
    return fed(less, StopRequested("asked to", insist=cluster.stops > 0))


def in_office(cluster: Cluster, what: str) -> Made:
    """Return the cluster with the next controller: it has the journal. What was on its way down is lost, or late."""
    term = cluster.controller.term + 1
    known = {up.node for up in cluster.ups if isinstance(up.report, NodeJoined)}
    downs = tuple(replace(down, late=True) for down in cluster.downs) if what == "takeovers" else ()
    alive = replace(cluster, downs=downs, heard=(), budget=cluster.budget.less(what))
    for node in alive.nodes:
        if node not in known:
            alive = said(alive, node, joined(node, alive.processes))
    return fed(alive, ControllerStarted(term))
