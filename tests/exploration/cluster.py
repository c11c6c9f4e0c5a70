"""A whole job as one value: the real recovery machine, and around it what it can tell apart.

Nodes are there or gone, processes are values, messages are under way in both directions. What goes to or from one node
arrives in the order in which it was sent, unless it is lost and sent again; what goes to or from different nodes, in
any order. Time stands still until a deadline passes.
"""

from dataclasses import dataclass, replace

import msgspec

from midstep.controller.actions import Action, Forget, Send
from midstep.controller.events import Event
from midstep.controller.machine import RecoveryMachine
from midstep.controller.recovery.state import Phase
from midstep.protocol.messages import ArmFault, Command, IntroduceNode, ProcessExited, Report, WelcomeNode
from midstep.protocol.types import Activity, RankProgress, RunningProcess

from .process import Process, Stage
from .snapshot import copied, fingerprint

STEP_S = 0.1
KILLED = -9
NOTHING_TO_DO = (WelcomeNode, IntroduceNode, ArmFault)  # of which nothing follows here
APART = frozenset({"losses", "timeouts", "crashes"})  # not counted among the faults


class Budget(msgspec.Struct, frozen=True):
    """How much more may go wrong."""

    kills: int = 0  # of a process
    exceptions: int = 0  # in a train function
    broken_links: int = 0  # a collective that fails, with every process alive
    lost_nodes: int = 0
    losses: int = 0  # messages that are sent again, and overtaken
    timeouts: int = 0  # deadlines that pass while something else could still happen
    crashes: int = 0  # of the controller
    faults: int = 0  # kills, exceptions, broken links and lost nodes together

    def less(self, what: str) -> "Budget":
        """Return what is left after one more."""
        left = {what: getattr(self, what) - 1}
        if what not in APART:
            left["faults"] = self.faults - 1
        return msgspec.structs.replace(self, **left)

    def allows(self, what: str) -> bool:
        """Whether one more may come."""
        return getattr(self, what) > 0 and (what in APART or self.faults > 0)


class Size(msgspec.Struct, frozen=True):
    """The job: so many ranks, one on each node, spare nodes, and steps to train."""

    ranks: int = 2
    spares: int = 1
    steps: int = 2


class Up(msgspec.Struct, frozen=True):
    """A report on its way from a node. `late`: it was lost and is sent again, so that others may overtake it."""

    node: str
    report: Report
    late: bool = False


class Down(msgspec.Struct, frozen=True):
    """A command on its way to a node, or to the process of a rank there."""

    node: str
    receiver: str
    command: Command
    late: bool = False


@dataclass(frozen=True)
class Cluster:
    """Where everything stands. `ups` and `downs`: what is under way to the controller, and from it."""

    size: Size
    machine: RecoveryMachine
    memory: bytes  # what stands for the machine
    budget: Budget
    nodes: tuple[str, ...]
    now: float = 0.0
    processes: tuple[Process, ...] = ()
    ups: tuple[Up, ...] = ()
    downs: tuple[Down, ...] = ()
    ended: bool = False  # the job; the controller has nothing left to do

    def process(self, rank: int) -> Process | None:
        """Return the latest living process of a rank."""
        of_rank = [process for process in self.processes if process.rank == rank]
        return max(of_rank, key=lambda process: process.incarnation, default=None)


def fed(cluster: Cluster, event: Event) -> tuple[Cluster, list[Action]]:
    """Return the cluster after the machine has taken in an event, and sent what it wants sent."""
    machine = copied(cluster.machine)
    actions = machine.handle(event, cluster.now)
    downs = list(cluster.downs)
    for action in actions:
        match action:
            case Send(receiver=receiver, body=body):
                node = _node_of(machine, receiver)
                if node in cluster.nodes and not isinstance(body, NOTHING_TO_DO):
                    downs.append(Down(node, receiver, body))
            case Forget(receiver=receiver):
                downs = [down for down in downs if down.receiver != receiver]
            case _:
                pass
    ups = () if machine.phase is Phase.ENDED else cluster.ups  # nobody listens any more
    return replace(cluster, machine=machine, memory=fingerprint(machine), downs=tuple(downs), ups=ups), actions


def _node_of(machine: RecoveryMachine, receiver: str) -> str:
    """Return the node to which the controller sends what is for a receiver."""
    kind, _, name = receiver.partition("/")
    return machine.state.world.holders[int(name)].node if kind == "rank" else name


def step_clock(cluster: Cluster, process: Process) -> RankProgress:
    activity = {Stage.TRAINING: Activity.COMPUTING, Stage.FINISHED: Activity.FINISHED}.get(
        process.stage, Activity.RECOVERING
    )
    if process.stage is Stage.TRAINING and not process.faulty:
        activity = Activity.COMMITTING if process.ready else Activity.COLLECTIVE
    return RankProgress(
        rank=process.rank,
        incarnation=process.incarnation,
        generation=process.generation,
        step=process.committed,
        activity=activity,
        collectives=0,
        activity_age_s=10 * STEP_S,
        step_age_s=10 * STEP_S,
        median_step_s=STEP_S,
    )


def said(cluster: Cluster, node: str, report: Report) -> Cluster:
    """Return the cluster with one more report under way."""
    if cluster.machine.phase is Phase.ENDED:
        return cluster
    return replace(cluster, ups=(*cluster.ups, Up(node, report)))


def changed(cluster: Cluster, before: Process, after: Process) -> Cluster:
    """Return the cluster with a process in another state."""
    processes = tuple(after if process is before else process for process in cluster.processes)
    return replace(cluster, processes=processes)


def ended_process(cluster: Cluster, process: Process, status: int, *, expected: bool) -> Cluster:
    """Return the cluster without a process; its agent has seen it end."""
    rest = tuple(each for each in cluster.processes if each is not process)
    running = RunningProcess(process.rank, process.pid, process.incarnation, process.generation)
    exited = ProcessExited(
        process.node, running, status, cluster.now, expected=expected, last=step_clock(cluster, process)
    )
    return said(replace(cluster, processes=rest), process.node, exited)


def without_node(cluster: Cluster, node: str) -> Cluster:
    """Return the cluster without a node and all that ran there. What it has said already is under way."""
    nodes = tuple(each for each in cluster.nodes if each != node)
    downs = tuple(down for down in cluster.downs if down.node != node)
    processes = tuple(process for process in cluster.processes if process.node != node)
    return replace(cluster, nodes=nodes, downs=downs, processes=processes)
