"""A whole job as one value: the real recovery machine and the real loops of its ranks, and what is under way between.

Nodes are there or gone, processes are values, messages are under way in both directions. What goes to or from one node
arrives in the order in which it was sent, unless it is lost and sent again; what goes to or from different nodes, in
any order. Time stands still until a deadline passes.
"""

from collections.abc import Iterable

import msgspec
from msgspec.structs import replace

from midstep.controller.recovery.events import Action, Event, Forget, Send
from midstep.controller.recovery.state import Phase
from midstep.processor.session import SessionStage
from midstep.protocol.messages import (
    ArmFault,
    Command,
    FaultReported,
    ProcessExited,
    Report,
    StepCommitted,
    WelcomeNode,
)
from midstep.protocol.types import PLATFORM, Activity, LocalStateCopy, RankProgress, RunningProcess

from .budget import Budget, Size
from .controller import Controller, Controllers
from .inputs import Wait
from .life import STEP_S
from .process import Lives, Outcome, Process
from .snapshot import digest
from .wire import Wire

KILLED = -9
HUNG_S = 1000.0  # longer than any step may take
NOTHING_TO_DO = (WelcomeNode, ArmFault)  # of which nothing follows here


class Up(msgspec.Struct, frozen=True):
    """A report on its way from a node. `late`: it was lost and is sent again, so that others may overtake it."""

    node: str
    report: Report
    key: bytes
    late: bool = False


class Down(msgspec.Struct, frozen=True):
    """A command on its way to a node, or to the process of a rank there. `term`: of the controller that has sent it."""

    node: str
    receiver: str
    command: Command
    term: int
    key: bytes
    late: bool = False


class Memory(msgspec.Struct, frozen=True, eq=False):
    """What is the same for all clusters of an exploration: what was found out already."""

    controllers: Controllers
    lives: Lives
    wire: Wire


class Cluster(msgspec.Struct, frozen=True, eq=False):
    """Where everything stands. `ups` and `downs`: what is under way to the controller, and from it."""

    size: Size
    memory: Memory
    controller: Controller
    budget: Budget
    nodes: tuple[str, ...]
    now: float
    processes: tuple[Process, ...] = ()
    ups: tuple[Up, ...] = ()
    downs: tuple[Down, ...] = ()
    boxes: tuple[tuple[str, int, tuple[LocalStateCopy, ...]], ...] = ()  # black boxes that have outlived their process
    checkpoints: tuple[int, ...] = ()  # that are complete
    cut: tuple[str, ...] = ()  # nodes that run, and that the controller cannot reach
    unsound: tuple[str, ...] = ()  # nodes that must be left, and the controller has been told
    heard: tuple[str, ...] = ()  # who has heard of the present term
    stops: int = 0  # how often the job was asked to stop
    made: int = 0  # nodes, by the platform
    taken: tuple[tuple[str, int], ...] = ()  # how often each rung was, where the bound counts that
    broken: tuple[str, ...] = ()  # rules that the last move has broken

    def process(self, rank: int) -> Process | None:
        """Return the latest living process of a rank."""
        latest = None
        for process in self.processes:
            if process.rank == rank and (latest is None or process.incarnation > latest.incarnation):
                latest = process
        return latest


def key_of(cluster: Cluster) -> bytes:
    """Return what tells this state from all others: the order in which messages were sent does not."""
    return digest(
        (
            cluster.controller.memory,
            cluster.now,
            cluster.budget,
            cluster.nodes,
            sorted([process.key for process in cluster.processes]),
            [(up.late, up.node, up.key) for up in sorted(cluster.ups, key=_of_up)],
            [(down.late, down.node, down.term, down.key) for down in sorted(cluster.downs, key=_of_down)],
            (
                sorted(cluster.boxes),
                cluster.checkpoints,
                cluster.cut,
                cluster.unsound,
                cluster.heard,
                cluster.stops,
                cluster.made,
            ),
            cluster.taken,
        )
    )


def _of_up(up: Up) -> tuple[bool, str, bytes]:
    return (up.late, up.node, up.key if up.late else b"")


def _of_down(down: Down) -> tuple[bool, str, bytes]:
    return (down.late, down.node, down.key if down.late else b"")


def fed(cluster: Cluster, event: Event) -> tuple[Cluster, tuple[Action, ...]]:
    """Return the cluster after the machine has taken in an event, and sent what it wants sent."""
    step = cluster.memory.controllers.after(cluster.controller, event, cluster.now)
    after, downs = step.controller, cluster.downs
    for action in step.actions:
        match action:
            case Send(receiver=receiver, body=body):
                node = _node_of(after, receiver)
                if not isinstance(body, NOTHING_TO_DO) and (node in cluster.nodes or node == PLATFORM):
                    key = digest((receiver, type(body).__name__, body))
                    downs = (*downs, Down(node, receiver, body, after.term, key))
            case Forget(receiver=receiver):  # what was lost is not sent again; what is on its way arrives
                downs = tuple(down for down in downs if not (down.late and down.receiver == receiver))
            case _:
                pass
    ups = () if after.phase is Phase.ENDED else cluster.ups  # nobody listens any more
    cluster = replace(cluster, controller=after, downs=downs, ups=ups, broken=after.broken)
    if step.decided and cluster.size.counts_rungs:
        counted = dict(cluster.taken)
        for rung in step.decided:
            counted[rung] = counted.get(rung, 0) + 1
        cluster = replace(cluster, taken=tuple(sorted(counted.items())))
    return cluster, step.actions


def _node_of(controller: Controller, receiver: str) -> str:
    """Return the node to which the controller sends what is for a receiver."""
    kind, _, name = receiver.partition("/")
    if kind == "rank":
        holder = controller.machine.state.world.holder(int(name))
        return "" if holder is None else holder.node
    return name if kind == "node" else receiver


def step_clock(process: Process, now: float) -> RankProgress:
    """Return what the process's black box says of it."""
    activity = {Wait.COLLECTIVES: Activity.COLLECTIVE, Wait.BARRIER: Activity.COMMITTING}.get(process.at.wait)
    if process.hung and activity is not None:
        activity = Activity.COMPUTING
    age_s = HUNG_S if process.hung or process.stalled else now - process.since + STEP_S
    return RankProgress(
        rank=process.rank,
        incarnation=process.incarnation,
        generation=process.at.generation,
        step=process.at.count,
        activity=activity or process.at.activity,
        collectives=0,
        activity_age_s=age_s,
        step_age_s=age_s,
        median_step_s=STEP_S,
    )


def said(cluster: Cluster, node: str, report: Report) -> Cluster:
    """Return the cluster with one more report under way."""
    if cluster.controller.phase is Phase.ENDED:
        return cluster
    if isinstance(report, FaultReported):
        report = FaultReported(replace(report.report, at_s=cluster.now))
    elif isinstance(report, StepCommitted):
        report = replace(report, at_s=cluster.now)
    return replace(cluster, ups=(*cluster.ups, Up(node, report, digest((type(report).__name__, report)))))


def gone_on(cluster: Cluster, process: Process, outcome: Outcome, **changes: bool) -> Cluster:
    """Return the cluster after something has come of what happened to a process."""
    after = replace(process, at=outcome.at, since=cluster.now, **changes)
    cluster = changed(cluster, process, after)
    if outcome.broken:
        cluster = replace(cluster, broken=(*cluster.broken, *outcome.broken))
    if outcome.published:
        cluster = replace(cluster, checkpoints=tuple(sorted({*cluster.checkpoints, *outcome.published})))
    for report in outcome.said:
        cluster = said(cluster, process.node, report)
    if outcome.at.wait is Wait.NOTHING:
        cluster = ended_process(cluster, after, 0, expected=False)
    return cluster


def changed(cluster: Cluster, before: Process, after: Process) -> Cluster:
    """Return the cluster with a process in another state."""
    processes = tuple([after if process is before else process for process in cluster.processes])
    return replace(cluster, processes=processes)


def ended_process(cluster: Cluster, process: Process, status: int, *, expected: bool) -> Cluster:
    """Return the cluster without a process; its agent has seen it end, and keeps its black box."""
    rest = tuple([each for each in cluster.processes if each is not process])
    boxes = [box for box in cluster.boxes if box[:2] != (process.node, process.rank)]
    boxes.append((process.node, process.rank, process.at.box))
    running = RunningProcess(process.rank, process.pid, process.incarnation, process.at.generation)
    exited = ProcessExited(
        process.node, running, status, cluster.now, expected=expected, last=step_clock(process, cluster.now)
    )
    return said(replace(cluster, processes=rest, boxes=tuple(boxes)), process.node, exited)


def without_nodes(cluster: Cluster, gone: Iterable[str]) -> Cluster:
    """Return the cluster without nodes and all that ran there. What they have said already is under way."""
    gone = set(gone)
    return replace(
        cluster,
        nodes=tuple(node for node in cluster.nodes if node not in gone),
        cut=tuple(node for node in cluster.cut if node not in gone),
        downs=tuple(down for down in cluster.downs if down.node not in gone),
        boxes=tuple(box for box in cluster.boxes if box[0] not in gone),
        processes=tuple(process for process in cluster.processes if process.node not in gone),
    )


def parked_or_linking(process: Process, generation: int) -> bool:
    """Whether a process will come to the links of a generation, or has them."""
    at = process.at
    if at.linked == generation:
        return True
    linking = at.wait is Wait.LINKS and at.generation == generation
    return linking or (at.stage is SessionStage.PARKED and at.generation <= generation)
