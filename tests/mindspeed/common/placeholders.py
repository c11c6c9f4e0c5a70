"""Names of libraries that MindSpeed imports, and hardly calls: whatever is not known is a placeholder."""

import importlib.abc
import importlib.machinery
import types
from collections.abc import Sequence
from typing import Any

# CANN's own Python, the compiler of graphs that torch-npu brings for it, and what is built with it.
OF_CANN = ("acl", "torchair", "te", "tbe", "torch_atb", "triton_ascend")
KNOWN: dict[str, dict[str, Any]] = {
    "acl": {"get_soc_name": lambda: "Ascend910B2"},
    "torchair": {"register_fx_node_ge_converter": lambda *_, **__: lambda function: function},
}


class Placeholder:
    """A name of the library that is not here: its attributes are placeholders, too, and calling it raises."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, key: str) -> Any:
        if key.startswith("__"):
            raise AttributeError(key)
        return Placeholder(f"{self._name}.{key}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{self._name} is not among the stand-ins (tests/mindspeed)")


class PlaceholderModule(types.ModuleType):
    """A module whose unknown names are placeholders."""

    def __getattr__(self, key: str) -> Any:
        if key.startswith("__"):
            raise AttributeError(key)
        return Placeholder(f"{self.__name__}.{key}")


class NamedModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds these packages and all below them, `but` for one whose modules are files."""

    def __init__(self, packages: Sequence[str], but: str = "") -> None:
        self._packages, self._but = packages, but

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find those that are not files here."""
        known = fullname.split(".", maxsplit=1)[0] in self._packages
        if not known or (self._but and fullname.startswith(self._but)):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Make one of placeholders."""
        return PlaceholderModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Give it what is called."""
        vars(module).update(KNOWN.get(module.__name__, {}))
