"""The package mindio_ttp and its C library, which nothing but a rank of `midstep run --mindio` ever finds.

By the C library MindSpore's compiled graphs announce that an update begins. MindSpore opens it by its place in the
package, from C++, and calls it in a thread of its own. It is built here, with `cc`, once for each user and machine,
since what is installed may not be written to.
"""

import ctypes
import importlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

from ...protocol.errors import ConfigurationError

NAME = "mindio_ttp"
PATH = Path(__file__).parent / "path"
SOURCE = Path(__file__).with_name("update_announcement.c")
FRAMEWORK = Path("framework_ttp", "libttp_framework.so")  # which MindSpore opens first
ANNOUNCEMENT = Path("mindspore_api", "libttp_c_api.so")
ANNOUNCED, REFUSED = 0, 1
BUILD_S = 60.0
WITHOUT = (
    "updates of compiled graphs are not announced. Where a process ends while another one has applied an update, the "
    "other one is replaced, too; where none is left with the state, all start again. What is missing: %s"
)
_log = logging.getLogger("midstep")


def refuse_installed() -> None:
    """Raise ConfigurationError if another package of the name can be imported here."""
    place = _installed()
    if place is not None:
        raise ConfigurationError(
            f"--mindio: a package {NAME} is installed in {place}. Both would decide what a recovery does. Remove it "
            f"(`pip uninstall {NAME}`), or leave --mindio out."
        )


def refuse_beside(folder: Path) -> None:
    """Raise ConfigurationError if a script in this folder would import another package of the name from there."""
    for place in (folder / NAME, folder / f"{NAME}.py"):
        if place.exists():
            raise ConfigurationError(
                f"--mindio: {place} would be imported in the place of midstep's {NAME}, and nothing would recover. "
                "Rename it, or leave --mindio out."
            )


def put_on_path(folder: Path) -> None:
    """Let this process import the package, for a script in `folder`. Raises ConfigurationError if there is another."""
    refuse_installed()
    refuse_beside(folder)
    sys.path.insert(0, str(PATH))
    importlib.invalidate_caches()


def path_with_package(path: str) -> str:
    """Return a PYTHONPATH with which a program that is not Python, a shell script say, lets Python find the package."""
    return os.pathsep.join(filter(None, (str(PATH), path)))


def _installed() -> str | None:
    loaded = sys.modules.get(NAME)
    spec = importlib.util.find_spec(NAME) if loaded is None else loaded.__spec__
    if spec is None:
        return None
    places = [spec.origin or "", *(spec.submodule_search_locations or ())]
    place = next(each for each in places if each)
    return None if str(PATH) in place else place


class _Loaded:
    """Holds the callback, which has to live as long as the process."""

    callback: object = None


def offer(update_begins: Callable[[], bool]) -> None:
    """Have MindSpore find the library, which calls `update_begins`. Warn where it cannot be had."""
    try:
        place = build(_cache())
        load(place, update_begins)
    except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:  # RuntimeError: the user has no home
        _log.warning(WITHOUT, error)
        return
    sys.modules["mindio_ttp"].__path__.insert(0, str(place))


def load(place: Path, update_begins: Callable[[], bool]) -> None:
    """Load the library of a place into this process, and have it call `update_begins`."""
    library = ctypes.CDLL(str(place / ANNOUNCEMENT))
    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64)
    callback = kind(lambda backup_step: ANNOUNCED if update_begins() else REFUSED)
    library.midstep_set_update_begins(callback)
    _Loaded.callback = callback


def build(cache: Path) -> Path:
    """Build the library below `cache`, or take the one that is there; return the folder that stands for the package.

    Raises OSError: there is no compiler, it has failed, or there is no room.
    """
    place = cache / f"mindio-{sha256(SOURCE.read_bytes() + os.uname().machine.encode()).hexdigest()[:16]}"
    if (place / FRAMEWORK).exists():
        return place
    compiler = shutil.which("cc")
    if compiler is None:
        raise FileNotFoundError("there is no C compiler (cc) on the path")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as work:
        made = Path(work, "made")
        for name in (ANNOUNCEMENT, FRAMEWORK):
            (made / name).parent.mkdir(parents=True)
        _compile(compiler, made / ANNOUNCEMENT)
        (made / FRAMEWORK).symlink_to(Path("..") / ANNOUNCEMENT)
        try:
            made.rename(place)
        except OSError:
            if not (place / FRAMEWORK).exists():  # otherwise another rank was faster
                raise
    return place


def _compile(compiler: str, target: Path) -> None:
    command = [compiler, "-O1", "-shared", "-fPIC", "-o", str(target), str(SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_S, check=False)
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)} failed: {done.stderr.strip()[-500:]}")


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "midstep"
