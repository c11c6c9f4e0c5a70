"""The files of a checkpoint directory: how they are made, opened and removed, and what a manifest may say of them.

The directory lies on a file system that others can write to as well. Nothing is read, written or removed through a
symbolic link there, nothing is waited for that is no regular file, and nothing is removed that midstep has not
written. What midstep makes is never writable for the group or for others, whatever the umask; a stricter umask makes
it stricter.

Nothing in a manifest is believed that could not be true. It names files, so each name must be one that midstep gives,
and the ranks' local states must be those of its world, no more and no fewer.
"""

import contextlib
import dataclasses
import errno
import functools
import logging
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, BinaryIO, TypeVar

import msgspec
import xxhash

from ...protocol.decoders import json_decoder
from ...protocol.errors import CheckpointError

FILE_MODE = 0o640
DIRECTORY_MODE = 0o750
MANIFEST = "manifest.json"
DAMAGED = "manifest.damaged.json"
DAMAGE = "manifest.damaged.txt"  # what was found, in words
RECORD = ".part.json"
MARK = "world.json"  # of the world that completes checkpoints here, see Fence
_DRAFT = ".part.new"
SHARD = ".safetensors"
METADATA = ".metadata"  # of torch.distributed.checkpoint (DCP), whose files have the names that torch gives them
FOREIGN_DAMAGE = "midstep-found-damage.txt"  # in a directory that midstep has not written
MOST_DAMAGE_BYTES = 4096
MOST_MANIFEST_BYTES = 64 << 20  # a hundred thousand ranks take a tenth of it
_PART = rf"(?:own-\d{{1,9}}\.bin|[A-Za-z0-9._-]+{re.escape(SHARD)}|__\d{{1,9}}_\d{{1,9}}\.distcp|{re.escape(METADATA)})"
_BESIDE = r"(?:\.part\.json|\.[0-9a-f]{8}\.part\.new)"  # its record, or a draft
_MANIFESTS = "|".join(map(re.escape, (MANIFEST, DAMAGED, DAMAGE)))
_OWN_FILE = re.compile(rf"{_MANIFESTS}|{_PART}{_BESIDE}?")
_ONLY_OURS = re.compile(rf"{_MANIFESTS}|own-\d{{1,9}}\.bin(?:\.part\.json)?")
_PART_NAME = re.compile(_PART)
_log = logging.getLogger("midstep")
_PIECE_BYTES = 8 << 20
FORMAT = 1
MOST_RANKS = 1 << 20
MOST_STEPS = 10**15
MOST_OWN_BYTES = 1 << 30  # no black box is larger
Record = TypeVar("Record")


@functools.lru_cache(maxsize=1024)
def warn_once(text: str) -> None:
    """Log a warning that would otherwise be repeated with each look at the directory."""
    _log.warning("%s", text)


@contextlib.contextmanager
def told(doing: str) -> Iterator[None]:
    """Turn an OSError into a CheckpointError that says what could not be done."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot {doing}: {error}. Look at free space and permissions there") from error


def is_part(name: str) -> bool:
    """Return whether a file of a checkpoint can have this name: that of a shard, of a rank-local state, or DCP's."""
    return _PART_NAME.fullmatch(name) is not None


def draft_of(path: Path) -> Path:
    """Return a name beside a part that no other process has, under which it is written first."""
    return path.with_name(f"{path.name}.{secrets.token_hex(4)}{_DRAFT}")


def make_directory(path: Path) -> None:
    """Make a directory and those above it that are missing. Raises OSError."""
    missing: list[Path] = []
    place = path
    while not place.exists():
        missing.append(place)
        place = place.parent
    for each in reversed(missing):
        with contextlib.suppress(FileExistsError):  # another rank has made it
            each.mkdir(mode=DIRECTORY_MODE)


def warn_if_open(directory: str | Path) -> None:
    """Say so where others can write to a directory that the user has named. Raises OSError."""
    mode = Path(directory).stat().st_mode
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        warn_once(
            f"{directory} has mode {stat.S_IMODE(mode):o}: every user that can write there can replace checkpoints"
        )


def make_own_directory(path: Path) -> None:
    """Make a directory that nothing but midstep writes to. Raises OSError, also where it is a link or a file."""
    make_directory(path.parent)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=DIRECTORY_MODE)
    if not stat.S_ISDIR(path.lstat().st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "something else has its name", str(path))


def create(path: Path) -> BinaryIO:
    """Open a file that is not there yet, for writing. Raises OSError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, FILE_MODE), "wb", buffering=0)


def write_whole(path: Path, data: bytes, *, partial: Path) -> None:
    """Write a small file whole or not at all, in the place of what has its name. Raises OSError."""
    partial.unlink(missing_ok=True)
    with create(partial) as file:
        left = memoryview(data)
        while left:
            left = left[file.write(left) :]
    partial.replace(path)


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading, without waiting. Raises OSError, CheckpointError where it is no regular file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path} is damaged: it is no regular file")
    return os.fdopen(descriptor, "rb", buffering=0)


def read_small(path: Path, most_bytes: int) -> bytes:
    """Read a whole file. Raises OSError, CheckpointError where it is too large or no regular file."""
    with open_regular(path) as file:
        pieces, left = [], most_bytes + 1
        while left and (piece := file.read(left)):
            pieces.append(piece)
            left -= len(piece)
    if not left:
        raise CheckpointError(f"{path} is damaged: it has more than {most_bytes} bytes")
    return b"".join(pieces)


def holds_own_files(place: Path) -> bool:
    """Return whether a directory has a file that only midstep writes. Raises OSError."""
    return any(_ONLY_OURS.fullmatch(name) for name in os.listdir(place))


def remove_checkpoint(place: Path) -> None:
    """Remove what midstep has written into a directory, and the directory when it is empty then.

    What says that it is complete goes first: what is half removed must not look complete. Raises OSError.
    """
    descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        names = sorted(os.listdir(descriptor), key=lambda name: (name != MANIFEST, name != METADATA))
        for name in filter(_OWN_FILE.fullmatch, names):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=descriptor)
    finally:
        os.close(descriptor)
    place.rmdir()


_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]
_Counts = Annotated[tuple[_Count, ...], msgspec.Meta(max_length=64)]
_Key = tuple[str | int, ...]


class Item(msgspec.Struct, frozen=True, array_like=True):
    """One part of a tensor, or a value without shape, in a file of a DCP directory. `also`: other names of it."""

    path: _Key
    start: _Count
    size_bytes: _Count
    shape: _Counts | None = None  # of the whole tensor
    dtype: str = ""
    offsets: _Counts = ()
    sizes: _Counts = ()
    also: tuple[_Key, ...] = ()


class Part(msgspec.Struct, frozen=True, omit_defaults=True):
    """One file of a checkpoint. `items`: what is in a file of DCP, until the checkpoint is complete."""

    size_bytes: _Count
    checksum: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]  # xxh3, 64 bit, hexadecimal
    items: tuple[Item, ...] = ()


class Manifest(msgspec.Struct, frozen=True):
    """The contents of a complete checkpoint."""

    format: int
    step: Annotated[int, msgspec.Meta(ge=0, le=MOST_STEPS)]
    world_size: Annotated[int, msgspec.Meta(ge=1, le=MOST_RANKS)]
    parts: dict[str, Part]


def step_directory(directory: str | Path, step: int) -> Path:
    """Return where the complete checkpoint of `step` lies."""
    return Path(directory) / f"step-{step:08d}"


def own_name(rank: int) -> str:
    """Return the name of the file of a rank's local state."""
    return f"own-{rank}.bin"


def read_manifest(place: Path) -> Manifest:
    """Return the manifest of the checkpoint in a directory. Raises OSError, CheckpointError where it is damaged."""
    path = place / MANIFEST
    manifest = read_record(path, Manifest, MOST_MANIFEST_BYTES)
    wrong = _wrong(manifest, place)
    if wrong:
        raise CheckpointError(f"{path} is damaged: {wrong}")
    return manifest


def mark_damaged(place: Path, found: str) -> None:
    """Have the checkpoint in a directory count as damaged, and say of what. Idempotent. Raises OSError."""
    with contextlib.suppress(OSError), create(place / DAMAGE) as file:  # without it the mark still counts
        file.write(found.encode(errors="backslashreplace")[:MOST_DAMAGE_BYTES])
    with contextlib.suppress(FileNotFoundError):  # another rank has been here
        (place / MANIFEST).rename(place / DAMAGED)


def mark_foreign_damage(place: Path, found: str) -> None:
    """Have a directory that midstep has not written be passed over from now on. Idempotent. Raises OSError."""
    with contextlib.suppress(FileExistsError), create(place / FOREIGN_DAMAGE) as file:
        file.write(found.encode(errors="backslashreplace")[:MOST_DAMAGE_BYTES])


def damage_of(place: Path) -> str | None:
    """Return what was found in a checkpoint that is marked as damaged; None if it is not marked."""
    if not os.path.lexists(place / DAMAGED):
        return None
    try:
        return read_small(place / DAMAGE, MOST_DAMAGE_BYTES).decode(errors="replace")
    except (OSError, CheckpointError):
        return f"{place} was found to be damaged, and has {DAMAGED} since"


def read_record(path: Path, kind: type[Record], most_bytes: int) -> Record:
    """Return what a file of JSON holds. Raises OSError, CheckpointError where it is damaged."""
    try:
        return json_decoder(kind).decode(read_small(path, most_bytes))
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error


def _wrong(manifest: Manifest, place: Path) -> str:
    if manifest.format != FORMAT:
        return f"it has format {manifest.format}, and this version reads format {FORMAT}"
    if step_directory(place.parent, manifest.step) != place:
        return f"it is that of step {manifest.step}"
    foreign = next((name for name in manifest.parts if not is_part(name)), None)
    if foreign is not None:
        return f"it names {foreign[:64]!r}, which is no file of a checkpoint"
    own = [manifest.parts.get(own_name(rank)) for rank in range(min(manifest.world_size, len(manifest.parts)))]
    states = sum(name.startswith("own-") and name.endswith(".bin") for name in manifest.parts)
    if states != manifest.world_size or None in own or states == len(manifest.parts):
        ranks, names = manifest.world_size, len(manifest.parts)
        return f"it names {names} files, which are not the shards and rank-local states of {ranks} ranks"
    if any(part is not None and part.size_bytes > MOST_OWN_BYTES for part in own):
        return f"it names a rank-local state of more than {MOST_OWN_BYTES} bytes"
    return ""


@dataclasses.dataclass(frozen=True)
class Written:
    """A file that has reached the disk: its size and checksum."""

    size_bytes: int
    checksum: str


class HashedFile:
    """A file that is hashed while it is written; synced to the disk by `finish`."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = create(path)
        self._hash = xxhash.xxh3_64()
        self._size_bytes = 0

    @property
    def size_bytes(self) -> int:
        """How much was written."""
        return self._size_bytes

    def write(self, data: bytes | memoryview) -> None:
        """Write all of it."""
        left = memoryview(data)
        while left:
            piece = left[:_PIECE_BYTES]
            count = self._file.write(piece)
            self._hash.update(piece[:count])
            self._size_bytes += count
            left = left[count:]

    def finish(self) -> Written:
        """Bring it to the disk."""
        os.fsync(self._file.fileno())
        return Written(self._size_bytes, self._hash.hexdigest())

    def close(self) -> None:
        """Close it, finished or not."""
        self._file.close()
