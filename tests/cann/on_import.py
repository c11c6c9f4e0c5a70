"""Has operators and faults put into torch-npu when it is imported, in every Python of the environment.

A script needs no line of its own for the fake CANN: the demo's and the examples run as they are. The environment
imports this when a Python starts (environment.py), so it is light.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        from . import faults, operators

        module.inject = faults.inject  # type: ignore[attr-defined]
        operators.install()


class _Finder:
    """Finds torch-npu where it is, and has it loaded by the loader above."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "torch_npu":
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


sys.meta_path.insert(0, _Finder())
