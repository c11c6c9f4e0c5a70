"""When checkpoints are written in training, by whom, and when they count.

At a step boundary each rank writes its own state, and rank 0 the replicated shards. The checkpoint is made complete
after the next commit barrier: passing it proves that every rank has written its part.
"""

from typing import TYPE_CHECKING

from ..protocol.errors import CheckpointError
from . import checkpoint

if TYPE_CHECKING:
    from .lifecycle import Framework
    from .runtime import Runtime

WRITER = 0


class Checkpoints:
    """This rank's share in the checkpoints of its job. Used by the train thread."""

    def __init__(self, runtime: "Runtime", framework: "Framework") -> None:
        self._runtime = runtime
        self._framework = framework
        self._settings = runtime.settings
        self._pending: int | None = None

    def due(self, committed: int) -> bool:
        """Whether a checkpoint is to be written after this many updates."""
        every = self._settings.checkpoint_every_steps
        return every > 0 and committed % every == 0 and self._settings.checkpoint_directory is not None

    def save(self, step: int) -> None:
        """Write this rank's part. Raises CheckpointError; nothing that existed is lost then."""
        self._write(step, shards=self._runtime.rank == WRITER)
        self._pending = step

    def publish_pending(self) -> None:
        """Make the checkpoint that is waiting complete, and drop the oldest. After a barrier."""
        step, self._pending = self._pending, None
        if step is None or self._runtime.rank != WRITER:
            return
        checkpoint.publish(self._directory, step, world_size=self._runtime.world_size)
        checkpoint.prune(self._directory, keep=self._settings.checkpoint_keep)

    def forget_pending(self) -> None:
        """A recovery has begun: whether everybody has written is not known any more."""
        self._pending = None

    def save_emergency(self, step: int, *, publish: bool) -> tuple[str, str]:
        """Write what a parked rank holds; returns where, and what went wrong (empty: nothing)."""
        try:
            self._write(step, shards=publish)
            for copy in self._runtime.black_box.copies():
                blob = self._runtime.own_states.read(copy.rank, copy.step)
                if copy.step == step and copy.rank != self._runtime.rank and blob is not None:
                    checkpoint.save_own(self._directory, step, copy.rank, blob)
            if not publish:
                return self._directory, ""
            return str(checkpoint.publish(self._directory, step, world_size=self._runtime.world_size)), ""
        except CheckpointError as error:
            return self._directory, str(error)

    @property
    def _directory(self) -> str:
        directory = self._settings.checkpoint_directory
        if directory is None:
            raise CheckpointError("the policy names no checkpoint directory")
        return directory

    def _write(self, step: int, *, shards: bool) -> None:
        own = self._runtime.own_states.read(self._runtime.rank, step)
        if own is None:
            raise CheckpointError(f"rank {self._runtime.rank} has no copy of its own state as of step {step}")
        checkpoint.save_own(self._directory, step, self._runtime.rank, own)
        if shards:
            for hold in self._framework.shards():
                checkpoint.save_shard(self._directory, step, hold.shard_id, self._framework.open_shard(hold.shard_id))
