"""A played train thread: a generator on the timeline that yields what it waits for.

It can be torn out of a collective, as an abort or a broken link does. One that is stopped, hangs or is dead does not go
on.
"""

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, TypeVar

from ...protocol.errors import CommunicatorAborted, CommunicatorFailed, LinkUpFailed, MidstepError
from ...protocol.types import Activity, Rendezvous

if TYPE_CHECKING:
    from .communicators import Group
    from .timeline import Timeline

Returned = TypeVar("Returned")
Wait = Callable[[Callable[[Any], None]], None]  # is handed what lets the thread go on, with what it has waited for
Thread = Generator[Wait, Any, Returned]


class PlayedThread:
    """What a process does in its train thread, and how it is torn out of it."""

    def __init__(self, rank: int, timeline: "Timeline") -> None:
        self.rank = rank
        self.timeline = timeline
        self.alive, self.suspended, self.hung = True, False, False
        self.slowness = 1.0
        self.epoch = 0  # how often the thread has gone on, or was torn out of what it did
        self.group: Group | None = None
        self.failed: str | None = None  # why the communicators have failed
        self.in_collective = False  # and fails out of it when the communicators do
        self.activity = Activity.STARTING
        self.since_s = self.step_since_s = timeline.now
        self.collectives = 0
        self._thread: Thread[None] | None = None

    def play(self, thread: Thread[None]) -> None:
        """Be this thread, from its beginning on."""
        self._thread = thread
        self._go_on(None)

    def still(self, call: Callable[[Any], None]) -> Callable[[Any], None]:
        """Return `call`, which is void when the thread has gone on meanwhile, or cannot go on."""
        epoch = self.epoch

        def go(value: Any) -> None:
            if self.alive and not self.suspended and not self.hung and epoch == self.epoch:
                call(value)

        return go

    def sleep(self, delay_s: float) -> Wait:
        """Let time pass."""
        return lambda go: self.timeline.after(delay_s, lambda: go(None))

    def within(self, limit_s: float, wait: Wait, error: MidstepError) -> Wait:
        """Wait in a collective, which fails with `error` when it takes longer than `limit_s`."""

        def begin(go: Callable[[Any], None]) -> None:
            epoch = self.epoch

            def give_up() -> None:
                if self.alive and epoch == self.epoch:
                    self._tear(0.0, error)

            self.timeline.after(limit_s, give_up)
            wait(go)

        return begin

    def doing(self, activity: Activity) -> None:
        """Set the step clock's activity."""
        self.activity, self.since_s = activity, self.timeline.now

    # --- communicators ------------------------------------------------------------------------------------------

    def link_up(self, group: "Group", store: Rendezvous, limit_s: float) -> Thread[None]:
        """Connect to all others at a store. Raises LinkUpFailed after `limit_s`, or what `enter` raises."""
        self.group, self.failed, self.in_collective = group, None, True
        error = LinkUpFailed(f"not connected within {limit_s} s")
        yield self.within(limit_s, lambda go: group.connect(self, store, lambda: go(None)), error)

    def enter(self, activity: Activity) -> "Thread[Group]":
        """Begin a collective, and return where. Raises CommunicatorError, now or while it is waited for."""
        assert self.group is not None
        self.doing(activity)
        self.collectives += 1
        if self.failed is not None:
            yield self.sleep(0.001)
            raise CommunicatorFailed(self.failed)
        self.in_collective = True
        return self.group

    def abort(self, reason: str) -> None:
        """Abort the communicators (any thread). A train thread in a collective fails out of it."""
        if self.group is not None:
            self.group.leave(self)
        self.failed = self.failed or reason
        self._tear(0.002, CommunicatorAborted(reason))

    def lose_connection(self, group: "Group", reason: str) -> None:
        """A peer has gone, or a link broke."""
        if self.alive and not self.suspended and self.group is group and self.failed is None:
            self.failed = reason
            self._tear(0.0, CommunicatorFailed(reason))

    def raise_now(self, error: MidstepError) -> None:
        """Have what the thread waits for fail."""
        assert self._thread is not None
        self.in_collective = False
        self._wait_for(lambda thread: thread.throw(error))

    # --- inside -------------------------------------------------------------------------------------------------

    def _go_on(self, value: Any) -> None:
        self._wait_for(lambda thread: thread.send(value))

    def _wait_for(self, next_of: Callable[[Thread[None]], Wait]) -> None:
        assert self._thread is not None
        try:
            wait = next_of(self._thread)
        except StopIteration:
            return
        self.epoch += 1
        wait(self.still(self._go_on))

    def _tear(self, delay_s: float, error: MidstepError) -> None:
        if self.in_collective:
            self.in_collective = False
            self.epoch += 1
            throw = self.still(lambda _: self.raise_now(error))
            self.timeline.after(delay_s, lambda: throw(None))
