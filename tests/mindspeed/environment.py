"""The environment of the MindSpeed-LLM tests, and the checkouts that they run. Prints where its programs are.

python -m tests.mindspeed.environment
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from ..versions.environments import Suite

SUITE = Suite(
    name="mindspeed",
    module="transformers",
    pythons=("3.10", "3.11"),
    library=f"--requirement={Path(__file__).with_name('requirements.txt')}",
    extras="test",
    release="2.7.1",
    constrained=False,
)
PROGRAMS, BELOW, MEGATRON = "MIDSTEP_MINDSPEED_LLM", "MIDSTEP_MINDSPEED", "MIDSTEP_MEGATRON_LM_0_12"
VARIABLES = (PROGRAMS, BELOW, MEGATRON)


def missing() -> str:
    """Return which checkouts are not named; empty: all are."""
    return ", ".join(name for name in VARIABLES if name not in os.environ)


def checkouts() -> list[tuple[Path, Path]]:
    """Return the checkouts of MindSpeed-LLM that are named, each with its MindSpeed."""
    programs, below = (os.environ.get(name, "").split(os.pathsep) for name in (PROGRAMS, BELOW))
    return [(Path(program), Path(under)) for program, under in zip(programs, below, strict=True) if program]


def release_of(program: Path) -> str:
    """Return the number that a checkout of MindSpeed-LLM gives itself (26.1.0 says 26.0.0dev0)."""
    found = re.search(r"__version__ = '(.+)'", (program / "setup.py").read_text())
    return found[1] if found else program.name


def put_together(program: Path, folder: Path) -> Path:
    """Copy a MindSpeed-LLM with Megatron-LM's folder in it, as its guide says, and build what Megatron-LM builds."""
    megatron = Path(os.environ[MEGATRON]) / "megatron"
    shutil.copytree(program, folder, ignore=shutil.ignore_patterns(".git", "docs", "tests", "docker"))
    shutil.copytree(megatron, folder / "megatron", dirs_exist_ok=True)
    _build_helpers(folder / "megatron" / "core" / "datasets")
    of_fsdp2 = folder / "mindspeed_llm" / "fsdp2" / "data" / "megatron_data"
    if of_fsdp2.is_dir():  # not in 2.3.0
        _build_helpers(of_fsdp2)
    return folder


def _build_helpers(datasets: Path) -> None:
    import pybind11

    built = f"helpers_cpp{sysconfig.get_config_var('EXT_SUFFIX')}"
    headers = [f"-I{pybind11.get_include()}", f"-I{sysconfig.get_path('include')}"]
    build = ["c++", "-O3", "-shared", "-std=c++17", "-fPIC", *headers, "helpers.cpp", "-o", built]
    subprocess.run(build, cwd=datasets, check=True, timeout=600)
    (datasets / "Makefile").write_text("default:\n")  # it would be built once more, for the python3 of the path


if __name__ == "__main__":
    print(SUITE.make(*sys.argv[1:2]))
