"""Published torch-npu packages, read without importing them: they need a CANN installation, and a device.

A wheel is fetched once and kept in `~/.cache/midstep/torch-npu`. Its Python is read as syntax trees, its library as
bytes.
"""

import ast
import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from functools import cache, cached_property
from pathlib import Path

import msgspec

RELEASES = ("2.6.0", "2.7.1.post11", "2.10.0.post7", "2.13.0", "2.14.0")
LIBRARY = "torch_npu/lib/libtorch_npu.so"
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
FETCH_S = 100.0
_CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "midstep" / "torch-npu"


class NotReachable(Exception):
    """The package registry does not answer, or does not have the package any more."""


@cache
def wheel(version: str) -> "Wheel":
    """Return a release's wheel, fetched if it is not there yet. Raises NotReachable."""
    directory = _CACHE / version
    for _ in range(2):
        found = sorted(directory.glob("torch_npu-*.whl"))
        if found and zipfile.is_zipfile(found[0]):
            return Wheel(version, found[0])
        _fetch(version, directory)
    raise NotReachable(f"torch-npu {version}: no wheel in {directory} after pip download")


def _fetch(version: str, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    platforms = [argument for platform in PLATFORMS for argument in ("--platform", platform)]
    python = ["--only-binary=:all:", "--python-version", "3.11", "--implementation", "cp", "--abi", "cp311"]
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--retries", "1", *python, *platforms]
    try:
        done = subprocess.run(
            [*command, "-d", str(directory), f"torch-npu=={version}"],
            capture_output=True,
            text=True,
            timeout=FETCH_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise NotReachable(f"torch-npu {version}: pip download took more than {FETCH_S:.0f} s") from error
    if done.returncode != 0:
        raise NotReachable(f"torch-npu {version}: {done.stderr.strip().splitlines()[-1:]}")


class Signature(msgspec.Struct, frozen=True):
    """A function as its source declares it: parameters in order, and those of them that may be left out."""

    parameters: tuple[str, ...]
    optional: frozenset[str]


class Wheel:
    """One release."""

    def __init__(self, version: str, path: Path) -> None:
        self.version = version
        self.path = path
        self._archive = zipfile.ZipFile(path)

    @cached_property
    def sources(self) -> Mapping[str, str]:
        """The Python files that the calls of midstep lead through, by path."""
        wanted = ("torch_npu/npu/", "torch_npu/distributed/")
        names = [name for name in self._archive.namelist() if name.startswith(wanted) and name.endswith(".py")]
        return {name: self._archive.read(name).decode() for name in names}

    @cached_property
    def library(self) -> bytes:
        """The compiled library, about 100 MB."""
        return self._archive.read(LIBRARY)


class Sources:
    """Looks up what a dotted name of a package leads to, by its syntax trees alone."""

    def __init__(self, files: Mapping[str, str], package: str = "torch_npu") -> None:
        self._files = files
        self._package = package
        self._trees: dict[str, ast.Module] = {}

    def find(self, name: str) -> ast.FunctionDef | ast.ClassDef | None:
        """Return the definition behind `name` (below the package); None if there is none."""
        module, parts = f"{self._package}", name.split(".")
        while len(parts) > 1 and self._path(f"{module}.{parts[0]}") is not None:
            module, parts = f"{module}.{parts[0]}", parts[1:]
        found = self._in_module(module, parts[0], 5)
        for part in parts[1:]:
            if not isinstance(found, ast.ClassDef):
                return None
            found = _named(found.body, part)
        return found

    def signature(self, name: str) -> Signature | None:
        """Return how `name` is called; for a class, how it is made. None if it is not there."""
        found = self.find(name)
        if isinstance(found, ast.ClassDef):
            made = _named(found.body, "__new__") or _named(found.body, "__init__")
            found = made if isinstance(made, ast.FunctionDef) else None
        if found is None:
            return None
        everything = [*found.args.posonlyargs, *found.args.args]
        names = [argument.arg for argument in everything if argument.arg not in {"self", "cls"}]
        with_default = len(found.args.defaults)
        optional = (
            {argument.arg for argument in everything[len(everything) - with_default :]} if with_default else set()
        )
        for argument, default in zip(found.args.kwonlyargs, found.args.kw_defaults, strict=True):
            names.append(argument.arg)
            optional |= {argument.arg} if default is not None else set()
        return Signature(tuple(names), frozenset(optional))

    def _path(self, module: str) -> str | None:
        base = module.replace(".", "/")
        return next((path for path in (f"{base}.py", f"{base}/__init__.py") if path in self._files), None) or (
            base if any(path.startswith(f"{base}/") for path in self._files) else None
        )

    def _tree(self, module: str) -> ast.Module | None:
        path = self._path(module)
        if path is None or path not in self._files:
            return None
        if path not in self._trees:
            self._trees[path] = ast.parse(self._files[path])
        return self._trees[path]

    def _in_module(self, module: str, name: str, depth: int) -> ast.FunctionDef | ast.ClassDef | None:
        tree = self._tree(module)
        if tree is None or depth == 0:
            return None
        here = _named(tree.body, name)
        if here is not None:
            return here
        is_package = (self._path(module) or "").endswith("__init__.py")
        for node in tree.body:
            if not isinstance(node, ast.ImportFrom):
                continue
            source = self._absolute(node, module, is_package)
            for alias in node.names:
                if alias.name == "*" or (alias.asname or alias.name) == name:
                    found = self._in_module(source, name if alias.name == "*" else alias.name, depth - 1)
                    if found is not None:
                        return found
        return None

    @staticmethod
    def _absolute(node: ast.ImportFrom, module: str, is_package: bool) -> str:
        if node.level == 0:
            return node.module or ""
        parts = module.split(".")
        kept = parts[: len(parts) - node.level + (1 if is_package else 0)]
        return ".".join([*kept, node.module] if node.module else kept)


def _named(body: list[ast.stmt], name: str) -> ast.FunctionDef | ast.ClassDef | None:
    found = None
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            found = node
    return found
