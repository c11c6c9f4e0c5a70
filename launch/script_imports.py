"""Refuse fewer nodes for a script that cannot train on them, by its text, before a world is started for nothing.

The script is read, and the modules that lie below its folder and are imported from there; nothing of them is run. The
ranks refuse the rest when they register their state: a framework that is imported by a name made at run time, or by a
package that is installed.
"""

import ast
import os
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import msgspec

from ..protocol.errors import ConfigurationError

MOST_FILES = 200
MOST_LEVELS = 8  # of modules that import each other
MOST_BYTES = 4 << 20  # of all files together
_TITAN = "midstep.adapters.torchtitan"
_FSDP = ("torch.distributed.fsdp", "torch.distributed._composable.fsdp")


class _Framework(msgspec.Struct, frozen=True):
    """A framework whose world keeps its size. `names`: of modules and functions that only its scripts import."""

    name: str
    names: tuple[str, ...]
    any_script: bool = True  # False: a script without midstep is restarted as a whole, and may find another size


_MEGATRON = _Framework("Megatron", ("megatron", "mindspeed", "mindspeed_llm", "midstep.adapters.megatron"))
_TORCHTITAN = _Framework("torchtitan", (_TITAN,))
_FULLY_SHARD = _Framework(
    "fully_shard", tuple(f"{home}.{name}" for home in _FSDP for name in ("fully_shard", "_fully_shard")), False
)
_RESILIENT = ("midstep.TrainState", "midstep.resilient", "midstep.init_process_group", "midstep.adapters")


def refuse_another_size(command: Sequence[str], folder: Path, *, is_module: bool, mindio: bool) -> None:
    """Refuse `scale.min_nodes` for a script, or a module, that its ranks would refuse it for.

    `folder`: from where it imports first. Raises ConfigurationError.
    """
    if mindio:
        by, framework = "--mindio", _MEGATRON
    elif is_module and f"{command[0]}.".startswith(f"{_TITAN}."):
        by, framework = "--titan", _TORCHTITAN
    else:
        found = _framework_of(command[0], folder.resolve(), is_module=is_module)
        if found is None:
            return
        by, framework = found
    raise ConfigurationError(
        f"{by}: a world of another size is not possible with {framework.name}, where what a rank holds follows from "
        "the number of ranks. Leave scale.min_nodes out of the policy, or MIN out of --nnodes MIN:MAX; have spare "
        "nodes instead (--spares)."
    )


def _framework_of(command: str, folder: Path, *, is_module: bool) -> tuple[str, _Framework] | None:
    """Return where such a framework is imported, and which one; None where none is seen."""
    found: dict[str, tuple[str, _Framework]] = {}
    is_resilient = False
    for shown, tree in _texts(command, folder, is_module=is_module):
        for name, line in _used_names(tree):
            is_resilient = is_resilient or name == "midstep" or _is_below(name, _RESILIENT)
            for framework in (_MEGATRON, _TORCHTITAN, _FULLY_SHARD):
                if _is_below(name, framework.names):
                    found.setdefault(framework.name, (f"{shown}, line {line}", framework))
    return next((each for each in found.values() if each[1].any_script or is_resilient), None)


def _is_below(name: str, homes: Sequence[str]) -> bool:
    return any(f"{name}.".startswith(f"{home}.") for home in homes)


def _texts(command: str, folder: Path, *, is_module: bool) -> Iterator[tuple[str, ast.Module]]:
    """Yield the program and the modules below its folder that it imports, the nearest first, each with its name."""
    modules = (command, f"{command}.__main__") if is_module else ()
    roots = chain.from_iterable(_files(folder, name, folder) for name in modules) if is_module else [Path(command)]
    waiting = deque((path.absolute(), 1) for path in roots)
    seen = {path.resolve() for path, _ in waiting}
    left = MOST_BYTES
    while waiting and left > 0:
        path, level = waiting.popleft()
        text = _read(path, left)
        left -= len(text)
        tree = _parsed(text)
        if tree is None:
            continue
        yield str(path), tree
        for each in _imported_files(tree, path, folder) if level < MOST_LEVELS else ():
            if len(seen) < MOST_FILES and each.resolve() not in seen:
                seen.add(each.resolve())
                waiting.append((each, level + 1))


def _read(path: Path, most: int) -> bytes:
    """Return what a file says; nothing when it cannot be read, or is longer than that."""
    try:
        if not path.is_file():
            return b""
        with path.open("rb") as file:
            text = file.read(most + 1)
    except (OSError, ValueError):
        return b""
    return text if len(text) <= most else b""


def _parsed(text: bytes) -> ast.Module | None:
    """Return what was read, as Python; None when it is none. Its own warnings are the ranks' to give."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None


def _nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield what is said, but for what a script can do without: imports for types, and those that may fail."""
    waiting = deque([tree])
    while waiting:
        node = waiting.popleft()
        yield node
        passed = set(map(id, _dispensable(node)))
        waiting.extend(each for each in ast.iter_child_nodes(node) if id(each) not in passed)


def _dispensable(node: ast.AST) -> list[ast.stmt]:
    if isinstance(node, ast.If) and _last_name(node.test) == "TYPE_CHECKING":
        return node.body
    if isinstance(node, ast.Try) and any(_catches_missing(each.type) for each in node.handlers):
        return node.body
    return []


def _catches_missing(caught: ast.expr | None) -> bool:
    names = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    return any(_last_name(each) in {"ImportError", "ModuleNotFoundError"} for each in names)


def _last_name(node: ast.expr | None) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _used_names(tree: ast.Module) -> list[tuple[str, int]]:
    """Return the whole names of what is imported, and of what is reached through that, with their lines, in order."""
    nodes = list(_nodes(tree))
    bound: dict[str, str] = {}
    names: list[tuple[str, int]] = []
    for node in nodes:
        if isinstance(node, ast.Import):
            names += [(each.name, node.lineno) for each in node.names]
            bound |= {each.asname: each.name for each in node.names if each.asname}
            tops = {each.name.partition(".")[0] for each in node.names if not each.asname}
            bound |= {top: top for top in tops}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names += [(f"{node.module}.{each.name}", node.lineno) for each in node.names]
            bound |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    names += [(_whole_name(node, bound), node.lineno) for node in nodes if isinstance(node, ast.Attribute)]
    return sorted(names, key=lambda each: each[1])


def _whole_name(node: ast.expr, bound: dict[str, str]) -> str:
    """Return `torch.distributed.fsdp.fully_shard` for `fsdp.fully_shard`; nothing when it begins otherwise."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in bound:
        return ""
    return ".".join([bound[node.id], *reversed(parts)])


def _imported_files(tree: ast.Module, path: Path, folder: Path) -> Iterator[Path]:
    """Yield the files below the folder that a module's imports run, packages before what is in them."""
    for node in _nodes(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                yield from _files(folder, each.name, folder)
        elif isinstance(node, ast.ImportFrom) and node.level <= len(path.parents):
            base = path.parents[node.level - 1] if node.level else folder
            for each in node.names:
                yield from _files(base, ".".join(filter(None, (node.module, each.name))), folder)


def _files(base: Path, name: str, folder: Path) -> Iterator[Path]:
    """Yield the files that run when this name is imported from `base`, as far as they lie below the folder."""
    if not base.is_relative_to(folder):
        return
    for part in name.split("."):
        package, module = base / part / "__init__.py", base / f"{part}.py"
        # A package comes before a module of its name. Path.is_file would raise where a name is too long.
        yield from [each for each in (package, module) if os.path.isfile(each)][:1]
        base = base / part
