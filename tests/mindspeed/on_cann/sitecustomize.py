"""Begins each Python of a job on torch-npu's own wheel: what is not there of CANN, and the faults of a test.

torch-npu brings `torchair` itself, whose libraries need CANN's compiler of graphs. No graph is compiled here.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType

from placeholders import OF_CANN, NamedModules  # type: ignore[import-not-found]  # of tests/mindspeed/common

CHANGES_TORCH = "torch_npu.contrib.transfer_to_npu"


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        import faults

        for name in [each for each in sys.modules if each.partition(".")[0] in OF_CANN]:
            del sys.modules[name]
        faults.begin_with_groups()


class _Finder:
    """Finds the module with which MindSpeed begins, and has it loaded by the loader above."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == CHANGES_TORCH else None
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


sys.meta_path[:0] = [_Finder()]
sys.meta_path.append(NamedModules(OF_CANN))
