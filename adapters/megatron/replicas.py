"""Which copies there are of each shard: those that Megatron keeps anyway, or one at a buddy."""

import enum
from typing import NamedTuple, Protocol

from ...processor.lifecycle import OpenShard
from ...protocol.errors import ConfigurationError, RecoveryError
from ...protocol.types import ShardHold
from .buddy import Buddies, piece_name
from .parts import Parts
from .shards import Shard, find_pieces, is_distributed


class Replica(enum.StrEnum):
    """Where the copy of a distributed optimizer's piece is."""

    INSTANCES = "instances"  # Megatron's num_distributed_optimizer_instances keeps one for each instance
    BUDDY_DEVICE = "buddy_device"  # at a rank of another node, in device memory
    NONE = "none"  # nowhere: the checkpoint is the way back


class Place(NamedTuple):
    """Where a rank is."""

    rank: int
    world_size: int
    ranks_per_node: int

    def node_of(self, rank: int) -> int:
        """Return the number of the node of a rank."""
        return rank // self.ranks_per_node


class _Held(Protocol):
    @property
    def first(self) -> bool: ...
    def open(self) -> Shard: ...
    def accept(self, header: bytes) -> Shard: ...
    def adopt(self, shard: Shard) -> None: ...


class Replicas:
    """The shards of this rank: its own, and the copy that it keeps for a ward."""

    def __init__(self, parts: Parts, place: Place, wanted: Replica | None) -> None:
        self.kind = _chosen(parts, wanted)
        alone = piece_name(place.rank) if self.kind is Replica.BUDDY_DEVICE else None
        self._pieces: dict[str, _Held] = {**find_pieces(parts, alone=alone)}
        self.buddies: Buddies | None = None
        if alone is not None:
            own = find_pieces(parts, alone=alone)[alone]
            self.buddies = Buddies(own, *place)
            if place.world_size > 1:
                self._pieces[piece_name(self.buddies.ward)] = self.buddies.piece

    def holds(self) -> tuple[ShardHold, ...]:
        """Name the shards that this rank must hold, with their sizes now, and whether they are there yet."""
        return tuple(
            ShardHold(shard_id, piece.open().size_bytes, held=self._is_here(piece))
            for shard_id, piece in self._pieces.items()
        )

    def written_here(self) -> tuple[str, ...]:
        """Name the shards of which this rank is the first holder."""
        return tuple(shard_id for shard_id, piece in self._pieces.items() if piece.first)

    def open(self, shard_id: str) -> OpenShard:
        """Open a shard to send from it."""
        return self._piece(shard_id).open()

    def accept(self, shard_id: str, header: bytes) -> OpenShard:
        """Make room for a shard that arrives."""
        return self._piece(shard_id).accept(header)

    def adopt(self, shard_id: str, shard: OpenShard) -> None:
        """Make a shard that has arrived this rank's."""
        if not isinstance(shard, Shard):
            raise RecoveryError(f"shard {shard_id!r} was not accepted by this state, it is a {type(shard).__name__}")
        self._piece(shard_id).adopt(shard)

    def _is_here(self, piece: _Held) -> bool:
        return self.buddies is None or piece is not self.buddies.piece or self.buddies.piece.held

    def _piece(self, shard_id: str) -> _Held:
        if shard_id not in self._pieces:
            raise RecoveryError(f"this rank has no shard {shard_id!r}; it has {', '.join(sorted(self._pieces))}")
        return self._pieces[shard_id]


def _chosen(parts: Parts, wanted: Replica | None) -> Replica:
    """Return how pieces are copied. Raises ConfigurationError for what cannot be."""
    cut = [leaf for leaf in parts.leaves if is_distributed(leaf)]
    instances = parts.chunks[0].ddp_config.num_distributed_optimizer_instances
    if not cut:
        return Replica.INSTANCES  # with a plain optimizer every data parallel rank holds everything
    if wanted is Replica.INSTANCES and instances < 2:
        raise ConfigurationError(
            "replica 'instances' needs num_distributed_optimizer_instances of at least 2, it is 1; set it, or choose "
            f"{Replica.BUDDY_DEVICE.value!r} or {Replica.NONE.value!r}"
        )
    if instances > 1:
        return Replica.INSTANCES
    return wanted if wanted is not None else Replica.BUDDY_DEVICE
