"""Who is to blame: pure functions from what was seen to the ranks at fault."""

import signal
from collections.abc import Iterable

from ..protocol.types import Activity, FaultKind, RankProgress

# Something is wrong, and the rank that says so is most likely not the one at fault: those who wait for a dead or
# stalled rank report first.
SUSPICIONS = frozenset({FaultKind.COMMUNICATION, FaultKind.STALL, FaultKind.LINK_UP})

WAITING_FOR_PEERS = frozenset({Activity.COLLECTIVE, Activity.COMMITTING})

# Known to take long: the others wait, and that is as it should be.
EXCUSED = frozenset({Activity.CHECKPOINTING, Activity.PAUSED})


def stalled_ranks(clocks: Iterable[RankProgress], silent: Iterable[int] = ()) -> tuple[int, ...]:
    """Return the ranks that hold up the others, from all step clocks read at about the same time.

    A rank that the kernel has stopped is at fault, and so is one of a node that does not answer (`silent`). Otherwise
    those that are furthest behind, if they are not waiting in a collective themselves. Empty: nobody can be blamed.
    """
    clocks = list(clocks)
    certain = {clock.rank for clock in clocks if clock.suspended} | set(silent)
    if certain:
        return tuple(sorted(certain))
    working = [clock for clock in clocks if clock.activity is not Activity.FINISHED]
    if not working:
        return ()
    last = min((clock.step, clock.collectives) for clock in working)
    behind = [clock for clock in working if (clock.step, clock.collectives) == last]
    blamed = [clock.rank for clock in behind if clock.activity not in WAITING_FOR_PEERS | EXCUSED]
    if len(blamed) == len(working):
        return ()
    return tuple(sorted(blamed))


def excused_ranks(clocks: Iterable[RankProgress]) -> tuple[int, ...]:
    """Return the ranks that take long with good reason."""
    return tuple(sorted(clock.rank for clock in clocks if clock.activity in EXCUSED))


def moved_on(clocks: Iterable[RankProgress], factor: float, grace_s: float) -> bool:
    """Say whether nobody stands still any more: every rank is within `factor` of its median step and `grace_s`.

    Who is furthest behind in a world that runs is nobody's fault.
    """
    return all(
        not clock.suspended and clock.median_step_s > 0 and clock.step_age_s <= factor * clock.median_step_s + grace_s
        for clock in clocks
    )


def describe_clock(clock: RankProgress | None) -> str:
    """Say in words what a rank is doing; None: its node did not answer."""
    if clock is None:
        return "its node does not answer"
    stopped = ", stopped by a signal" if clock.suspended else ""
    return f"in {clock.activity} for {clock.activity_age_s:.1f} s{stopped}"


def describe_exit(status: int) -> str:
    """Say in words how a process ended; negative numbers are signals."""
    if status >= 0:
        return f"the process ended with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"the process was ended by {name}"
