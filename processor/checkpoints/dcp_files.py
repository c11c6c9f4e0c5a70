"""Reading the files of torch.distributed.checkpoint (DCP): values, and pieces of tensors.

A piece is read from all parts that overlap it, written by midstep or plain torch, in worlds of other sizes or
on other meshes. Parts are read by torch's `weights_only` reader, which runs no code of theirs.
"""

import io
import math
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from ...communicators.host_memory import TORCH
from ...protocol.errors import CheckpointError
from .. import tree
from .dcp_metadata import StoredChunk, read_index
from .files import Part, open_regular

_PIECE_BYTES = 8 << 20


class Wanted(NamedTuple):
    """A piece of a stored tensor."""

    key: str
    offsets: tuple[int, ...]


class StoredFiles:
    """Reads what a directory holds. Raises OSError, CheckpointError where a file is damaged.

    `parts`: what the files are to be, where midstep wrote them: each is compared before it is read first. None: torch
    did, and what is read has to have the size and the kind that was written down.
    """

    def __init__(self, place: Path, parts: Mapping[str, Part] | None) -> None:
        self.place = place
        self._parts = parts
        self._compared: set[str] = set()
        self.index = read_index(place)

    def value(self, key: str) -> Any:
        """Return a stored value."""
        stored = self.index.values[key]
        return self._decoded(stored.file, stored.start, stored.size_bytes, key)

    def whole(self, key: str) -> Any:
        """Return a whole tensor, on the host."""
        stored = self.index.tensors[key]
        tensor = TORCH.empty(stored.shape, dtype=tree.dtype_of(stored.dtype))
        self.fill(tensor, Wanted(key, (0,) * len(stored.shape)))
        return tensor

    def fill(self, target: Any, wanted: Wanted) -> None:
        """Read a piece into a tensor of its shape, from all parts that overlap it."""
        missing = target.numel()
        for chunk in self.index.tensors[wanted.key].chunks:
            begins = [max(ours, theirs) for ours, theirs in zip(wanted.offsets, chunk.offsets, strict=True)]
            ends = [
                min(ours + our_size, theirs + their_size)
                for ours, our_size, theirs, their_size in zip(
                    wanted.offsets, target.shape, chunk.offsets, chunk.sizes, strict=True
                )
            ]
            if any(begin >= end for begin, end in zip(begins, ends, strict=True)):
                continue
            here = tuple(slice(a - o, b - o) for a, b, o in zip(begins, ends, wanted.offsets, strict=True))
            there = tuple(slice(a - o, b - o) for a, b, o in zip(begins, ends, chunk.offsets, strict=True))
            target[here].copy_(self._tensor(chunk, wanted.key)[there])
            missing -= math.prod(end - begin for begin, end in zip(begins, ends, strict=True))
        if missing > 0:
            raise CheckpointError(f"{self.place} is damaged: {missing} elements of {wanted.key!r} are missing")

    def _tensor(self, chunk: StoredChunk, key: str) -> Any:
        found = self._decoded(chunk.file, chunk.start, chunk.size_bytes, key)
        stored = self.index.tensors[key]
        if (
            not isinstance(found, TORCH.Tensor)
            or tuple(found.shape) != chunk.sizes
            or found.dtype != tree.dtype_of(stored.dtype)
        ):
            raise CheckpointError(f"{self.place / chunk.file} is damaged: {key!r} in it is not what it is said to be")
        return found

    def _decoded(self, name: str, start: int, size_bytes: int, key: str) -> Any:
        path = self.place / name
        with open_regular(path) as file:
            self._compare(name, file)
            file.seek(start)
            raw = b"".join(iter(lambda: file.read(min(_PIECE_BYTES, start + size_bytes - file.tell())), b""))
        try:
            _refuse_compressed(raw)
            return TORCH.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises many kinds over bytes that it has not written
            raise CheckpointError(f"{path} is damaged: {key!r} in it cannot be read: {str(error)[:200]}") from error

    def _compare(self, name: str, file: Any) -> None:
        if self._parts is None or name in self._compared:
            return
        path, part = self.place / name, self._parts.get(name)
        if part is None:
            raise CheckpointError(f"{self.place} is damaged: its manifest does not know {name}")
        found, size_bytes = xxhash.xxh3_64(), 0
        while piece := file.read(_PIECE_BYTES):
            found.update(piece)
            size_bytes += len(piece)
        if (size_bytes, found.hexdigest()) != (part.size_bytes, part.checksum):
            raise CheckpointError(f"{path} is damaged: its checksum is not the one it was written with")
        self._compared.add(name)


def _refuse_compressed(raw: bytes) -> None:
    """Refuse what grows when it is read: torch compresses nothing. Raises ValueError."""
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        for each in archive.infolist():
            if each.compress_type != zipfile.ZIP_STORED or each.file_size > len(raw):
                raise ValueError("it is compressed, as torch does not do")
