"""Keep Python's part of a collective's work alive for torch's C++, where torch itself does not: before torch 2.7.

There C++ holds only its own part of a work whose class is Python's. Once no Python code holds the other part either,
a wait in C++ (a functional collective's) finds torch's default, which waits for ever. From 2.7 on torch keeps both.
"""

from collections import deque

import torch
from packaging.version import Version
from torch import distributed as dist

FIRST_THAT_KEEPS = Version("2.7")
MOST = 1024  # that nobody has waited for; then the completed ones are let go
LATEST = 8  # that have been waited for: of a coalesced collective, C++ waits once for each tensor

_kept: dict[int, dist.Work] | None = None if Version(torch.__version__) >= FIRST_THAT_KEEPS else {}
_latest: deque[dist.Work] = deque(maxlen=LATEST)


def keep(work: dist.Work) -> None:
    """Keep a new work until `release`. Does nothing where torch keeps it."""
    if _kept is None:
        return
    if len(_kept) >= MOST:
        for key, each in [*_kept.items()]:
            if each.is_completed():
                _kept.pop(key, None)
    _kept[id(work)] = work


def release(work: dist.Work) -> None:
    """Let a work go that has been waited for, soon. Idempotent."""
    if _kept is not None and _kept.pop(id(work), None) is not None:
        _latest.append(work)
