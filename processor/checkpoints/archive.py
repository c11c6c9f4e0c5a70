"""Checkpoints on a file system that all nodes share: the last resort when every copy of a state is gone.

`<directory>/step-00000120/` holds a safetensors file for each shard, `own-<rank>.bin` for each rank and
`manifest.json` with sizes and checksums; or the files of torch.distributed.checkpoint instead of safetensors, see
`dcp.py`. All parts are written into `step-00000120.tmp-<attempt>/` and brought to the
disk; the folder gets its name when all of them are there. So a folder with the plain name is complete, whatever died
in between. Nothing that is read here can run code.

At a step's end each rank calls `save_local`, one of them `save_shard` for each shard; when all have done
so (a barrier), one calls `publish`, then `prune`. All of one attempt use the same `attempt` text.

A shard's file is written from the tensors' own memory and read into it. Any safetensors reader can open it; the shard's
header lies in its metadata. It is written by hand because the library makes a second copy of every tensor first.
"""

import base64
import contextlib
import json
import os
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import xxhash

from ...communicators import host_memory
from ...communicators.host_memory import memory_of
from ...protocol.errors import CheckpointError, RecoveryError, StateUnreadable
from .. import tree
from ..framework import Framework, OpenShard, Portable
from ..shard_layout import ShardLayout
from . import dcp, dcp_loading, files
from .entries import complete_steps as complete_steps
from .entries import forget_after as forget_after
from .entries import move_aside, note_latest
from .entries import prune as prune
from .entries import set_aside as set_aside

ATTEMPT = "0"  # for callers that never have two attempts at one step under way
HEADER_KEY = "midstep_header"
_METADATA = "__metadata__"
_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 8
_PIECE_BYTES = 8 * 1024 * 1024
_MAX_INDEX_BYTES = 1 << 30
_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}


def shard_name(shard_id: str) -> str:
    """Return the name of the file of a shard."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", shard_id) + files.SHARD


def save_shard(directory: str | Path, step: int, shard_id: str, shard: OpenShard, *, attempt: str = ATTEMPT) -> int:
    """Write a shard as a part of a checkpoint; returns its bytes. Raises CheckpointError; what existed is untouched."""
    return _save(directory, step, attempt, shard_name(shard_id), lambda file: write_shard(file, shard))


def save_portable(
    directory: str | Path, step: int, name: str, shard_id: str, framework: Portable, *, attempt: str = ATTEMPT
) -> int:
    """Write a shard as torch.distributed.checkpoint has it, into a file of this name; returns its bytes.

    Raises CheckpointError; what existed is untouched.
    """
    shard, layout = framework.open_shard(shard_id), framework.layout(shard_id)
    buffers = framework.buffers()
    return save_laid_out(directory, step, name, shard, layout=layout, buffers=buffers, attempt=attempt)


def save_laid_out(
    directory: str | Path,
    step: int,
    name: str,
    shard: OpenShard,
    *,
    layout: ShardLayout,
    buffers: Mapping[str, Any],
    attempt: str,
) -> int:
    """Do what `save_portable` does, for a shard of which layout and buffers are at hand."""
    return _save(directory, step, attempt, name, lambda file: dcp.write_shard(file, shard, layout, buffers))


def save_pieces(
    directory: str | Path, step: int, shard_id: str, pieces: Sequence[bytes | memoryview], *, attempt: str
) -> int:
    """Do what `save_shard` does, for a shard of which the bytes of the file are at hand, in pieces."""

    def write(file: files.HashedFile) -> None:
        for piece in pieces:
            file.write(piece)

    return _save(directory, step, attempt, shard_name(shard_id), write)


def save_local(directory: str | Path, step: int, rank: int, blob: bytes, *, attempt: str = ATTEMPT) -> int:
    """Write a rank's local state as a part of a checkpoint; returns its bytes. Raises CheckpointError."""
    return _save(directory, step, attempt, files.own_name(rank), lambda file: file.write(blob))


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
    unfinished, final = _unfinished(directory, step, attempt), files.step_directory(directory, step)
    with files.told(f"make the checkpoint {final} complete"):
        written = {path.name.removesuffix(files.RECORD) for path in unfinished.glob(f"*{files.RECORD}")}
        portable = sorted((name for name in written if name.endswith(dcp.SUFFIX)), key=dcp.order_of)
        shards = portable or sorted(name for name in written if name.endswith(files.SHARD)) or [f"*{files.SHARD}"]
        if shard_ids is not None:
            shards = [shard_name(shard_id) for shard_id in shard_ids]
        names = [*shards, *map(files.own_name, range(world_size))]
        missing = [name for name in names if name not in written]
        if missing:
            raise CheckpointError(
                f"the checkpoint of step {step} cannot be made complete: {unfinished} lacks {', '.join(missing[:5])} "
                f"({len(missing)} of {len(names)} parts). Do all nodes see the same {directory}?"
            )
        parts = {
            name: files.read_record(unfinished / (name + files.RECORD), files.Part, files.MOST_MANIFEST_BYTES)
            for name in names
        }
        if portable:
            metadata = dcp.metadata_of({name: parts[name].items for name in portable})
            parts[files.METADATA] = _write_beside(unfinished / files.METADATA, metadata)
            parts = {name: files.Part(part.size_bytes, part.checksum) for name, part in parts.items()}
        manifest = msgspec.json.encode(files.Manifest(files.FORMAT, step, world_size, parts))
        _write_beside(unfinished / files.MANIFEST, msgspec.json.format(manifest, indent=1))
        for name in names:
            (unfinished / (name + files.RECORD)).unlink()
        _sync(unfinished)
        _give_name(unfinished, final)
        note_latest(directory, step)
    return final


def is_written(directory: str | Path, step: int, *, world_size: int, attempt: str) -> bool:
    """Return whether all ranks have written their parts. Raises CheckpointError where that cannot be seen."""
    unfinished = _unfinished(directory, step, attempt)
    with files.told(f"look into {unfinished}"):
        written = set(os.listdir(unfinished))
    return all(files.own_name(rank) + files.RECORD in written for rank in range(world_size))


def discard(directory: str | Path, step: int, *, attempt: str = ATTEMPT) -> None:
    """Remove the parts of an attempt that failed. Raises CheckpointError when they cannot be removed."""
    with files.told(f"remove {_unfinished(directory, step, attempt)}"), contextlib.suppress(FileNotFoundError):
        files.remove_checkpoint(_unfinished(directory, step, attempt))


def load_shard(directory: str | Path, step: int, shard_id: str, framework: Framework) -> int:
    """Read a shard and make it the state of this rank; returns its bytes. In repair.

    Raises CheckpointError when the file is missing or damaged, RecoveryError when it is not for this model. A damaged
    checkpoint is marked, so that `complete_steps` no longer offers it and the next attempt takes an older one.
    """
    place = files.step_directory(directory, step)
    path = place / shard_name(shard_id)
    with files.told(f"read {place}"):
        parts = _manifest(place).parts if _is_own(place) else None
    if parts is None or files.METADATA in parts:
        if not isinstance(framework, Portable):
            raise CheckpointError(
                f"{place} was written by torch.distributed.checkpoint, which a {type(framework).__name__} does not "
                "read. Give the job another checkpoint.directory"
            )
        with files.told(f"read {place}"), _marking_damage(place):
            return dcp_loading.load_shard(place, shard_id, framework, parts)
    with files.told(f"read {path}"):
        part = _expected(path)
    with files.told(f"read {path}"), _marking_damage(path.parent):
        _same_size(path, part)
        shard = read_shard(path, part.checksum, lambda header: framework.accept_shard(shard_id, header))
    try:
        framework.adopt_shard(shard_id, shard)
    except RecoveryError:
        raise
    except Exception as error:  # whatever a framework raises over a shard of another model
        raise RecoveryError(f"{path} is not for this model: {error}") from error
    return part.size_bytes


def world_size_of(directory: str | Path, step: int) -> int | None:
    """Return how many ranks wrote the checkpoint of a step. Raises CheckpointError when it cannot be read.

    None: it was written by torch alone, and has no rank-local states.
    """
    path = files.step_directory(directory, step) / files.MANIFEST
    with files.told(f"read {path}"):
        return _manifest(path.parent).world_size if _is_own(path.parent) else None


def load_local(directory: str | Path, step: int, rank: int) -> bytes:
    """Read a rank's local state. Raises CheckpointError as `load_shard` does."""
    path = files.step_directory(directory, step) / files.own_name(rank)
    with files.told(f"read {path}"):
        part = _expected(path)
    with files.told(f"read {path}"), _marking_damage(path.parent):
        _same_size(path, part)
        blob = files.read_small(path, files.MOST_OWN_BYTES)
        if xxhash.xxh3_64_hexdigest(blob) != part.checksum:
            raise CheckpointError(f"{path} is damaged: its checksum is not the one it was written with")
    return blob


@contextlib.contextmanager
def restoring_local(directory: str | Path, step: int, rank: int) -> Iterator[None]:
    """Take the file of a rank's local state for damaged if its bytes, put back in this block, cannot be decoded.

    Its checksum was right, so whatever wrote it has written that. Raises CheckpointError as `load_shard` does.
    """
    path = files.step_directory(directory, step) / files.own_name(rank)
    with _marking_damage(path.parent):
        try:
            yield
        except StateUnreadable as error:
            raise CheckpointError(f"{path}, of the checkpoint of step {step}, is damaged: {error}") from error


def _unfinished(directory: str | Path, step: int, attempt: str) -> Path:
    if not re.fullmatch(r"[A-Za-z0-9._-]+", attempt):
        raise CheckpointError(f"an attempt is named with letters, digits, '.', '-' and '_', not {attempt!r}")
    final = files.step_directory(directory, step)
    return final.with_name(f"{final.name}.tmp-{attempt}")


def _is_own(place: Path) -> bool:
    """Return whether midstep has written a directory, and not torch alone. Raises OSError."""
    return files.holds_own_files(place) or not (place / files.METADATA).exists()


def _write_beside(path: Path, data: bytes) -> files.Part:
    """Write a file of a checkpoint that is being made complete, whose parts are all there. Raises OSError.

    What an attempt of that name has left, which was ended in the middle of this, is replaced.
    """
    path.unlink(missing_ok=True)
    with contextlib.closing(files.HashedFile(path)) as file:
        file.write(data)
        written = file.finish()
    return files.Part(written.size_bytes, written.checksum)


def _save(directory: str | Path, step: int, attempt: str, name: str, write: Callable[[files.HashedFile], Any]) -> int:
    """Write a part, and beside it what it should be, for the rank that writes the manifest; returns its bytes.

    Each first gets a name of its own: the local state of a rank is written by that rank and, in an emergency,
    by those that keep a copy of it, at the same time. It has the same bytes whichever comes last.
    """
    path = _unfinished(directory, step, attempt) / name
    with files.told(f"write {path}"):
        files.make_own_directory(path.parent)
        draft = files.draft_of(path)
        try:
            with contextlib.closing(files.HashedFile(draft)) as file:
                items = write(file)
                written = file.finish()
            draft.replace(path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        record = msgspec.json.encode(files.Part(written.size_bytes, written.checksum, items or ()))
        files.write_whole(path.with_name(name + files.RECORD), record, partial=files.draft_of(path))
    return written.size_bytes


def _give_name(unfinished: Path, final: Path) -> None:
    attempt = unfinished.name.rpartition("tmp-")[2]
    aside = final.with_name(f"{final.name}.old-{attempt}")
    replaces = os.path.lexists(final)
    if replaces and (final.is_symlink() or not final.is_dir() or not files.holds_own_files(final)):
        move_aside(final, attempt)
        replaces = False
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
        try:
            files.remove_checkpoint(aside)
        except OSError as error:
            files.warn_once(f"cannot remove {aside} whole: {error}")


def _manifest(place: Path) -> files.Manifest:
    """Read the manifest. Raises OSError, CheckpointError: with what another rank has found, if it has marked that."""
    try:
        return files.read_manifest(place)
    except FileNotFoundError:
        found = files.damage_of(place)
        if found is None:
            raise
        raise CheckpointError(found) from None


def _expected(path: Path) -> files.Part:
    part = _manifest(path.parent).parts.get(path.name)
    if part is None:
        raise CheckpointError(f"{path.parent} has no {path.name}: it was written by another job, or another world size")
    return part


def _same_size(path: Path, part: files.Part) -> None:
    size_bytes = path.lstat().st_size
    if size_bytes != part.size_bytes:
        raise CheckpointError(f"{path} is damaged: it has {size_bytes} bytes instead of {part.size_bytes}")


@contextlib.contextmanager
def _marking_damage(place: Path) -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        try:
            if _is_own(place):
                files.mark_damaged(place, str(error))
            else:
                files.mark_foreign_damage(place, str(error))
        except OSError as refused:
            text = f"{error}; it could not be marked as damaged, and will be tried again: {refused}"
            raise CheckpointError(text) from error
        raise


def _sync(place: Path) -> None:
    descriptor = os.open(place, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _Place(msgspec.Struct, frozen=True):
    """The place of a tensor in the file, after the index."""

    data_offsets: tuple[int, int]


def write_shard(file: files.HashedFile, shard: OpenShard) -> None:
    """Write a shard; its tensors are not copied unless they lie on a device."""
    file.write(head_of(shard))
    for tensor in shard.tensors:
        file.write(memory_of(tree.tensor_bytes(tensor)))


def head_of(shard: OpenShard) -> bytes:
    """Return the bytes of a shard's file before those of its tensors, which follow one after the other."""
    names = getattr(shard, "names", None) or [f"tensor.{index:06d}" for index in range(len(shard.tensors))]
    index: dict[str, Any] = {_METADATA: {HEADER_KEY: base64.b64encode(shard.header).decode()}}
    offset = 0
    for name, tensor in zip(names, shard.tensors, strict=True):
        dtype = _DTYPES.get(host_memory.dtype_name(tensor.dtype))
        index[name] = {
            "dtype": dtype or "U8",
            "shape": list(tensor.shape) if dtype else [tensor.nbytes],
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(index, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return _LENGTH.pack(len(text)) + text


def read_shard(path: Path, checksum: str, accept: Callable[[bytes], OpenShard]) -> OpenShard:
    """Read a shard into what `accept` makes of its header. Raises CheckpointError when the file is not what it was."""
    found = xxhash.xxh3_64()
    with files.open_regular(path) as file:
        header, sizes = _read_index(file, path, found)
        try:
            shard = accept(header)
        except Exception as error:  # whatever a framework raises over a header that it did not write
            while piece := file.read(_PIECE_BYTES):
                found.update(piece)
            if found.hexdigest() != checksum:
                raise CheckpointError(f"{path} is damaged: its checksum is not the one it was written with") from error
            if isinstance(error, RecoveryError):
                raise  # the file is whole: it is not for this model
            raise RecoveryError(f"{path} is not for this model: {error}") from error
        if sizes != [tensor.nbytes for tensor in shard.tensors]:
            raise CheckpointError(f"{path} holds other tensors than its own header says: it is damaged")
        for tensor in shard.tensors:
            _read_tensor(file, path, tensor, found)
        if file.read(1) or found.hexdigest() != checksum:
            raise CheckpointError(f"{path} is damaged: its checksum is not the one it was written with")
    return shard


def _read_index(file: BinaryIO, path: Path, found: Any) -> tuple[bytes, list[int]]:
    """Return the shard's header, and how many bytes each tensor has."""
    damaged = CheckpointError(f"{path} is damaged: its index cannot be read")
    raw = file.read(_LENGTH.size)
    if len(raw) != _LENGTH.size:
        raise damaged
    (length,) = _LENGTH.unpack(raw)
    if length > min(_MAX_INDEX_BYTES, path.stat().st_size):
        raise damaged
    text = file.read(length)
    found.update(raw + text)
    try:
        entries = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(entries.pop(_METADATA), type=dict[str, str])
        header = base64.b64decode(metadata[HEADER_KEY])
        places = [msgspec.json.decode(entry, type=_Place).data_offsets for entry in entries.values()]
    except (msgspec.MsgspecError, ValueError, LookupError, RecursionError) as error:
        raise damaged from error
    return header, [end - start for start, end in places]


def _read_tensor(file: BinaryIO, path: Path, tensor: Any, found: Any) -> None:
    direct = host_memory.on_host(tensor)
    host = tensor if direct else host_memory.empty(tensor.shape, tensor.dtype)
    left = memory_of(host)
    while left:
        count = file.readinto(left[:_PIECE_BYTES])  # type: ignore[attr-defined]
        if not count:
            raise CheckpointError(f"{path} is damaged: it ends {len(left)} bytes too early in one of its tensors")
        found.update(left[:count])
        left = left[count:]
    if not direct:
        tensor.copy_(host)
