"""The logs of a training process: what it prints, and, in a second file, what is for debugging.

The first file is shown at the terminal of `midstep run` as it grows, so it holds what the script prints and nothing of
a recovery that went well.
"""

import contextlib
import os
import stat
import sys
from pathlib import Path

_DIRECTORY = "logs"
LAST_BYTES = 2000
LAST_LINES = 20
_SHOWN = "_midstep_shown"  # of an exception: its traceback is in the output


def output_log(job_directory: str, rank: int, incarnation: int) -> Path:
    """Return the file that holds what a process has printed."""
    return Path(job_directory) / _DIRECTORY / f"rank-{rank}.{incarnation}.log"


def debug_log(job_directory: str, rank: int, incarnation: int) -> Path:
    """Return the file with tracebacks of interrupted collectives, and with the interpreter's dump after a crash."""
    return Path(job_directory) / _DIRECTORY / f"rank-{rank}.{incarnation}.debug.log"


def built_log(job_directory: str, rank: int, spare: str = "") -> Path:
    """Return the file that holds what processes print that are built ahead for a rank, up to the train function.

    `spare`: the node on which they are, where that is not the rank's own.
    """
    return Path(job_directory) / _DIRECTORY / f"rank-{rank}.built{'.' * bool(spare)}{spare}.log"


def last_words(log: Path, most_bytes: int = LAST_BYTES) -> str:
    """Return the last lines of a log; the empty string for what is no file, or cannot be read. It does not wait."""
    try:
        descriptor = os.open(log, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return ""
        begin = max(0, status.st_size - most_bytes)
        text = os.pread(descriptor, most_bytes, begin).decode("utf-8", "replace")
    except OSError:
        return ""
    finally:
        os.close(descriptor)
    _, cut, rest = text.partition("\n") if begin else ("", "", text)
    return "\n".join((rest if cut or not begin else text).splitlines()[-LAST_LINES:])


def show_once(error: BaseException) -> None:
    """Print the traceback of an exception as an interpreter does at its end, unless that has been done."""
    if getattr(error, _SHOWN, False):
        return
    with contextlib.suppress(AttributeError, TypeError):  # a class may refuse attributes: then it is shown twice
        setattr(error, _SHOWN, True)
    sys.excepthook(type(error), error, error.__traceback__)
