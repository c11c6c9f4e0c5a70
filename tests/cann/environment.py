"""The environment of the tests on the fake CANN: this project's, with the published torch-npu for its torch.

python -m tests.cann.environment [PROGRAM ARGUMENT...]

Makes it, and runs a program of its `bin` in it. torch-npu's wheel is not modified, and what it needs of CANN is built
here, by `c++`, from the folder `library`. Nothing but the wheel is installed: the rest is found where it is.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import pytest

from ..versions.environments import INSTALL_S, ROOT, NotHere

# The last torch-npu of each torch that one was published for, as far as these tests have run with it.
RELEASES = {"2.13.0": "2.13.0"}
REQUIRED = "MIDSTEP_REQUIRE_CANN"  # set where the tests have to run: a skipped one is a failed one then
HOME = "FAKE_CANN_HOME"  # set in this environment; what processes on the fake devices leave there tells the next ones
SOURCES = Path(__file__).with_name("library")
HCCL = ("communicators", "links", "reduction", "collectives")  # the other files are libascendcl's
# Libraries that torch-npu is linked to or opens, and that find everything in libascendcl.
EMPTY = ("acl_op_compiler", "acl_tdt_channel", "atb", "ge_runner", "graph", "opapi", "runtime")
BUILD_S = 300.0
FLAGS = ("-std=c++17", "-O1", "-shared", "-fPIC", "-Wall", "-pthread")


def require_cann() -> None:
    """Skip the test where there is no fake CANN, with what to do; fail it where it has to run."""
    if HOME in os.environ and find_spec("torch_npu") is not None:
        return
    reason = "no fake CANN in this environment: `make test SUITE=cann` makes one"
    if os.environ.get(REQUIRED):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


def make() -> Path:
    """Make the environment, or take the one that is there; return its folder. Raises NotHere."""
    torch = _torch()
    release = RELEASES.get(torch)
    if release is None:
        raise NotHere(f"there is no torch-npu for torch {torch} among those of these tests: {', '.join(RELEASES)}")
    compiler = shutil.which("c++")
    if compiler is None:
        raise NotHere("there is no C++ compiler (c++) on the path")
    place = ROOT / ".versions" / f"cann-{release}"
    done = place / "installed"
    wanted = f"{sys.executable} torch {torch} torch-npu {release}"
    if not done.is_file() or done.read_text() != wanted:
        _install(place, release)
        done.write_text(wanted)
    _build(compiler, place)
    return place


def variables(place: Path) -> dict[str, str]:
    """Return the variables with which a program finds the fake CANN."""
    library = _library(place)
    site = Path(sysconfig.get_path("purelib"))
    of_npu = place / "lib" / site.parent.name / site.name / "torch_npu" / "lib"
    return {
        "LD_LIBRARY_PATH": os.pathsep.join(map(str, (library, of_npu, site / "torch" / "lib"))),
        "ASCEND_HOME_PATH": str(library),
        "ASCEND_OPP_PATH": str(library),
        "ASCEND_AICPU_PATH": str(library),
        "ACL_OP_INIT_MODE": "1",  # no operator is compiled when torch-npu begins
        HOME: str(place / "devices"),
        REQUIRED: "1",
    }


def _torch() -> str:
    try:
        return version("torch").partition("+")[0]
    except PackageNotFoundError:
        raise NotHere("there is no torch in this environment") from None


def _install(place: Path, release: str) -> None:
    """Make a virtual environment that finds everything of this one, and install torch-npu's wheel in it."""
    _run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(place)], INSTALL_S)
    site = place / "lib" / Path(sysconfig.get_path("purelib")).parent.name / "site-packages"
    (site / "midstep_own.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site)]
    _run([*pip, f"torch-npu=={release}"], INSTALL_S)


def _library(place: Path) -> Path:
    """Return where the libraries are that these sources give."""
    sources = b"".join(each.read_bytes() for each in sorted(SOURCES.iterdir()))
    return place / f"library-{sha256(sources).hexdigest()[:16]}"


def _build(compiler: str, place: Path) -> None:
    """Build the libraries against the headers in the wheel, if the sources have changed."""
    if _library(place).is_dir():
        return
    (place / "devices").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place) as work:
        made = Path(work, "made")
        for folder in (made / "compiler", made / "runtime"):  # torch-npu looks for them
            folder.mkdir(parents=True)
        _compile([compiler, *FLAGS], next(place.glob("lib/*/site-packages/torch_npu/include")), made)
        try:
            made.rename(_library(place))
        except OSError:
            if not _library(place).is_dir():  # otherwise another one was faster
                raise


def _compile(compiler: list[str], headers: Path, made: Path) -> None:
    inside = [f"-I{headers / each}" for each in ("third_party/acl/inc", "third_party/hccl/inc", ".")]
    sources = sorted(SOURCES.glob("*.cpp"))
    cann = ["-Wl,--no-as-needed", f"-L{made}", "-lascendcl"]
    nothing = made / "nothing.cpp"
    nothing.write_text("")
    parts = {
        "ascendcl": ([each for each in sources if each.stem not in HCCL], []),
        "hccl": ([each for each in sources if each.stem in HCCL], cann),
        **{name: ([nothing], cann) for name in EMPTY},
    }
    for name, (files, linked) in parts.items():
        _run([*compiler, *inside, "-o", str(made / f"lib{name}.so"), *map(str, files), *linked], BUILD_S)


def _run(command: list[str], limit_s: float) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        raise NotHere(f"`{' '.join(command[:4])}` took more than {limit_s:.0f} s") from None
    if done.returncode != 0:
        raise NotHere(f"`{' '.join(command[:4])}` failed: {(done.stderr or done.stdout).strip()[-600:]}")


def main() -> None:
    """Make the environment, and become the program that is to run in it."""
    place = make()
    if len(sys.argv) > 1:
        os.environ.update(variables(place))
        os.environ["PATH"] = os.pathsep.join((str(place / "bin"), os.environ["PATH"]))
        os.execv(place / "bin" / sys.argv[1], [str(place / "bin" / sys.argv[1]), *sys.argv[2:]])


if __name__ == "__main__":
    main()
