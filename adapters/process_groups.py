"""Process groups of a framework: the default one, which it makes itself, and those that its objects hold.

A framework names a backend and a timeout of its own in every job: its default group is redirected to midstep's
communicator, where the policy holds. After a recovery all groups must be of one generation, so all are found.
"""

import functools
import inspect
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..processor.group_arguments import GroupArguments
from ..processor.runtime import Runtime

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


BACKENDS = "midstep_"  # what the names of midstep's backends begin with
_redirected = False


def redirect_default_group() -> None:
    """Have `torch.distributed.init_process_group` make midstep's group from now on. Does nothing the second time."""
    global _redirected  # noqa: PLW0603 - what is redirected is global, too
    if _redirected:
        return
    _redirected = True
    plain = dist.init_process_group
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def init_process_group(*args: object, **options: object) -> None:
        given = signature.bind(*args, **options).arguments
        backend = given.get("backend")
        runtime = Runtime.current()
        if runtime is None or (isinstance(backend, str) and backend.startswith(BACKENDS)):
            plain(*args, **options)  # type: ignore[arg-type]
            return
        known = {name: value for name, value in given.items() if name in GroupArguments.__struct_fields__}
        runtime.init_process_group(GroupArguments(**known).naming_peers)

    dist.init_process_group = init_process_group
