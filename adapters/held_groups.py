"""Find the process groups that the objects of a framework hold: after a recovery all must be of one generation."""

import functools
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

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


class HeldGroup(NamedTuple):
    """A process group, and where it is held."""

    place: str
    group: Any


def walk_groups(root: Any, place: str, seen: set[int]) -> Iterator[HeldGroup]:
    """Yield every group that is held by `root` or by what it holds; `place` names it. Not through tensors and types.

    `seen`: ids of what other walks have been through, which are left out and added to.
    """
    stack = [(root, place)]
    while stack:
        item, where = stack.pop()
        if isinstance(item, dist.ProcessGroup):
            yield HeldGroup(where, item)
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
