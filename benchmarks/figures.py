"""Medians with their spread, as data and as text."""

import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, least and greatest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def text(values: Mapping[str, float], factor: float = 1.0, digits: int = 2) -> str:
    """Return a spread as `median (least-greatest)`."""
    median, least, greatest = (f"{factor * values[key]:.{digits}f}" for key in ("median", "min", "max"))
    return f"{median} ({least}-{greatest})"


def medians(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each name over all runs that have it, in the order of the first."""
    names = dict.fromkeys(name for run in runs for name in run)
    return {name: statistics.median(run[name] for run in runs if name in run) for name in names}


def machine() -> dict[str, Any]:
    """Say on what the measurement was taken."""
    return {
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }
