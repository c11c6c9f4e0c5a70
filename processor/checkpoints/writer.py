"""Write checkpoints in training: when, which rank writes what, and when a checkpoint counts.

At a step boundary each rank writes its local state, and of the ranks that hold a shard one writes it. The checkpoint
is made complete after the next commit barrier: passing it proves that every rank has written its part.

Only the world that was led into training last completes checkpoints. A world that was given up for lost may train on:
no message reaches it. The directory does. Each world that writes checkpoints marks it before its state is brought back,
and a rank that finds the mark of another world makes nothing complete there any more. The same holds for two jobs that
were given one directory by mistake: the later one has it. The mark is looked at right before a checkpoint gets its
name. A world that takes over between the two is not seen; the result is a whole checkpoint of the world before it.
"""

import logging
import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec

from ...protocol.errors import CheckpointError, ConfigurationError
from ...protocol.types import CheckpointFormat
from ..framework import Portable
from . import archive
from .dcp import file_name, import_torch
from .files import MARK, make_directory, read_record, told, warn_if_open, write_whole

if TYPE_CHECKING:
    from ..framework import Framework
    from ..runtime import Runtime

PUBLISHER = 0
MOST_MARK_BYTES = 64 << 10
_NONCE_BYTES = 8
_Line = Annotated[str, msgspec.Meta(max_length=1024, pattern=r"^[^\x00-\x1f\x7f]*$")]  # it is said in the log

_log = logging.getLogger("midstep")


class CheckpointWriter:
    """This rank's share in the checkpoints of its job. Used by the train thread."""

    def __init__(self, runtime: "Runtime", framework: "Framework") -> None:
        self._runtime = runtime
        self._framework = framework
        self._settings = runtime.settings
        self._pending: tuple[int, str] | None = None  # step and attempt
        self._fence: Fence | None = None  # where this rank makes checkpoints complete
        self._portable = self._portable_framework()

    def take_over(self, generation: int) -> None:
        """Mark the directory: from here on checkpoints of this generation count, and no others.

        At the start of the way back. A failure is logged, and tried again when the first checkpoint is complete.
        """
        directory = self._settings.checkpoint_directory
        if directory is None or not self._settings.checkpoint_every_steps or self._runtime.rank != PUBLISHER:
            return
        self._fence = Fence(directory)
        try:
            self._fence.take(self._runtime.job, generation, self._runtime.node)
            with told(f"look at {directory}"):
                warn_if_open(directory)
        except CheckpointError as error:
            _log.error("%s", error)

    def due(self, committed: int) -> bool:
        """Return whether a checkpoint is to be written after this many updates."""
        every = self._settings.checkpoint_every_steps
        return every > 0 and committed % every == 0 and self._settings.checkpoint_directory is not None

    def save(self, step: int) -> None:
        """Write this rank's part. A failure (full disk, say) is logged, and training continues without it."""
        attempt = self._attempt(self._runtime.generation)
        try:
            self._write(step, attempt, self._framework.writes())
        except CheckpointError as error:
            _log.error("no checkpoint of step %d: %s", step, error)
        else:
            self._pending = (step, attempt)

    def publish_pending(self) -> None:
        """Make the checkpoint that is waiting complete, and drop the oldest. After a barrier."""
        pending, self._pending = self._pending, None
        if pending is None or self._fence is None:
            return
        step, attempt = pending
        try:
            other = self._fence.lost_to()
            if other is not None:
                _log.error("no checkpoint of step %d: %s has taken over %s", step, other, self._directory)
                archive.discard(self._directory, step, attempt=attempt)
                return
            archive.publish(self._directory, step, world_size=self._runtime.world_size, attempt=attempt)
            archive.prune(self._directory, keep=self._settings.checkpoint_keep, written=step)
        except CheckpointError as error:
            _log.error("%s", error)

    def forget_pending(self) -> None:
        """Drop the checkpoint that is waiting: after a fault it is not known whether all parts are written."""
        self._pending = None

    def save_emergency(self, step: int, generation: int, *, publish: bool, shards: Sequence[str]) -> tuple[str, str]:
        """Write what a parked rank holds; returns where, and what went wrong (empty: nothing).

        Copies of other ranks' local states are written too: their owners may be dead. Ranks that are new to the world,
        and have not trained in it, have none that would be missed.
        """
        attempt = self._attempt(generation)
        try:
            self._write(step, attempt, shards)
            for copy in self._runtime.black_box.copies():
                blob = self._runtime.local_states.read(copy.rank, copy.step)
                if copy.step == step and copy.rank != self._runtime.rank and blob is not None:
                    archive.save_local(self._directory, step, copy.rank, blob, attempt=attempt)
            if not publish:
                return self._directory, ""
            place = archive.publish(self._directory, step, world_size=self._runtime.former_size, attempt=attempt)
            return str(place), ""
        except CheckpointError as error:
            return self._directory, str(error)

    def _portable_framework(self) -> Portable | None:
        """Return the framework if its checkpoints are directories of torch.distributed.checkpoint.

        Raises ConfigurationError where the policy asks for those, and the state has no names that torch knows.
        """
        framework = self._framework
        if self._settings.checkpoint_format is not CheckpointFormat.DCP:
            return None
        if not isinstance(framework, Portable):
            raise ConfigurationError(
                f"checkpoint.format: dcp in the policy asks for torch.distributed.checkpoint, for which a "
                f"{type(framework).__name__} has no names. Leave it out: checkpoints are safetensors then"
            )
        for hold in framework.shards():
            framework.layout(hold.shard_id)
        if self._runtime.rank == PUBLISHER:
            import_torch()
        return framework

    def _attempt(self, generation: int) -> str:
        return f"{self._runtime.job}-g{generation}"

    @property
    def _directory(self) -> str:
        directory = self._settings.checkpoint_directory
        if directory is None:
            raise CheckpointError("the policy names no checkpoint directory")
        return directory

    def _write(self, step: int, attempt: str, shards: Sequence[str]) -> None:
        own = self._runtime.local_states.read(self._runtime.rank, step)
        if own is None:
            raise CheckpointError(f"rank {self._runtime.rank} has no copy of its local state as of step {step}")
        for number, shard_id in enumerate(shards):
            if self._portable is not None:
                name = file_name(self._runtime.rank, number)
                archive.save_portable(self._directory, step, name, shard_id, self._portable, attempt=attempt)
                continue
            archive.save_shard(self._directory, step, shard_id, self._framework.open_shard(shard_id), attempt=attempt)
        # Comes last: that all rank-local states are there proves that all shards are, when it is published.
        archive.save_local(self._directory, step, self._runtime.rank, own, attempt=attempt)


class WorldMark(msgspec.Struct, frozen=True):
    """The mark of one world. For people to read, except for the nonce, which no other world has."""

    job: _Line
    generation: int
    node: _Line
    pid: int
    since: _Line
    nonce: _Line

    def __str__(self) -> str:
        return f"generation {self.generation} of job {self.job} (process {self.pid} on {self.node}, since {self.since})"


def mark_of(directory: Path) -> WorldMark | None:
    """Return the mark in a directory; None where there is none. Raises CheckpointError when it cannot be read."""
    path = directory / MARK
    with told(f"read {path}"):
        try:
            return read_record(path, WorldMark, MOST_MARK_BYTES)
        except FileNotFoundError:
            return None
        except CheckpointError as error:
            raise CheckpointError(f"{error}. Remove it if nothing else trains") from error


class Fence:
    """One process's view of the mark in one directory."""

    def __init__(self, directory: str | Path) -> None:
        self._path = Path(directory) / MARK
        self._mine: WorldMark | None = None
        self._written = False

    def take(self, job: str, generation: int, node: str) -> None:
        """Mark the directory as this world's. Runs at the start of the way back, on the rank that publishes.

        Raises CheckpointError when the file system refuses; `lost_to` tries again then.
        """
        since = time.strftime("%Y-%m-%d %H:%M:%S %z")
        self._mine = WorldMark(job, generation, node, os.getpid(), since, secrets.token_hex(_NONCE_BYTES))
        self._written = False
        self._write()

    def lost_to(self) -> WorldMark | None:
        """Return the mark of a world that has taken over since; None where checkpoints of this one count.

        Raises CheckpointError when the mark cannot be read.
        """
        if not self._written:
            self._write()
            return None
        found = mark_of(self._path.parent)
        if found is None:  # the directory was cleared
            self._write()
        return None if found == self._mine else found

    def _write(self) -> None:
        partial = self._path.with_suffix(f".{os.getpid()}.new")
        with told(f"write {self._path}"):
            make_directory(partial.parent)
            write_whole(self._path, msgspec.json.format(msgspec.json.encode(self._mine), indent=1), partial=partial)
        self._written = True
