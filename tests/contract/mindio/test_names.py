"""mindio_ttp as midstep gives it to ranks has the names, parameters, defaults and values of MindIO."""

import ast
import importlib
import importlib.util
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from midstep.adapters.mindio.package import PATH, refuse_installed
from midstep.protocol.errors import ConfigurationError

from . import names

MIND_CLUSTER = "MIDSTEP_MINDCLUSTER"  # a checkout of Ascend/mind-cluster
MINDSPEED_LLM = "MIDSTEP_MINDSPEED_LLM"  # checkouts of Ascend/MindSpeed-LLM, with a colon between them


@pytest.fixture(scope="module", autouse=True)
def on_path() -> Iterator[None]:
    """Have the package on the path, as a rank has it, and nowhere afterwards."""
    sys.path.insert(0, str(PATH))
    try:
        yield
    finally:
        sys.path.remove(str(PATH))
        for name in [each for each in sys.modules if each.partition(".")[0] == "mindio_ttp"]:
            del sys.modules[name]


def shape(given: str) -> list[tuple[str, str]]:
    """Return parameters and defaults of a line of the table."""
    function = ast.parse(f"def each({given}): ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    return shape_of(function)


def shape_of(function: ast.FunctionDef) -> list[tuple[str, str]]:
    """Return parameters and defaults of a function's source."""
    arguments = function.args.args
    defaults = [""] * (len(arguments) - len(function.args.defaults)) + [ast.unparse(d) for d in function.args.defaults]
    return [(argument.arg, default) for argument, default in zip(arguments, defaults, strict=True)]


@pytest.mark.parametrize("home", names.SIGNATURES)
def test_each_function_has_mindio_s_parameters_and_defaults(home: str) -> None:
    """Scripts pass some by name and some by place."""
    module = importlib.import_module(home)
    for name, given in names.SIGNATURES[home].items():
        found = [
            (parameter.name, "" if parameter.default is parameter.empty else repr(parameter.default))
            for parameter in inspect.signature(getattr(module, name)).parameters.values()
        ]
        assert found == shape(given), f"{home}.{name}"


@pytest.mark.parametrize("enumeration", names.VALUES)
def test_each_value_is_mindio_s(enumeration: str) -> None:
    """Scripts compare the numbers, and hand them on."""
    for home in ("mindio_ttp.framework_ttp", "mindio_ttp.framework_ttp.ttp_decorator"):
        found = getattr(importlib.import_module(home), enumeration)
        assert {each.name: each.value for each in found} == names.VALUES[enumeration]


@pytest.mark.parametrize("user", names.IMPORTED)
def test_every_name_that_is_imported_exists(user: str) -> None:
    """MindSpeed-LLM, MindSpore and TaskD find what they look for."""
    for home, wanted in names.IMPORTED[user].items():
        module = importlib.import_module(home)
        assert not [name for name in wanted.split() if not hasattr(module, name)], home


def test_the_old_adaptor_is_refused_with_a_sentence() -> None:
    """It patches Megatron-LM itself, which MindIO has given up."""
    with pytest.raises(ImportError, match="of an old MindIO"):
        importlib.import_module("mindio_ttp.adaptor")


def test_a_real_package_is_refused_with_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two packages of one name would decide what a recovery does."""
    (tmp_path / "mindio_ttp").mkdir()
    (tmp_path / "mindio_ttp" / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path), *(each for each in sys.path if each != str(PATH))])
    for name in [each for each in sys.modules if each.partition(".")[0] == "mindio_ttp"]:
        monkeypatch.delitem(sys.modules, name)

    with pytest.raises(ConfigurationError, match=f"is installed in {re.escape(str(tmp_path))}"):
        refuse_installed()


def test_only_a_rank_of_mindio_finds_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name is nowhere on the path of a Python with midstep in it."""
    code = "import importlib.util, midstep; print(importlib.util.find_spec('mindio_ttp'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "None"


# --- against the sources ----------------------------------------------------------------------------------------------


def checkouts(variable: str) -> list[Path]:
    """Return the checkouts that a variable names, or skip."""
    if variable not in os.environ:
        pytest.skip(f"{variable} names no checkout")
    return [Path(each) for each in os.environ[variable].split(os.pathsep)]


def mind_cluster() -> Path:
    """Return the checkout of MindCluster, or skip."""
    (found,) = checkouts(MIND_CLUSTER)
    return found


@pytest.mark.parametrize("home", names.HOMES)
def test_the_table_is_that_of_mindio_s_sources(home: str) -> None:
    """Every function that is public there is in the table, as it is there."""
    source = ast.parse((mind_cluster() / home).read_text())
    public = {
        each.name: shape_of(each)
        for each in source.body
        if isinstance(each, ast.FunctionDef) and (each.name.startswith("tft_") or each.name in names.HOMES[home])
    }
    assert public == {name: shape(given) for name, given in names.HOMES[home].items()}


@pytest.mark.parametrize("header", names.ENUMERATIONS)
def test_the_values_are_those_of_mindio_s_sources(header: str) -> None:
    """They are given by C++ enumerations, in their order."""
    name = names.ENUMERATIONS[header]
    found = re.search(rf"enum class {name}[^{{]*{{(.*?)}}", (mind_cluster() / header).read_text(), re.DOTALL)
    assert found is not None
    members = re.findall(r"\b(R[ST]_\w+)", found.group(1))
    assert {member: number for number, member in enumerate(members) if member != "RT_BUTT"} == names.VALUES[name]


def imported_in(root: Path) -> dict[str, set[str]]:
    """Return what the Python files below a directory import from mindio_ttp, by module."""
    found: dict[str, set[str]] = {}
    for path in root.rglob("*.py"):
        text = path.read_text(errors="replace")
        if "mindio_ttp" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "mindio_ttp":
                found.setdefault(node.module or "", set()).update(alias.name for alias in node.names)
    return found


def missing(found: dict[str, set[str]]) -> list[str]:
    """Return the names that midstep's package does not have."""

    def lacks(home: str, name: str) -> bool:
        module: ModuleType = importlib.import_module(home)
        return not hasattr(module, name) and importlib.util.find_spec(f"{home}.{name}") is None

    return [f"{home}.{name}" for home, wanted in sorted(found.items()) for name in sorted(wanted) if lacks(home, name)]


def test_mindspeed_llm_finds_every_name() -> None:
    """And imports no other than the table says."""
    table = {home: set(wanted.split()) for home, wanted in names.IMPORTED["MindSpeed-LLM c77308a1"].items()}
    for checkout in checkouts(MINDSPEED_LLM):
        found = imported_in(checkout / "mindspeed_llm")
        assert found
        assert not missing(found)
        assert not {home: more for home, wanted in found.items() if (more := wanted - table.get(home, set()))}, checkout


def test_taskd_finds_every_name() -> None:
    """And imports no other than the table says."""
    found = imported_in(mind_cluster() / "component" / "taskd" / "taskd")
    assert not missing(found)
    assert found == {home: set(wanted.split()) for home, wanted in names.IMPORTED["TaskD 22bb3d98"].items()}


@pytest.mark.parametrize("library", ["mindspore", "mindformers"])
def test_what_is_installed_here_finds_every_name(library: str) -> None:
    """It is asked for without being imported: MindSpore takes its names from the module, one by one."""
    home = os.environ.get(f"MIDSTEP_{library.upper()}")  # where the package lies, if it is not installed here
    spec = importlib.util.find_spec(library) if home is None else None
    if home is None and (spec is None or spec.origin is None):
        pytest.skip(f"{library} is not installed, and MIDSTEP_{library.upper()} names no package")
    root = Path(home) if home is not None else Path(str(spec.origin)).parent if spec else Path()
    assert not missing(imported_in(root))
    module = importlib.import_module("mindio_ttp.framework_ttp")
    texts = [path.read_text(errors="replace") for path in root.rglob("*.py")]
    used = {name for text in texts if "tft" in text for name in re.findall(r"\btft\.([A-Za-z]\w*)", text)}
    used = {name for name in used if name.startswith("tft_") or name in names.VALUES}
    assert not [name for name in sorted(used) if not hasattr(module, name)]
