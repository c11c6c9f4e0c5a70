"""Rebuild, repair and rollback of a process."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..processor.session import Stage
from ..protocol.messages import RankReady, Rejoin
from ..protocol.types import Activity, FaultKind, OwnStateTransfer, RestoreSource, ShardTransfer
from .communicators import Key
from .invariants import Invariant

if TYPE_CHECKING:
    from .communicators import Group
    from .process import Process

LINK_UP_S = 1.5


class WayBack:
    """Carries out one Rejoin at a time."""

    def __init__(self, process: "Process") -> None:
        self._process = process
        self._world = process.world
        self._attempt = 0
        self._missing = 0
        self._linked = False
        self._own: int | None = None
        self._arrived: dict[str, int] = {}  # shards, adopted when all else has come, too

    def begin(self, order: Rejoin) -> None:
        """Rebuild first; a world that started together is seated already."""
        process = self._process
        process.session.reach(Stage.REJOINING)
        process.repeat_itself()
        process.doing(Activity.RECOVERING)
        self._attempt += 1
        self._world.reached("rebuild")
        if order.seated:
            process.broken = self._broken
            self._rebuilt(order)
            return
        process.group = self._world.group(order.generation, process.world_size)
        process.failed, process.broken, process.collectives = None, self._broken, 0
        attempt = self._attempt

        def give_up() -> None:
            if process.alive and attempt == self._attempt and process.broken == self._broken and not self._linked:
                process.epoch += 1
                process.later(0.0, self._link_up_failed)

        self._linked = False
        self._world.timeline.after(LINK_UP_S, give_up)
        process.group.connect(process, order.store, process.still(lambda: self._connected(order)))

    def _connected(self, order: Rejoin) -> None:
        self._linked = True
        self._rebuilt(order)

    def _rebuilt(self, order: Rejoin) -> None:
        process, part, group = self._process, order.part, self._group
        if process.standing.struck_since:
            self._state_lost("memory was struck after the repair was planned")
            return
        process.standing.repairing(part, process.rank)
        if part.restore is RestoreSource.CHECKPOINT:
            self._load(order)
            return
        incoming: list[tuple[Key, Callable[[int], None]]] = []
        self._arrived = {}
        for transfer in part.transfers:
            key: Key = ("shard", transfer.shard_id, transfer.offset_bytes, transfer.source, transfer.destination)
            if transfer.source == process.rank:
                held = process.memory.shards[transfer.shard_id]
                if held != part.target_step:
                    what = f"rank {process.rank} is a source of step {part.target_step} and holds {held}"
                    self._world.fail(Invariant.SAME_NUMBERS, what)
                group.post(key, held)
            else:
                process.memory.overwrite(transfer.shard_id)
                incoming.append((key, self._taker(transfer)))
        self._own = process.seat.own(part.target_step)
        for move in part.own_states:
            self._move_own(move, part.target_step, incoming)
        self._missing = len(incoming)
        self._world.reached("repair")
        for key, take in incoming:
            group.receive(key, self._once(order, take))
        if not incoming:
            process.later(0.001, lambda: self._roll_back(order))

    def _move_own(self, move: OwnStateTransfer, step: int, incoming: list[tuple[Key, Callable[[int], None]]]) -> None:
        process, key = self._process, ("own state", move.rank)
        if move.source == process.rank:
            blob = process.seat.copy_of(move.rank, step)
            if blob is None:
                self._world.fail(
                    Invariant.NOTHING_LOST,
                    f"rank {process.rank} has no own state of rank {move.rank} as of step {step}",
                )
            elif move.rank != process.rank:
                self._group.post(key, blob)
        else:
            incoming.append((key, self._take_own))

    def _taker(self, transfer: ShardTransfer) -> Callable[[int], None]:
        def take(value: int) -> None:
            self._arrived[transfer.shard_id] = value

        return take

    def _take_own(self, blob: int) -> None:
        self._own = blob

    def _once(self, order: Rejoin, take: Callable[[int], None]) -> Callable[[int], None]:
        process, epoch = self._process, self._process.epoch

        def arrived(value: int) -> None:
            if not process.alive or process.suspended or process.hung or epoch != process.epoch:
                return
            if self._world.corrupt():
                self._state_lost("wrong checksum")
                return
            take(value)
            self._missing -= 1
            if self._missing == 0:
                process.memory.shards |= self._arrived
                self._roll_back(order)

        return arrived

    def _load(self, order: Rejoin) -> None:
        process, step = self._process, order.part.target_step
        if step not in self._world.disk and self._world.saving.spoiled:
            self._state_lost(f"the checkpoint of step {step} is damaged")
            return
        if step not in self._world.disk:
            self._world.fail(
                Invariant.NOTHING_LOST, f"rank {process.rank} is told to load step {step}, which no checkpoint has"
            )
        process.memory.load(step)
        self._own = step
        process.later(0.05, lambda: self._roll_back(order))

    def _roll_back(self, order: Rejoin) -> None:
        process, step = self._process, order.part.target_step
        process.standing.repaired()
        if self._own is None:
            self._state_lost(f"no copy of the own state as of step {step}")
            return
        process.memory.own = self._own
        process.loop.order.rolled_back(step)
        process.seat.keep_own(step, self._own)
        self._world.reached("rollback")
        ward = self._world.ward(process.rank, process.world_size)
        if ward == process.rank:
            self._ready(order)
            return
        self._group.post(("rolled back", process.rank), self._own)
        epoch = process.epoch

        def swapped(blob: int) -> None:
            if process.alive and not process.suspended and not process.hung and epoch == process.epoch:
                process.seat.keep_ward(ward, step, blob)
                self._ready(order)

        self._group.receive(("rolled back", ward), swapped)

    def _ready(self, order: Rejoin) -> None:
        process = self._process
        process.broken = None
        process.standing.whole_again()
        process.memory.come_back(order.part.target_step)
        if not process.session.quiescing:
            process.session.reach(Stage.READY)
            step = process.standing.count
            self._world.watch.ready(process, order)
            process.post(RankReady(process.rank, order.generation, process.incarnation, step, {"rebuild": 0.01}))
        process.next_order()

    # --- the ways out -------------------------------------------------------------------------------------------

    def _broken(self) -> None:
        """A collective failed under it: aborted for the next generation, or a peer is gone."""
        process = self._process
        assert process.failed is not None
        if process.session.quiescing:
            process.next_order()
        else:
            self._failed(FaultKind.COMMUNICATION, process.failed)

    def _state_lost(self, why: str) -> None:
        self._process.broken = None
        self._process.harmed = True
        self._failed(FaultKind.CORRUPTION, why)

    def _link_up_failed(self) -> None:
        self._process.broken = None
        self._failed(FaultKind.LINK_UP, f"not connected within {LINK_UP_S} s")

    def _failed(self, kind: FaultKind, detail: str) -> None:
        process = self._process
        process.epoch += 1
        if not process.session.quiescing:
            process.report_fault(kind, detail)
        process.next_order()

    @property
    def _group(self) -> "Group":
        assert self._process.group is not None
        return self._process.group
