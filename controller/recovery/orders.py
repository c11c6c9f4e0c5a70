"""The verbs by which topics change the world: each does one thing to the books, and sends the command for it.

Nothing is decided here. A topic that starts, stops or moves a process, asks for a node or gives one back, or begins a
generation, does it by one of these.
"""

from collections.abc import Iterable, Mapping

from ...protocol.messages import CreateNode, DeleteNode, ProbeProgress, Quiesce, StartProcess, StopProcess
from ...protocol.types import CONTROLLER, PLATFORM, FaultKind, FaultReport, node_address, rank_address
from .state import JobState, Newcomer
from .world import GONE, PARKED, REACHABLE, Holder, Meeting, NodeState, RankEvent

# What replacements are waited for: deadlines by name.
NEWCOMERS = "newcomers"  # that they reach their train function
DEVICES = "devices"  # that the devices of `Due.held` are well again
LOOK = "planned change"  # that what is planned is ready, or may be looked at again
NODES = "nodes"  # that nodes come for the ranks of `Due.unplaced`


def await_newcomers(state: JobState, *, some: bool = True) -> None:
    """Give those that start now the policy's time to reach their train function; none: no process is waited for."""
    if some:
        state.due.incident[NEWCOMERS] = state.now + state.policy.deadlines.start_s
    else:
        state.due.incident.pop(NEWCOMERS, None)


def next_generation(state: JobState, replaced: Iterable[int]) -> None:
    """Begin the next generation, in which these ranks have other processes."""
    state.fence()
    state.meeting = Meeting(state.meeting.key)
    state.incident = state.incident.opened(replaced)
    state.repair = None
    state.history.opened(state.generation, replaced)


def quiesce(state: JobState, survivors: Iterable[Holder]) -> None:
    """Ask those that are not parked already to stop now, in the present generation."""
    for holder in survivors:
        if holder.state not in PARKED:
            order = Quiesce(holder.rank, state.generation, replaces=bool(state.incident.replaced))
            state.send(rank_address(holder.rank), order)
            state.world.take(holder, RankEvent.QUIESCE_ORDERED)


def start(state: JobState, holder: Holder, *, connected: bool) -> None:
    """Have the agent start the next process of a rank (it ends the present one first).

    Beside others that live (not `connected`) it waits where the rank has no node, or a device whose fault passes.
    """
    limits, due = state.policy.deadlines, state.due
    left = not connected and state.world.nodes[holder.node].state is not NodeState.ACTIVE
    waits = left or (not connected and limits.device_s > 0 and state.book.passing(holder.node, holder.rank) is not None)
    state.forget(holder.rank)
    if waits:
        end_process(state, holder)
    else:
        due.started(holder.rank)
        state.world.lose(holder)
    holder.incarnation, holder.connected = holder.next_incarnation(), connected
    state.world.take(holder, RankEvent.START_ORDERED)
    if not waits:
        state.send(node_address(holder.node), start_command(state, holder))
    elif left:
        due.unplaced.add(holder.rank)
        due.incident.setdefault(NODES, state.now + limits.nodes_s)  # however often they are put off
    else:
        due.held.add(holder.rank)
        due.incident[DEVICES] = state.now + limits.device_s


def hand_to(state: JobState, newcomers: Mapping[int, Newcomer]) -> tuple[int, ...]:
    """Let processes that were started early hold their ranks, which they join when they are asked; return the ranks."""
    for newcomer in newcomers.values():
        holder = state.world.holders[newcomer.rank]
        holder.incarnation, holder.pid, holder.early = newcomer.incarnation, newcomer.pid, True
        state.world.take(holder, RankEvent.START_ORDERED)
        state.forget(newcomer.rank)
    return tuple(sorted(newcomers))


def start_command(state: JobState, holder: Holder, *, early: int = 0, nodes: int = 0) -> StartProcess:
    """Return the command that starts the present incarnation of a rank; `early`: a later one, to take it over.

    `nodes`: how many the world is to have by then; 0: as many as now.
    """
    return StartProcess(
        rank=holder.rank,
        local_rank=holder.rank % state.world.ranks_per_node,
        group_rank=holder.rank // state.world.ranks_per_node,
        incarnation=early or holder.incarnation,
        generation=state.generation,
        restart_count=state.accounts.restarts,
        connected=holder.connected and not early,
        store=state.meeting.rendezvous(state.world, state.job.job, state.generation),
        early=early > 0,
        world_size=size_on(state, nodes) if nodes else state.world.size,
        nodes=nodes or state.nodes_needed,
    )


def size_on(state: JobState, nodes: int) -> int:
    """Return how many ranks the world has on so many nodes."""
    return min(nodes * state.world.ranks_per_node, state.job.world_size)


def end_process(state: JobState, holder: Holder, node: str = "") -> None:
    """End the process of a rank, which may still be on its way; `node`: where it is, if the rank has moved already."""
    name = node or holder.node
    known = name in state.world.nodes and state.world.nodes[name].state is not NodeState.LOST
    if known and holder.state not in GONE:
        state.send(node_address(name), StopProcess(holder.rank, holder.incarnation, grace_s=0.0))
    state.due.started(holder.rank)
    state.world.lose(holder)


def stop_all_processes(state: JobState) -> None:
    """End every process of the world; the ranks stay where they are placed."""
    for holder in state.world.holders:
        end_process(state, holder)


def vacate(state: JobState, name: str) -> None:
    """End what runs on a node, and isolate it if it is alive."""
    for holder in state.world.on(name):
        end_process(state, holder)
    if state.world.nodes[name].state is not NodeState.LOST:
        state.world.nodes[name].state = NodeState.ISOLATED


def leave_node(state: JobState, name: str, spare: str) -> None:
    """Move the ranks of a node to a spare one; without one they stay in its books until a node has come."""
    vacate(state, name)
    if spare:
        state.world.move(name, spare)


def settle(state: JobState, name: str | None) -> None:
    """Take a spare out of use while a fault of it stands, and back when none does."""
    node = state.world.nodes.get(name or "")
    if node is None:
        return
    unfit = state.is_unfit(node.name)
    if unfit and node.state is NodeState.SPARE:
        node.state = NodeState.UNFIT
    elif not unfit and node.state is NodeState.UNFIT:
        node.state = NodeState.SPARE


def request_node(state: JobState) -> None:
    """Ask the platform for one more node."""
    name = state.world.new_node_name()
    state.world.add_node(name, NodeState.REQUESTED)
    state.send(PLATFORM, CreateNode(name))


def request_missing(state: JobState, spares: int = 0) -> None:
    """Ask the platform, if it can create nodes, for those that the world takes and that neither are there nor come."""
    have = len(state.world.named(NodeState.ACTIVE, NodeState.SPARE, NodeState.REQUESTED))
    for _ in range(state.nodes_needed + spares - have if state.arrivals.can_be_created else 0):
        request_node(state)


def replace_node(state: JobState, name: str) -> None:
    """Give a node back and make sure that another takes its place: a spare one, or one that the platform creates."""
    vacate(state, name)
    _give_back(state, name)
    request_missing(state)


def give_back_all_nodes(state: JobState) -> None:
    """Release every node and ask for as many new ones."""
    stop_all_processes(state)
    for name in state.world.named(*REACHABLE):
        state.world.nodes[name].state = NodeState.LOST
        _give_back(state, name)
    for _ in range(state.nodes_needed - len(state.world.named(NodeState.REQUESTED))):
        request_node(state)


def _give_back(state: JobState, name: str) -> None:
    """Have the platform end a node; it will not be used again, whatever it says meanwhile."""
    state.world.nodes[name].given_back = True
    state.send(PLATFORM, DeleteNode(name))


def give_up_waiting(state: JobState) -> None:
    """Count on no promised node any more; one that comes all the same is welcome."""
    for name in state.world.named(NodeState.REQUESTED):
        state.world.nodes[name].state = NodeState.LOST


def ask_for_clocks(state: JobState) -> None:
    """Ask every node for the step clocks of its ranks."""
    probe = state.clocks.ask(state.world.group_nodes())
    for name in sorted(state.clocks.awaited):
        state.send(node_address(name), ProbeProgress(probe))


def fault_of(state: JobState, holder: Holder, kind: FaultKind, detail: str) -> FaultReport:
    """Return a fault of the process that holds a rank, as the controller sees it now."""
    return FaultReport(
        kind, state.now, CONTROLLER, detail, holder.rank, holder.node, state.generation, holder.incarnation
    )


def faults_of(state: JobState, ranks: Iterable[int], kind: FaultKind, what: str) -> list[FaultReport]:
    """Return one fault for each of the ranks: `what` it did, or did not do in time."""
    return [fault_of(state, state.world.holders[rank], kind, f"rank {rank} {what}") for rank in sorted(ranks)]
