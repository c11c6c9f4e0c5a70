"""A fence for the checkpoint directory: only the world that was led into training last completes checkpoints.

A world that was given up for lost may train on: no message reaches it. The directory does, and each world that writes
checkpoints as it trains marks it before its state is brought back. A rank that finds the mark of another world makes
nothing complete there any more. So it is for two jobs that were given one directory by mistake: the later one has it.

The mark is looked at right before a checkpoint gets its name. Between the two a world that takes over is not seen; what
comes of that is a whole checkpoint of the world before it, as any that it wrote earlier.
"""

import contextlib
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec

from ...protocol.errors import CheckpointError
from .files import make_directory, read_record, write_whole

MARK = "world.json"
MOST_MARK_BYTES = 64 << 10
_NONCE_BYTES = 8

_Line = Annotated[str, msgspec.Meta(max_length=1024, pattern=r"^[^\x00-\x1f\x7f]*$")]  # it is said in the log


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


def is_marked(directory: str | Path) -> bool:
    """Return whether a world has marked a directory."""
    return os.path.lexists(Path(directory) / MARK)


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
        with self._told("read"):
            try:
                found = read_record(self._path, WorldMark, MOST_MARK_BYTES)
            except FileNotFoundError:  # the directory was cleared
                self._write()
                return None
            except CheckpointError as error:
                raise CheckpointError(f"{error}. Remove it if nothing else trains") from error
        return None if found == self._mine else found

    def _write(self) -> None:
        partial = self._path.with_suffix(f".{os.getpid()}.new")
        with self._told("write"):
            make_directory(partial.parent)
            write_whole(self._path, msgspec.json.format(msgspec.json.encode(self._mine), indent=1), partial=partial)
        self._written = True

    @contextlib.contextmanager
    def _told(self, doing: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"cannot {doing} {self._path}: {error}. Look at free space and permissions"
            ) from error
