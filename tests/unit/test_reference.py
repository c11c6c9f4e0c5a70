"""The API reference: which names are public, and the pages that pdoc makes of their docstrings.

Run as a script (`make docs`) it writes the pages to `out/api`.
"""

import inspect
import re
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pdoc
import pytest

from midstep import TrainState
from midstep.processor import framework

OUT = Path(__file__).resolve().parents[2] / "out" / "api"

# module -> the names that scripts use; None: all that it exports
PUBLIC: dict[str, tuple[str, ...] | None] = {
    "midstep": None,
    "midstep.launch.ray": None,  # midstep.ray
    "midstep.adapters.megatron": None,
    "midstep.processor.data": ("ResumableBatches",),
    "midstep.processor.ledger": ("Step",),
    "midstep.protocol.errors": None,
}
# public methods of a public class that only the recovery calls
INTERNAL = {
    name
    for protocol in (framework.Framework, framework.Expectant, framework.Rescalable)
    for name in vars(protocol)
    if not name.startswith("_") and name != "audit"
}


def exported(module_name: str) -> dict[str, Any]:
    """Return the public names of a module with what they stand for."""
    module = import_module(module_name)
    listed = PUBLIC[module_name] or getattr(module, "__all__", None)
    names = listed or [name for name, item in vars(module).items() if getattr(item, "__module__", None) == module_name]
    return {name: getattr(module, name) for name in names}


def generate(directory: Path) -> None:
    """Write the reference as HTML pages."""
    with ExitStack() as stack:
        for name in PUBLIC:
            # names of the face are looked up lazily, which pdoc does not see
            members = exported(name)
            stack.enter_context(patch.dict(vars(import_module(name)), {**members, "__all__": list(members)}))
        for name in INTERNAL & vars(TrainState).keys():
            stack.enter_context(patch.object(vars(TrainState)[name], "__doc__", "@private"))
        pdoc.render.configure(docformat="google", footer_text="midstep")
        modules = [*PUBLIC, "!midstep.adapters.megatron.resilient"]  # a function has the name of its module
        pdoc.pdoc(*modules, output_directory=directory)


NAMES = [(module, name) for module in PUBLIC for name in exported(module) if name != "__version__"]


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_every_public_name_has_a_docstring_of_its_own(module: str, name: str) -> None:
    """Nothing is inherited, and public methods have one each."""
    item = exported(module)[name]
    methods = vars(item).items() if inspect.isclass(item) else ()
    silent = [
        each
        for each, method in methods
        if not each.startswith("_") and (inspect.isfunction(method) or isinstance(method, property))
        if not inspect.getdoc(method)
    ]

    assert item.__doc__
    assert not silent


def test_every_public_name_has_an_entry_in_the_reference(tmp_path: Path) -> None:
    """`make docs` writes one page for each module, and hides what only the recovery calls."""
    generate(tmp_path)

    for module in PUBLIC:
        page = (tmp_path / f"{module.replace('.', '/')}.html").read_text()
        entries = set(re.findall(r'<(?:section|div) id="([\w.]+)"', page))
        assert entries >= set(exported(module))
        assert not {f"TrainState.{name}" for name in INTERNAL} & entries
    assert (tmp_path / "index.html").exists()


if __name__ == "__main__":
    generate(OUT)
    print(f"API reference: {OUT / 'index.html'}")
