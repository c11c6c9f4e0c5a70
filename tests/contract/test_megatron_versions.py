"""The names of megatron-core that the adapter uses, looked for in the published packages of several versions."""

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from midstep.adapters.megatron.compatibility import ATTRIBUTES, EARLIER_NAMES, NAMES, TESTED

NEWEST = "newest"


@pytest.fixture(scope="module", params=[NEWEST, *TESTED])
def wheel(request: pytest.FixtureRequest) -> zipfile.ZipFile:
    """The wheel of a version, from the registry or from the cache of an earlier run."""
    version: str = request.param
    cache = Path(request.config.cache.mkdir("megatron-core")) / version
    if not any(cache.glob("*.whl")):
        wanted = "megatron-core" if version == NEWEST else f"megatron-core=={version}"
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--only-binary=:all:",
            "-d",
            str(cache),
            wanted,
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
        if done.returncode != 0:
            pytest.skip(f"{wanted} cannot be had from the package registry: {done.stderr.strip()[-200:]}")
    return zipfile.ZipFile(next(cache.glob("*.whl")))


def source(wheel: zipfile.ZipFile, owner: str) -> tuple[ast.Module, str | None]:
    """Return the parsed module of a dotted name, and the class in it if the name is one of a class."""
    path = owner.replace(".", "/")
    inside = set(wheel.namelist())
    for module, kind in ((owner, None), tuple(owner.rpartition(".")[::2])):
        path = (module or "").replace(".", "/")
        for file in (f"{path}.py", f"{path}/__init__.py"):
            if file in inside:
                return ast.parse(wheel.read(file)), kind
    raise AssertionError(f"{owner} is in no module of this version")


def classes(wheel: zipfile.ZipFile, owner: str) -> list[ast.ClassDef]:
    """Return a class and, as far as they are in the same package, those that it inherits from."""
    module, kind = source(wheel, owner)
    mine = {node.name: node for node in module.body if isinstance(node, ast.ClassDef)}
    assert kind in mine, f"{owner} is not there"
    found, names = [], [kind]
    while names:
        node = mine.get(names.pop())
        if node is not None and node not in found:
            found.append(node)
            names += [base.id for base in node.bases if isinstance(base, ast.Name)]
    return found


def methods(nodes: list[ast.ClassDef]) -> set[str]:
    """Return the names of the methods of classes."""
    return {item.name for node in nodes for item in node.body if isinstance(item, ast.FunctionDef)}


def attributes(nodes: list[ast.ClassDef]) -> set[str]:
    """Return the names that classes assign to `self`."""
    return {
        item.attr
        for node in nodes
        for item in ast.walk(node)
        if isinstance(item, ast.Attribute)
        and isinstance(item.ctx, ast.Store)
        and isinstance(item.value, ast.Name)
        and item.value.id == "self"
    }


def top_level(module: ast.Module) -> set[str]:
    """Return the names that a module defines or imports."""
    names = set()
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


@pytest.mark.parametrize("owner", NAMES)
def test_what_is_called_is_there(wheel: zipfile.ZipFile, owner: str) -> None:
    """Every function, method and global that the adapter calls or replaces exists."""
    module, kind = source(wheel, owner)
    there = top_level(module) if kind is None else methods(classes(wheel, owner))
    missing = {name for name in NAMES[owner] if name not in there and EARLIER_NAMES.get(name) not in there}
    assert not missing, sorted(missing)


@pytest.mark.parametrize("owner", ATTRIBUTES)
def test_what_is_read_is_there(wheel: zipfile.ZipFile, owner: str) -> None:
    """Every attribute that the adapter reads or resets is assigned somewhere in its class."""
    there = attributes(classes(wheel, owner))
    assert set(ATTRIBUTES[owner]) <= there, sorted(set(ATTRIBUTES[owner]) - there)
