"""The train state of a job with MindIO's handlers: midstep knows the holders, the handlers move.

The shards have no tensors here: the plan of a repair says which rank sends which shard to which, and the repair handler
does it over the framework's own groups. What midstep itself brings back is each rank's random numbers.

Who holds copies of whose optimizer state is what `tft_set_optimizer_replica` says. A shard is one type of optimizer at
one place of a data parallel group: with `replica_cnt` copies in a group of n ranks, ranks that are n / replica_cnt
places apart hold the same. MindSpore names replicas when its first step has ended, so a process that replaces another
one does not know its own when the repair is planned: they are noted with the rank's local state on its node, and where
that is lost, too, the survivors know (`settled`).
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ...processor.framework import OpenShard
from ...processor.local_state import framework_part
from ...protocol.errors import ConfigurationError, RecoveryError, StateUnreadable
from ...protocol.messages import SaveCheckpoint
from ...protocol.types import InjectionPoint, RepairPart, RestoreSource, ShardHold
from .script_checkpoints import first_step_here, folder_here, whole_steps
from .values import RepairType, is_mindspore

if TYPE_CHECKING:
    from ...processor.ledger import Ledger
    from ...processor.runtime import Runtime

EVERYTHING = "0/0/0"  # the one shard of a job that has named no replicas: every rank holds all


class OptimizerReplicas(msgspec.Struct, frozen=True):
    """One type of optimizer: the ranks of its data parallel group, and how many hold each part."""

    type: int
    rank_list: tuple[int, ...]
    replica_cnt: int


class _Own(msgspec.Struct, frozen=True, array_like=True):
    offset: int | None
    random: bytes
    regions: dict[str, bytes] = {}  # random numbers by Megatron-LM's name for where they are drawn
    replicas: tuple[OptimizerReplicas, ...] = ()


class _Token:
    """A shard without bytes."""

    header = b""
    tensors: Sequence[Any] = ()


class HandledState:
    """See Framework. Used by the driver thread."""

    def __init__(self, rank: int) -> None:
        """Begin without replicas: until the script names some, every rank is taken to hold everything."""
        self._rank = rank
        self.replicas: tuple[OptimizerReplicas, ...] = ()
        self.offset: int | None = None  # the script's count of updates less midstep's, as far as it is known
        self.confirmed = False  # two updates, or the script itself, have said the same of it
        self.chosen: int | None = None  # by the script's count, the checkpoint to which the script wants to go back
        self.part: RepairPart | None = None
        self.save: Callable[[SaveCheckpoint], tuple[str, str]] = _unset
        self.noted_offset: Callable[[], int | None] = lambda: None  # in a local state that is kept on this node
        self.noted_replicas: Callable[[], tuple[OptimizerReplicas, ...]] = tuple  # by the process before this one
        self._random = _random_state()
        self._ledger: Ledger | None = None

    @property
    def ledger(self) -> "Ledger":
        """The step ledger of the running train function."""
        assert self._ledger is not None
        return self._ledger

    def informed(self, part: RepairPart) -> None:
        """Take note of this rank's part of the plan."""
        self.part = part

    def save_emergency(self, order: SaveCheckpoint) -> tuple[str, str]:
        """Have the script's handlers write."""
        return self.save(order)

    def moves(self) -> tuple["Move", ...]:
        """Return what the plan has this rank send and receive."""
        transfers = () if self.part is None else self.part.transfers
        return tuple(Move(type_of(each.shard_id), each.destination, each.source) for each in transfers)

    @property
    def known_replicas(self) -> tuple[OptimizerReplicas, ...]:
        """The replicas that the script has named, or that the process before this one has noted."""
        return self.replicas or self.noted_replicas()

    @property
    def sure_offset(self) -> int | None:
        """The offset, once it can be relied upon: the end of a first bracket may have any number."""
        return self.offset if self.confirmed else None

    @property
    def loads_checkpoint(self) -> bool:
        """True if the plan has all ranks load the script's checkpoint."""
        return self.part is not None and self.part.restore is RestoreSource.CHECKPOINT

    @property
    def likely_offset(self) -> int:
        """The offset, or where that is not sure what other processes here have noted, or the beginning of the job."""
        if self.sure_offset is not None:
            return self.sure_offset
        noted = self.noted_offset()
        return first_step_here() if noted is None else noted

    def loadable(self) -> tuple[int, ...]:
        """Return the steps of the script's newest checkpoints, by midstep's count, the newest first, if it is known.

        A process that is wrong about the count reports other steps than the others. Where that leaves one in common
        all the same, the script loads another one than planned, and says so.
        """
        folder = None if is_mindspore() else folder_here()
        steps = () if folder is None else whole_steps(folder)
        return tuple(step - self.likely_offset for step in steps if step > self.likely_offset)

    def counted(self, offset: int) -> None:
        """Note what the end of an update has said."""
        self.confirmed = self.confirmed or offset == self.offset
        self.offset = offset

    def agreed(self, offset: int) -> None:
        """Note what is sure: other ranks know it, or the script has said it."""
        self.offset, self.confirmed = offset, True

    def bind(self, ledger: "Ledger") -> None:
        """Set the step ledger."""
        self._ledger = ledger

    def audit(self) -> tuple[str, ...]:
        """Return nothing: what is not in the handlers is not known here."""
        return ()

    def shards(self) -> tuple[ShardHold, ...]:
        """Return the shards of this rank, without a size."""
        return tuple(ShardHold(each, 0) for each in shards_of(self._rank, self.known_replicas) or (EVERYTHING,))

    def writes(self) -> tuple[str, ...]:
        """Return nothing: the script writes its checkpoints itself."""
        return ()

    def capture_local(self) -> bytes:
        """Capture the random numbers, how the script counts, and who holds the same."""
        random = self._random.capture() if self._random else b""
        return msgspec.msgpack.encode(_Own(self.offset, random, _regions(), self.replicas))

    def restore_local(self, blob: bytes) -> None:
        """Restore them. Runs after the rollback handler, which may draw."""
        own = _own(blob)
        if self.offset is None:
            self.offset = own.offset
        if self._random and own.random:
            self._random.restore(own.random)
        if own.regions:
            _put_back_regions(own.regions)

    def clean(self) -> None:
        """Do nothing: the clean handler has."""

    def rebuilt(self) -> None:
        """Do nothing: the rebuild handler does."""

    def rolled_back(self, step: int) -> None:
        """Do nothing: the rollback handler has."""

    def open_shard(self, shard_id: str) -> OpenShard:
        """Return a shard without tensors: the repair handler sends them."""
        return _Token()

    def accept_shard(self, shard_id: str, header: bytes) -> OpenShard:
        """Return a shard without tensors: the repair handler receives them."""
        return _Token()

    def adopt_shard(self, shard_id: str, shard: OpenShard) -> None:
        """Do nothing: the repair handler does."""

    def fire_in(self, point: InjectionPoint, fire: Callable[[], None]) -> None:
        """Do nothing: the steps are the script's own, and not known from inside."""


def _own(blob: bytes) -> _Own:
    try:
        return msgspec.msgpack.decode(blob, type=_Own)
    except msgspec.MsgspecError as error:
        raise StateUnreadable(f"the captured state ({len(blob)} bytes) cannot be read: {error}") from error


def offset_in(runtime: "Runtime") -> int | None:
    """Return how the script counts, from the newest local state in this rank's black box: each rank counts alike."""
    return next((own.offset for _, own in _kept_in(runtime)), None)


def replicas_in(runtime: "Runtime") -> tuple[OptimizerReplicas, ...]:
    """Return the replicas that the process before this one has noted in this rank's black box; empty: there are none.

    A world that starts again names its own.
    """
    if runtime.connected:
        return ()
    return next((own.replicas for rank, own in _kept_in(runtime) if rank == runtime.rank and own.replicas), ())


def _kept_in(runtime: "Runtime") -> Iterator[tuple[int, _Own]]:
    """Yield the local states in this rank's black box, the newest first, each with its rank."""
    for copy in sorted(runtime.black_box.copies(), key=lambda each: each.step, reverse=True):
        blob = runtime.local_states.read(copy.rank, copy.step)
        if blob is not None:
            yield copy.rank, _own(framework_part(blob))


def _unset(order: SaveCheckpoint) -> tuple[str, str]:
    raise RecoveryError("no handlers are set")


def _tracker() -> Any:
    """Return the object in which Megatron-LM keeps a state of the device's generator for each region; None if none."""
    return getattr(sys.modules.get("megatron.core.tensor_parallel.random"), "_CUDA_RNG_STATE_TRACKER", None)


def _regions() -> dict[str, bytes]:
    """Capture what Megatron-LM's regions draw from, if they are states and no generators of their own."""
    states = {} if (tracker := _tracker()) is None else tracker.get_states()
    return {name: bytes(each.cpu().numpy()) for name, each in states.items() if hasattr(each, "numpy")}


def _put_back_regions(regions: Mapping[str, bytes]) -> None:
    """Put them back. Raises StateUnreadable where there is nothing to put them into."""
    import torch

    tracker = _tracker()
    if tracker is None:
        names = ", ".join(regions)
        raise StateUnreadable(f"the captured state has random numbers of {names}, and Megatron-LM has none")
    states = {name: torch.frombuffer(bytearray(each), dtype=torch.uint8) for name, each in regions.items()}
    tracker.set_states({**tracker.get_states(), **states})


def _random_state() -> Any:
    try:
        from ...processor.local_state import RandomState
    except ImportError:  # without torch: MindSpore's generators are put back by the script
        return None
    return RandomState()


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
    """A rank's message to all others once it is linked to them. `offset`: the script's steps less midstep's.

    `reboots`: the process takes the place of another one, and knows it, so it has loaded nothing at its start.
    `chosen`: by the script's count, the checkpoint that its script wants to go back to.
    """

    rank: int
    newcomer: bool
    reboots: bool
    struck: bool
    offset: int | None
    moves: tuple[Move, ...]
    replicas: tuple[OptimizerReplicas, ...] = ()
    chosen: int | None = None


def settled(world: Sequence[RankPart]) -> list[RankPart]:
    """Return the parts of all ranks with the moves of those that could not know what they hold, as the others know it.

    The plan of the repair takes such a rank to hold everything. Raises RecoveryError where no process holds its state.
    """
    known = {rank: each.replicas for each in world for part in each.replicas for rank in part.rank_list}
    unsure = [each.rank for each in world if known and each.newcomer and not each.replicas]
    late = {rank: known.get(rank, ()) for rank in unsure}
    parts = [
        msgspec.structs.replace(each, moves=tuple(move for move in each.moves if move.destination not in late))
        for each in world
    ]
    for rank, replicas in late.items():
        moves = tuple(_move(rank, each, world) for each in replicas if rank in each.rank_list)
        if not moves:
            raise RecoveryError(f"no process is left that knows what rank {rank} held: all ranks have to start again")
        parts[rank] = msgspec.structs.replace(parts[rank], moves=(*parts[rank].moves, *moves))
    return parts


def _move(rank: int, replicas: OptimizerReplicas, world: Sequence[RankPart]) -> Move:
    held = shards_of(rank, (replicas,))
    holders = [each.rank for each in world if not each.newcomer and shards_of(each.rank, (replicas,)) == held]
    if not holders:
        raise RecoveryError(
            f"no process is left that holds what rank {rank} held (of {', '.join(map(str, replicas.rank_list))}): "
            "all ranks have to start again"
        )
    return Move(replicas.type, rank, min(holders))


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
