"""Which rank keeps the copy of another one's local state: one that does not fail together with it, where there is one.

Pure, from where the ranks are. The ranks stand in a circle in which those of one failure domain, and of one node, are
neighbours; the buddy of each is so many places further as the largest domain has ranks. So no domain has both copies,
unless it has more than half of all ranks.

A copy that does not belong to the pairs of a generation is kept until the next one has arrived: of its two slots for
copies a black box gives up the older one.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from .sources import Location, distance


def buddies(places: Mapping[int, Location]) -> dict[int, int]:
    """Return the buddy of each rank. Each is the buddy of one other rank; a rank that is alone has none.

    As many as can have it in another failure domain, then as many as can on another node. Where every domain has at
    most half of the ranks all have; where each node is its own domain it is the same place on the next node.
    """
    circle = _circle(places)
    if len(circle) < 2:
        return {}
    shifts = dict.fromkeys(
        max(Counter(each).values()) % len(circle) or 1
        for each in ((place.failure_domain for place in places.values()), (place.node for place in places.values()))
    )
    paired = [dict(zip(circle, circle[shift:] + circle[:shift], strict=True)) for shift in shifts]
    return max(paired, key=lambda pairs: _apart(pairs, places))


def _circle(places: Mapping[int, Location]) -> list[int]:
    """Return all ranks, those of a domain and of a node together; both in the order of their lowest rank."""
    domains: dict[str, int] = {}
    nodes: dict[str, int] = {}
    for rank in sorted(places):
        domains.setdefault(places[rank].failure_domain, rank)
        nodes.setdefault(places[rank].node, rank)
    return sorted(places, key=lambda rank: (domains[places[rank].failure_domain], nodes[places[rank].node], rank))


def _apart(pairs: Mapping[int, int], places: Mapping[int, Location]) -> tuple[int, int]:
    """Return how many pairs are in two domains, and how many on two nodes."""
    distances = [distance(places[rank], places[buddy]) for rank, buddy in pairs.items()]
    return _at_least(2, distances), _at_least(1, distances)


def _at_least(least: int, distances: Iterable[int]) -> int:
    return sum(each >= least for each in distances)
