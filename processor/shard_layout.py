"""The names of a shard's tensors, and where in each of them its piece lies, as torch.distributed.checkpoint (DCP) says.

A shard as adapters open it is a structure of pieces (`ReplicatedState`). A DCP directory is a flat dictionary of whole
tensors, of which each file has some parts, and of values. A layout says which is which, without a collective and
without a `state_dict`. It does not change while a model lives.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from ..communicators.host_memory import TORCH
from ..protocol.errors import UnsupportedState
from . import tree

ENTRY = ("midstep", "replicated")  # what is exact of a replicated state, packed; other readers pass it over
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")  # of torch.compile, and of recomputed activations

Path = tuple[str | int, ...]
Shape = tuple[int, ...]


class Extent(msgspec.Struct, frozen=True, array_like=True):
    """The place of a piece in its whole tensor. `also`: other names of the same parameter."""

    shape: Shape
    offsets: Shape
    sharded: bool = False  # what the optimizer keeps for it is cut like it
    also: tuple[str, ...] = ()


class ShardLayout(msgspec.Struct, frozen=True, array_like=True):
    """One shard. `optimizers`: the module and the path of each parameter, by the groups of each optimizer."""

    parameters: dict[str, dict[str, Extent]]
    optimizers: dict[str, list[list[tuple[str, str]]]]

    def names(self, optimizer: str) -> list[list[str]]:
        """Return what parameters are called in an optimizer's state, by its groups."""
        groups = self.optimizers[optimizer]
        several = len({module for group in groups for module, _ in group}) > 1
        return [[f"{module}.{public(path)}" if several else public(path) for module, path in group] for group in groups]

    def extents(self, optimizer: str) -> list[Extent | None]:
        """Return the places of an optimizer's parameters, by their positions; None: in another shard."""
        groups = self.optimizers[optimizer]
        return [self.parameters.get(module, {}).get(path) for group in groups for module, path in group]


class Entry(NamedTuple):
    """One entry of the dictionary: a piece of a tensor, or a value without shape. `also`: other names of it."""

    path: Path
    value: Any
    shape: Shape | None = None
    offsets: Shape = ()
    also: tuple[Path, ...] = ()


def public(path: str) -> str:
    """Return the name of a parameter without those that wrappers add."""
    for wrapper in _WRAPPERS:
        path = path.replace(wrapper, "")
    return path


def entries(
    content: Mapping[str, Any], layout: ShardLayout, buffers: Mapping[str, Mapping[str, Any]]
) -> Iterator[Entry]:
    """Yield all entries of an open shard: what torch has by these names, and last what is midstep's own.

    Raises UnsupportedState for an optimizer's state that has no names there.
    """
    for module, named in content["parameters"].items():
        for path, tensor in named.items():
            extent = layout.parameters[module][path]
            also = tuple((module, public(each)) for each in extent.also)
            yield Entry((module, public(path)), tensor, extent.shape, extent.offsets, also)
    for module, named in buffers.items():
        for path, tensor in named.items():
            yield _entry((module, public(path)), tensor)
    for name, state in content["optimizers"].items():
        yield from _of_optimizer(name, state, layout)
    for kind in ("schedulers", "scalers"):
        for name, state in content["small"][kind].items():
            yield from _flat((name,), state)
    yield _entry(ENTRY, _packed(content))


def _of_optimizer(name: str, state: Mapping[str, Any], layout: ShardLayout) -> Iterator[Entry]:
    if not state["plain"]:
        raise UnsupportedState(f"{name} keeps state for other things than its parameters, which DCP has no name for")
    groups = layout.names(name)
    names, extents = [each for group in groups for each in group], layout.extents(name)
    cut = set(map(tuple, state.get("sharded", ())))
    for position, held in state["state"].items():
        extent = extents[position]
        assert extent is not None
        for key, value in held.items():
            path: Path = (name, "state", names[position], key)
            if (position, key) in cut or like_parameter(key, value, extent):
                yield Entry(path, value, extent.shape, extent.offsets)
            elif extent.sharded and isinstance(value, TORCH.Tensor) and value.ndim:
                raise UnsupportedState(f"{'.'.join(map(str, path))} is not cut as its parameter, so DCP cannot name it")
            else:
                yield from _flat(path, value)
    for number, (group, members) in enumerate(zip(state["groups"], groups, strict=True)):
        place: Path = (name, "param_groups", number)
        for key, value in group.items():
            yield from _flat((*place, key), value)
        yield Entry((*place, "params"), members)


def like_parameter(key: str, value: Any, extent: Extent) -> bool:
    """Return whether what an unsharded parameter's optimizer keeps has the parameter's own shape."""
    return not extent.sharded and key != "step" and tuple(getattr(value, "shape", (-1,))) == extent.shape


def _packed(content: Mapping[str, Any]) -> Any:
    """Return what a rank of midstep needs beside named tensors, bit for bit, as a tensor of bytes."""
    optimizers = content["optimizers"]
    packed = tree.pack(
        {
            "small": content["small"],
            "baseline": content["baseline"],
            "groups": {name: state["groups"] for name, state in optimizers.items()},
            "on_host": {name: sorted({key for _, key in state["on_host"]}) for name, state in optimizers.items()},
        },
        "state",
    )
    return TORCH.frombuffer(bytearray(packed), dtype=TORCH.uint8)


def _flat(path: Path, value: Any) -> Iterator[Entry]:
    """Yield the leaves of nested state by the rules of torch: lists are entered where they hold tensors or dicts."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat((*path, str(key)), item)
    elif isinstance(value, list) and any(isinstance(item, Mapping | TORCH.Tensor) for item in value):
        for index, item in enumerate(value):
            yield from _flat((*path, index), item)
    else:
        yield _entry(path, value)


def _entry(path: Path, value: Any) -> Entry:
    if isinstance(value, TORCH.Tensor):
        return Entry(path, value, tuple(value.shape), (0,) * value.ndim)
    return Entry(path, value)
