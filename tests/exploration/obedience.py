"""How agents, training processes and the platform carry out commands, and answer."""

from collections.abc import Iterable

from msgspec.structs import replace

from midstep.protocol.messages import (
    Command,
    CreateNode,
    DeleteNode,
    EndJob,
    IntroduceNode,
    NodeJoined,
    NodeRefused,
    ProbeProgress,
    ProcessStarted,
    ProgressReported,
    Quiesce,
    Rejoin,
    Release,
    Resume,
    SaveCheckpoint,
    StartProcess,
    StopProcess,
)
from midstep.protocol.types import PLATFORM, RunningProcess, StoreEndpoint

from .cluster import KILLED, Cluster, Down, ended_process, gone_on, said, step_clock, without_nodes
from .inputs import Birth, Heard
from .process import Process

ORDERS = (Quiesce, Rejoin, Resume, Release, SaveCheckpoint)


def obeyed(cluster: Cluster, down: Down, *, torn: bool = False) -> Cluster:
    """Return the cluster after a command has arrived. `torn`: the update that it asks for is torn."""
    command = down.command
    kind, _, name = down.receiver.partition("/")
    if down.receiver == PLATFORM:
        return _platform_obeys(cluster, command)
    here = process_at(cluster, int(name), down.node) if kind == "rank" else None
    hears = down.receiver if here is None else here.name
    if kind == "rank" and here is None:
        return cluster
    if down.term < cluster.controller.term and hears in cluster.heard:
        if not cluster.memory.wire.takes_earlier_terms:
            return cluster
        what = f"7 one brain: {hears} takes a {type(command).__name__} of term {down.term}"
        cluster = replace(cluster, broken=(*cluster.broken, what))
    if down.term == cluster.controller.term > 1 and hears not in cluster.heard:
        cluster = replace(cluster, heard=tuple(sorted({*cluster.heard, hears})))
    if cluster.memory.wire.takes_twice:
        what = f"7 one brain: {hears} takes a {type(command).__name__} twice"
        cluster = replace(cluster, broken=(*cluster.broken, what))
    if here is None:
        return _node_obeys(cluster, name, command)
    if here.hung or not isinstance(command, ORDERS):
        return cluster
    outcome = cluster.memory.lives.after(here.at, Heard(command, cluster.checkpoints, torn))
    return gone_on(cluster, here, outcome, stalled=False, harmed=here.harmed or torn)


def process_at(cluster: Cluster, rank: int, node: str) -> Process | None:
    """Return the process of a rank on a node."""
    return next((process for process in cluster.processes if (process.rank, process.node) == (rank, node)), None)


def joined(node: str, processes: Iterable[Process]) -> NodeJoined:
    """Return what an agent says to a controller that is new to it."""
    running = tuple(RunningProcess(p.rank, p.pid, p.incarnation, p.at.generation) for p in processes if p.node == node)
    return NodeJoined(node, node, StoreEndpoint("127.0.0.1", 1), running)


def _platform_obeys(cluster: Cluster, command: Command) -> Cluster:
    match command:
        case CreateNode(node=node) if node not in cluster.nodes:
            if cluster.made < cluster.size.created:
                more = replace(cluster, nodes=(*cluster.nodes, node), made=cluster.made + 1)
                return said(more, node, joined(node, ()))
            return said(cluster, PLATFORM, NodeRefused(node, "there are no more"))
        case DeleteNode(node=node):
            return without_nodes(cluster, [node])
        case _:
            return cluster


def _node_obeys(cluster: Cluster, node: str, command: Command) -> Cluster:  # noqa: PLR0911 - one for each command
    match command:
        case StartProcess():
            return _started(cluster, node, command)
        case StopProcess(rank=rank, incarnation=incarnation):
            process = process_at(cluster, rank, node)
            if process is not None and process.incarnation <= incarnation:
                return ended_process(cluster, process, KILLED, expected=True)
            return cluster
        case EndJob():
            return without_nodes(cluster, [node])
        case ProbeProgress(probe=probe):
            clocks = tuple([step_clock(process, cluster.now) for process in cluster.processes if process.node == node])
            return said(cluster, node, ProgressReported(node, probe, cluster.now, clocks))
        case IntroduceNode():
            return said(cluster, node, joined(node, cluster.processes))
        case _:
            return cluster


def _started(cluster: Cluster, node: str, order: StartProcess) -> Cluster:
    before = process_at(cluster, order.rank, node)
    if before is not None:
        if before.incarnation >= order.incarnation:
            return cluster
        cluster = ended_process(cluster, before, KILLED, expected=True)
    box = next((box[2] for box in cluster.boxes if box[:2] == (node, order.rank)), ())
    size = cluster.size
    shard = f"shard {order.rank}" if size.sharded else "replicated"
    birth = Birth(order, node, box, cluster.checkpoints, size.steps, size.every_steps, shard, size.votes)
    outcome = cluster.memory.lives.born(birth)
    new = Process(order.rank, node, order.incarnation, outcome.at)
    cluster = replace(
        cluster,
        processes=(*cluster.processes, new),
        boxes=tuple(each for each in cluster.boxes if each[:2] != (node, order.rank)),
    )
    running = RunningProcess(new.rank, new.pid, new.incarnation, new.at.generation)
    cluster = said(cluster, node, ProcessStarted(node, running, warm=True))
    return gone_on(cluster, new, outcome)
