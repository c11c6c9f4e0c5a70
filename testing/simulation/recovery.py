"""Rebuild, repair and rollback of a simulated process: what moves between ranks, and what is lost on the way."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...processor.rank_actions import NOTHING, ReceivedBytes
from ...protocol.errors import CheckpointError, ChecksumMismatch, StateLost
from ...protocol.messages import Rejoin
from ...protocol.types import LocalStateTransfer, RestoreSource, ShardTransfer
from .communicators import Group, Key
from .invariants import Invariant
from .played_thread import Thread
from .process_faults import OneShot

if TYPE_CHECKING:
    from .process import Process

LINK_UP_S = 1.5
Incoming = list[tuple[Key, Callable[[int], None]]]


class RankRecovery:
    """Carries out one Rejoin at a time. Until it is over the thread counts as in a collective: any abort ends it."""

    def __init__(self, process: "Process") -> None:
        self._process = process
        self._world = process.world
        self._own: int | None = None
        self._arrived: dict[str, int] = {}  # shards, adopted when all else has come, too

    def rebuild(self, order: Rejoin) -> Thread[None]:
        """Connect; a world that started together is connected already."""
        process = self._process
        process.in_collective = True
        if not order.connected:
            process.collectives = 0
            group = self._world.group(order.generation, process.world_size)
            yield from process.link_up(group, order.store, LINK_UP_S)

    def repair(self, order: Rejoin) -> Thread[ReceivedBytes]:
        """Get what is lost, and hand out what others have lost."""
        process, part = self._process, order.part
        if part.restore is RestoreSource.CHECKPOINT:
            self._load(part.target_step)
            yield process.sleep(0.05)
            return NOTHING
        incoming: Incoming = []
        self._arrived = {}
        for transfer in part.transfers:
            self._move_shard(transfer, part.target_step, incoming)
        self._own = process.place.copy_of(process.rank, part.target_step)
        for move in part.local_states:
            self._move_local(move, part.target_step, incoming)
        self._world.reached("repair")
        if incoming:
            yield lambda go: self._receive(incoming, go)
            process.memory.shards |= self._arrived
        else:
            yield process.sleep(0.001)
        return NOTHING

    def recall_local_state(self, step: int) -> None:
        """Raise StateLost where there is no copy of this rank's rank-local state."""
        if self._own is None:
            raise StateLost(f"no copy of the rank-local state as of step {step}")

    def roll_back(self, order: Rejoin) -> Thread[None]:
        """Be as of the target step, and hand the rank-local state to the buddy."""
        process, group, step, own = self._process, self._group, order.part.target_step, self._own
        assert own is not None
        process.memory.own = own
        process.place.keep_local(step, own)
        self._world.reached("rollback")
        process.copied_rank = peer = order.part.copied_rank
        if peer is not None:
            group.post(("rolled back", process.rank), own)
            blob: int = yield lambda go: group.receive(("rolled back", peer), go)
            process.place.keep_peer(peer, step, blob)
        process.in_collective = False
        process.memory.restored(step)

    # --- inside -------------------------------------------------------------------------------------------------

    def _move_shard(self, transfer: ShardTransfer, step: int, incoming: Incoming) -> None:
        process, shard = self._process, transfer.shard_id
        key: Key = ("shard", shard, transfer.offset_bytes, transfer.source, transfer.destination)
        if transfer.source == process.rank:
            held = process.memory.shards[shard]
            if held != step:
                what = f"rank {process.rank} is a source of step {step} and holds {held}"
                self._world.fail(Invariant.SAME_NUMBERS, what)
            self._group.post(key, held)
        else:
            process.memory.overwrite(shard)
            incoming.append((key, lambda value: self._arrived.update({shard: value})))

    def _move_local(self, move: LocalStateTransfer, step: int, incoming: Incoming) -> None:
        process, key = self._process, ("rank-local state", move.rank)
        if move.source != process.rank:
            incoming.append((key, self._take_local))
            return
        blob = process.place.copy_of(move.rank, step)
        if blob is None:
            what = f"rank {process.rank} has no rank-local state of rank {move.rank} as of step {step}"
            self._world.fail(Invariant.NOTHING_LOST, what)
        elif move.rank != process.rank:
            self._group.post(key, blob)

    def _take_local(self, blob: int) -> None:
        self._own = blob

    def _receive(self, incoming: Incoming, go: Callable[[Any], None]) -> None:
        """Take what arrives, in whatever order; go on with the last."""
        missing = len(incoming)

        def once(take: Callable[[int], None]) -> Callable[[int], None]:
            def arrived(value: int) -> None:
                nonlocal missing
                if self._world.fires(OneShot.TRANSFER):
                    self._process.raise_now(ChecksumMismatch("wrong checksum"))
                    return
                take(value)
                missing -= 1
                if missing == 0:
                    go(None)

            return self._process.still(arrived)

        for key, take in incoming:
            self._group.receive(key, once(take))

    def _load(self, step: int) -> None:
        process, disk = self._process, self._world.disk
        if step not in disk.steps:
            if disk.damaged:
                raise CheckpointError(f"the checkpoint of step {step} is damaged")
            what = f"rank {process.rank} is told to load step {step}, which no checkpoint has"
            self._world.fail(Invariant.NOTHING_LOST, what)
        process.memory.load(step)
        self._own = step

    @property
    def _group(self) -> Group:
        assert self._process.group is not None
        return self._process.group
