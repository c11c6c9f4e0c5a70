"""Says when a rank's process has been stopped for too long: by SIGSTOP, a debugger, or whatever else stops processes.

The stall clock knows a rank's usual step, and has to wait for a history of steps before it may judge. That a process
is stopped is known at once, from the kernel, in any step and also while the rank starts, joins or recovers. Pure: the
agent hands in what it read and when, and tells when it was itself held up, since then the machine may have been.
"""

import msgspec

from ..protocol.types import Activity, RankProgress


class Suspension(msgspec.Struct, frozen=True):
    """A rank's process is stopped, since `stopped_s` seconds that it alone has lost."""

    progress: RankProgress
    stopped_s: float

    @property
    def detail(self) -> str:
        """Say in words what is seen, for the fault report."""
        return (
            f"the process has been stopped for {self.stopped_s:.1f} s by a signal or a debugger, while "
            f"{self.progress.activity} at step {self.progress.step}"
        )


# A process that is traced is stopped for a moment at each system call, and gets on all the same.
_Place = tuple[int, int, int, Activity, int]


def _place_of(progress: RankProgress) -> _Place:
    return progress.incarnation, progress.generation, progress.step, progress.activity, progress.collectives


class _Stop:
    """What is remembered of a process that is stopped."""

    __slots__ = ("place", "reports", "since_s")

    def __init__(self, place: _Place, since_s: float) -> None:
        self.place = place
        self.since_s = since_s
        self.reports = 0


class SuspensionClock:
    """Watches which ranks of a node are stopped.

    A rank is reported when its process has been stopped for `limit_s` at one place, without a break, and again each
    time that this has doubled: the controller may not have been able to do anything about it. A rank that has finished
    is not reported: nothing is lost with it, and its end has a deadline of its own.
    """

    def __init__(self, *, limit_s: float) -> None:
        self._limit_s = limit_s
        self._stops: dict[int, _Stop] = {}

    def held_up(self, lag_s: float) -> None:
        """The observer itself was not running for `lag_s`: whatever held it up may have stopped the ranks, too."""
        for stop in self._stops.values():
            stop.since_s += lag_s

    def forget(self, rank: int) -> None:
        """The rank's process is gone."""
        self._stops.pop(rank, None)

    def observe(self, progress: RankProgress, now: float) -> Suspension | None:
        """Take in a reading of a rank at `now`, and return its suspension when it is to be reported."""
        if not progress.suspended or progress.activity is Activity.FINISHED:
            self.forget(progress.rank)
            return None
        stop = self._stops.get(progress.rank)
        place = _place_of(progress)
        if stop is None or stop.place != place:
            stop = self._stops[progress.rank] = _Stop(place, now)
        stopped_s = now - stop.since_s
        if stopped_s < self._limit_s * 2**stop.reports:
            return None
        stop.reports += 1
        return Suspension(progress, stopped_s)
