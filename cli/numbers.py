"""Numbers on the command line: whole ones and ranges of them, as torchrun's flags take them, and durations."""

import re
from typing import Any

import click
import msgspec

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_DURATION = re.compile(r"(\d{1,6})([smhd])")


class Whole(click.IntRange):
    """A whole number of at least 1; what else torchrun would take is refused with what to write instead."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Make a number of the text."""
        text = str(value)
        if text in {"auto", "gpu", "cpu"}:
            self.fail(f"{text!r}: midstep starts as many ranks as you say; give the number", param, ctx)
        if not isinstance(value, int) and not text.isdecimal():
            self.fail(f"{text!r} is not a whole number of at least 1", param, ctx)
        return int(super().convert(value, param, ctx))


class NodesAsked(msgspec.Struct, frozen=True):
    """How many nodes a job has. `least`: with how few it trains; None: with all of them, or as the policy says."""

    most: int
    least: int | None = None


def node_count(context: click.Context, option: click.Parameter, text: str) -> NodesAsked:
    """Make numbers of N or MIN:MAX. The callback of an option."""
    least, colon, most = text.rpartition(":")
    whole = Whole(min=1)
    if not colon:
        return NodesAsked(whole.convert(most, option, context))
    count = NodesAsked(whole.convert(most, option, context), whole.convert(least, option, context))
    if count.least is not None and count.least > count.most:
        raise click.BadParameter(f"{text!r}: the fewest nodes come first, as in {most}:{least}")
    return count


def duration_s(context: click.Context, option: click.Parameter, value: str | None) -> int | None:
    """Make seconds of a number with its unit, as in 90m."""
    if value is None:
        return None
    match = _DURATION.fullmatch(value)
    if match is None or int(match[1]) == 0:
        raise click.BadParameter(f"{value!r} is no duration: write a number and s, m, h or d, for example 12h")
    return int(match[1]) * _UNITS_S[match[2]]
