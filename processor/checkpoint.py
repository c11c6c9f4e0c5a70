"""Checkpoints on a file system that all nodes share: the last resort when every copy of a state is gone.

`<directory>/step-00000120/` holds a safetensors file for each shard, `own-<rank>.bin` for each rank and
`manifest.json` with sizes and checksums. All parts are written into `step-00000120.tmp-<attempt>/` and brought to the
disk; the folder gets its name when all of them are there. So a folder with the plain name is complete, whatever died
in between. Nothing that is read here can run code.

Who does what: at a step's end each rank calls `save_own`, one of them `save_shard` for each shard; when all have done
so (a barrier), one calls `publish`, then `prune`. All of one attempt use the same `attempt` text.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import xxhash

from ..protocol.errors import CheckpointError
from .lifecycle import Framework, OpenShard
from .shard_file import HashedFile, Written, read_shard, write_shard

FORMAT = 1
ATTEMPT = "0"  # for callers that never have two attempts at one step under way
MANIFEST = "manifest.json"
DAMAGED = "manifest.damaged.json"
_RECORD = ".part.json"
_SHARD = ".safetensors"
_COMPLETE = re.compile(r"step-(\d{8,})")
_UNFINISHED = re.compile(r"step-(\d{8,})\.(?:tmp|old)-.+")

Record = TypeVar("Record")


class Part(msgspec.Struct, frozen=True):
    """One file of a checkpoint."""

    size_bytes: int
    checksum: str  # xxh3, 64 bit, hexadecimal


class Manifest(msgspec.Struct, frozen=True):
    """What a complete checkpoint consists of."""

    format: int
    step: int
    world_size: int
    parts: dict[str, Part]


def shard_name(shard_id: str) -> str:
    """Return the name of the file of a shard."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", shard_id) + _SHARD


def own_name(rank: int) -> str:
    """Return the name of the file of a rank's own state."""
    return f"own-{rank}.bin"


def step_directory(directory: str | Path, step: int) -> Path:
    """Return where the complete checkpoint of `step` lies."""
    return Path(directory) / f"step-{step:08d}"


def save_shard(directory: str | Path, step: int, shard_id: str, shard: OpenShard, *, attempt: str = ATTEMPT) -> int:
    """Write a shard as a part of a checkpoint; returns its bytes. Raises CheckpointError; what existed is untouched."""
    with _part(directory, step, attempt, shard_name(shard_id)) as file:
        write_shard(file, shard)
        return _record(directory, step, attempt, shard_name(shard_id), file.finish())


def save_own(directory: str | Path, step: int, rank: int, blob: bytes, *, attempt: str = ATTEMPT) -> int:
    """Write a rank's own state as a part of a checkpoint; returns its bytes. Raises CheckpointError."""
    with _part(directory, step, attempt, own_name(rank)) as file:
        file.write(blob)
        return _record(directory, step, attempt, own_name(rank), file.finish())


def publish(
    directory: str | Path,
    step: int,
    *,
    world_size: int,
    shard_ids: Sequence[str] | None = None,
    attempt: str = ATTEMPT,
) -> Path:
    """Make the checkpoint complete: all parts are there, so it gets its name. Returns where it lies.

    `shard_ids`: the shards that it must have; None: those that were written, at least one.
    Raises CheckpointError when a part is missing or the file system refuses; complete checkpoints stay as they are.
    """
    unfinished, final = _unfinished(directory, step, attempt), step_directory(directory, step)
    with _told(f"make the checkpoint {final} complete"):
        written = {path.name.removesuffix(_RECORD) for path in unfinished.glob(f"*{_RECORD}")}
        shards = sorted(name for name in written if name.endswith(_SHARD)) or [f"*{_SHARD}"]
        if shard_ids is not None:
            shards = [shard_name(shard_id) for shard_id in shard_ids]
        names = [*shards, *map(own_name, range(world_size))]
        missing = [name for name in names if name not in written]
        if missing:
            raise CheckpointError(
                f"the checkpoint of step {step} cannot be made complete: {unfinished} lacks {', '.join(missing[:5])} "
                f"({len(missing)} of {len(names)} parts). Do all nodes see the same {directory}?"
            )
        parts = {name: _read(unfinished / (name + _RECORD), Part) for name in names}
        manifest = msgspec.json.encode(Manifest(FORMAT, step, world_size, parts))
        with contextlib.closing(HashedFile(unfinished / MANIFEST)) as file:
            file.write(msgspec.json.format(manifest, indent=1))
            file.finish()
        for name in names:
            (unfinished / (name + _RECORD)).unlink()
        _sync(unfinished)
        _give_name(unfinished, final)
    return final


def discard(directory: str | Path, step: int, *, attempt: str = ATTEMPT) -> None:
    """Remove the parts of an attempt that failed. Raises CheckpointError when they cannot be removed."""
    with _told(f"remove {_unfinished(directory, step, attempt)}"), contextlib.suppress(FileNotFoundError):
        shutil.rmtree(_unfinished(directory, step, attempt))


def complete_steps(directory: str | Path) -> tuple[int, ...]:
    """Return the steps whose checkpoints are complete, ascending; checks that the files are there in full size.

    Raises CheckpointError when the directory exists and cannot be read.
    """
    with _told(f"look for checkpoints in {directory}"):
        try:
            names = os.listdir(directory)
        except FileNotFoundError:
            return ()
        steps = sorted(int(match[1]) for name in names if (match := _COMPLETE.fullmatch(name)))
        return tuple(step for step in steps if _is_whole(step_directory(directory, step)))


def load_shard(directory: str | Path, step: int, shard_id: str, framework: Framework) -> int:
    """Read a shard and make it the state of this rank; returns its bytes. In repair.

    Raises CheckpointError when the file is missing or damaged. A damaged checkpoint is marked, so that
    `complete_steps` no longer offers it and the next attempt takes an older one.
    """
    path = step_directory(directory, step) / shard_name(shard_id)
    with _told(f"read {path}"):
        part = _expected(path)
    with _told(f"read {path}"), _marking_damage(path.parent):
        _same_size(path, part)
        shard = read_shard(path, part.checksum, lambda header: framework.accept_shard(shard_id, header))
    framework.adopt_shard(shard_id, shard)
    return part.size_bytes


def world_size_of(directory: str | Path, step: int) -> int:
    """Return how many ranks wrote the checkpoint of a step. Raises CheckpointError when it cannot be read."""
    path = step_directory(directory, step) / MANIFEST
    with _told(f"read {path}"):
        return _read(path, Manifest).world_size


def load_own(directory: str | Path, step: int, rank: int) -> bytes:
    """Read a rank's own state. Raises CheckpointError as `load_shard` does."""
    path = step_directory(directory, step) / own_name(rank)
    with _told(f"read {path}"):
        part = _expected(path)
    with _told(f"read {path}"), _marking_damage(path.parent):
        _same_size(path, part)
        blob = path.read_bytes()
        if xxhash.xxh3_64_hexdigest(blob) != part.checksum:
            raise CheckpointError(f"{path} is damaged: its checksum is not the one it was written with")
    return blob


def prune(directory: str | Path, keep: int) -> tuple[int, ...]:
    """Remove all but the newest `keep` complete checkpoints, and what older attempts left; returns the steps removed.

    Raises CheckpointError when something cannot be removed.
    """
    steps = complete_steps(directory)
    gone = steps[: max(0, len(steps) - max(1, keep))]
    with _told(f"remove old checkpoints in {directory}"):
        for step in gone:
            # The manifest goes first: a folder that is half removed must not look complete.
            (step_directory(directory, step) / MANIFEST).unlink()
            shutil.rmtree(step_directory(directory, step))
        for name in os.listdir(directory) if steps else ():
            match = _UNFINISHED.fullmatch(name)
            if match and int(match[1]) < steps[-1]:
                shutil.rmtree(Path(directory) / name)
    return gone


def _unfinished(directory: str | Path, step: int, attempt: str) -> Path:
    if not re.fullmatch(r"[A-Za-z0-9._-]+", attempt):
        raise CheckpointError(f"an attempt is named with letters, digits, '.', '-' and '_', not {attempt!r}")
    final = step_directory(directory, step)
    return final.with_name(f"{final.name}.tmp-{attempt}")


@contextlib.contextmanager
def _part(directory: str | Path, step: int, attempt: str, name: str) -> Iterator[HashedFile]:
    """Open one part for writing; a part that was not finished is removed again."""
    path = _unfinished(directory, step, attempt) / name
    with _told(f"write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # the same attempt, once more
        with contextlib.closing(HashedFile(path)) as file:
            try:
                yield file
            except BaseException:
                path.unlink(missing_ok=True)
                raise


def _record(directory: str | Path, step: int, attempt: str, name: str, written: Written) -> int:
    """Write down beside a part what it should be, for whoever writes the manifest."""
    path = _unfinished(directory, step, attempt) / (name + _RECORD)
    partial = path.with_suffix(".new")
    partial.write_bytes(msgspec.json.encode(Part(written.size_bytes, written.checksum)))
    partial.replace(path)
    return written.size_bytes


def _give_name(unfinished: Path, final: Path) -> None:
    aside = final.with_name(f"{final.name}.old-{unfinished.name.rpartition('tmp-')[2]}")
    replaces = final.exists()
    if replaces:  # the same step once more, after a recovery
        final.rename(aside)
    try:
        unfinished.rename(final)
    except OSError:
        if replaces:
            aside.rename(final)
        raise
    _sync(final.parent)
    if replaces:
        shutil.rmtree(aside)


def _is_whole(place: Path) -> bool:
    try:
        manifest = _read(place / MANIFEST, Manifest)
        sizes = {name: (place / name).stat().st_size for name in manifest.parts}
    except (FileNotFoundError, CheckpointError):
        return False
    same_format = manifest.format == FORMAT and step_directory(place.parent, manifest.step) == place
    return same_format and all(sizes[name] == part.size_bytes for name, part in manifest.parts.items())


def _expected(path: Path) -> Part:
    part = _read(path.parent / MANIFEST, Manifest).parts.get(path.name)
    if part is None:
        raise CheckpointError(f"{path.parent} has no {path.name}: it was written by another job, or another world size")
    return part


def _same_size(path: Path, part: Part) -> None:
    if path.stat().st_size != part.size_bytes:
        raise CheckpointError(f"{path} is damaged: it has {path.stat().st_size} bytes instead of {part.size_bytes}")


def _read(path: Path, kind: type[Record]) -> Record:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error


@contextlib.contextmanager
def _marking_damage(place: Path) -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        with contextlib.suppress(FileNotFoundError):  # another rank has been here
            try:
                (place / MANIFEST).rename(place / DAMAGED)
            except PermissionError as refused:
                error.add_note(f"it could not be marked as damaged, and will be tried again: {refused}")
        raise


@contextlib.contextmanager
def _told(doing: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot {doing}: {error}. Look at free space and permissions there") from error


def _sync(place: Path) -> None:
    descriptor = os.open(place, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
