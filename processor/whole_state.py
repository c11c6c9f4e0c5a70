"""A train state that every rank holds whole: what those of plain PyTorch and of MindSpore have in common.

There is one shard, the replicated one, which a lost rank copies from any other; the rest is the rank's own.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from ..protocol.errors import NotUnderMidstep, RecoveryError
from ..protocol.types import ShardHold
from .framework import OpenShard, ShardDigest
from .shard import Shard, digests_of
from .values import TrailingValues, Value

if TYPE_CHECKING:
    from .ledger import Ledger, Step

SHARD_ID = "replicated"
WATCHED_STEPS = 2  # in which the script may be seen to change replicated state in the wrong place


class WholeState:
    """The base of a train state whose ranks all hold the same. A subclass opens, accepts and adopts the shard."""

    def __init__(self, values: Mapping[str, Value]) -> None:
        self._ledger: Ledger | None = None
        self._trailing = TrailingValues(values)
        self._watched_steps = WATCHED_STEPS
        self._applied: dict[str, Any] = {}
        self._misplaced: set[str] = set()  # what changes after the update although all ranks must have the same

    # --- for the script -------------------------------------------------------------------------------------------

    def bind(self, ledger: "Ledger") -> None:
        """Set the step ledger of the train function that is about to run."""
        self._ledger = ledger

    def steps(self, total: int) -> "Iterator[Step]":
        """Go through the steps that are left of `total`.

        Args:
            total: The number of steps of the whole training, those before a recovery or restart included.

        Returns:
            An iterator of `midstep.processor.ledger.Step`.

        Raises:
            NotUnderMidstep: The call was made outside of a resilient train function.
        """
        return self._bound("steps").steps(total)

    def paused(self) -> AbstractContextManager[None]:
        """Stop the step clock in a `with` block: for an evaluation and other things that rightly take long.

        A hang of this rank inside the block is not noticed.

        Raises:
            NotUnderMidstep: The call was made outside of a resilient train function.
        """
        paused: AbstractContextManager[None] = self._bound("paused").paused()
        return paused

    @property
    def step(self) -> int:
        """The index of the current step, 0-based: how many updates have been committed."""
        return self._bound("step").count

    @property
    def stage(self) -> int:
        """The number that ranks with equal work have in common: here all do the same."""
        return 0

    def audit(self) -> tuple[str, ...]:
        """Return what a recovery could not bring back. Runs at start and after the first steps, and warns in the log.

        Returns:
            One sentence for each thing that changes where a recovery may miss it.
        """
        local = tuple(
            f"values[{name!r}] changes in the update block or after it: a rank that is lost with its node goes on "
            "without the last change. Change it before `with step.update():`"
            for name in sorted(self._trailing.changed)
        )
        return local + tuple(
            f"{name} changes after the update block: a rank that is replaced may miss the last change, and all ranks "
            "must have the same. Change it inside `with step.update():`"
            for name in sorted(self._misplaced)
        )

    def _bound(self, name: str) -> "Ledger":
        if self._ledger is None:
            raise NotUnderMidstep(
                f"{type(self).__name__}.{name} is only available inside a train function that midstep runs: decorate "
                "the function with @midstep.resilient, or call midstep.resilient(state) around it, and use the state "
                "that it passes"
            )
        return self._ledger

    # --- what a subclass has ----------------------------------------------------------------------------------------

    @property
    def _rank(self) -> int:
        """The rank of this process."""
        raise NotImplementedError

    def _open(self) -> Shard:
        """Open the replicated shard, uncopied. Raises UnsupportedState for what cannot be carried."""
        raise NotImplementedError

    def _accept(self, header: bytes) -> Shard:
        """Return the tensors that receive a replicated shard."""
        raise NotImplementedError

    def _adopt(self, shard: Shard) -> None:
        """Make a received replicated shard the state of this rank."""
        raise NotImplementedError

    def _replicated_marks(self) -> dict[str, Any]:
        """Return something for each replicated thing, by its name, that is another one when the thing has changed."""
        raise NotImplementedError

    # --- for the recovery: the Framework protocol -----------------------------------------------------------------

    @property
    def reports_values(self) -> bool:
        """True: the loop is the script's own, which has each step at hand."""
        return True

    def shards(self) -> tuple[ShardHold, ...]:
        """Return the only shard, the replicated one, with its size now."""
        return (ShardHold(SHARD_ID, self._open().size_bytes),)

    def writes(self) -> tuple[str, ...]:
        """Return the shards that this rank writes into checkpoints: on rank 0 the replicated one."""
        return (SHARD_ID,) if self._rank == 0 else ()

    def digests(self) -> dict[str, ShardDigest]:
        """Return a hash of the replicated shard."""
        return digests_of({SHARD_ID: self._open()})

    def open_shard(self, shard_id: str) -> OpenShard:
        """Open the replicated shard to send from it."""
        _known(shard_id)
        return self._open()

    def accept_shard(self, shard_id: str, header: bytes) -> OpenShard:
        """Provide the tensors that receive the replicated shard. Until `adopt_shard` this rank's state is not whole."""
        _known(shard_id)
        return self._accept(header)

    def adopt_shard(self, shard_id: str, shard: OpenShard) -> None:
        """Make the received replicated shard the state of this rank."""
        _known(shard_id)
        if not isinstance(shard, Shard):
            raise RecoveryError(f"shard {shard_id!r} was not accepted by this state, it is a {type(shard).__name__}")
        self._adopt(shard)

    def update_applied(self) -> None:
        """Remember the replicated state in the first steps, to see whether the script changes it too late."""
        if self._watched_steps:
            self._applied = self._replicated_marks()

    def capture_trailing(self) -> bytes | None:
        """Capture the rank-local values that the script has changed since `capture_local`."""
        if self._watched_steps:
            self._watched_steps -= 1
            marks, applied = self._replicated_marks(), self._applied
            self._misplaced |= {name for name, mark in marks.items() if mark != applied.get(name, mark)}
            self._applied = {}
        return self._trailing.changes()

    def restore_trailing(self, blob: bytes) -> None:
        """Put back what `capture_trailing` has returned."""
        self._trailing.restore(blob)


def _known(shard_id: str) -> None:
    if shard_id != SHARD_ID:
        raise RecoveryError(f"there is no shard {shard_id!r} in plain data parallel training, only {SHARD_ID!r}")
