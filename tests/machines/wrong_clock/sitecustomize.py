"""Have this Python's wall clock be off by what a file says, whenever that changes. It runs at the start, by PYTHONPATH.

A namespace has no wall clock of its own, and a library that stands between a program and all its clocks breaks waiting.
"""

import os
import time
from pathlib import Path

FILE = "MIDSTEP_TEST_WALL_CLOCK"  # names the file with the seconds
_right = time.time


def _wrong() -> float:
    return _right() + float(Path(os.environ[FILE]).read_text("utf-8"))


time.time = _wrong
time.time_ns = lambda: int(_wrong() * 1e9)
