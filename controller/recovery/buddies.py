"""Copies of ranks' state that outlive their processes: who keeps whose, and of which step there is one of every rank.

Each rank has a buddy that keeps the copy of its local state, in another failure domain where there is one: the ranks
stand in a circle in which those of one domain, and of one node, are neighbours, and the buddy of each is as many places
further as the largest domain has ranks. Where the buddy is on another node it can keep the rank's copies in host memory
as well: a rank that has lost its own with its node gets one from there. A copy that does not belong to the pairs of a
generation is kept until the next one has arrived: of its two slots for copies a black box gives up the older one.

All of it is pure, and runs when a repair is planned (`repair.py`).
"""

from collections import Counter
from collections.abc import Mapping

import msgspec

from ...protocol.types import ShardTransfer, StepReport

COPY = "host copy"  # in the place of a shard's name: all that the destination holds


class Location(msgspec.Struct, frozen=True):
    """Where a rank runs; near sources are preferred."""

    node: str
    failure_domain: str


def distance(one: Location, other: Location) -> int:
    """Return how far apart two places are: 0 on one node, 1 in one failure domain, 2 elsewhere."""
    if one.node == other.node:
        return 0
    return 1 if one.failure_domain == other.failure_domain else 2


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
    return distances.count(2), len(distances) - distances.count(0)


def paired(places: Mapping[int, Location]) -> dict[int, dict[str, int]]:
    """Return who keeps copies for each rank, and for whom it keeps some, under the names of a part of the plan."""
    pairs: dict[int, dict[str, int]] = {}
    for rank, buddy in buddies(places).items():
        pairs.setdefault(rank, {})["buddy"] = buddy
        pairs.setdefault(buddy, {})["copied_rank"] = rank
        if places[rank].node != places[buddy].node:
            pairs[rank]["copy_holder"], pairs[buddy]["copy_guest"] = buddy, rank
    return pairs


def common_copy(reports: Mapping[int, StepReport], *, most: int | None = None) -> int:
    """Return the newest step of which there is a whole copy of every rank in host memory, or 0; of at most `most`.

    A copy is the rank's own, or with a rank of another node.
    """
    found = {rank: set(report.host_copies) for rank, report in reports.items()}
    for report in reports.values():
        for kept in report.guest_copies:
            found.get(kept.rank, set()).add(kept.step)
    steps = set.intersection(*found.values()) if found else set()
    return max((step for step in steps if most is None or step <= most), default=0)


def copy_transfers(reports: Mapping[int, StepReport], step: int) -> list[ShardTransfer]:
    """Bring the copy of a step from the rank that keeps it to each rank that has none of its own any more."""
    holders = {
        kept.rank: (rank, kept.size_bytes)
        for rank, report in sorted(reports.items(), reverse=True)
        for kept in report.guest_copies
        if kept.step == step
    }
    lacking = [rank for rank, report in sorted(reports.items()) if step not in report.host_copies]
    return [ShardTransfer(COPY, 0, holders[rank][1], holders[rank][0], rank) for rank in lacking]
