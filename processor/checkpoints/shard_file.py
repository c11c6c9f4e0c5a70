"""A shard as a file in the safetensors format, written from and read into the tensors' own memory.

Any safetensors reader can open it; there is nothing in it that could run. The shard's header lies in the file's
metadata. Written by hand because the library makes a second copy of every tensor in memory first.
"""

import base64
import dataclasses
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import xxhash

from ...communicators import host_memory
from ...communicators.host_memory import memory_of
from ...protocol.errors import CheckpointError, RecoveryError
from .. import tree
from ..framework import OpenShard
from .files import create, open_regular

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


@dataclasses.dataclass(frozen=True)
class Written:
    """A file that has reached the disk: its size and checksum."""

    size_bytes: int
    checksum: str


class _Place(msgspec.Struct, frozen=True):
    """Where a tensor lies in the file, after the index."""

    data_offsets: tuple[int, int]


class HashedFile:
    """A file that is hashed while it is written; synced to the disk by `finish`."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = create(path)
        self._hash = xxhash.xxh3_64()
        self._size_bytes = 0

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


def write_shard(file: HashedFile, shard: OpenShard) -> None:
    """Write a shard; its tensors are not copied unless they lie on a device."""
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
    file.write(_LENGTH.pack(len(text)))
    file.write(text)
    for tensor in shard.tensors:
        file.write(memory_of(tree.tensor_bytes(tensor)))


def read_shard(path: Path, checksum: str, accept: Callable[[bytes], OpenShard]) -> OpenShard:
    """Read a shard into what `accept` makes of its header. Raises CheckpointError when the file is not what it was."""
    found = xxhash.xxh3_64()
    with open_regular(path) as file:
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
