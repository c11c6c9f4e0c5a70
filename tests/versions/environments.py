"""The environments that `make test SUITE=versions` makes: which releases are run together, and how one is installed."""

import glob
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from midstep.cli.doctor import MEGATRON, PYTHON, TORCH

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
NEEDED_BYTES = 8 * 10**9  # torch with the CUDA packages that its default build depends on, and pip's copies of them
INSTALL_S = 1800.0
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
ENVIRONMENTS = (
    OLDEST,
    Environment("3.10", "2.7.1", "0.12.1", instead="3.11"),  # the stack of MindSpeed-LLM 2.3.0 to 26.1.0
    Environment("3.12", "2.9.1", "0.14.0"),
    Environment("3.13", "2.15.0", "0.16.1"),
)


class Made(NamedTuple):
    """An environment that is there, and what is in it."""

    bin: Path
    versions: dict[str, str]


def make(environment: Environment, folder: Path, install_s: float = INSTALL_S) -> Made:
    """Make an environment below `folder`, or take the one that is there. Raises NotHere with the reason."""
    interpreter = find_python(environment.python) or (environment.instead and find_python(environment.instead))
    if not interpreter:
        raise NotHere(f"no Python {' or '.join(filter(None, (environment.python, environment.instead)))} is at hand")
    place = folder / environment.name
    done = place / "installed"
    wanted = key(interpreter, *environment)
    if not done.is_file() or done.read_text() != wanted:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        if not (place / "bin").is_dir() and free < NEEDED_BYTES:
            raise NotHere(f"{free / 1e9:.1f} GB are free in {folder}, and it needs {NEEDED_BYTES / 1e9:.0f}")
        _install(environment, interpreter, place, install_s)
        done.write_text(wanted)
    return Made(place / "bin", _versions(place / "bin" / "python"))


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


def _install(environment: Environment, interpreter: str, place: Path, install_s: float) -> None:
    constraints = place.with_name(f"{place.name}.txt")
    constraints.write_text(f"torch=={environment.torch}\nmegatron-core=={environment.megatron}\n")
    pip = [str(place / "bin" / "python"), "-m", "pip", "install", "--quiet", "--constraint", str(constraints)]
    for command in ([interpreter, "-m", "venv", str(place)], [*pip, "--editable", f"{ROOT}[test,megatron]"]):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=install_s, check=False)
        except subprocess.TimeoutExpired:
            raise NotHere(f"`{' '.join(command[1:4])}` took more than {install_s:.0f} s") from None
        if done.returncode != 0:
            last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "without a word")
            raise NotHere(f"it cannot be installed from the package index of this machine: {last[:300]}")


def _versions(python: Path) -> dict[str, str]:
    code = (
        "import platform; from importlib.metadata import version;"
        f"print(platform.python_version(), version('{TORCH}'), version('{MEGATRON}'))"
    )
    said = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout.split()
    return dict(zip((PYTHON, TORCH, MEGATRON), said, strict=True))
