"""Nested state as bytes, without pickle: a small skeleton and the tensors it refers to.

State dicts travel between ranks and lie in checkpoints, so reading them must never run code. The skeleton is
MessagePack made of plain values and of tagged lists; what is not in the list of tags is refused with its path. Floats,
integers of any size and tensors come back bit for bit; the types of containers and scalars come back too.

Two places that hold one tensor object share it again. Tensors that merely overlap in memory are carried apart.
"""

import collections
import enum
import math
import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from ..communicators import host_memory
from ..communicators.host_memory import TORCH, dtype_name, memory_of
from ..protocol.errors import RecoveryError, StateUnreadable, UnsupportedState

if TYPE_CHECKING:
    import torch

SKELETON_VERSION = 1
MAX_DEPTH = 64  # deeper than any state dict; a structure that contains itself ends here
_INT64 = range(-(2**63), 2**64)  # what MessagePack holds by itself
_NUMPY_KINDS = "biufcSUmM"  # no objects, no records
_LENGTHS = struct.Struct("<QQ")


class Tag(enum.IntEnum):
    """The meanings of a list in the skeleton; its first element is one of these."""

    LIST = 0
    TUPLE = 1
    DICT = 2
    TENSOR = 3
    NUMPY_ARRAY = 4
    NUMPY_SCALAR = 5
    DTYPE = 6
    COMPLEX = 7
    BIG_INT = 8
    ORDERED_DICT = 9
    COUNTER = 10
    SIZE = 11


_DICTS: dict[type, Tag] = {dict: Tag.DICT, collections.OrderedDict: Tag.ORDERED_DICT, collections.Counter: Tag.COUNTER}
_DICT_MAKERS: dict[Tag, Callable[[Any], Any]] = {
    Tag.DICT: dict,
    Tag.ORDERED_DICT: collections.OrderedDict,
    Tag.COUNTER: lambda pairs: collections.Counter(dict(pairs)),
}
_SIZE: type = tuple if TORCH is None else TORCH.Size
_SEQUENCES: dict[type, Tag] = {_SIZE: Tag.SIZE, list: Tag.LIST, tuple: Tag.TUPLE}
_SEQUENCE_MAKERS: dict[Tag, Callable[[Any], Any]] = {Tag.LIST: list, Tag.TUPLE: tuple, Tag.SIZE: _SIZE}
_LEAVES = (type(None), bool, float, bytes)


class TensorSlot(msgspec.Struct, frozen=True):
    """A place in an outline where a tensor belongs: its index in the flat list, and what it looks like."""

    index: int
    dtype: "torch.dtype"  # numpy's, where torch is not installed
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """The bytes of its contents."""
        return self.dtype.itemsize * math.prod(self.shape)


def dtype_of(name: str) -> "torch.dtype":
    """Return the dtype of a name that `dtype_name` gave; raises StateUnreadable for any other name."""
    try:
        return host_memory.dtype_of(name)
    except TypeError as error:
        raise StateUnreadable(f"the state names a dtype {name!r} that is not known here: {error}") from error


def flatten(value: object, path: str) -> "tuple[bytes, list[torch.Tensor]]":
    """Split `value` into a skeleton and its tensors, which are not copied and may be non-contiguous.

    `path` is what the value is called in errors, e.g. `optimizer`. Raises UnsupportedState with path and type.
    """
    encoder = _Encoder()
    root = encoder.node(value, path, 0)
    specs = [[dtype_name(tensor.dtype), list(tensor.shape)] for tensor in encoder.tensors]
    try:
        return msgspec.msgpack.encode([SKELETON_VERSION, specs, root]), encoder.tensors
    except UnicodeEncodeError as error:
        raise UnsupportedState(f"{path} holds a string that is not valid unicode: {error}") from error


def slots(skeleton: bytes) -> tuple[TensorSlot, ...]:
    """Return what tensors a skeleton refers to, in their order."""
    return tuple(_decode(skeleton)[0])


def empty(slot: TensorSlot) -> Any:
    """Return memory on the host that can receive what belongs in `slot`."""
    return host_memory.empty(slot.shape, slot.dtype)


def slots_and_outline(skeleton: bytes) -> tuple[tuple[TensorSlot, ...], Any]:
    """Return what `slots` and `outline` return, for less than both."""
    found, root = _decode(skeleton)
    return tuple(found), _rebuild(root, found.__getitem__, lambda index, _dtype, _shape: found[index])


def outline(skeleton: bytes) -> Any:
    """Return the structure with a TensorSlot wherever a tensor or numpy array belongs."""
    return slots_and_outline(skeleton)[1]


def tensor_names(skeleton: bytes) -> list[str]:
    """Return a name for each tensor, from its path in the structure. They are unique."""
    names = [f"tensor.{slot.index}" for slot in slots(skeleton)]

    def visit(node: Any, path: str) -> None:
        if isinstance(node, TensorSlot):
            names[node.index] = path
        elif isinstance(node, dict):
            for key, item in node.items():
                visit(item, f"{path}.{key}" if path else str(key))
        elif isinstance(node, list | tuple):
            for index, item in enumerate(node):
                visit(item, f"{path}.{index}")

    visit(outline(skeleton), "")
    return names if len(set(names)) == len(names) else [f"{path}#{index}" for index, path in enumerate(names)]


def unflatten(skeleton: bytes, tensors: "Sequence[torch.Tensor]") -> Any:
    """Put a structure together again. The tensors are used as they are; numpy arrays share their memory."""
    found, root = _decode(skeleton)
    if len(found) != len(tensors):
        raise RecoveryError(f"the state's skeleton refers to {len(found)} tensors, but {len(tensors)} came with it")

    def array(index: int, dtype: str, shape: list[int]) -> Any:
        raw = host_memory.as_array(tensors[index].reshape(-1))
        return raw.view(np.dtype(dtype)).reshape(shape) if raw.size else np.empty(shape, np.dtype(dtype))

    return _rebuild(root, tensors.__getitem__, array)


def pack(value: object, path: str) -> bytes:
    """Encode `value` and its tensors as one run of bytes; raises UnsupportedState like `flatten`."""
    skeleton, tensors = flatten(value, path)
    body = [memory_of(tensor_bytes(tensor)).tobytes() for tensor in tensors]
    return b"".join((_LENGTHS.pack(len(skeleton), sum(map(len, body))), skeleton, *body))


def unpack(data: bytes) -> Any:
    """Decode what `pack` gave. Raises StateUnreadable when the bytes are not whole."""
    try:
        skeleton_bytes, body_bytes = _LENGTHS.unpack_from(data)
    except struct.error as error:
        raise StateUnreadable(f"a packed state of {len(data)} bytes is too short to be one") from error
    start = _LENGTHS.size + skeleton_bytes
    if len(data) != start + body_bytes:
        raise StateUnreadable(f"a packed state has {len(data)} bytes instead of {start + body_bytes}: it was cut")
    skeleton = data[_LENGTHS.size : start]
    tensors = []
    found = slots(skeleton)
    if sum(slot.size_bytes for slot in found) != body_bytes or any(slot.size_bytes < 0 for slot in found):
        raise StateUnreadable("a packed state holds other bytes than its tensors need: it was changed")
    for slot in found:
        tensor = empty(slot)
        if slot.size_bytes:
            memory_of(tensor)[:] = data[start : start + slot.size_bytes]
        tensors.append(tensor)
        start += slot.size_bytes
    return unflatten(skeleton, tensors)


def tensor_bytes(tensor: Any) -> Any:
    """Return the tensor's memory as flat bytes: a view where it is contiguous, else of a copy; CPU copies of others."""
    if host_memory.is_array(tensor):
        return host_memory.flat_view(np.ascontiguousarray(tensor))
    flat = tensor.detach().contiguous().reshape(-1)
    return host_memory.flat_view(flat if host_memory.on_host(flat) else flat.cpu())


class _Encoder:
    """One walk over a value; collects the tensors, each object once."""

    def __init__(self) -> None:
        self.tensors: list[Any] = []
        self._seen: dict[int, int] = {}
        self._alive: list[object] = []  # an id is only good while its object lives

    def node(self, value: object, path: str, depth: int) -> Any:  # noqa: PLR0911 - one return for each kind of value
        kind = type(value)
        if kind in _LEAVES or kind is str:
            return value
        if kind is int:
            return value if value in _INT64 else self._big_int(value)  # type: ignore[arg-type]
        if depth > MAX_DEPTH:
            raise UnsupportedState(f"{path} is nested more than {MAX_DEPTH} deep; does it contain itself?")
        if kind in _SEQUENCES:
            items = enumerate(value)  # type: ignore[arg-type,var-annotated]
            return [_SEQUENCES[kind], *(self.node(item, f"{path}[{i}]", depth + 1) for i, item in items)]
        if kind in _DICTS:
            return self._mapping(_DICTS[kind], value, path, depth)  # type: ignore[arg-type]
        if TORCH is not None and isinstance(value, TORCH.Tensor):
            return self._tensor(value, path)
        if kind is complex:
            return [Tag.COMPLEX, value.real, value.imag]  # type: ignore[attr-defined]
        if TORCH is not None and kind is TORCH.dtype:
            return [Tag.DTYPE, dtype_name(value)]
        if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in _NUMPY_KINDS:
            return self._numpy(value)
        raise UnsupportedState(
            f"{path} is a {kind.__module__}.{kind.__qualname__}, which cannot be carried without pickle. Give it as "
            "plain values (numbers, strings, lists, dicts, tensors, arrays), or through get and set functions that do"
        )

    def _mapping(self, tag: Tag, value: dict[Any, Any], path: str, depth: int) -> list[Any]:
        node: list[Any] = [tag]
        for key, item in value.items():
            if not _is_key(key):
                raise UnsupportedState(f"{path} has a key {key!r} of type {type(key).__qualname__}; use str or int")
            place = f"{path}.{key}" if isinstance(key, str) else f"{path}[{key!r}]"
            node += (self.node(key, place, depth + 1), self.node(item, place, depth + 1))
        return node

    def _tensor(self, value: Any, path: str) -> list[Any]:
        plain = type(value) in (TORCH.Tensor, TORCH.nn.Parameter) and value.layout == TORCH.strided
        if not plain or value.is_meta or value.is_quantized:
            raise UnsupportedState(
                f"{path} is a {type(value).__module__}.{type(value).__qualname__} (layout {value.layout}, device "
                f"{value.device}); only plain dense tensors can be carried"
            )
        return [Tag.TENSOR, self._add(value, value.detach().resolve_conj().resolve_neg())]

    def _numpy(self, value: Any) -> list[Any]:
        if isinstance(value, np.generic):
            return [Tag.NUMPY_SCALAR, value.dtype.str, value.tobytes()]
        raw = host_memory.from_bytes(bytearray(value.tobytes())) if value.size else host_memory.empty_bytes(0)
        return [Tag.NUMPY_ARRAY, self._add(value, raw), value.dtype.str, list(value.shape)]

    def _add(self, value: object, tensor: Any) -> int:
        if id(value) not in self._seen:
            self._seen[id(value)] = len(self.tensors)
            self._alive.append(value)
            self.tensors.append(tensor)
        return self._seen[id(value)]

    @staticmethod
    def _big_int(value: int) -> list[Any]:
        return [Tag.BIG_INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)]


def _is_key(key: object) -> bool:
    if type(key) is tuple:
        return all(_is_key(part) for part in key)
    return type(key) in (str, int, bool, float, bytes, type(None))


def _decode(skeleton: bytes) -> tuple[list[TensorSlot], Any]:
    try:
        version, specs, root = msgspec.msgpack.decode(skeleton)
        if version == SKELETON_VERSION:
            found = [TensorSlot(i, dtype_of(name), tuple(shape)) for i, (name, shape) in enumerate(specs)]
            if any(type(size) is not int or size < 0 for slot in found for size in slot.shape):
                raise ValueError("a tensor's shape is no shape")
            return found, root
    except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
        raise StateUnreadable(f"{len(skeleton)} bytes are no skeleton of a state: {error}") from error
    raise StateUnreadable(f"the state was written in format {version}; this midstep reads format {SKELETON_VERSION}")


def _rebuild(node: Any, tensor: Callable[[int], Any], array: Callable[[int, str, list[int]], Any]) -> Any:
    try:
        return _build(node, tensor, array)
    except (ValueError, TypeError, LookupError, OverflowError, RuntimeError, SyntaxError, RecursionError) as error:
        raise StateUnreadable(f"a state's skeleton is damaged: {error}") from error


def _build(node: Any, tensor: Callable[[int], Any], array: Callable[[int, str, list[int]], Any]) -> Any:  # noqa: PLR0911
    if type(node) is not list:
        return node
    tag, rest = node[0], node[1:]  # an int, which is the same key as its Tag and is looked up faster
    if tag == Tag.TENSOR:
        return tensor(rest[0])
    if tag in _SEQUENCE_MAKERS:
        return _SEQUENCE_MAKERS[tag]([_build(item, tensor, array) for item in rest])
    if tag in _DICT_MAKERS:
        built = [_build(item, tensor, array) for item in rest]
        return _DICT_MAKERS[tag](zip(built[::2], built[1::2], strict=True))
    if tag == Tag.NUMPY_ARRAY:
        return array(rest[0], rest[1], rest[2])
    if tag == Tag.NUMPY_SCALAR:
        return np.frombuffer(rest[1], np.dtype(rest[0]))[0]
    if tag == Tag.COMPLEX:
        return complex(rest[0], rest[1])
    if tag == Tag.DTYPE:
        return dtype_of(rest[0])
    if tag == Tag.BIG_INT:
        return int.from_bytes(rest[0], "little", signed=True)
    raise ValueError(f"{tag!r} is no tag")
