"""Propose an order of ranks in which no node holds all copies of a shard.

Which ranks hold copies follows from Megatron's `order`, the sequence in which it counts through its kinds of
parallelism; which ranks share a node, from the launcher. Either can be changed. Everything here is arithmetic on ranks;
`replicas.py` asks at start, and prints the answer.
"""

import enum
from collections.abc import Iterable, Iterator, Sequence
from itertools import permutations
from typing import NamedTuple

MEGATRONS = "tp-cp-ep-dp-pp"  # Megatron's own order
ACROSS = "tp-cp-ep-pp-dp"  # what Megatron-LM takes with --use-tp-pp-dp-mapping
_OTHERS = ("-".join(("tp", *rest)) for rest in permutations(("cp", "ep", "dp", "pp")))
ORDERS = tuple(dict.fromkeys((MEGATRONS, ACROSS, *_OTHERS)))  # tensor parallel ranks stay neighbours in all of them
_TRIES = 50_000  # assignments that are tried before the search is given up

Group = tuple[int, ...]


class Sizes(NamedTuple):
    """The number of ways of each kind of parallelism. `expert_tensor` and `expert_data` are those of the experts."""

    tensor: int
    context: int
    pipeline: int
    data: int
    expert: int
    expert_tensor: int
    expert_data: int
    instances: int  # of a distributed optimizer; 0: there is none, every data parallel rank is a copy

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.tensor * self.context * self.pipeline * self.data


class SearchOutcome(enum.Enum):
    """The result of the search for a placement."""

    FOUND = enum.auto()
    IMPOSSIBLE = enum.auto()
    GIVEN_UP = enum.auto()


class RankOrder(NamedTuple):
    """The ranks that each node should have; empty unless found."""

    outcome: SearchOutcome
    ranks_of: dict[int, Group]


def copies(sizes: Sizes, order: str) -> list[Group]:
    """Return the groups of ranks that hold the same, in a world that is counted in this order."""
    experts = _groups(_expert_ways(sizes), order, {"dp"})
    if sizes.instances:
        pieces = [len(group) // sizes.instances for group in experts]
        return [group[i::size] for group, size in zip(experts, pieces, strict=True) for i in range(size)]
    dense = _groups(_dense_ways(sizes), order, {"dp", "cp"})
    return dense + experts if sizes.expert > 1 else dense


def find_members(sizes: Sizes, rank: int, peers: Group, together: Iterable[int]) -> Group:
    """Return the ranks that hold a copy of the model with this one; none if no order of ranks is like that.

    `peers`: those that hold what this one holds. `together`: ranks that compute with it, which are of the same copy.
    """
    ways = _expert_ways(sizes) if sizes.expert > 1 else _dense_ways(sizes)
    wanted = set(together)
    for order in ORDERS:
        members = _group_of(rank, _groups(ways, order, {"tp", "cp", "ep", "pp"}))
        if _group_of(rank, _groups(ways, order, {"dp"})) == peers and wanted <= set(members):
            return members
    return ()


def neighbours(sizes: Sizes, order: str) -> list[Group]:
    """Return the tensor parallel groups, which should stay on their nodes."""
    return _groups(_dense_ways(sizes), order, {"tp"})


def on_one_node(groups: Sequence[Group], node_of: Sequence[int]) -> list[Group]:
    """Return those of the groups that one node could take away."""
    return [group for group in groups if len({node_of[rank] for rank in group}) == 1]


def propose_order(sizes: Sizes, node_of: Sequence[int]) -> str | None:
    """Return the first order in which no node holds all copies of anything, ranks being where they are."""
    return next((order for order in _allowed(sizes) if not on_one_node(copies(sizes, order), node_of)), None)


def propose_placement(groups: Sequence[Group], together: Sequence[Group], node_of: Sequence[int]) -> RankOrder:
    """Return which ranks each node should have, so that no group is on one node.

    `together`: ranks that stay on one node, as far as a node has room for them. Nodes keep as many ranks as they have.
    """
    room = {node: node_of.count(node) for node in sorted(set(node_of))}
    units = [unit for group in together for unit in ([group] if len(group) <= max(room.values()) else _each(group))]
    unit_of = {rank: index for index, unit in enumerate(units) for rank in unit}
    sets = sorted({tuple(sorted({unit_of[rank] for rank in group})) for group in groups})
    if any(len(one) == 1 for one in sets):
        return RankOrder(SearchOutcome.IMPOSSIBLE, {})  # one holder only, or all copies among ranks that stay together
    outcome, chosen = _search([len(unit) for unit in units], sets, room)
    ranks_of: dict[int, list[int]] = {node: [] for node in room}
    for unit, node in zip(units, chosen, strict=False):
        ranks_of[node] += unit
    return RankOrder(outcome, {node: tuple(sorted(ranks)) for node, ranks in ranks_of.items()} if chosen else {})


def advice(sizes: Sizes, node_of: Sequence[int], *, order: str = MEGATRONS) -> str:
    """Return one sentence about how copies would come to different nodes."""
    if len(set(node_of)) == 1:
        return "there is one node, so no order of ranks helps"
    if any(len(group) == 1 for group in copies(sizes, order)):
        return "some of it is held by one rank only, so no order of ranks helps"
    better = propose_order(sizes, node_of)
    if better is not None:
        told = ", Megatron-LM's --use-tp-pp-dp-mapping" if better == ACROSS else ""
        return f"initialize_model_parallel(order={better!r}){told} puts them on different nodes"
    outcome, ranks_of = propose_placement(copies(sizes, order), neighbours(sizes, order), node_of)
    if outcome is SearchOutcome.FOUND:
        told = "; ".join(f"{', '.join(map(str, ranks))} on node {node}" for node, ranks in ranks_of.items())
        return f"no order of Megatron's puts them on different nodes; this placement of its ranks would: {told}"
    if outcome is SearchOutcome.IMPOSSIBLE:
        return "no order of ranks puts them on different nodes while tensor parallel ranks stay together"
    return "no order of ranks was found that puts them on different nodes"


def current_order(sizes: Sizes, held_together: Sequence[Group]) -> str:
    """Return the order in which this world is counted, by groups that one of its ranks is in."""
    for order in ORDERS:
        known = {tuple(sorted(group)) for group in (*copies(sizes, order), *neighbours(sizes, order))}
        if all(tuple(sorted(group)) in known for group in held_together):
            return order
    return MEGATRONS


def _group_of(rank: int, groups: Sequence[Group]) -> Group:
    return next(tuple(sorted(group)) for group in groups if rank in group)


def _each(group: Group) -> list[Group]:
    return [(rank,) for rank in group]


def _dense_ways(sizes: Sizes) -> dict[str, int]:
    return {"tp": sizes.tensor, "cp": sizes.context, "ep": 1, "dp": sizes.data, "pp": sizes.pipeline}


def _expert_ways(sizes: Sizes) -> dict[str, int]:
    return {
        "tp": sizes.expert_tensor,
        "cp": 1,
        "ep": sizes.expert,
        "dp": sizes.expert_data,
        "pp": sizes.pipeline,
    }


def _allowed(sizes: Sizes) -> Iterator[str]:
    """Yield the orders in which dense and expert parameters have the same pipelines; Megatron takes no others."""
    dense, experts = _dense_ways(sizes), _expert_ways(sizes)
    return (order for order in ORDERS if _groups(dense, order, {"pp"}) == _groups(experts, order, {"pp"}))


def _groups(ways: dict[str, int], order: str, varied: set[str]) -> list[Group]:
    """Return the ranks that differ in the `varied` ways only, by the others; the first way counts fastest."""
    steps, step = {}, 1
    for name in order.split("-"):
        steps[name] = step
        step *= ways[name]

    def walk(names: list[str]) -> list[int]:
        found = [0]
        for name in names:
            found = [rank + steps[name] * index for index in range(ways[name]) for rank in found]
        return found

    names = order.split("-")
    inner = walk([name for name in names if name in varied])
    return [tuple(start + each for each in inner) for start in walk([name for name in names if name not in varied])]


def _search(weights: Sequence[int], sets: Sequence[Group], room: dict[int, int]) -> tuple[SearchOutcome, list[int]]:
    """Give each unit a node such that no set is on one node: depth first, the roomiest other node first."""
    sets_of: dict[int, list[Group]] = {index: [] for index in range(len(weights))}
    for one in sets:
        for index in one:
            sets_of[index].append(one)
    free = dict(room)
    sequence = sorted(range(len(weights)), key=lambda index: (sets_of[index][0] if sets_of[index] else (), index))
    node_of: dict[int, int] = {}
    choices = [_choices(sequence[0], weights, sets_of, free, node_of)] if sequence else []
    for _ in range(_TRIES):
        if not choices:
            break
        index = sequence[len(choices) - 1]
        if index in node_of:
            free[node_of.pop(index)] += weights[index]
        node = next(choices[-1], None)
        if node is None:
            choices.pop()
            continue
        node_of[index] = node
        free[node] -= weights[index]
        if len(node_of) == len(sequence):
            return SearchOutcome.FOUND, [node_of[each] for each in range(len(weights))]
        choices.append(_choices(sequence[len(choices)], weights, sets_of, free, node_of))
    return (SearchOutcome.GIVEN_UP if choices else SearchOutcome.IMPOSSIBLE), []


def _choices(
    index: int,
    weights: Sequence[int],
    sets_of: dict[int, list[Group]],
    free: dict[int, int],
    node_of: dict[int, int],
) -> Iterator[int]:
    """Return the nodes that a unit can take now, the best first."""
    others = [[node_of[other] for other in one if other in node_of] for one in sets_of[index]]
    closed = {
        taken[0]
        for one, taken in zip(sets_of[index], others, strict=True)
        if len(taken) == len(one) - 1 and len(set(taken)) == 1
    }
    crowd = {node: sum(taken.count(node) for taken in others) for node in free}
    fitting = [node for node, slots in free.items() if slots >= weights[index] and node not in closed]
    return iter(sorted(fitting, key=lambda node: (crowd[node], -free[node], node)))
