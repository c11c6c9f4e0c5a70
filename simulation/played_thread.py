"""A played train thread: a chain of calls on the timeline.

Each link of the chain is dropped when the thread has been torn out of it (`epoch`), is stopped, hangs, or is dead.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..protocol.types import Activity

if TYPE_CHECKING:
    from .communicators import Group
    from .timeline import Timeline


class PlayedThread:
    """What a process does in its train thread, and how it is torn out of it."""

    def __init__(self, rank: int, timeline: "Timeline") -> None:
        self.rank = rank
        self.timeline = timeline
        self.alive, self.suspended, self.hung = True, False, False
        self.slowness = 1.0
        self.epoch = 0
        self.group: Group | None = None
        self.failed: str | None = None
        self.broken: Callable[[], None] | None = None  # where the train thread goes when its collective fails
        self.activity = Activity.STARTING
        self.since_s = self.step_since_s = timeline.now
        self.collectives = 0

    def later(self, delay_s: float, call: Callable[[], None]) -> None:
        """Have the train thread do something after a while, unless something comes between."""
        self.timeline.after(delay_s, self.still(call))

    def still(self, call: Callable[[], None]) -> Callable[[], None]:
        """Return `call` for the train thread as it goes now; it is void when the thread is torn out."""
        go = self.still_with(lambda _: call())
        return lambda: go(0)

    def still_with(self, call: Callable[[int], None]) -> Callable[[int], None]:
        """Return `call`, which takes what has arrived, for the train thread as it goes now."""
        epoch = self.epoch

        def go(value: int) -> None:
            if self.alive and not self.suspended and not self.hung and epoch == self.epoch:
                call(value)

        return go

    def doing(self, activity: Activity) -> None:
        """Set the step clock's activity."""
        self.activity, self.since_s = activity, self.timeline.now

    def block(self, activity: Activity, broken: Callable[[], None]) -> bool:
        """Enter a collective, and return whether it is entered: `broken` is where its failure leads, now or later."""
        self.doing(activity)
        self.collectives += 1
        self.broken = broken
        if self.failed is None:
            return True
        self._tear(0.001)
        return False

    def abort(self, reason: str) -> None:
        """Abort the communicators (any thread). A train thread in a collective fails out of it."""
        if self.group is not None:
            self.group.leave(self)
        self.failed = self.failed or reason
        self._tear(0.002)

    def lose_connection(self, group: "Group", reason: str) -> None:
        """A peer has gone, or a link broke."""
        if self.alive and not self.suspended and self.group is group and self.failed is None:
            self.failed = reason
            self._tear(0.0)

    def _tear(self, delay_s: float) -> None:
        broken, self.broken = self.broken, None
        if broken is not None:
            self.epoch += 1
            self.later(delay_s, broken)
