"""The files of torch.distributed.checkpoint (DCP): tensors by name, in parts, which a world of any size reads.

A rank writes its pieces of a shard into one file, `__<rank>_<number>.distcp`, and says beside it what lies where. The
rank that makes the checkpoint complete writes `.metadata` from that. No collective is done for it, and no file is
written twice. How they are read is in `dcp_files.py` and `dcp_loading.py`.
"""

import importlib
import math
import pickle
from collections.abc import Iterable, Mapping
from typing import Any

from ...communicators.host_memory import TORCH, dtype_name
from ...protocol.errors import CheckpointError, UnsupportedState
from .. import tree
from ..framework import OpenShard
from ..shard_layout import ShardLayout, entries
from .files import HashedFile, Item

SUFFIX = ".distcp"


def file_name(rank: int, number: int) -> str:
    """Return the name that torch gives to such a file of a rank."""
    return f"__{rank}_{number}{SUFFIX}"


def order_of(name: str) -> tuple[int, ...]:
    """Return by what files are ordered: of entries that several have, those of the first are read."""
    return tuple(int(each) for each in name.removesuffix(SUFFIX).strip("_").split("_"))


def write_shard(
    file: HashedFile, shard: OpenShard, layout: ShardLayout, buffers: Mapping[str, Any]
) -> tuple[Item, ...]:
    """Write the pieces of a shard, and the values beside them; returns what lies where.

    Raises OSError, and CheckpointError for what has no name there or cannot be written.
    """
    items = []
    try:
        for entry in entries(tree.unflatten(shard.header, shard.tensors), layout, buffers):
            start, value = file.size_bytes, entry.value
            if entry.shape is None:
                TORCH.save(value, _Stream(file))
                items.append(Item(entry.path, start, file.size_bytes - start))
            elif value.numel() or 0 in entry.shape:  # a piece may be empty where a tensor has fewer rows than ranks
                TORCH.save(_alone(value), _Stream(file))
                size_bytes, dtype = file.size_bytes - start, dtype_name(value.dtype)
                sizes = tuple(value.shape)
                items.append(Item(entry.path, start, size_bytes, entry.shape, dtype, entry.offsets, sizes, entry.also))
    except UnsupportedState as error:
        raise CheckpointError(f"{error}. Set checkpoint.format: safetensors in the policy") from error
    return tuple(items)


class _Stream:
    """A file as torch.save takes one."""

    def __init__(self, file: HashedFile) -> None:
        self._file = file

    def write(self, data: Any) -> int:
        """Write all of it."""
        self._file.write(memoryview(data).cast("B"))
        return len(data)

    def flush(self) -> None:
        """Do nothing: `finish` brings the file to the disk."""


def _alone(tensor: Any) -> Any:
    """Return a tensor on the host without the rest of the memory that it is a view of: all of that would be written."""
    host = tensor.detach().cpu()
    alone = host.is_contiguous() and host.untyped_storage().nbytes() == host.nbytes
    return host if alone else host.clone(memory_format=TORCH.contiguous_format)


def metadata_of(parts: Mapping[str, Iterable[Item]]) -> bytes:
    """Return the contents of `.metadata` for the items of some files, of which the first of two alike counts.

    Raises CheckpointError where files contradict each other, or a tensor is not all there.
    """
    from torch.distributed.checkpoint import metadata as torch_metadata
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    kinds: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    for file, item in ((file, item) for file, items in parts.items() for item in items):
        for path in (item.path, *item.also):
            key = ".".join(map(str, path))
            if paths.setdefault(key, path) != path:
                raise CheckpointError(f"two things in {file} are called {key!r}: name the modules differently")
            where = torch_metadata.MetadataIndex(key, None if item.shape is None else item.offsets)
            if where in places:
                continue
            places[where] = _StorageInfo(file, item.start, item.size_bytes)
            _describe(kinds, key, item, file, torch_metadata)
    for key, kind in kinds.items():
        if isinstance(kind, torch_metadata.TensorStorageMetadata):
            _check_whole(key, kind)
    return pickle.dumps(torch_metadata.Metadata(kinds, planner_data=paths, storage_data=places))


def _describe(kinds: dict[str, Any], key: str, item: Item, file: str, torch_metadata: Any) -> None:
    """Add one item to what is known of its key."""
    if item.shape is None:
        kinds.setdefault(key, torch_metadata.BytesStorageMetadata())
        return
    dtype = tree.dtype_of(item.dtype)
    chunk = torch_metadata.ChunkStorageMetadata(TORCH.Size(item.offsets), TORCH.Size(item.sizes))
    properties = torch_metadata.TensorProperties(dtype=dtype)
    kind = kinds.setdefault(key, torch_metadata.TensorStorageMetadata(properties, TORCH.Size(item.shape), []))
    alike = isinstance(kind, torch_metadata.TensorStorageMetadata)
    if not alike or (tuple(kind.size), kind.properties.dtype) != (item.shape, dtype):
        raise CheckpointError(f"{key!r} is something else in {file} than in another part: do all ranks build the same?")
    kind.chunks.append(chunk)


def _check_whole(key: str, kind: Any) -> None:
    held = sum(math.prod(chunk.sizes) for chunk in kind.chunks)
    if held != math.prod(kind.size):
        raise CheckpointError(f"of {key!r} there are {held} of {math.prod(kind.size)} elements: a part is missing")


def import_torch() -> None:
    """Import what `metadata_of` needs, which takes a moment: before training begins."""
    importlib.import_module("torch.distributed.checkpoint")
