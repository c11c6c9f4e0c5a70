"""Fault attribution: pure functions from what was seen to the ranks at fault."""

import signal
from collections.abc import Iterable

from ...protocol.types import Activity, RankProgress
from ...protocol.wording import BY_ITSELF

_WAITING_FOR_PEERS = frozenset({Activity.COLLECTIVE, Activity.COMMITTING})
# Known to take long: the others wait, and that is as it should be.
_EXCUSED = frozenset({Activity.CHECKPOINTING, Activity.PAUSED})


def stalled_ranks(clocks: Iterable[RankProgress], silent: Iterable[int] = (), limit_s: float = 0.0) -> tuple[int, ...]:
    """Return the ranks that hold up the others, from all step clocks read at about the same time.

    A rank that the kernel has stopped is at fault, and so is one of a node that does not answer (`silent`). Otherwise
    those that are furthest behind, if they are not waiting in a collective themselves and have been at what they do
    for longer than `limit_s` (the age of their step would hold against them that they had to wait in it). Empty:
    no rank can be blamed.
    """
    clocks = list(clocks)
    certain = {clock.rank for clock in clocks if clock.suspended} | set(silent)
    if certain:
        return tuple(sorted(certain))
    blamed = [clock for clock in _furthest_behind(clocks) if clock.activity not in _WAITING_FOR_PEERS | _EXCUSED]
    if len(blamed) == sum(clock.activity is not Activity.FINISHED for clock in clocks):
        return ()
    return tuple(sorted(clock.rank for clock in blamed if clock.activity_age_s > limit_s))


def excused_ranks(clocks: Iterable[RankProgress]) -> tuple[int, ...]:
    """Return the ranks that take long with good reason."""
    return tuple(sorted(clock.rank for clock in clocks if clock.activity in _EXCUSED))


def nobody_waits(clocks: Iterable[RankProgress]) -> bool:
    """Say whether every rank is at work for itself: all of them together are slow, and none holds up another."""
    clocks = list(clocks)
    return bool(clocks) and not any(clock.suspended or clock.activity in _WAITING_FOR_PEERS for clock in clocks)


def moved_on(clocks: Iterable[RankProgress], limit_s: float) -> bool:
    """Say whether those that all others wait for are at work again, since less than `limit_s`.

    In a world that runs, the rank that is furthest behind is not at fault for that.
    """
    clocks = list(clocks)
    if any(clock.suspended for clock in clocks):
        return False
    behind = [clock for clock in _furthest_behind(clocks) if clock.activity not in _WAITING_FOR_PEERS | _EXCUSED]
    fresh = [clock for clock in behind or clocks if clock.activity_age_s <= limit_s]
    return len(fresh) == len(behind or clocks)


def _furthest_behind(clocks: Iterable[RankProgress]) -> list[RankProgress]:
    working = [clock for clock in clocks if clock.activity is not Activity.FINISHED]
    last = min(((clock.step, clock.collectives) for clock in working), default=None)
    return [clock for clock in working if (clock.step, clock.collectives) == last]


def describe_clock(clock: RankProgress | None) -> str:
    """Say in words what a rank is doing; None: its node did not answer."""
    if clock is None:
        return "its node does not answer"
    stopped = ", stopped by a signal" if clock.suspended else ""
    return f"in {clock.activity} for {clock.activity_age_s:.1f} s{stopped}"


def describe_exit(status: int, *, out_of_memory: bool = False) -> str:
    """Say in words how a process ended; negative numbers are signals."""
    if out_of_memory:
        return "the process was killed by the kernel for lack of memory"
    if status >= 0:
        return f"{BY_ITSELF} {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"the process was ended by {name}"
