"""Every kind of number that a command takes, with its bounds; ranges of nodes, as torchrun writes them; and durations.

A number that no job has is refused when the command line is read, before anything is made or sent.
"""

import math
import os
import re
from pathlib import Path
from typing import Any

import click
import msgspec

from ..protocol.bounds import LARGEST_COUNT, LARGEST_NUMBER, LARGEST_RANK, MOST_NODES

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
YEAR_S = 366 * 86_400
_DURATION = re.compile(r"(\d{1,6})([smhd])")


class Whole(click.IntRange):
    """A whole number from 1 to `most`; what else torchrun would take is refused with what to write instead."""

    def __init__(self, most: int) -> None:
        super().__init__(1, most)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Make a number of the text."""
        text = str(value)
        if not isinstance(value, int) and not text.isdecimal():
            self.fail(f"{text!r} is not a whole number of at least 1", param, ctx)
        return int(super().convert(value, param, ctx))


class RanksPerNode(Whole):
    """A number of ranks, or torchrun's words for one: `cpu`, `gpu`, and `auto` for accelerators, else processors."""

    name = "n|auto|cpu|gpu"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Make a number of the text. What is counted is what this machine has."""
        if value == "xpu":
            self.fail("'xpu': midstep has no device of that kind; give a number, or cpu", param, ctx)
        if value not in {"auto", "cpu", "gpu"}:
            return super().convert(value, param, ctx)
        count = 0 if value == "cpu" else _gpus()
        if value == "gpu" and not count:
            self.fail("'gpu': torch finds no CUDA device on this machine; give a number, or cpu", param, ctx)
        if value == "auto" and not count:
            count = len([each for each in Path("/dev").glob("davinci*") if each.name[7:].isdecimal()])
        return super().convert(count or os.cpu_count() or 1, param, ctx)


def _gpus() -> int:
    try:
        import torch
    except ImportError:
        return 0
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


class Real(click.FloatRange):
    """A number within bounds. NaN, which no comparison finds out of bounds, is none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Make a number of the text."""
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail(f"{value!r} is not a number", param, ctx)
        return number


NODES = click.IntRange(1, MOST_NODES)
RANKS_OF_A_NODE = click.IntRange(1, 1024)  # of a forecast; `run` takes what a node can have
SPARES = click.IntRange(0, MOST_NODES)
RESTARTS = click.IntRange(0, 1_000_000)
RANK = click.IntRange(0, LARGEST_RANK)
STEP = click.IntRange(0, LARGEST_COUNT)
STEPS_OF_DEMO = click.IntRange(20, 1_000_000)
DEVICE = click.IntRange(0, LARGEST_RANK)
INCIDENT = click.IntRange(1, LARGEST_COUNT)
SESSION = click.IntRange(0, LARGEST_NUMBER)
SEED = click.IntRange(-LARGEST_NUMBER, LARGEST_NUMBER)
DESCRIPTOR = click.IntRange(0, 1 << 20)  # of a file; Linux allows no more to a process
PROBABILITY = Real(0, 1)
HOURS = Real(0, 100_000, min_open=True)


def seconds(least: float = 0) -> Real:
    """Return the type of a time in seconds, from `least` to a year."""
    return Real(least, YEAR_S)


class NodesAsked(msgspec.Struct, frozen=True):
    """The number of nodes of a job. `least`: the fewest with which it trains; None: all, or as the policy says."""

    most: int
    least: int | None = None


def node_count(context: click.Context, option: click.Parameter, text: str) -> NodesAsked:
    """Make numbers of N or MIN:MAX. The callback of an option."""
    least, colon, most = text.rpartition(":")
    whole = Whole(MOST_NODES)
    if not colon:
        return NodesAsked(whole.convert(most, option, context))
    count = NodesAsked(whole.convert(most, option, context), whole.convert(least, option, context))
    if count.least is not None and count.least > count.most:
        raise click.BadParameter(f"{text!r}: the fewest nodes come first, as in {most}:{least}")
    return count


def duration_s(context: click.Context, option: click.Parameter, value: str | None) -> int | None:
    """Make seconds of a number with its unit, as in 90m."""
    return None if value is None else seconds_in(value)


def seconds_in(text: str) -> int:
    """Make seconds of a number with its unit, as in 90m. Raises BadParameter."""
    match = _DURATION.fullmatch(text)
    if match is None or int(match[1]) == 0:
        raise click.BadParameter(f"{text!r} is no duration: write a number and s, m, h or d, for example 12h")
    return int(match[1]) * _UNITS_S[match[2]]
