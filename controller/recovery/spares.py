"""TOPIC: spares: those that were used or lost are asked for again, and what they build ahead of a fault.

A platform that has none now is asked again later, less and less often, and in the end not any more: a job trains on
without spares as well. Whatever node comes makes it worth asking again.

With `standby.depth: built` a spare runs the script up to the train function as each rank of a node in use. When that
node is lost its ranks move to this spare, where their processes need not be started. The ranks of a node move together,
so a spare builds for whole nodes. It keeps those it has, since what it has built is of no use to others. A node whose
processes have failed more often than others' comes first, and each node is covered by one spare.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from ...protocol.messages import BuildAhead, ProcessesPrepared
from ...protocol.types import StandbyDepth, node_address
from .orders import give_up_waiting, request_node, start_command
from .state import JobState, Phase
from .topic import ALIVE, Deadline, Follow, NodeCame, Owed, Recs, Refill, Row, Rule, Topic
from .world import REACHABLE, AheadOrder, Node, NodeState

TRIES = 6  # in a row that bring nothing
AGAIN_S = 60.0  # to the second try; each further one comes after twice as long


def _missing(state: JobState) -> int:
    """Return how many spares are to be asked for now, once the job has had all that it was started with."""
    world, job, arrivals = state.world, state.job, state.arrivals
    if not arrivals.can_be_created or len(world.nodes) < state.nodes_asked + job.spare_nodes:
        return 0
    if _REFILL.due(state) is not None or arrivals.refills >= TRIES:
        return 0
    have = set(world.named(NodeState.SPARE, NodeState.UNFIT, NodeState.REQUESTED)) - state.planned.going
    return max(0, job.spare_nodes - len(have))


def _refill(state: JobState, _: Refill | None = None) -> Recs:
    """Ask for as many spares as are missing. Runs when the job trains again, when it loses one, and when time is up."""
    arrivals, missing = state.arrivals, _missing(state)
    if missing > 0:
        for _number in range(missing):
            request_node(state)
        _REFILL.within(state, max(state.policy.deadlines.nodes_s, AGAIN_S * 2**arrivals.refills))
        arrivals.refills += 1
    return None


def _look_again(state: JobState) -> Recs:
    """Look again: the nodes asked for have come, were refused, or are not counted on any more."""
    give_up_waiting(state)
    return _refill(state)


def _node_came(state: JobState, _: NodeCame) -> Recs:
    state.arrivals.refills = 0
    if _REFILL.due(state) is not None and not state.world.named(NodeState.REQUESTED):
        _REFILL.drop(state)
    return None


def _trains_again(state: JobState) -> bool:
    return state.turn.came_in is not Phase.RUNNING and _missing(state) > 0


# --- what spares build ahead ------------------------------------------------------------------------------------------


def _build_ahead(state: JobState) -> Recs:
    """Order each spare to build ahead, while the job trains."""
    if state.job.settings.standby_depth is not StandbyDepth.BUILT or not state.ever_resilient:
        return None
    wanted = _wanted(state)
    for node in state.world.nodes.values():
        order = wanted.get(node.name, AheadOrder())
        if order == node.ahead:
            continue
        node.ahead = order
        node.prepared.pop(StandbyDepth.BUILT, None)  # what it has now is for others
        if node.state in REACHABLE:
            state.send(node_address(node.name), _ahead_command(state, node))
    return None


def _ahead_command(state: JobState, node: Node) -> BuildAhead:
    """Return what a node is to build ahead, as it is ordered now."""
    holders = state.world.holders
    return BuildAhead(tuple(start_command(state, holders[rank]) for rank in node.ahead.ranks if rank < len(holders)))


def _wanted(state: JobState) -> dict[str, AheadOrder]:
    """Return the order of each spare that is to build something."""
    world = state.world
    covered = cover(
        in_use=[name for name in world.group_nodes() if world.nodes[name].state is NodeState.ACTIVE],
        spares={name: world.nodes[name].ahead.nodes for name in world.spares()},
        failures=Counter(failure.node for failure in state.accounts.node_failures),
        most=state.policy.standby.nodes_per_spare,
    )
    orders = {}
    for spare, nodes in covered.items():
        ranks = tuple(holder.rank for name in nodes for holder in world.on(name))
        orders[spare] = AheadOrder(nodes, ranks, state.accounts.restarts, world.size)
    return orders


def cover(
    in_use: Sequence[str], spares: Mapping[str, Sequence[str]], failures: Mapping[str, int], most: int
) -> dict[str, tuple[str, ...]]:
    """Return the nodes that each spare builds for, at most `most`; a spare that builds for none is left out.

    `spares`: each with the nodes that it builds for now, in the order in which spares are taken.
    """
    uncovered = dict.fromkeys(in_use)
    covers: dict[str, list[str]] = {}
    for spare, before in spares.items() if most else ():
        covers[spare] = [name for name in before if name in uncovered][:most]
        for name in covers[spare]:
            del uncovered[name]
    for name in sorted(uncovered, key=lambda name: -failures.get(name, 0)):
        least = min(covers.values(), key=len, default=None)
        if least is None or len(least) >= most:
            break
        least.append(name)
    return {spare: tuple(names) for spare, names in covers.items() if names}


def _on_processes_prepared(state: JobState, event: ProcessesPrepared) -> Recs:
    """A node has prepared what may be needed: remember it, and say what it costs, of each depth at first."""
    node, prepared = state.world.nodes.get(event.node), event.prepared
    if node is None:
        state.ignore("processes that are prepared on a node that is not there")
        return None
    is_first = all(prepared.depth not in each.prepared for each in state.world.nodes.values())
    node.prepared[prepared.depth] = prepared
    if is_first or (node.state is NodeState.SPARE and prepared.ranks):
        state.say(f"{event.node}: {prepared.in_words()}")
    return None


# --- the topic --------------------------------------------------------------------------------------------------------


def _owes(state: JobState) -> Iterator[Owed]:
    for name in state.world.named(*REACHABLE) if state.job.settings.standby_depth is StandbyDepth.BUILT else ():
        yield node_address(name), _ahead_command(state, state.world.nodes[name])


def _contradictions(state: JobState) -> Iterator[str]:
    covered: dict[str, str] = {}
    for node in state.world.nodes.values() if state.phase is Phase.RUNNING else ():
        if node.ahead.nodes and node.state is not NodeState.SPARE:
            yield f"{node.name} is {node.state}, and is to build processes for {', '.join(node.ahead.nodes)}"
        for name in node.ahead.nodes:
            if state.world.nodes[name].state is not NodeState.ACTIVE:
                yield f"{node.name} is to build processes for {name}, which is {state.world.nodes[name].state}"
            if covered.setdefault(name, node.name) != node.name:
                yield f"{covered[name]} and {node.name} are both to build processes for {name}"


_REFILL = Deadline("spares", _look_again, ahead=True)

SPARES = Topic(
    name="spares",
    takes=(Row(ALIVE, ProcessesPrepared, _on_processes_prepared),),
    answers={Refill: _refill, NodeCame: _node_came},
    rules=(Rule(frozenset({Phase.RUNNING}), _trains_again, _refill),),
    follows=Follow(frozenset({Phase.RUNNING}), _build_ahead),
    deadlines=(_REFILL,),
    owes=_owes,
    contradictions=_contradictions,
)
