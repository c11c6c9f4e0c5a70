"""The environments of the tests on the fake CANN: one with torch, and the published torch-npu for that torch.

python -m tests.cann.environment [--release 2.7.1] [PROGRAM ARGUMENT...]

Makes one, and runs a program of its `bin` in it. torch-npu's wheel is not modified, and what it needs of CANN is built
here, by `c++`, from the folder `library`. torch is that of this project's own environment, or of one of those that
`make test SUITE=versions` makes: nothing but the wheel is installed on top.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

import pytest

from ..versions.environments import INSTALL_S, ROOT, NotHere
from ..versions.environments import make as make_below
from .releases import RELEASES, Release, chosen

REQUIRED = "MIDSTEP_REQUIRE_CANN"  # set where the tests have to run: a skipped one is a failed one then
HOME = "FAKE_CANN_HOME"  # set in this environment; what processes on the fake devices leave there tells the next ones
SOURCES = Path(__file__).with_name("library")
HCCL = ("communicators", "links", "reduction", "collectives")  # the other files are libascendcl's
# Libraries that torch-npu is linked to or opens, and that find everything in libascendcl.
EMPTY = ("acl_op_compiler", "acl_tdt_channel", "atb", "ge_runner", "graph", "opapi", "runtime")
HEADERS = "headers"
# What a Python of the environment starts with: the packages below it, and operators when torch-npu is imported.
STARTS_WITH = """import site; site.addsitedir({site!r})
import sys; sys.path.append({root!r}); import tests.cann.on_import
"""
BUILD_S = 900.0  # at the lowest priority, beside tests that keep all cores busy
ASK_S = 300.0
# From 2.10 on torch-npu registers settings of the allocator that a torch with CUDA registers as well, which ends the
# process. The compiler keeps the last 16 bytes of such a long name by themselves.
ENDS_OF_SETTINGS = (b"_segment_size_mb", b"_memory_fraction")
FLAGS = ("-std=c++17", "-O1", "-shared", "-fPIC", "-Wall", "-pthread")


_PACKAGES = "import sysconfig; print(sysconfig.get_path('purelib'))"
_TORCH = "from importlib.util import find_spec; print(find_spec('torch').submodule_search_locations[0])"
_TORCH_VERSION = "from importlib.metadata import version; print(version('torch'))"


def require_cann() -> None:
    """Skip the test where there is no fake CANN, with what to do; fail it where it has to run."""
    if HOME in os.environ and find_spec("torch_npu") is not None:
        return
    reason = "no fake CANN in this environment: `make test SUITE=cann` makes one"
    if os.environ.get(REQUIRED):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


def make(release: Release = RELEASES[0], below: Path | None = None) -> Path:
    """Make the environment of a release, or take the one that is there; return its folder. Raises NotHere.

    `below`: the Python of an environment with torch, and more, to make it upon.
    """
    compiler = shutil.which("c++")
    if compiler is None:
        raise NotHere("there is no C++ compiler (c++) on the path")
    folder = ROOT / ".versions"
    python = below
    if python is None:
        python = Path(sys.executable) if release.below is None else make_below(release.below, folder).bin / "python"
    torch, site, home = _asked(python, _TORCH_VERSION, _PACKAGES, _TORCH)
    torch = torch.partition("+")[0]
    if torch != release.torch:
        raise NotHere(f"torch-npu {release.version} is for torch {release.torch}, and {python} has {torch}")
    place = folder / (f"cann-{release.version}" if below is None else f"cann-{release.version}-{below.parents[1].name}")
    _rename_settings(Path(home, "lib", "libc10_cuda.so"))
    done = place / "installed"
    wanted = f"{python} torch {torch} torch-npu {release.version} headers {release.headers}\n{STARTS_WITH}"
    if not done.is_file() or done.read_text() != wanted:
        _install(place, python, site, release)
        done.write_text(wanted)
    _build(compiler, place)
    return place


def _rename_settings(cuda: Path) -> None:
    """Have a torch's own part for CUDA, if it has one, call two settings otherwise. There is no CUDA device here."""
    if not cuda.is_file():
        return
    content = found = cuda.read_bytes()
    for end in ENDS_OF_SETTINGS:
        content = content.replace(end, end[:-1] + b"~")
    if content != found:
        renamed = cuda.with_suffix(".renamed")
        renamed.write_bytes(content)
        renamed.replace(cuda)  # pip may have linked the file that was there to another environment's


def variables(place: Path) -> dict[str, str]:
    """Return the variables with which a program finds the fake CANN."""
    library = _library(place)
    own, below = _asked(place / "bin" / "python", _PACKAGES, _TORCH)
    parts = (library, Path(own, "torch_npu", "lib"), Path(below, "lib"))
    return {
        "LD_LIBRARY_PATH": os.pathsep.join(map(str, parts)),
        "ASCEND_HOME_PATH": str(library),
        "ASCEND_OPP_PATH": str(library),
        "ASCEND_AICPU_PATH": str(library),
        "ACL_OP_INIT_MODE": "1",  # no operator is compiled when torch-npu begins
        HOME: str(place / "devices"),
        REQUIRED: "1",
    }


def _asked(python: Path, *codes: str) -> list[str]:
    """Return the lines that a Python prints."""
    said = _run([str(python), "-c", "\n".join(codes)], ASK_S)
    return said.split()


def _install(place: Path, python: Path, site: str, release: Release) -> None:
    """Make a virtual environment that finds everything of another one, and install torch-npu's wheel in it."""
    _run([str(python), "-m", "venv", "--clear", "--without-pip", str(place)], INSTALL_S)
    (own,) = _asked(place / "bin" / "python", _PACKAGES)
    Path(own, "midstep_own.pth").write_text(STARTS_WITH.format(site=site, root=str(ROOT)))
    pip = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    _run([*pip, own, f"torch-npu=={release.version}"], INSTALL_S)
    if release.headers:
        _run([*pip, str(place / HEADERS), f"torch-npu=={release.headers}"], INSTALL_S)


def _headers(place: Path) -> Path:
    """Return where CANN's headers are, as a wheel of torch-npu brings them."""
    other = place / HEADERS / "torch_npu" / "include"
    return other if other.is_dir() else next(place.glob("lib/*/site-packages/torch_npu/include"))


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
        _compile([compiler, *FLAGS], _headers(place), made)
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


def _run(command: list[str], limit_s: float) -> str:
    """Run a command and return what it prints. Raises NotHere."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        raise NotHere(f"`{' '.join(command[:4])}` took more than {limit_s:.0f} s") from None
    if done.returncode != 0:
        raise NotHere(f"`{' '.join(command[:4])}` failed: {(done.stderr or done.stdout).strip()[-600:]}")
    return done.stdout


def main() -> None:
    """Make the environment, and become the program that is to run in it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--release", default="", help="beginning of torch-npu's number, as 2.7.1")
    parser.add_argument("program", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    try:
        place = make(chosen(options.release))
    except NotHere as reason:
        sys.exit(f"no environment on the fake CANN: {reason}")
    if options.program:
        name, *arguments = options.program
        os.environ.update(variables(place))
        os.environ["PATH"] = os.pathsep.join((str(place / "bin"), os.environ["PATH"]))
        os.execv(place / "bin" / name, [str(place / "bin" / name), *arguments])


if __name__ == "__main__":
    main()
