"""The C library by which MindSpore's compiled graphs announce that an update begins.

MindSpore opens it by its place in the package mindio_ttp, from C++, and calls it in a thread of its own. It is built
here, with `cc`, once for each user and machine, since what is installed may not be written to.
"""

import ctypes
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

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


class _Loaded:
    """What has to live as long as the process."""

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
