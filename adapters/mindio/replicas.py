"""Who holds copies of whose optimizer state, as `tft_set_optimizer_replica` says it, and each rank's part in a repair.

Pure. A shard is one type of optimizer at one place of a data parallel group: with `replica_cnt` copies in a group of n
ranks, ranks that are n / replica_cnt places apart hold the same.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ...protocol.errors import ConfigurationError, RecoveryError
from .values import RepairType


class OptimizerReplicas(msgspec.Struct, frozen=True):
    """One type of optimizer: the ranks of its data parallel group, and how many hold each part."""

    type: int
    rank_list: tuple[int, ...]
    replica_cnt: int


class _Entry(msgspec.Struct):
    rank_list: list[int]
    replica_cnt: int
    replica_shift: int


class Move(msgspec.Struct, frozen=True, order=True):
    """One shard of a type that goes from a rank to another one."""

    type: int
    destination: int
    source: int


class RankPart(msgspec.Struct, frozen=True):
    """What each rank tells all others once it is linked to them. `offset`: the script's steps less midstep's."""

    rank: int
    newcomer: bool
    struck: bool
    offset: int | None
    moves: tuple[Move, ...]


def replicas_of(replica_info: Sequence[Mapping[str, Any]]) -> tuple[OptimizerReplicas, ...]:
    """Read the argument of `tft_set_optimizer_replica`. Raises ConfigurationError."""
    return tuple(_read(position, entry) for position, entry in enumerate(replica_info))


def _read(position: int, entry: Mapping[str, Any]) -> OptimizerReplicas:
    where = f"tft_set_optimizer_replica: entry {position}"
    try:
        given = msgspec.convert(entry, _Entry)
    except msgspec.ValidationError as error:
        raise ConfigurationError(
            f"{where} must have a list of ranks rank_list, and the numbers replica_cnt and replica_shift: {error}"
        ) from error
    if given.replica_shift:
        raise ConfigurationError(
            f"{where} has replica_shift {given.replica_shift}. midstep knows copies that are evenly spread over "
            "rank_list only, which is 0."
        )
    size, count = len(given.rank_list), given.replica_cnt
    if not size or count < 1 or size % count:
        raise ConfigurationError(f"{where} has {size} ranks, which is no multiple of replica_cnt {count}")
    return OptimizerReplicas(position, tuple(given.rank_list), count)


def shards_of(rank: int, replicas: Sequence[OptimizerReplicas]) -> tuple[str, ...]:
    """Return the shards that a rank holds."""
    held = []
    for each in replicas:
        if rank in each.rank_list:
            apart = len(each.rank_list) // each.replica_cnt
            held.append(f"{each.type}/{each.rank_list[0]}/{each.rank_list.index(rank) % apart}")
    return tuple(held)


def type_of(shard_id: str) -> int:
    """Return the type of optimizer that a shard is of."""
    return int(shard_id.partition("/")[0])


def repair_of(rank: int, world: Sequence[RankPart]) -> dict[str, Any] | None:
    """Return the `repair_info` of a rank; None if it takes no part. Raises RecoveryError if it had to do both."""
    moves = sorted({move for each in world for move in each.moves})
    mine = [move for move in moves if rank in {move.source, move.destination}]
    if not mine:
        return None
    sends = [move.source == rank for move in mine]
    if any(sends) and not all(sends):
        raise RecoveryError(f"rank {rank} would have to send and to receive in one repair, which no handler can do")
    struck = any(each.struck for each in world if each.rank == rank)
    receives = RepairType.RT_UCE_HIGHLEVEL if struck else RepairType.RT_RECV_REPAIR
    return {
        "type": [move.type for move in mine],
        "repair_type": (RepairType.RT_SEND if all(sends) else receives).value,
        "src": [move.source for move in mine],
        "dst": [move.destination for move in mine],
        "rank_list": sorted({each for move in moves for each in (move.source, move.destination)}),
    }


def dump_of(
    shards: Sequence[str], replicas: Sequence[OptimizerReplicas], writers: Sequence[int]
) -> list[dict[str, Any]]:
    """Return the `save_info` of a rank that writes these shards: each type, with all ranks that write a part of it.

    Of the ranks that hold a part the lowest writer writes it. Without `replicas` every rank holds everything.
    """
    if not replicas:
        return [{"type": 0, "ranks": [min(writers)]}] if shards else []
    info = []
    for each in replicas:
        first = str(each.rank_list[0])
        if not any(shard_id.split("/")[:2] == [str(each.type), first] for shard_id in shards):
            continue
        apart = len(each.rank_list) // each.replica_cnt
        holders = [[rank for rank in each.rank_list[place::apart] if rank in writers] for place in range(apart)]
        info.append({"type": each.type, "ranks": [min(ranks) for ranks in holders if ranks]})
    return info
