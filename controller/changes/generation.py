"""How a generation is opened: who is asked to quiesce, whose process is started, and where.

Three ways: survivors stay and some ranks get a new process (`open_generation`, and `widen_generation` for those that
fail meanwhile); all start again on the nodes at hand (`open_world`); or nodes have to come first (`wait_for_nodes`).
"""

from collections.abc import Iterable

from ...protocol.messages import CreateNode, DeleteNode, Quiesce, StartProcess, StopProcess
from ...protocol.types import CONTROLLER, PLATFORM, FaultKind, FaultReport, node_address, rank_address
from ..recovery.events import Log
from ..recovery.state import JobState, Phase, Reschedule
from ..recovery.world import GONE, PARKED, REACHABLE, Holder, NodeState, RankEvent, RankState

SPARES_WAIT_S = 5.0  # how long a job that has its nodes waits for its spares


def nodes_needed(state: JobState) -> int:
    """Return how many nodes the ranks of the job take."""
    return -(-state.world.size // state.world.ranks_per_node)


def wait_for_nodes(state: JobState, now: float) -> None:
    """Start the world when there are enough nodes; until then wait, for as long as the policy says."""
    if _nodes_at_hand(state) < nodes_needed(state):
        state.enter(now, state.policy.deadlines.nodes_s)
        state.arrivals.nodes_due_s = state.due.phase_s
    start_if_possible(state, now)


def start_if_possible(state: JobState, now: float) -> None:
    """Start the world that waits once there are enough nodes for it, and its spares have come or are overdue."""
    have = _nodes_at_hand(state)
    if have < nodes_needed(state):
        _last_call(state, have, now)
        return
    if state.arrivals.spares_awaited and have < nodes_needed(state) + state.job.spare_nodes:
        if state.due.phase_s is None or state.due.phase_s > now + SPARES_WAIT_S:
            state.due.phase_s = now + SPARES_WAIT_S
        return
    open_world(state, now)


def _last_call(state: JobState, have: int, now: float) -> None:
    """A job that has not begun can do with fewer nodes: once those are there, the others have so long to come."""
    arrivals, scale = state.arrivals, state.policy.scale
    if state.generation > 0 or scale.min_nodes is None or arrivals.nodes_due_s is None:
        return
    if have < scale.min_nodes:
        arrivals.last_call_s = None
    elif arrivals.last_call_s is None:
        arrivals.last_call_s = now + scale.last_call_s
    limits = (arrivals.nodes_due_s, arrivals.last_call_s)
    state.due.phase_s = min(limit for limit in limits if limit is not None)


def _nodes_at_hand(state: JobState) -> int:
    return len(state.world.named(NodeState.ACTIVE, NodeState.SPARE))


def open_world(state: JobState, now: float) -> None:
    """Start a new process of every rank: where it was, or on a spare in the place of a node that has gone."""
    state.arrivals.spares_awaited = False
    state.arrivals.lost = 0
    world = state.world
    before = {holder.rank: holder.node for holder in world.holders}
    spares = iter(world.spares())
    in_place = [name if world.nodes[name].state is NodeState.ACTIVE else next(spares) for name in world.group_nodes()]
    world.place([*in_place, *spares])
    for holder in world.holders:
        if holder.node != before[holder.rank]:
            _end_process(state, holder, before[holder.rank])
    if state.generation > 0:
        state.accounts.restarts += 1
    if state.turn.came_in is Phase.STARTING and state.ever_resilient:
        state.meeting.link_up_failed(state.world)  # a world that links up as it starts did not get that far
    next_generation(state, range(world.size))
    for holder in world.holders:
        _start(state, holder, connected=True)
    # A plain script never joins; one that has joined before must do so again.
    state.due.newcomers_s = now + state.policy.deadlines.start_s if state.ever_resilient else None
    state.enter(now)


def open_world_or_wait(state: JobState, now: float) -> None:
    """Start a new process of every rank; where there are too few nodes, end all and wait for them."""
    if _nodes_at_hand(state) >= nodes_needed(state):
        open_world(state, now)
        return
    request_missing(state)
    stop_all_processes(state)
    wait_for_nodes(state, now)


def open_generation(state: JobState, replace: Iterable[int], now: float, *, moved: Iterable[int] = ()) -> None:
    """Open the next generation: survivors quiesce, the ranks of `replace` get a new process, those of `moved` have one.

    Newcomers of an earlier attempt that are still on their way, and ranks that are parked already, stay as they are.
    Where no process would survive, the world starts as a whole.
    """
    replaced = _without_process(state, replace)
    survivors = _survivors(state, replaced)
    if not survivors:
        open_world_or_wait(state, now)
        return
    next_generation(state, {*replaced, *moved})
    quiesce(state, survivors)
    _start_all(state, replaced, now)
    state.enter(now, state.policy.deadlines.quiesce_s)


def widen_generation(state: JobState, replace: Iterable[int], now: float) -> None:
    """Give further ranks a new process in the generation that gathers already; its survivors need not hear of it.

    Many nodes that are lost at once are lost one after the other: were each to open a generation, each would
    be ordered to every rank.
    """
    replaced = _without_process(state, replace)
    if not _survivors(state, replaced):
        open_world_or_wait(state, now)
        return
    state.incident = state.incident.opened(replaced)
    state.history.replaced(replaced)
    _start_all(state, replaced, now)


def _without_process(state: JobState, replace: Iterable[int]) -> set[int]:
    """Return these ranks, and all others that need a new process."""
    world = state.world
    replaced = {*replace, *(h.rank for h in world.in_state(RankState.ABSENT, RankState.EXITED))}
    return replaced | {h.rank for h in world.in_state(RankState.STARTING) if h.connected}


def _survivors(state: JobState, replaced: set[int]) -> list[Holder]:
    return [holder for holder in state.world.holders if holder.rank not in replaced and holder.resilient]


def _start_all(state: JobState, replaced: Iterable[int], now: float) -> None:
    """Start the next processes of these ranks, each where it is placed, and limit how long they may take."""
    ranks = sorted(replaced)
    for rank in ranks:
        _start_or_hold(state, state.world.holders[rank], now)
    joining = state.world.ranks(RankState.STARTING) - state.due.unplaced
    if ranks or not joining:
        state.due.newcomers_s = now + state.policy.deadlines.start_s if joining else None


def quiesce(state: JobState, survivors: Iterable[Holder]) -> None:
    """Ask those that are not parked already to stop now, in the present generation."""
    for holder in survivors:
        if holder.state not in PARKED:
            order = Quiesce(holder.rank, state.generation, replaces=bool(state.incident.replaced))
            state.send(rank_address(holder.rank), order)
            state.world.take(holder, RankEvent.QUIESCE_ORDERED)


def leave_node(state: JobState, name: str, spare: str) -> None:
    """Move the ranks of a node to a spare one; without one they stay in its books until a node has come."""
    vacate(state, name)
    if spare:
        state.world.move(name, spare)


def replace_node(state: JobState, name: str) -> None:
    """Give a node back and make sure that another takes its place: a spare one, or one that the platform creates."""
    vacate(state, name)
    _give_back(state, name)
    request_missing(state)


def request_missing(state: JobState) -> None:
    """Ask the platform, if it can create nodes, for those that the world takes and that neither are there nor come."""
    have = len(state.world.named(NodeState.ACTIVE, NodeState.SPARE, NodeState.REQUESTED))
    for _ in range(nodes_needed(state) - have if state.arrivals.can_be_created else 0):
        request_node(state)


def vacate(state: JobState, name: str) -> None:
    """End what runs on a node, and isolate it if it is alive."""
    for holder in state.world.on(name):
        _end_process(state, holder)
    if state.world.nodes[name].state is not NodeState.LOST:
        state.world.nodes[name].state = NodeState.ISOLATED


def _give_back(state: JobState, name: str) -> None:
    """Have the platform end a node; it will not be used again, whatever it says meanwhile."""
    state.world.nodes[name].given_back = True
    state.send(PLATFORM, DeleteNode(name))


def given_back(state: JobState) -> list[str]:
    """Return the nodes that the platform has been told to end; that it has done so is not said."""
    return [node.name for node in state.world.nodes.values() if node.given_back]


def request_node(state: JobState) -> None:
    """Ask the platform for one more node."""
    world = state.world
    name = world.new_node_name()
    world.add_node(name, NodeState.REQUESTED)
    state.send(PLATFORM, CreateNode(name))


def give_back_all_nodes(state: JobState) -> None:
    """Release every node and ask for as many new ones."""
    world = state.world
    for holder in world.holders:
        _end_process(state, holder)
    for name in world.named(*REACHABLE):
        world.nodes[name].state = NodeState.LOST
        _give_back(state, name)
    for _ in range(nodes_needed(state) - len(world.named(NodeState.REQUESTED))):
        request_node(state)


def stop_all_processes(state: JobState) -> None:
    """End every process of the world; the ranks stay where they are placed."""
    for holder in state.world.holders:
        _end_process(state, holder)


def next_generation(state: JobState, replaced: Iterable[int]) -> None:
    """Begin the next generation, in which these ranks have other processes."""
    state.fence()
    state.meeting.begin()
    state.incident = state.incident.opened(replaced)
    state.plan = None
    state.history.opened(state.generation, replaced)


def _start(state: JobState, holder: Holder, *, connected: bool) -> None:
    """Have the agent start the next process of a rank (it ends the present one first)."""
    state.forget(holder.rank)
    state.due.held.discard(holder.rank)
    state.due.unplaced.discard(holder.rank)
    state.world.lose(holder)
    holder.incarnation, holder.connected = holder.next_incarnation(), connected
    state.world.take(holder, RankEvent.START_ORDERED)
    state.send(node_address(holder.node), start_command(state, holder))


def _start_or_hold(state: JobState, holder: Holder, now: float) -> None:
    """Start the next process of a rank; where it has no node, or a device whose fault passes, wait with that."""
    limits, due = state.policy.deadlines, state.due
    left = state.world.nodes[holder.node].state is not NodeState.ACTIVE
    if not left and (not limits.device_s or state.book.passing(holder.node, holder.rank) is None):
        _start(state, holder, connected=False)
        return
    state.forget(holder.rank)
    _end_process(state, holder)
    holder.incarnation = holder.next_incarnation()
    state.world.take(holder, RankEvent.START_ORDERED)
    if left:
        due.unplaced.add(holder.rank)
        due.nodes_s = now + limits.nodes_s if due.nodes_s is None else due.nodes_s  # however often they are put off
    else:
        due.held.add(holder.rank)
        due.devices_s = now + limits.device_s


def release_held(state: JobState, now: float) -> None:
    """Start the processes whose devices are well again."""
    for rank in sorted(state.due.held):
        holder = state.world.holders[rank]
        if state.book.passing(holder.node, rank) is None:
            state.due.held.discard(rank)
            state.send(node_address(holder.node), start_command(state, holder))
            state.due.newcomers_s = now + state.policy.deadlines.start_s
    if not state.due.held:
        state.due.devices_s = None


def start_command(state: JobState, holder: Holder, *, early: int = 0) -> StartProcess:
    """Return the command that starts the present incarnation of a rank; `early`: a later one, to take it over."""
    return StartProcess(
        rank=holder.rank,
        local_rank=holder.rank % state.world.ranks_per_node,
        group_rank=holder.rank // state.world.ranks_per_node,
        incarnation=early or holder.incarnation,
        generation=state.generation,
        restart_count=state.accounts.restarts,
        connected=holder.connected and not early,
        store=state.rendezvous(),
        early=early > 0,
        world_size=state.world.size,
        nodes=nodes_needed(state),
    )


def _end_process(state: JobState, holder: Holder, node: str = "") -> None:
    """End the process of a rank, which may still be on its way; `node`: where it is, if the rank has moved already."""
    name = node or holder.node
    known = name in state.world.nodes and state.world.nodes[name].state is not NodeState.LOST
    if known and holder.state not in GONE:
        state.send(node_address(name), StopProcess(holder.rank, holder.incarnation, grace_s=0.0))
    state.due.held.discard(holder.rank)
    state.due.unplaced.discard(holder.rank)
    state.world.lose(holder)


def faults_of(state: JobState, ranks: Iterable[int], kind: FaultKind, what: str, now: float) -> list[FaultReport]:
    """Return one fault for each of the ranks: `what` it did, or did not do in time."""
    return [
        FaultReport.of_rank(
            kind,
            f"rank {each.rank} {what}",
            each,
            node=each.node,
            generation=state.generation,
            seen_by=CONTROLLER,
            at_s=now,
        )
        for each in (state.world.holders[rank] for rank in sorted(ranks))
    ]


def restart(state: JobState, now: float, goal: Reschedule, remark: str = "") -> None:
    """Start every process again, as soon as there are nodes. `remark`: what became of the checkpoint."""
    if remark:
        state.plans.remark = remark
        state.turn.actions.append(Log(remark))
    if goal.every_node:
        give_back_all_nodes(state)
    else:
        _replace_nodes(state, goal.leaving)
    open_world_or_wait(state, now)


def _replace_nodes(state: JobState, leaving: tuple[str, ...]) -> None:
    """Replace the nodes that are to be left, and those that were lost, or refused, while the checkpoint was written."""
    nodes = state.world.nodes
    lost = [name for name in state.world.group_nodes() if nodes[name].state is NodeState.LOST]
    for name in dict.fromkeys((*leaving, *lost)):
        if not nodes[name].given_back:
            replace_node(state, name)
