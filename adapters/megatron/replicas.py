"""The copies of each shard: those that Megatron keeps anyway, or one at a buddy."""

from typing import NamedTuple, Protocol

import torch

from ...processor.framework import OpenShard, ShardDigest
from ...processor.shard import Shard, digests_of
from ...protocol.compat import StrEnum
from ...protocol.errors import ConfigurationError, RecoveryError
from ...protocol.types import ShardHold
from ..buddies import Buddies, pair
from .parts import Parts
from .peer_copy import HostPeerCopy, PeerCopy, piece_name
from .rank_order import advice, current_order
from .shards import find_pieces, is_distributed, replica_ranks, sizes


class Replica(StrEnum):
    """The place of the copy of a distributed optimizer's piece."""

    INSTANCES = "instances"  # Megatron's num_distributed_optimizer_instances keeps one for each instance
    BUDDY_DEVICE = "buddy_device"  # at a rank of another node, in device memory
    BUDDY_HOST = "buddy_host"  # there, in host memory
    NONE = "none"  # nowhere: the checkpoint is the way back


_PEER_COPIES = {Replica.BUDDY_DEVICE: PeerCopy, Replica.BUDDY_HOST: HostPeerCopy}


class RankPlace(NamedTuple):
    """The place of a rank in the job and on its node."""

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
    """The shards of this rank: its own, and its peer copy."""

    def __init__(self, parts: Parts, place: RankPlace, wanted: Replica | None) -> None:
        self.kind = _chosen(parts, wanted)
        self._parts = parts
        self._place = place
        copy_kind = _PEER_COPIES.get(self.kind)
        alone = None if copy_kind is None else piece_name(place.rank)
        self._pieces: dict[str, _Held] = {**find_pieces(parts, alone=alone)}
        self.buddies: Buddies[PeerCopy] | None = None
        if copy_kind is not None and alone is not None:
            own = find_pieces(parts, alone=alone)[alone]
            ring = pair(place.rank, range(place.world_size), place.ranks_per_node)
            self.buddies = Buddies(own.open, copy_kind(own, _device(parts)), ring)
            if place.world_size > 1:
                self._pieces[piece_name(self.buddies.copied_rank)] = self.buddies.piece

    def holds(self) -> tuple[ShardHold, ...]:
        """Return the shards that this rank must hold, with their sizes now, and whether they are there yet."""
        return tuple(
            ShardHold(shard_id, piece.open().size_bytes, held=self._is_here(piece))
            for shard_id, piece in self._pieces.items()
        )

    def cost(self) -> str:
        """Return one sentence about the memory and traffic that the copies cost this rank."""
        if self.buddies is None:
            return f"replica {self.kind.value}: nothing is kept or sent beside what Megatron keeps anyway"
        on_device, on_host = (size / 1e6 for size in self.buddies.piece.memory(self.buddies.piece.elements))
        same = ", which are the same memory here" if self.buddies.piece.device.type == "cpu" else ""
        return (
            f"replica {self.kind.value}: about {on_device:.1f} MB more device memory and {on_host:.1f} MB more host "
            f"memory on this rank{same}; {self.buddies.piece.sent_bytes / 1e6:.1f} MB of gradients sent to rank "
            f"{self.buddies.buddy} in each step, and a second optimizer step"
        )

    def findings(self) -> tuple[str, ...]:
        """Return one sentence for each shard that the loss of one node would take away."""
        node_of = self._place.node_of
        if self.buddies is not None:
            if self.buddies.same_node:
                return ("there is one node: its loss takes the optimizer's pieces and their copies",)
            return ()
        if self.kind is Replica.NONE:
            return ("replica is none: after the loss of any rank all go back to the last checkpoint",)
        held = replica_ranks(self._parts)
        lost = {what: ranks for what, ranks in held.items() if len({node_of(rank) for rank in ranks}) == 1}
        if not lost:
            return ()
        world, nodes = sizes(self._parts), [node_of(rank) for rank in range(self._place.world_size)]
        order = current_order(world, [tuple(ranks) for ranks in held.values()])
        better = advice(world, nodes, order=order)
        return tuple(
            f"all copies of {what} are on one node (ranks {', '.join(map(str, ranks))}): its loss means going back to "
            f"a checkpoint; {better}"
            for what, ranks in lost.items()
        )

    def written_here(self) -> tuple[str, ...]:
        """Return the shards that this rank writes into checkpoints, as their first holder."""
        return tuple(shard_id for shard_id, piece in self._pieces.items() if piece.first)

    def digests(self) -> dict[str, ShardDigest]:
        """Return a hash of the tensors of each shard that is here, the peer copy included."""
        here = {shard_id: piece.open() for shard_id, piece in self._pieces.items() if self._is_here(piece)}
        return digests_of(here, with_header=False)

    def open(self, shard_id: str) -> OpenShard:
        """Open a shard to send from it."""
        return self._piece(shard_id).open()

    def accept(self, shard_id: str, header: bytes) -> OpenShard:
        """Return the tensors that receive a shard."""
        return self._piece(shard_id).accept(header)

    def adopt(self, shard_id: str, shard: OpenShard) -> None:
        """Make a received shard the state of this rank. Raises RecoveryError for one that was not accepted here."""
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
    """Return where pieces are copied. Raises ConfigurationError where that is not possible."""
    cut = [leaf for leaf in parts.leaves if is_distributed(leaf)]
    instances = parts.chunks[0].ddp_config.num_distributed_optimizer_instances
    if not cut:
        return Replica.INSTANCES  # with a plain optimizer every data parallel rank holds everything
    if wanted is Replica.INSTANCES and instances < 2:
        raise ConfigurationError(
            "replica 'instances' needs num_distributed_optimizer_instances of at least 2, it is 1; set it, or choose "
            f"{Replica.BUDDY_DEVICE.value!r}, {Replica.BUDDY_HOST.value!r} or {Replica.NONE.value!r}"
        )
    if instances > 1:
        return Replica.INSTANCES
    return wanted if wanted is not None else Replica.BUDDY_DEVICE


def _device(parts: Parts) -> torch.device:
    return next(parts.chunks[0].parameters()).device  # type: ignore[no-any-return]
