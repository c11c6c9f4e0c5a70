"""Sharded parameters (DTensor): FSDP2, which is `fully_shard`, on one mesh dimension or with replicas (HSDP)."""

from .state import ShardedTrainState

__all__ = ["ShardedTrainState"]
