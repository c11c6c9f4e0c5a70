"""The train state of a job with MindIO's handlers: midstep knows the holders, the handlers move.

The shards have no tensors here: the plan of a repair says which rank sends which shard to which, and the repair handler
does it over the framework's own groups. What midstep itself brings back is each rank's random numbers.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ...processor.framework import OpenShard
from ...protocol.errors import RecoveryError, StateUnreadable
from ...protocol.messages import SaveCheckpoint
from ...protocol.types import InjectionPoint, RepairPart, ShardHold
from .replicas import Move, OptimizerReplicas, shards_of, type_of

if TYPE_CHECKING:
    from ...processor.ledger import Ledger

EVERYTHING = "0/0/0"  # the one shard of a job that has named no replicas: every rank holds all


class _Own(msgspec.Struct, frozen=True, array_like=True):
    offset: int | None
    random: bytes


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
        self.part: RepairPart | None = None
        self.save: Callable[[SaveCheckpoint], tuple[str, str]] = _unset
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

    def moves(self) -> tuple[Move, ...]:
        """Return what the plan has this rank send and receive."""
        transfers = () if self.part is None else self.part.transfers
        return tuple(Move(type_of(each.shard_id), each.destination, each.source) for each in transfers)

    @property
    def sure_offset(self) -> int | None:
        """The offset, once it can be relied upon: the end of a first bracket may have any number."""
        return self.offset if self.confirmed else None

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
        return tuple(ShardHold(each, 0) for each in shards_of(self._rank, self.replicas) or (EVERYTHING,))

    def writes(self) -> tuple[str, ...]:
        """Return nothing: the script writes its checkpoints itself."""
        return ()

    def capture_local(self) -> bytes:
        """Capture the random numbers, and how the script counts."""
        return msgspec.msgpack.encode(_Own(self.offset, self._random.capture() if self._random else b""))

    def restore_local(self, blob: bytes) -> None:
        """Restore them. Runs after the rollback handler, which may draw."""
        try:
            own = msgspec.msgpack.decode(blob, type=_Own)
        except msgspec.MsgspecError as error:
            raise StateUnreadable(f"the captured state ({len(blob)} bytes) cannot be read: {error}") from error
        if self.offset is None:
            self.offset = own.offset
        if self._random and own.random:
            self._random.restore(own.random)

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


def _unset(order: SaveCheckpoint) -> tuple[str, str]:
    raise RecoveryError("no handlers are set")


def _random_state() -> Any:
    try:
        from ...processor.random_state import RandomState
    except ImportError:  # without torch: MindSpore's generators are put back by the script
        return None
    return RandomState()
