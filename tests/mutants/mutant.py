"""A mutant: the product with one thing broken on purpose, in memory only.

A mutant is a piece of a module's text and what stands in its place. The module is compiled once more, and its functions
get the new code for a while. Nothing is written to any file.
"""

import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import NamedTuple

from midstep.controller.recovery.state import Phase

CODE_PARTS = ("co_code", "co_consts", "co_names")  # in which a function that was broken differs
FOCUSES = (None, Phase.RESUMING, Phase.SAVING, Phase.REJOINING)  # in turn: where faults wait in a simulated job


class Mutant(NamedTuple):
    """One break: wherever `old` stands in `module`, `new` takes its place."""

    name: str
    module: str
    old: str
    new: str
    focuses: tuple[Phase | None, ...] = FOCUSES


class TextGone(Exception):
    """The text of a mutant is no longer in its module: write the mutant again, so that it breaks the same thing."""


@contextmanager
def applied(mutant: Mutant) -> Iterator[None]:
    """Break the module. Raises TextGone when its text has changed."""
    module = importlib.import_module(mutant.module)
    source = inspect.getsource(module)
    if mutant.old not in source:
        raise TextGone(f"{mutant.name}: this stands no longer in {mutant.module}: {mutant.old}")
    namespace: dict[str, object] = {
        "__name__": mutant.module,
        "__package__": module.__package__,
        "__file__": module.__file__,
    }
    exec(compile(source.replace(mutant.old, mutant.new), str(module.__file__), "exec"), namespace)
    changed = {}
    for function, broken in _pairs(vars(module), namespace):
        if any(getattr(function.__code__, part) != getattr(broken.__code__, part) for part in CODE_PARTS):
            changed[function] = function.__code__
            function.__code__ = broken.__code__
    try:
        yield
    finally:
        for function, code in changed.items():
            function.__code__ = code


def _pairs(ours: dict[str, object], theirs: dict[str, object]) -> Iterator[tuple[FunctionType, FunctionType]]:
    """Yield the functions and methods that two versions of a module have in common."""
    for name, value in list(ours.items()):
        mine, other = (each.fget if isinstance(each, property) else each for each in (value, theirs.get(name)))
        if getattr(mine, "__module__", None) != theirs["__name__"]:
            continue
        if isinstance(mine, FunctionType) and isinstance(other, FunctionType):
            yield mine, other
        elif isinstance(mine, type) and isinstance(other, type):
            yield from _pairs(dict(vars(mine)), {**vars(other), "__name__": theirs["__name__"]})
