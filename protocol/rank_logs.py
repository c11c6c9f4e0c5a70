"""Where a training process writes: what it prints, and, in a second file, what is only for whoever looks into it.

The first file is shown at the terminal of `midstep run` as it grows, so it holds what the script prints and nothing of
a recovery that went well.
"""

from pathlib import Path

_DIRECTORY = "logs"


def output_log(job_directory: str, rank: int, incarnation: int) -> Path:
    """Return the file that holds what a process has printed."""
    return Path(job_directory) / _DIRECTORY / f"rank-{rank}.{incarnation}.log"


def debug_log(job_directory: str, rank: int, incarnation: int) -> Path:
    """Return the file with tracebacks of interrupted collectives, and with the interpreter's dump after a crash."""
    return Path(job_directory) / _DIRECTORY / f"rank-{rank}.{incarnation}.debug.log"
