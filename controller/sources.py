"""The ranks that send a lost shard: near holders first, each with about as many bytes as the others.

Plain bookkeeping for `repair.py`. Holders are kept by node and by failure domain, the least loaded at hand, so that a
choice among ten thousand costs no more than one among ten.
"""

import heapq
from collections.abc import Mapping

import msgspec

from ..protocol.types import ShardTransfer

MAX_SOURCES_PER_SHARD = 4
MIN_STRIPE_BYTES = 8 * 1024 * 1024


class Location(msgspec.Struct, frozen=True):
    """Where a rank runs; near sources are preferred."""

    node: str
    failure_domain: str


def distance(one: Location, other: Location) -> int:
    """Return how far apart two places are: 0 on one node, 1 in one failure domain, 2 elsewhere."""
    if one.node == other.node:
        return 0
    return 1 if one.failure_domain == other.failure_domain else 2


class Sources:
    """The clean holders of every shard, and how many bytes each has to send by now."""

    def __init__(self, places: Mapping[int, Location]) -> None:
        self._places = places
        self._load: dict[int, int] = {}
        self._sizes: dict[str, int] = {}
        # shard -> node, failure domain or everywhere -> holders as (bytes to send when it was looked at, rank)
        self._holders: dict[str, dict[tuple[str, str], list[tuple[int, int]]]] = {}

    def add(self, shard_id: str, size_bytes: int, rank: int) -> None:
        """Enter a holder. Ranks come in order, so that each list is a heap from the start."""
        place = self._places[rank]
        groups = self._holders.setdefault(shard_id, {})
        for key in (("node", place.node), ("domain", place.failure_domain), ("", "")):
            groups.setdefault(key, []).append((0, rank))
        self._sizes[shard_id] = size_bytes

    def __contains__(self, shard_id: str) -> bool:
        return shard_id in self._holders

    def send(self, shard_id: str, destination: int) -> list[ShardTransfer]:
        """Cut a shard over the nearest, least loaded holders; remember what each will have to send."""
        size_bytes, place = self._sizes[shard_id], self._places[destination]
        groups = self._holders[shard_id]
        keys = (("node", place.node), ("domain", place.failure_domain), ("", ""))
        heap = next(groups[key] for key in keys if key in groups)
        chosen = self._least_loaded(heap, max(1, min(MAX_SOURCES_PER_SHARD, size_bytes // MIN_STRIPE_BYTES)))
        piece = -(-size_bytes // len(chosen))
        transfers = []
        for number, source in enumerate(chosen):
            offset = number * piece
            length = min(piece, size_bytes - offset)
            self._load[source] = self._load.get(source, 0) + length
            heapq.heappush(heap, (self._load[source], source))
            transfers.append(ShardTransfer(shard_id, offset, length, source, destination))
        return transfers

    def _least_loaded(self, heap: list[tuple[int, int]], count: int) -> list[int]:
        """Take the ranks with the least to send off the heap. What has grown elsewhere since is sorted in again."""
        chosen: list[int] = []
        while heap and len(chosen) < count:
            known, rank = heapq.heappop(heap)
            load = self._load.get(rank, 0)
            if known == load:
                chosen.append(rank)
            else:
                heapq.heappush(heap, (load, rank))
        return chosen
