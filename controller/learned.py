"""Gather what a controller learns from the events of its job: it follows from the journal, and from nothing else.

It can be written down as a snapshot, from which another controller continues without the events before it.
"""

from collections.abc import Iterable, Sequence

import msgspec

from ..protocol.errors import JournalError, SnapshotUnreadable
from ..protocol.messages import ProcessStarted
from ..protocol.slow_records import SlowTold
from .enrolment import EnrolmentBook
from .journaled import Journaled, NoticeEvent, handled, together
from .liveness import Liveness, Watch
from .notifications import NoticeBook
from .recovery.events import Action, Event, Finish, Send, StopRequested
from .recovery.machine import Machine
from .routes import Routes
from .slow_history import SlowHistory
from .time_account import TimeAccount

FORMAT = 1  # of a snapshot


class Snapshot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A controller's knowledge after an event. `machine`: its memory, which the machine itself reads."""

    format: int
    at_s: float  # the time of the latest event
    machine: bytes
    routes: Routes
    watch: Watch
    enrolments: EnrolmentBook
    finish: Finish | None
    stop_requested: bool
    times: TimeAccount = msgspec.field(default_factory=TimeAccount)
    notices: NoticeBook = msgspec.field(default_factory=NoticeBook)
    slow: SlowHistory = msgspec.field(default_factory=SlowHistory)


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Snapshot).decode


class Learned:
    """Machine, routes, liveness, admitted nodes, time and notices of one controller, taught by the same events."""

    def __init__(
        self, machine: Machine, routes: Routes, liveness: Liveness, enrolments: EnrolmentBook | None = None
    ) -> None:
        """Begin where they stand: at the founding of a job."""
        self.machine = machine
        self.routes = routes
        self.liveness = liveness
        self.enrolments = enrolments or EnrolmentBook()
        self.finish: Finish | None = None
        self.stop_requested = False
        self.at_s = 0.0
        self.times = TimeAccount()
        self.notices = NoticeBook()
        self.slow = SlowHistory()

    def slow_told(self) -> SlowTold:
        """Return which nodes were named slow."""
        return self.slow.told()

    def take(self, event: Journaled, at_s: float) -> list[Action]:
        """Learn from what was journaled, and from what the machine makes of it; the same in a replay."""
        return self.take_all((event,), at_s)

    def take_all(self, journaled: Iterable[Journaled], at_s: float) -> list[Action]:
        """Learn from what was journaled at one time. Taken one by one it teaches the same."""
        return [action for events in together(journaled) for action in self._learn(events, at_s)]

    def _learn(self, events: Sequence[Event | NoticeEvent], at_s: float) -> list[Action]:
        actions = handled(self.machine, events, at_s)
        event = events[-1]  # of those of one kind none teaches what another one does not, but which processes there are
        for earlier in events[:-1] if isinstance(event, ProcessStarted) else ():
            self.routes.learn(earlier, ())
        self.at_s = max(self.at_s, at_s)
        self.stop_requested |= isinstance(event, StopRequested)
        self.routes.learn(event, actions)
        self.liveness.learn(event, at_s)
        self.times.follow(self.machine.state, event, at_s)
        self.notices.follow(self.machine.state, event, at_s)
        self.slow.follow(self.machine.state, event, at_s)
        self.enrolments.learn(event, at_s)
        for action in actions:
            if isinstance(action, Finish):
                self.finish = action
            elif isinstance(action, Send):
                self.liveness.ordered(action.receiver, action.body)
        return actions

    def snapshot(self) -> bytes:
        """Write down all of it. Only between two events, when everything that was taken is in the journal.

        Raises JournalError when something in it cannot be written down.
        """
        try:
            machine, routes, watch = self.machine.memory(), self.routes.learned(), self.liveness.learned()
            enrolments, finish, stop_requested = self.enrolments, self.finish, self.stop_requested
            folds = self.times, self.notices, self.slow
            return _encode(
                Snapshot(FORMAT, self.at_s, machine, routes, watch, enrolments, finish, stop_requested, *folds)
            )
        except (TypeError, ValueError, OverflowError) as error:
            raise JournalError(f"no snapshot can be written: {error}. Report this, with the journal.") from error

    def restore(self, data: bytes) -> None:
        """Know what an earlier controller of the job wrote down. All or nothing. Raises SnapshotUnreadable."""
        snapshot = read_snapshot(data)
        self.machine.restore(snapshot.machine)
        self.routes.restore(snapshot.routes)
        self.liveness.restore(snapshot.watch, snapshot.at_s)
        self.enrolments.restore(snapshot.enrolments)
        self.times, self.notices, self.slow = snapshot.times, snapshot.notices, snapshot.slow
        self.finish, self.stop_requested, self.at_s = snapshot.finish, snapshot.stop_requested, snapshot.at_s


def read_snapshot(data: bytes) -> Snapshot:
    """Return what was written down. Raises SnapshotUnreadable."""
    try:
        snapshot = _decode(data)
    except msgspec.MsgspecError as error:
        raise SnapshotUnreadable(f"it is not what this version of midstep writes: {error}") from error
    if snapshot.format != FORMAT:
        raise SnapshotUnreadable(f"it has format {snapshot.format}, this midstep reads {FORMAT}")
    return snapshot
