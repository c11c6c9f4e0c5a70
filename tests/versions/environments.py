"""The environments that tests make for themselves: which releases are run together, and how one is installed."""

import glob
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

from midstep.cli.doctor import MEGATRON, PYTHON, TORCH

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
NEEDED_BYTES = 8 * 10**9  # torch with the CUDA packages that its default build depends on, and pip's copies of them
INSTALL_S = 1800.0
INSTALLED = "installed"  # the file in an environment that says what it was made of, once all of it is there
# Where pyenv, the python.org packages of Debian and the like have interpreters that are not on the path.
ELSEWHERE = ("~/.pyenv/versions/{python}.*/bin/python", "/opt/python/cp{short}-cp{short}/bin/python")


class NotHere(Exception):
    """An environment cannot be made on this machine. The text says why."""


class Environment(NamedTuple):
    """Releases that are run together. `instead`: the Python to take where there is none of the first."""

    python: str
    torch: str
    megatron: str
    instead: str = ""

    @property
    def name(self) -> str:
        """Name the environment by its torch, the release that most depends on."""
        return f"torch-{self.torch}"


OLDEST = Environment("3.10", "2.6.0", "0.12.1", instead="3.11")
NEWEST = Environment("3.13", "2.15.0", "0.16.1")
ENVIRONMENTS = (
    OLDEST,
    Environment("3.10", "2.7.1", "0.12.1", instead="3.11"),  # the stack of MindSpeed-LLM 2.3.0 to 26.1.0
    Environment("3.12", "2.9.1", "0.14.0"),
    NEWEST,
)


class Made(NamedTuple):
    """An environment that is there, and what is in it."""

    bin: Path
    versions: dict[str, str]


class Suite(NamedTuple):
    """What the tests of one library are run in. `pythons`: those that will do, the best first.

    `library`: what pip is asked for, with `{}` for the release. `extras`: of midstep. `release`: where none is named.
    """

    name: str
    module: str
    pythons: tuple[str, ...]
    library: str
    extras: str
    release: str
    constrained: bool = True  # by constraints.txt

    @property
    def required(self) -> str:
        """Name the variable that is set where the tests have to run: a skipped one is a failed one then."""
        return f"MIDSTEP_REQUIRE_{self.name.upper()}"

    def require(self) -> None:
        """Skip the test where the library is not here, with what to do; fail it where it has to run."""
        if find_spec(self.module) is not None:
            return
        reason = f"no {self.module} in this environment: `make test SUITE={self.name}` makes one"
        if os.environ.get(self.required):
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)

    def make(self, release: str = "") -> Path:
        """Make the environment, or take the one that is there; return its folder of programs. Raises NotHere."""
        release = release or self.release
        place = ROOT / ".versions" / f"{self.name}-{release}"
        wishes = (self.library.format(release), "--editable", f"{ROOT}[{self.extras}]")
        constraints = ROOT / "constraints.txt" if self.constrained else None
        return _provided(place, _interpreter(self.pythons), wishes, constraints, INSTALL_S)


def make(environment: Environment, folder: Path, install_s: float = INSTALL_S) -> Made:
    """Make an environment below `folder`, or take the one that is there. Raises NotHere with the reason."""
    interpreter = _interpreter(filter(None, (environment.python, environment.instead)))
    place = folder / environment.name
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if not (place / INSTALLED).is_file() and free < NEEDED_BYTES:
        raise NotHere(f"{free / 1e9:.1f} GB are free in {folder}, and it needs {NEEDED_BYTES / 1e9:.0f}")
    constraints = place.with_name(f"{place.name}.txt")
    constraints.write_text(f"torch=={environment.torch}\nmegatron-core=={environment.megatron}\n")
    wishes = ("--editable", f"{ROOT}[test,megatron]")
    programs = _provided(place, interpreter, wishes, constraints, install_s)
    return Made(programs, _versions(programs / "python"))


def _interpreter(pythons: Iterable[str]) -> str:
    """Return an interpreter of the first version that is at hand. Raises NotHere."""
    wanted = tuple(pythons)
    interpreter = next(filter(None, map(find_python, wanted)), "")
    if not interpreter:
        raise NotHere(f"no Python {' or '.join(wanted)} is at hand")
    return interpreter


def _provided(place: Path, interpreter: str, wishes: Sequence[str], constraints: Path | None, install_s: float) -> Path:
    """Make a virtual environment with what pip is asked for, unless it is there; return its folder of programs.

    One whose installation was stopped is made from nothing: pip takes a package with half of its files for installed.
    """
    done, programs = place / INSTALLED, place / "bin"
    limits = constraints.read_text() if constraints is not None else ""
    wanted = key(interpreter, *wishes, limits)
    if done.is_file() and done.read_text() == wanted:
        return programs
    if done.is_file():
        done.unlink()
    else:
        shutil.rmtree(place, ignore_errors=True)
    pip = [str(programs / "python"), "-m", "pip", "install", "--quiet"]
    pip += ["--constraint", str(constraints)] if constraints is not None else []
    for command in ([interpreter, "-m", "venv", str(place)], [*pip, *wishes]):
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=install_s, check=False)
        except subprocess.TimeoutExpired:
            raise NotHere(f"`{' '.join(command[1:4])}` took more than {install_s:.0f} s") from None
        if ended.returncode != 0:
            last = next((line for line in reversed(ended.stderr.splitlines()) if line.strip()), "without a word")
            raise NotHere(f"it cannot be installed from the package index of this machine: {last[:300]}")
    done.write_text(wanted)
    return programs


def key(*wishes: str) -> str:
    """Hash what an environment is made of: wishes, the project's dependencies and where it is; not how it is linted."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    made_of = (*wishes, str(ROOT), repr(project), (ROOT / "constraints.txt").read_text())
    return hashlib.sha256("\n".join(made_of).encode()).hexdigest()


def find_python(version: str) -> str:
    """Return an interpreter of this minor version, or nothing."""
    if sys.version_info[:2] == tuple(map(int, version.split("."))):
        return sys.executable
    names = [shutil.which(f"python{version}") or ""]
    for pattern in ELSEWHERE:
        path = os.path.expanduser(pattern.format(python=version, short=version.replace(".", "")))
        names += sorted(glob.glob(path))
    return next((name for name in names if name and _runs(name, version)), "")


def _runs(interpreter: str, version: str) -> bool:
    """Try it: what pyenv puts on the path is a shim, which fails where the version is not switched on."""
    says = [interpreter, "-c", "import sys, venv; print('%d.%d' % sys.version_info[:2])"]
    try:
        done = subprocess.run(says, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and done.stdout.strip() == version


def _versions(python: Path) -> dict[str, str]:
    code = (
        "import platform; from importlib.metadata import version;"
        f"print(platform.python_version(), version('{TORCH}'), version('{MEGATRON}'))"
    )
    said = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout.split()
    return dict(zip((PYTHON, TORCH, MEGATRON), said, strict=True))
