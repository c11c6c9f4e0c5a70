"""An open shard as adapters hand it out, and whether the copies of a shard are copies.

A repair overwrites one copy with another, so all holders must have the same bytes. Which ranks hold the same shard is
what the script says of its layout. Once, before its second update, all ranks compare hashes of what they hold, and a
job whose ranks hold different things under one name goes no further.
"""

import dataclasses
import struct
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
import xxhash

from ..protocol.errors import ConfigurationError
from . import tree
from .framework import ShardDigest
from .tensor_hash import hashes

if TYPE_CHECKING:
    import torch

    from .runtime import Runtime

MOST_NAMED = 3  # different contents of one shard

Holders = dict[str, dict[int, int]]  # of each shard: a hash of its content, and the lowest rank that has it
_DECODER = msgspec.msgpack.Decoder(Holders)
_HASH = struct.Struct("<Q")


@dataclasses.dataclass(frozen=True)
class Shard:
    """An open shard: a header that says what is in it, and the tensors themselves."""

    header: bytes
    tensors: "Sequence[torch.Tensor]"

    @property
    def names(self) -> list[str]:
        """A name for each tensor, for the checkpoint file."""
        return tree.tensor_names(self.header)

    @property
    def size_bytes(self) -> int:
        """The bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)


def digests_of(opened: Mapping[str, Shard], *, with_header: bool = True) -> dict[str, ShardDigest]:
    """Hash the tensors of each shard, and its header if that has to be the same on all holders."""
    found = {}
    for (name, shard), tensors in zip(
        opened.items(), hashes([shard.tensors for shard in opened.values()]), strict=True
    ):
        whole = xxhash.xxh3_64_intdigest(_HASH.pack(tensors) + shard.header) if with_header else tensors
        found[name] = ShardDigest(whole, tensors)
    return found


def refuse_differing(digests: dict[str, int], runtime: "Runtime") -> None:
    """Compare hashes of this rank's shards with those of all ranks. On all ranks, between two steps.

    Raises ConfigurationError where the holders of a shard differ, and what the communicator raises.
    """
    rank, world_size = runtime.rank, runtime.world_size
    holders: Holders = {shard_id: {digest: rank} for shard_id, digest in digests.items()}
    distance = 1
    while distance < world_size:  # each round doubles the ranks that a rank has heard of
        to, source = (rank + distance) % world_size, (rank - distance) % world_size
        arrived = runtime.communicator.swap(msgspec.msgpack.encode(holders), to, source)
        holders = _united(holders, _DECODER.decode(arrived))
        distance *= 2
    for shard_id, found in sorted(holders.items()):
        if len(found) > 1:
            named = " and ".join(str(each) for each in sorted(found.values()))
            raise ConfigurationError(
                f"ranks {named} hold different parameters or optimizer state under the name {shard_id!r}, of which "
                "every holder must have the same: a recovery would overwrite one with the other. Wrap the model in "
                "DistributedDataParallel or synchronise it yourself; what differs between ranks (a part of a weight, "
                "say) does not belong into this train state"
            )


def _united(ours: Holders, theirs: Holders) -> Holders:
    united = {shard_id: dict(found) for shard_id, found in ours.items()}
    for shard_id, found in theirs.items():
        here = united.setdefault(shard_id, {})
        for digest, rank in found.items():
            here[digest] = min(rank, here.get(digest, rank))
        for digest in sorted(here, key=here.__getitem__)[MOST_NAMED:]:
            del here[digest]
    return united
