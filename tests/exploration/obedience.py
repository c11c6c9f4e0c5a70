"""How agents and training processes carry out commands, and answer."""

from dataclasses import replace

from midstep.protocol.messages import (
    CheckpointSaved,
    Command,
    EndJob,
    ProbeProgress,
    ProcessStarted,
    ProgressReported,
    Quiesce,
    RankJoined,
    RankQuiesced,
    Rejoin,
    Release,
    Resume,
    SaveCheckpoint,
    StartProcess,
    StopProcess,
)
from midstep.protocol.types import RunningProcess

from .cluster import KILLED, STEP_S, Cluster, Down, changed, ended_process, said, step_clock, without_node
from .process import Process, Stage


def obeyed(cluster: Cluster, down: Down) -> Cluster:
    """Return the cluster after a command has arrived."""
    command = down.command
    kind, _, name = down.receiver.partition("/")
    if kind == "node" and name in cluster.nodes:
        return _node_obeys(cluster, name, command)
    if kind == "rank":
        here = [process for process in cluster.processes if (process.rank, process.node) == (int(name), down.node)]
        if here:
            return _process_obeys(cluster, here[-1], command)
    return cluster


def _node_obeys(cluster: Cluster, node: str, command: Command) -> Cluster:
    match command:
        case StartProcess():
            return _started(cluster, node, command)
        case StopProcess(rank=rank, incarnation=incarnation):
            ended = [p for p in cluster.processes if p.node == node and p.rank == rank and p.incarnation <= incarnation]
            for process in ended:
                cluster = ended_process(cluster, process, KILLED, expected=True)
            return cluster
        case EndJob():
            return without_node(cluster, node)
        case ProbeProgress(probe=probe):
            clocks = tuple(step_clock(cluster, process) for process in cluster.processes if process.node == node)
            return said(cluster, node, ProgressReported(node, probe, cluster.now, clocks))
        case _:
            return cluster


def _started(cluster: Cluster, node: str, order: StartProcess) -> Cluster:
    before = [p for p in cluster.processes if p.rank == order.rank and p.node == node]
    if any(p.incarnation >= order.incarnation for p in before):
        return cluster
    kept = before[-1].local_states(cluster.size.ranks) if before else ()
    for process in before:
        cluster = ended_process(cluster, process, KILLED, expected=True)
    new = Process(order.rank, node, order.incarnation, order.generation, whole=order.connected, kept=kept)
    running = RunningProcess(new.rank, new.pid, new.incarnation, new.generation)
    cluster = replace(cluster, processes=(*cluster.processes, new))
    report = new.report(cluster.size.ranks)
    cluster = said(cluster, node, ProcessStarted(node, running, warm=True))
    return said(cluster, node, RankJoined(new.rank, new.generation, new.incarnation, new.pid, report, STEP_S))


def _process_obeys(cluster: Cluster, process: Process, command: Command) -> Cluster:
    head = (process.rank, getattr(command, "generation", 0), process.incarnation)
    match command:
        case Quiesce(generation=generation) if generation > process.generation:
            half = process.stage is Stage.REJOINING and not process.whole
            parked = process.change(
                stage=Stage.PARKED, generation=generation, complained=False, part=None, whole=process.whole and not half
            )
            quiesced = RankQuiesced(*head, parked.report(cluster.size.ranks), {"stop": 0.0})
            return said(changed(cluster, process, parked), process.node, quiesced)
        case Rejoin(generation=generation, part=part) if process.stage in {Stage.JOINED, Stage.PARKED}:
            if generation >= process.generation:
                rejoining = process.change(stage=Stage.REJOINING, generation=generation, part=part, complained=False)
                return changed(cluster, process, rejoining)
        case Resume(generation=generation) if (process.stage, process.generation) == (Stage.AT_BARRIER_TWO, generation):
            return changed(cluster, process, process.change(stage=Stage.TRAINING, resumed=True))
        case Release(generation=generation) if (process.stage, process.generation) == (Stage.FINISHED, generation):
            return ended_process(cluster, process, 0, expected=False)
        case SaveCheckpoint(generation=generation, step=step) if process.stage in {Stage.JOINED, Stage.PARKED}:
            return said(cluster, process.node, CheckpointSaved(process.rank, generation, step, "/checkpoint"))
        case _:
            pass
    return cluster
