"""What a framework must be able to do for a recovery, as one protocol.

The processor drives a recovery; it knows nothing of modules, optimizers or reducers. An adapter (plain PyTorch,
Megatron, ...) implements `Framework`; the five lifecycle callbacks of a recovery end in its methods, in the order in
which they are written here.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

    from ..protocol.types import InjectionPoint, ShardHold
    from .ledger import Ledger


class OpenShard(Protocol):
    """A shard as one run of bytes: a small header and the tensors behind it, in an order that all replicas share."""

    @property
    def header(self) -> bytes:
        """Everything of the shard that is no tensor (param groups, scheduler, ...), pickle-free; and tensor shapes."""
        ...

    @property
    def tensors(self) -> Sequence["torch.Tensor"]:
        """The tensors in order, contiguous on the CPU or the device; the transfer reads or writes their memory."""
        ...


class Framework(Protocol):
    """The framework's side of a recovery. All methods run in the train thread unless they say otherwise."""

    def bind(self, ledger: "Ledger") -> None:
        """Take the ledger that `steps` goes by. Runs once, when the resilient function is called."""
        ...

    def audit(self) -> tuple[str, ...]:
        """Return what is mutable and not registered, one sentence each. Runs once, before the first step."""
        ...

    def shards(self) -> "tuple[ShardHold, ...]":
        """Return the shards that this rank must hold, with their present sizes. Runs for barrier one."""
        ...

    def writes(self) -> tuple[str, ...]:
        """Return the ids of the shards that this rank writes into a checkpoint: of its holders one rank does."""
        ...

    def capture_local(self) -> bytes:
        """Capture the small state that is this rank's alone: RNG, data position, buffers, user values.

        Runs at `ready(s)`, right before the commit barrier; the answer is the local state after `s + 1` updates. It is
        also called once before the first step. Must be cheap: it is on the path of every step.
        """
        ...

    def clean(self) -> None:
        """Drop what an interrupted step left behind: gradients, async handles, reducer state. After stop."""
        ...

    def rebuilt(self) -> None:
        """Refresh what was derived from the communicators: they are connected in a new generation. After rebuild."""
        ...

    def open_shard(self, shard_id: str) -> OpenShard:
        """Open a shard that this rank holds, to send from it. In repair, at a source."""
        ...

    def accept_shard(self, shard_id: str, header: bytes) -> OpenShard:
        """Make room for a shard that arrives, as its header says. In repair, at a destination."""
        ...

    def adopt_shard(self, shard_id: str, shard: OpenShard) -> None:
        """Make the shard that has arrived (its checksum was right) the state of this rank. In repair."""
        ...

    def restore_local(self, blob: bytes) -> None:
        """Put back the rank-local state that `capture_local` gave. In rollback, on every rank, survivors included."""
        ...

    def rolled_back(self, step: int) -> None:
        """Reset what the framework keeps beside its state, which is as of `step` committed updates. End of rollback."""
        ...

    def fire_in(self, point: "InjectionPoint", fire: Callable[[], None]) -> None:
        """Call `fire` once, in the middle of the next forward or backward pass: a fault is armed there."""
        ...


@runtime_checkable
class Expectant(Protocol):
    """A framework that can get memory for a shard before the shard's source is there."""

    def expect_shard(self, shard_id: str, size_bytes: int) -> None:
        """Start to prefault memory for a shard that will arrive, and return at once.

        In rebuild, at a destination, while the links come up.
        """
        ...


@runtime_checkable
class Rescalable(Protocol):
    """A framework with state that does not depend on the number of ranks, so that a world can change its size."""

    def adopt_local(self, blob: bytes, *, random_numbers: bool) -> None:
        """Put back what `capture_local` gave in a world of another size. In repair, from a checkpoint.

        `random_numbers`: it is this rank's; otherwise another rank's, and this one keeps the numbers of its own start.
        """
        ...
