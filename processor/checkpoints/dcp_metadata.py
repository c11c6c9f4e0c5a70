"""The file `.metadata` of torch.distributed.checkpoint (DCP): which tensor lies where in which file. Read as data.

The file is a pickle, which torch loads with all that a pickle can do. Here it is read as data: names that torch's own
writers put there stand for plain records, any other name is refused, and none of torch's code runs. Nothing in it is
believed that cannot be true: files lie in the directory, parts lie in the files and in their tensors.
"""

import io
import math
import pickle
import pickletools
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ...protocol.errors import CheckpointError
from .files import METADATA, read_small

MOST_METADATA_BYTES = 256 << 20
_MOST_DIMENSIONS = 64
_MOST_ELEMENTS = 1 << 56
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,250}")
_OPCODES = frozenset(
    re.findall(
        r"\w+",
        """
        PROTO FRAME STOP MARK POP POP_MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT
        SHORT_BINUNICODE BINUNICODE EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS EMPTY_DICT
        SETITEM SETITEMS GLOBAL STACK_GLOBAL REDUCE NEWOBJ BUILD MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET
        """,
    )
)
_DTYPES = re.compile(r"(?:b?float|int|uint|complex|bool)[a-z0-9_]{0,16}")


class StoredChunk(NamedTuple):
    """A part of a tensor, and where it is: `size_bytes` from `start` of a file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    size_bytes: int


class StoredTensor(NamedTuple):
    """A tensor that is there, in parts."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]


class StoredValue(NamedTuple):
    """A value that is there: bytes in a file."""

    file: str
    start: int
    size_bytes: int


class Index(NamedTuple):
    """The contents of a directory, by their names."""

    tensors: dict[str, StoredTensor]
    values: dict[str, StoredValue]


def read_index(place: Path) -> Index:
    """Read what a directory holds. Runs no code of it, and needs no torch.distributed.

    Raises OSError, and CheckpointError that names the file where it is damaged, or says what could not be true.
    """
    path = place / METADATA
    raw = read_small(path, MOST_METADATA_BYTES)
    try:
        _check_opcodes(raw)
        index = _index_of(_Reader(io.BytesIO(raw)).load())
        _check_files(place, index)
    except _Refused as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    except (pickle.PickleError, ValueError, TypeError, LookupError, AttributeError, EOFError, ArithmeticError) as error:
        raise CheckpointError(f"{path} is damaged: it is not what torch writes: {str(error)[:200]}") from error
    except (MemoryError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: it is nested too deep, or asks for too much memory") from error
    return index


class _Refused(ValueError):
    """The file says what no writer says; the text says what."""


class _Record:
    """Stands for an object of one of torch's classes, with the state that it was written with."""

    state: Any = None

    def __new__(cls, *_: Any) -> "_Record":
        return super().__new__(cls)

    def __init__(self, *_: Any) -> None:
        """Take no notice of arguments: what is written has its state beside them."""

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str) -> Any:
        """Return a field; None where it was not written."""
        if not isinstance(self.state, dict):
            raise _Refused(f"a {type(self).__name__} has no fields")
        return self.state.get(name)


class _Metadata(_Record):
    pass


class _TensorStorage(_Record):
    pass


class _BytesStorage(_Record):
    pass


class _ChunkStorage(_Record):
    pass


class _Properties(_Record):
    pass


class _StoredAt(_Record):
    pass


class _Place(_Record):
    pass


class _Other(_Record):
    pass


def _nothing(*_: Any) -> None:
    return None


def _size(sizes: Any = ()) -> tuple[int, ...]:
    if not isinstance(sizes, tuple | list):
        raise _Refused("a size is no list of numbers")
    return tuple(sizes)


def _no_dict(*arguments: Any) -> dict[Any, Any]:
    if arguments:
        raise _Refused("a dictionary is made of something else")
    return {}


_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
_KNOWN: dict[tuple[str, str], Any] = {
    (_METADATA_MODULE, "Metadata"): _Metadata,
    (_METADATA_MODULE, "TensorStorageMetadata"): _TensorStorage,
    (_METADATA_MODULE, "BytesStorageMetadata"): _BytesStorage,
    (_METADATA_MODULE, "ChunkStorageMetadata"): _ChunkStorage,
    (_METADATA_MODULE, "TensorProperties"): _Properties,
    (_METADATA_MODULE, "MetadataIndex"): _Place,
    (_METADATA_MODULE, "StorageMeta"): _Other,
    (_METADATA_MODULE, "_MEM_FORMAT_ENCODING"): _nothing,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _StoredAt,
    ("torch.serialization", "_get_layout"): _nothing,
    ("torch", "Size"): _size,
    ("pathlib", "PosixPath"): _nothing,
    ("pathlib._local", "PosixPath"): _nothing,
    ("collections", "OrderedDict"): _no_dict,
}


class _Reader(pickle.Unpickler):
    """Reads a pickle of known names."""

    def find_class(self, module: str, name: str) -> Any:
        """Return what stands for a name, for a dtype its name. Raises _Refused for any other."""
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        if module == "torch" and _DTYPES.fullmatch(name):
            return name
        raise _Refused(f"it names {f'{module}.{name}'[:100]!r}, which no metadata has")

    def persistent_load(self, pid: Any) -> Any:
        """Refuse what lies outside of the file."""
        raise _Refused("it refers to an object outside of it")


def _check_opcodes(raw: bytes) -> None:
    """Refuse instructions that no metadata needs, and those that would take memory for nothing."""
    for opcode, argument, _ in pickletools.genops(raw):
        if opcode.name not in _OPCODES:
            raise _Refused(f"it has the instruction {opcode.name}, which no metadata has")
        if opcode.name in {"BINPUT", "LONG_BINPUT"} and int(argument or 0) > len(raw):
            raise _Refused("it asks for memory that its contents do not need")


def _index_of(metadata: Any) -> Index:
    if not isinstance(metadata, _Metadata):
        raise _Refused(f"it holds a {type(metadata).__name__.strip('_')} instead of a checkpoint's metadata")
    stored: dict[tuple[str, tuple[int, ...] | None], tuple[str, int, int]] = {}
    for where, what in _mapping(metadata.get("storage_data")):
        if not isinstance(where, _Place) or not isinstance(what, _StoredAt):
            raise _Refused("its storage_data are no places in files")
        offset = where.get("offset")
        stored[_text(where.get("fqn")), None if offset is None else _numbers(offset)] = _stored(what)
    index = Index({}, {})
    for key, what in _mapping(metadata.get("state_dict_metadata")):
        name = _text(key)
        if isinstance(what, _BytesStorage):
            index.values[name] = StoredValue(*_found(stored, name, None))
        elif isinstance(what, _TensorStorage):
            index.tensors[name] = _tensor(name, what, stored)
        else:
            raise _Refused(f"{name[:100]!r} is neither a tensor nor a value")
    return index


def _tensor(name: str, what: _TensorStorage, stored: Mapping[Any, tuple[str, int, int]]) -> StoredTensor:
    properties, shape, chunks = what.get("properties"), _numbers(what.get("size")), []
    if not isinstance(properties, _Properties) or not isinstance(properties.state, tuple) or not properties.state:
        raise _Refused(f"{name[:100]!r} has no dtype")
    dtype = _text(properties.state[0])
    item_bytes = _item_bytes(dtype)
    found = what.get("chunks")
    if not isinstance(found, list):
        raise _Refused(f"{name[:100]!r} has no list of parts")
    for chunk in found:
        if not isinstance(chunk, _ChunkStorage):
            raise _Refused(f"{name[:100]!r} has a part that is none")
        offsets, sizes = _numbers(chunk.get("offsets")), _numbers(chunk.get("sizes"))
        inside = all(start + size <= whole for start, size, whole in zip(offsets, sizes, shape, strict=True))
        file, start, size_bytes = _found(stored, name, offsets)
        if not inside or math.prod(sizes) * item_bytes > size_bytes:
            raise _Refused(f"a part of {name[:100]!r} is larger than its tensor, or than its place in the file")
        chunks.append(StoredChunk(offsets, sizes, file, start, size_bytes))
    if sum(math.prod(chunk.sizes) for chunk in chunks) < math.prod(shape):
        raise _Refused(f"of {name[:100]!r} some parts are missing")
    return StoredTensor(dtype, shape, tuple(chunks))


def _item_bytes(dtype: str) -> int:
    """Return the size of an element by the name of its type: bool, bfloat16, float8_e4m3fn, ..."""
    bits = re.search(r"\d+", dtype)
    return max(1, int(bits[0]) // 8) if bits and len(bits[0]) < 4 else 1


def _found(stored: Mapping[Any, tuple[str, int, int]], name: str, offsets: tuple[int, ...] | None) -> Any:
    place = stored.get((name, offsets)) or (stored.get((name, None)) if offsets is not None else None)
    if place is None:
        raise _Refused(f"it does not say where {name[:100]!r} is")
    return place


def _stored(what: _StoredAt) -> tuple[str, int, int]:
    file = _text(what.get("relative_path"))
    if not _FILE_NAME.fullmatch(file):
        raise _Refused(f"it names the file {file[:100]!r}, which is none of its directory")
    if what.get("transform_descriptors"):
        raise _Refused("its tensors are compressed or encrypted by an extension of torch, which midstep does not have")
    start, size_bytes = _numbers((what.get("offset"), what.get("length")))
    return file, start, size_bytes


def _mapping(value: Any) -> Iterable[tuple[Any, Any]]:
    if not isinstance(value, dict):
        raise _Refused("it has no dictionary of what it holds")
    return value.items()


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _Refused("a name in it is no text")
    return value


def _numbers(value: Any) -> tuple[int, ...]:
    if not isinstance(value, tuple) or len(value) > _MOST_DIMENSIONS or any(type(each) is not int for each in value):
        raise _Refused("a size or an offset in it is no number")
    if any(each < 0 for each in value) or math.prod(each for each in value if each) > _MOST_ELEMENTS**2:
        raise _Refused("a size or an offset in it cannot be")
    return value


def check_files(place: Path, index: Index) -> None:
    """Look whether the files are there, and long enough. Raises OSError, CheckpointError."""
    try:
        _check_files(place, index)
    except _Refused as error:
        raise CheckpointError(f"{place / METADATA} is damaged: {error}") from None


def _check_files(place: Path, index: Index) -> None:
    """Refuse what lies outside of the files that are there."""
    ends: dict[str, int] = {}
    for file, start, size_bytes in _places(index):
        ends[file] = max(ends.get(file, 0), start + size_bytes)
    for file, end in ends.items():
        try:
            found = (place / file).lstat()
        except FileNotFoundError:
            raise _Refused(f"{file} is missing") from None
        if not stat.S_ISREG(found.st_mode) or found.st_size < end:
            raise _Refused(f"{file} has {found.st_size} bytes, of which it names {end}: it was cut, or is no file")


def _places(index: Index) -> Iterator[tuple[str, int, int]]:
    yield from index.values.values()
    for tensor in index.tensors.values():
        yield from ((each.file, each.start, each.size_bytes) for each in tensor.chunks)
