"""The protocol that a framework adapter implements for a recovery.

The processor drives a recovery; it knows nothing of modules, optimizers or reducers. An adapter (plain PyTorch,
Megatron, ...) implements `Framework`; the five lifecycle callbacks of a recovery end in its methods, in the order in
which they are written here.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

    from ..protocol.messages import SaveCheckpoint
    from ..protocol.types import InjectionPoint, RepairPart, ShardHold
    from .ledger import Ledger
    from .shard_layout import ShardLayout


class OpenShard(Protocol):
    """A shard as one run of bytes: a small header, and the tensors behind it in an order that all replicas share."""

    @property
    def header(self) -> bytes:
        """Shapes and dtypes of the tensors, and everything else of the shard (param groups, ...), without pickle."""
        ...

    @property
    def tensors(self) -> Sequence["torch.Tensor"]:
        """The tensors in order: any shape and dtype, contiguous, on the CPU or the device of the job.

        The transfer reads and writes their memory as it is, without a copy.
        """
        ...


class ShardDigest(NamedTuple):
    """Hashes of what a rank holds of a shard: of all that every holder has to have the same, and of its tensors."""

    whole: int
    tensors: int


class Framework(Protocol):
    """The framework's side of a recovery. All methods run in the train thread unless they say otherwise."""

    def bind(self, ledger: "Ledger") -> None:
        """Set the step ledger. Runs once, when the resilient function is called.

        Args:
            ledger: What the loop of the script takes its steps from.
        """
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
        """Capture the rank-local state: random numbers, data position, changing buffers, values.

        Runs at `ready(s)`, right before the commit barrier, and once before the first step. Must be cheap: it is on the
        path of every step.

        Returns:
            The state as of `s + 1` updates, as bytes that `restore_local` takes.

        Raises:
            RecoveryError: The state cannot be captured.
        """
        ...

    def clean(self) -> None:
        """Drop what an interrupted step left behind: gradients, async handles, reducer state. After stop."""
        ...

    def rebuilt(self) -> None:
        """Refresh what was derived from the communicators: they are connected in a new generation. After rebuild."""
        ...

    def open_shard(self, shard_id: str) -> OpenShard:
        """Open a shard that this rank holds, to send from it. In repair, or at the start of rebuild, at a source.

        Args:
            shard_id: One of those that `shards` returns.

        Returns:
            The live tensors of the shard, not copied.

        Raises:
            RecoveryError: This rank has no such shard.
        """
        ...

    def accept_shard(self, shard_id: str, header: bytes) -> OpenShard:
        """Allocate the tensors of a shard that arrives. In repair, or before it (see Concurrent), at a destination.

        Args:
            shard_id: One of those that `shards` returns.
            header: The header of the shard at its source, with shapes and dtypes.

        Returns:
            Tensors to receive into, on the device of the job or the CPU: the live ones where they fit.

        Raises:
            RecoveryError: The shard does not fit the model of this rank.
        """
        ...

    def adopt_shard(self, shard_id: str, shard: OpenShard) -> None:
        """Make a received shard, whose checksums were right, the state of this rank. In repair.

        Args:
            shard_id: One of those that `shards` returns.
            shard: What `accept_shard` has returned, with the received bytes in it.
        """
        ...

    def restore_local(self, blob: bytes) -> None:
        """Restore the rank-local state that `capture_local` has returned. In rollback, on every rank.

        Args:
            blob: As of the target step, captured here, by an earlier process of this rank, or read from a checkpoint.

        Raises:
            RecoveryError: The bytes are no such state, or of another model.
        """
        ...

    def rolled_back(self, step: int) -> None:
        """Reset what the framework keeps beside its state, which is as of `step` committed updates. End of rollback."""
        ...

    def fire_in(self, point: "InjectionPoint", fire: Callable[[], None]) -> None:
        """Call `fire` once, in the middle of the next forward or backward pass, to inject a fault there.

        Args:
            point: FORWARD or BACKWARD, or another injection point that the framework has.
            fire: What raises or ends the process.
        """
        ...


@runtime_checkable
class Expectant(Protocol):
    """A framework that can allocate memory for a shard before the source of the shard is connected."""

    def expect_shard(self, shard_id: str, size_bytes: int) -> None:
        """Start to prefault memory for a shard that will arrive, and return at once.

        In rebuild, at a destination, while the links come up.

        Args:
            shard_id: One of those that `shards` returns.
            size_bytes: The size of the shard at its source.
        """
        ...


@runtime_checkable
class Rehearsing(Protocol):
    """A framework whose first step in a process works out what depends on shapes alone, and can do so ahead."""

    def rehearse(self) -> None:
        """Work it out now. In a process that is built ahead, at the train function, before it waits for its rank.

        Changes no state, draws no random numbers, does no collective, and raises nothing: the first step does what
        could not be done.
        """
        ...


@runtime_checkable
class Concurrent(Protocol):
    """A framework whose shards can be moved while the links come up, by another thread than the train thread."""

    @property
    def moves_early(self) -> bool:
        """True if that holds for this state: `accept_shard` may be called in that thread, beside `rebuilt`.

        Nothing may write to the tensors of a shard that was opened, or read those of one that was accepted, before
        repair. Asked in rebuild, in the train thread.
        """
        ...


@runtime_checkable
class Deriving(Protocol):
    """A framework with long-lived tensors that are in no shard, and are written whole before they are read again."""

    def derived(self) -> Sequence["torch.Tensor"]:
        """Return them: parameters that rollback makes from shards, buffers of gradients.

        In **clean**, after damage of the device's memory: what was damaged there is not lost, and may be used again.
        """
        ...


@runtime_checkable
class Steady(Protocol):
    """A framework that can be copied while the next forward and backward pass run."""

    @property
    def changes_in_updates_alone(self) -> bool:
        """True if the tensors of `open_shard` are the live ones, and change in the update block and nowhere else."""
        ...


@runtime_checkable
class Staged(Protocol):
    """A framework that knows which ranks do equal work in each step, so that their times can be compared."""

    @property
    def stage(self) -> int:
        """The number that all ranks with equal work have: that of their pipeline stage. Asked when training begins."""
        ...


@runtime_checkable
class Informed(Protocol):
    """A framework that moves lost state and writes emergency checkpoints itself, and wants to know the plan."""

    def informed(self, part: "RepairPart") -> None:
        """Take note of this rank's part of the plan. At the start of rebuild.

        Args:
            part: What this rank sends and receives.
        """
        ...

    def save_emergency(self, order: "SaveCheckpoint") -> tuple[str, str]:
        """Write this rank's part of an emergency checkpoint, or make it complete. While parked.

        Args:
            order: Which step, which shards, and whether to make it complete.

        Returns:
            Where it lies, and what went wrong (empty: nothing).
        """
        ...


@runtime_checkable
class LoadsItself(Protocol):
    """A framework whose script writes checkpoints and loads them, in its own part of **repair**."""

    def loadable(self) -> tuple[int, ...]:
        """Return the steps of the checkpoints that the script would load now. For barrier one."""
        ...


@runtime_checkable
class Trailing(Protocol):
    """A framework with values that the script may change between `capture_local` and its next step.

    They are captured again when the script asks for its next step. Random numbers and positions in the data are not:
    what the script has drawn ahead is lost with the variables of the train function, and is drawn again.
    """

    def update_applied(self) -> None:
        """Take note that the update block has ended. In every step, before the rest of the script's step runs."""
        ...

    def capture_trailing(self) -> bytes | None:
        """Capture the values that have changed since `capture_local`. Runs when the script asks for its next step.

        Returns:
            What `restore_trailing` takes; None where nothing has changed.
        """
        ...

    def restore_trailing(self, blob: bytes) -> None:
        """Put back what `capture_trailing` has returned. In rollback, after `restore_local`.

        Args:
            blob: As of the target step.

        Raises:
            RecoveryError: The bytes are no such values, or those of another script.
        """
        ...


@runtime_checkable
class Mirrored(Protocol):
    """A framework of which other ranks repeat the updates, to keep copies of what one rank alone holds."""

    def gradients_final(self) -> None:
        """Start to send the gradients of this step. Runs at `ready(s)`, right before `capture_local`, on all ranks.

        Raises:
            CommunicatorError: A collective was aborted or has failed.
        """
        ...


@runtime_checkable
class Exposed(Protocol):
    """A framework that shows its gradients, so that bits can be flipped in them on purpose."""

    def gradients(self) -> Sequence["torch.Tensor"]:
        """Return the gradients of this rank, as its update will use them. Runs where a fault is injected."""
        ...

    def trained(self) -> Sequence["torch.Tensor"]:
        """Return the parameters that the backward pass computes gradients of. Runs where a fault is injected."""
        ...


class ModelReplica(NamedTuple):
    """The ranks that hold one copy of the model and compute a gradient together, and this rank's place among them.

    Attributes:
        members: Its ranks, this one included. With plain data parallelism this one alone.
        peers: The ranks that have this rank's place in each replica, this one included, in the order of replicas.
    """

    members: tuple[int, ...]
    peers: tuple[int, ...]

    def before(self, rank: int) -> int:
        """Return the rank that has the same place in the replica before that of a rank."""
        return self.peers[self.peers.index(rank) - 1]

    def after(self, rank: int) -> int:
        """Return the rank that has the same place in the replica after that of a rank."""
        return self.peers[(self.peers.index(rank) + 1) % len(self.peers)]


@runtime_checkable
class Repeatable(Protocol):
    """A framework whose step another replica can repeat from its inputs: parameters are the same in all of them."""

    def model_replica(self) -> ModelReplica | None:
        """Return the replica that this rank belongs to.

        None if there is no other one, or if what another one has computed is needed within a step.
        """
        ...

    def capture_conditions(self) -> bytes:
        """Capture what a computation draws from beside its inputs: random numbers, buffers, values. Not the data."""
        ...

    def step_left(self, step: int) -> None:
        """Drop what a step leaves that ends before its update. No rank waits for another one here.

        Args:
            step: Updates that are applied, all of which stay.
        """
        ...

    def take_conditions(self, blob: bytes) -> None:
        """Put back what `capture_conditions` has returned, on another rank.

        Args:
            blob: What the rank has captured whose step is repeated.
        """
        ...


@runtime_checkable
class Reporting(Protocol):
    """A framework of whose steps values can be reported: by `step.report(...)`, `midstep.report(...)` or itself."""

    @property
    def reports_values(self) -> bool:
        """True if there are some. Otherwise rules on values are refused."""
        ...


@runtime_checkable
class LeavesOut(Protocol):
    """A framework whose captured state tells the data's position from all else, so that batches can be left out."""

    @property
    def has_data(self) -> bool:
        """True if positions in the data are registered. Otherwise batches are drawn from the random numbers."""
        ...

    @property
    def handed_out(self) -> dict[str, int] | None:
        """How many batches each of the registered data has handed out; None: one of them cannot say."""
        ...

    def advance(self, blob: bytes, batches: Mapping[str, int]) -> bytes:
        """Return `blob` with the data's positions so many batches further on. Of this rank; in repair.

        Args:
            blob: What `capture_local` has returned.
            batches: How many, by the name of the data.
        """
        ...

    def leave_out(self, blob: bytes, later: bytes) -> bytes:
        """Return `blob` with the data's position of `later`; or, without one, with its random numbers. In repair.

        Args:
            blob: What `capture_local` has returned, here or on another rank.
            later: The same, of a later step.
        """
        ...


@runtime_checkable
class Comparable(Protocol):
    """A framework whose shards have the same bytes on all of their holders, so that hashes of them can be compared."""

    def digests(self) -> dict[str, ShardDigest]:
        """Hash each shard that this rank holds. Runs before the second update of the job, and where ranks vote."""
        ...


@runtime_checkable
class Rescalable(Protocol):
    """A framework with state that does not depend on the number of ranks, so that a world can change its size."""

    def adopt_local(self, blob: bytes, *, random_numbers: bool) -> None:
        """Restore what `capture_local` has returned in a world of another size. In repair, from a checkpoint.

        Args:
            blob: The rank-local state of this rank or, where it had none in that world, of another one.
            random_numbers: Whether it is this rank's. Otherwise this rank keeps the random numbers of its own start.

        Raises:
            RecoveryError: The bytes are no such state, or of another model.
        """
        ...


@runtime_checkable
class Growing(Rescalable, Protocol):
    """A framework whose ranks can keep their processes when the world gets more ranks."""

    def refuse_growth(self) -> None:
        """Find what is registered and tied to the number of ranks. When training begins.

        Raises:
            ConfigurationError: There is something; the text says what.
        """
        ...

    def grown(self, world_size: int) -> None:
        """Have what is registered fit a world of so many ranks. In rebuild, on ranks that keep their processes.

        Args:
            world_size: The number of ranks from here on.
        """
        ...


@runtime_checkable
class Portable(Framework, Protocol):
    """A framework whose tensors have names that other programs know: those of torch.distributed.checkpoint."""

    def layout(self, shard_id: str) -> "ShardLayout":
        """Return the names of the tensors of a shard, and where its pieces lie in them. At start, before any step.

        Args:
            shard_id: One of those that `shards` returns.

        Raises:
            ConfigurationError: There is state that has no such names.
        """
        ...

    def buffers(self) -> "Mapping[str, Mapping[str, torch.Tensor]]":
        """Return the buffers that belong into a checkpoint, by module and path, as they are now. Between two steps."""
        ...
