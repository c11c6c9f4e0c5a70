"""Walks the objects that training works with, and finds every process group that they hold.

Megatron hands its groups to dozens of objects: DDP, buckets, layers, optimizers, configurations, collections. midstep
seats groups anew in place, so all of these keep what they have. The walk proves it: after each rebuild every group that
a live object holds must be one of this generation's.
"""

import functools
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ...protocol.errors import ConfigurationError, RecoveryError
from .parts import Parts

_BACKENDS = "midstep_"
_LEAVES = (
    str,
    bytes,
    int,
    float,
    complex,
    type(None),
    torch.dtype,
    torch.Tensor,
    type,
    types.ModuleType,
    types.CodeType,
)


class Handle(NamedTuple):
    """A process group, and where it is held."""

    place: str
    group: Any


def held_groups(parts: Parts) -> Iterator[Handle]:
    """Yield every group that Megatron's globals, the model, the optimizer or its configurations hold."""
    from megatron.core import parallel_state

    for name, value in vars(parallel_state).items():
        if name.startswith("_") and name.isupper():
            yield from _walk(value, f"parallel_state.{name}", set())
    seen: set[int] = set()
    yield from _walk(parts.optimizer, "optimizer", seen)
    for index, chunk in enumerate(parts.chunks):
        yield from _walk(chunk, f"model[{index}]", seen)


def refuse_foreign(parts: Parts) -> None:
    """Raise ConfigurationError for a group that is not midstep's. Runs before the first step."""
    for place, group in held_groups(parts):
        backend = group.name() if not hasattr(group, "getBackendName") else group.getBackendName()
        if not isinstance(backend, str) or not backend.startswith(_BACKENDS):
            raise ConfigurationError(
                f"{place} is a process group on {backend!r}, which a recovery could not connect anew. Make groups "
                "without naming a backend, after the train function has been decorated"
            )


def refuse_stale(parts: Parts) -> int:
    """Raise RecoveryError for a group that is not connected in this generation; return how many handles there are."""
    count = 0
    for place, group in held_groups(parts):
        count += 1
        if not group.connected:
            raise RecoveryError(f"{place} is a process group of an earlier generation: {group.getGroupName()}")
    return count


def _walk(root: Any, place: str, seen: set[int]) -> Iterator[Handle]:
    stack = [(root, place)]
    while stack:
        item, where = stack.pop()
        if isinstance(item, dist.ProcessGroup):
            yield Handle(where, item)
            continue
        if isinstance(item, _LEAVES) or id(item) in seen:
            continue
        seen.add(id(item))
        stack.extend((inner, f"{where}{name}") for name, inner in _inside(item))


def _inside(item: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an object holds, each with the text that leads there."""
    if isinstance(item, dict):
        yield from ((f"[{key!r}]" if isinstance(key, str | int) else "[...]", value) for key, value in item.items())
    elif isinstance(item, list | tuple | set | frozenset):
        yield from ((f"[{index}]", value) for index, value in enumerate(item))
    elif isinstance(item, functools.partial):
        yield from ((".func", item.func), (".args", item.args), (".keywords", item.keywords))
    elif isinstance(item, types.MethodType):
        yield ".__self__", item.__self__
    elif isinstance(item, types.FunctionType):
        for cell in item.__closure__ or ():
            try:
                yield f".{item.__name__}", cell.cell_contents
            except ValueError:  # an empty cell
                continue
    else:
        yield from ((f".{name}", value) for name, value in getattr(item, "__dict__", {}).items())
