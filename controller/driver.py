"""The loop around the recovery machine: what arrives becomes durable, then is handled, then acted on, in this order.

The machine decides and has no clock, socket or file; the driver has all three and decides nothing. One turn takes in
what is there, makes it durable in one transaction, hands it to the machine, and does what the machine wants. While the
journal cannot be written nothing is handled, acknowledged or sent; operators are warned, and it is tried again.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from ..policies.fault_codes import FaultCodes
from ..protocol.compat import within
from ..protocol.discovery import FOUND_S
from ..protocol.errors import JournalDamaged, JournalError, JournalSuperseded, MidstepError
from ..protocol.incidents import JobStatus, WebhookStatus
from ..protocol.messages import (
    NEVER_JOURNALED,
    EnrolmentRequested,
    FaultReported,
    NodeGoing,
    NodeHeartbeat,
    NodeLost,
    NodeRefused,
    NodeStaying,
    NodeWords,
    PlatformJoined,
    ProcessesStarted,
    RanksReported,
)
from ..protocol.types import CONTROLLER, FaultReport, node_address
from .clock import OLDEST_S, said_at, stamped
from .endpoints.control_requests import Refused, Reply
from .endpoints.discovery_files import JobResult, write_result
from .endpoints.local_sockets import ControlServer
from .endpoints.remote_operators import OperatorRequests
from .endpoints.request_handler import RequestHandler, StoryRequests
from .endpoints.standing_by import ToldNodes, WhileLoading
from .enroller import Enroller
from .journal.journal import Journal
from .journal.records import JournalEntry
from .journal.upkeep import JournalTrouble, Upkeep
from .journaled import Journaled, NoticeEvent, in_runs
from .keepalive import KeepAlive
from .learned import Learned
from .liveness import KeptWords, Liveness, ProgressBoard, beats_spacing, with_single_copies
from .metrics import Observation
from .notifications import NoticeBook
from .recovery.events import (
    Action,
    ControllerStarted,
    DeadlinePassed,
    Event,
    Finish,
    Forget,
    HoldEnded,
    Log,
    NodeReturned,
    Send,
    StopRequested,
)
from .recovery.machine import Machine
from .routes import Routes
from .switchover import Switchover
from .wire import Arrival, Wire

BATCH_LIMIT = 1000  # events in one transaction
DRAIN_S = 2.0  # after the end of the job: for its last words to arrive
NOTICES_S = 30.0  # after the end of the job: for webhooks to take what they are owed
LONGEST_SLEEP_S = 0.5  # a quarter of a lease: signs of life come from the loop
DEADLINE_SPACING_S = 0.02  # a machine that names a passed deadline again does not flood the journal
JOURNAL_PATIENCE_S = 600.0  # an unwritable journal for longer than this ends the controller
LOOKS_IN_INTERVAL = 10  # for silent nodes: each goes through all of them, and a second has hundreds of turns
_NODE_PREFIX = node_address("")

Answer = Callable[[Reply], None]
News = NodeGoing | NodeStaying | NodeRefused | PlatformJoined | NoticeEvent

_log = logging.getLogger(__name__)


@dataclass
class Pending:
    """An event on its way into the journal. Then `arrival` is acknowledged, and the request gets an `answer`."""

    entry: JournalEntry
    arrival: Arrival | None = None
    answer: Answer | None = None


def regret(error: JournalError) -> Refused:
    """Return the answer to a request that cannot be made durable."""
    return Refused(f"nothing was done, because the journal cannot be written: {error}")


class Waiting:
    """Watches descriptors in the running loop, inside a `with` block."""

    def __init__(self, descriptors: Sequence[int]) -> None:
        self._descriptors = descriptors
        self._woken = asyncio.Event()

    def __enter__(self) -> "Waiting":
        loop = asyncio.get_running_loop()
        for descriptor in self._descriptors:
            loop.add_reader(descriptor, self._woken.set)
        return self

    def __exit__(self, *_: object) -> None:
        loop = asyncio.get_running_loop()
        for descriptor in self._descriptors:
            loop.remove_reader(descriptor)

    def wake(self) -> None:
        """End the present wait, or else the next one, at once."""
        self._woken.set()

    def begin(self) -> None:
        """Forget what has happened so far: a turn that looks at everything begins."""
        self._woken.clear()

    async def wait(self, limit_s: float) -> None:
        """Wait until something has happened since `begin`, `limit_s` at most."""
        with contextlib.suppress(TimeoutError):
            await within(limit_s, self._woken.wait())

    async def rest(self, duration_s: float) -> None:
        """Wait, whatever happens. The descriptors are not looked at: one that stays readable would wake the loop."""
        self.__exit__()
        try:
            await asyncio.sleep(max(0.0, duration_s))
        finally:
            self.__enter__()


class Driver:
    """Runs one controller until the job is over. Journal, sockets and control server stay their creator's to close."""

    def __init__(
        self,
        *,
        machine: Machine,
        journal: Journal,
        wire: Wire,
        routes: Routes,
        board: ProgressBoard,
        liveness: Liveness,
        control: ControlServer,
        enroller: Enroller,
        job_directory: Path,
        codes: FaultCodes | None = None,
        patience_s: float = JOURNAL_PATIENCE_S,
        alive: KeepAlive | None = None,
        stop: str | None = None,
        switchover: Switchover | None = None,
        stories: StoryRequests | None = None,
    ) -> None:
        """Start nothing before `run`. `codes`: what codes of faults mean to this job. `stop`: why it is to end.

        `switchover` knows the other controllers, `stories` tells what the journal does.
        """
        self._machine = machine
        self._journal = journal
        self._wire = wire
        self._board = board
        self._liveness = liveness
        self._learned = Learned(machine, routes, liveness, enroller.book)
        self._upkeep = Upkeep(journal, self._learned)
        self._control = OperatorRequests(control, wire)
        self._codes = codes or FaultCodes({})
        self._alive = alive or KeepAlive()
        self._stop = stop
        self._enroller = enroller
        self._words = KeptWords()
        self._switchover = switchover or Switchover()
        self._told = ToldNodes(lambda: self._switchover.standing()[0])
        self._requests = RequestHandler(
            journal.founding.job,
            self._switchover,
            stories,
            lambda: machine.state.policy,
            self._learned.slow_told,
        )
        self._job_directory, self._clock = job_directory, journal.clock
        self._pending: list[Pending] = []
        self._trouble = JournalTrouble(patience_s)
        self._numbers, self._signalled = 0, False
        self._finish: Finish | None = None
        self._drain_until_s = self._deadline_not_before_s = self._turned_s = self._look_not_before_s = 0.0
        self._result: JobResult | None = None  # to be written when notices of the end have been told
        self.webhooks: Callable[[], tuple[WebhookStatus, ...]] = tuple
        self._waiting = Waiting((wire.fileno(), control.fileno()))

    async def run(self) -> int:
        """Replay, take over, and drive the job to its end. Returns the exit code of the job.

        Raises JournalError when the journal stays unwritable, JournalDamaged when it is not what was written,
        JournalSuperseded when another controller has taken over, or was promoted.
        """
        with self._waiting as waiting:
            self.begin()
            self._switchover.serve(self._journal.term)
            while True:
                waiting.begin()
                self.turn()
                if self._finish is not None and self._has_drained():
                    self._write_result()
                    self._upkeep.conclude()
                    return self._finish.exit_code
                if self._is_busy():
                    await asyncio.sleep(0)  # signals
                else:
                    await waiting.wait(self._longest_wait_s())
                if self._wire.heard_only_beats:
                    spacing_s = beats_spacing(len(self._machine.state.world.nodes))
                    await waiting.rest(self._turned_s + spacing_s - self._clock.now())

    def stop(self, reason: str) -> None:
        """Ask the machine to end the job; asked again, at once. For signal handlers in the loop's thread."""
        self._pend(StopRequested(reason, insist=self._signalled))
        self._signalled = True

    def report(self, report: FaultReport, answer: Answer) -> None:
        """Take in what a detector on this machine says; it is answered when that is durable. In the loop's thread."""
        if (refused := self._requests.misfit(report)) is None:
            self._pend(FaultReported(report), answer)
        else:
            answer(refused)

    def tell(self, news: News) -> None:
        """Take in what was learned beside the wire. In the loop's thread."""
        self._pend(news)

    def begin(self) -> None:
        """Learn from the journal without acting, then announce the new term to the machine."""
        events = 0
        for event, at_s in self._journal.load(self._learned.restore, self._beat_while_loading(self._control)):
            self._learned.take(event, at_s)
            events += 1
        if self._learned.stop_requested:
            self._stop = None  # asked twice, it would not wait for the checkpoint
        self._finish = self._learned.finish
        self._clock.raise_to(self._learned.at_s)
        self._wire.restore(self._journal.taken_in())
        self._enroller.restore()
        self._liveness.start(self._clock.now(), FOUND_S)
        _log.info("term %d begins, %d events replayed", self._journal.term, events)
        self._pend(ControllerStarted(self._journal.term, self._journal.guarded_until_s))
        if self._stop is not None:
            self._pend(StopRequested(self._stop, insist=False))

    def _beat_while_loading(self, control: OperatorRequests) -> Callable[[], None]:
        loading = WhileLoading(self._switchover.name, control, self._wire.set_aside)

        def beat() -> None:
            self._alive.beat()
            loading.beat()

        return beat

    def turn(self) -> None:
        """Do everything that is to be done now, within bounds."""
        self._alive.serve()
        self._journal.require_lead()
        self._switchover.require_unpromoted()
        now = self._turned_s = self._clock.now()
        for arrival in self._wire.receive(now):
            self._take(arrival, now)
        for connection in self._wire.alive:
            self._hear(connection, now)
        self._serve(now)
        self._listen_for_silence(now)
        self._commit(self._clock.now())
        self._watch_deadline(self._clock.now())
        self._wire.resend(self._clock.now())
        self._wire.flush()
        if not self._pending and self._trouble.error is None:
            self._upkeep.step(self._clock.now())

    def _is_busy(self) -> bool:
        return bool(self._pending and not self._trouble.error) or self._wire.pending or self._control.pending

    def status(self) -> JobStatus:
        """Return how the job stands, with the latest heartbeats and what this controller has refused."""
        now, error = self._clock.now(), self._trouble.error
        status = self._learned.times.told(self._board.overlay(self._machine.status(now)))
        status = with_single_copies(status, self._machine.state)
        controllers, paused_until_s = self._switchover.standing()
        return msgspec.structs.replace(
            status,
            refused={**status.refused, **self._wire.refused, **self._control.refused},
            reason=status.reason if error is None else f"the journal cannot be written: {error}",
            term=self._journal.term,
            holding=self._liveness.holding(now),
            controllers=controllers,
            proxies=self._wire.proxies(),
            failover_paused_until_s=paused_until_s,
            webhooks=self.webhooks(),
        )

    def notices(self) -> NoticeBook:
        """Return which notices are owed to webhooks. For the loop's thread."""
        return self._learned.notices

    def now(self) -> float:
        """Return the time on the job's clock. For any thread."""
        return self._clock.now()

    def observation(self) -> Observation:
        """Return how the job stands, for its numbers. Cheaper than a status, and for the loop's thread only."""
        now, state, times = self._clock.now(), self._machine.state, self._learned.times
        return Observation(
            at_s=now,
            state=state,
            step=max(self._board.reached(), state.progress.committed),
            time=times.until(now),
            time_lately=times.windows(now),
            slowness=self._board.slow.worst,
            reported=self._board.reported.told(),
            is_heard=self._board.is_heard,
            refused={**state.history.ignored, **self._wire.refused, **self._control.refused},
            term=self._journal.term,
            controllers=len(self._switchover.standing()[0]),
            writable=self._trouble.error is None,
        )

    def _take(self, arrival: Arrival, now: float) -> None:
        envelope = arrival.envelope
        if isinstance(envelope.body, NodeWords):  # no sign of life: nothing is decided by them
            self._words.take(envelope.body)
        else:
            self._hear(arrival.connection, now)
        if isinstance(envelope.body, NodeHeartbeat):
            self._board.take(envelope.body, now)
            if (answer := self._told.answer(envelope.sender, now)) is not None:
                self._wire.answer(arrival, answer, now)
        if isinstance(envelope.body, NEVER_JOURNALED):
            self._wire.acknowledge(arrival)
            return
        if isinstance(envelope.body, EnrolmentRequested):
            self._enroller.take(envelope.body, arrival, now, self._pend)
            return
        event: Journaled
        said_s, oldest_s = said_at(envelope, now), now - OLDEST_S
        if isinstance(envelope.body, RanksReported):
            said = envelope.body.reports
            words = [self._taken_in(each.word, max(said_s - each.age_s, oldest_s)) for each in said]
            event = envelope.body.of_words(words)  # type: ignore[arg-type]  # what is filled in stays what it is
        elif isinstance(envelope.body, ProcessesStarted):  # there is nothing to fill in
            event = envelope.body
        else:  # admission lets nothing but reports through
            event = self._taken_in(envelope.body, said_s)  # type: ignore[arg-type]
        entry = JournalEntry(event, envelope.sender, envelope.session, envelope.number)
        self._pending.append(Pending(entry, arrival))

    def _hear(self, connection: str, now: float) -> None:
        node = connection.removeprefix(_NODE_PREFIX)
        if node != connection and self._liveness.hear(node, now):
            self._pend(NodeReturned(node))

    def _pend(self, event: Event | NoticeEvent, answer: Answer | None = None) -> None:
        self._numbers += 1
        taken = event if isinstance(event, NoticeEvent) else self._taken_in(event, self._clock.now())
        entry = JournalEntry(taken, CONTROLLER, self._journal.session, self._numbers)
        self._pending.append(Pending(entry, answer=answer))
        self._waiting.wake()

    def _taken_in(self, event: Event, at_s: float) -> Event:
        """Fill in what a replay cannot know: the time on this clock, what a code means today, a lost node's words."""
        event = self._words.completed(stamped(event, at_s))
        return FaultReported(self._codes.completed(event.report)) if isinstance(event, FaultReported) else event

    def _serve(self, now: float) -> None:
        for asker, request in self._control.requests():
            answer = partial(self._control.answer, asker)
            event = self._requests.begin(request, self._control.role(asker), self.status, answer)
            if event is None:
                continue
            if self._trouble.error is not None and self._trouble.blocks(now):
                answer(regret(self._trouble.error))
            else:
                self._pend(event, answer)

    def _listen_for_silence(self, now: float) -> None:
        if now < self._look_not_before_s or self._wire.pending:  # a word of a node may lie unread
            return
        self._look_not_before_s = now + self._liveness.interval_s / LOOKS_IN_INTERVAL
        held = self._liveness.hold
        for event in self._liveness.judge(now, self._wire.tolerates_silence):
            _log.warning("%s", event.text if isinstance(event, HoldEnded) else f"node {event.node}: {event.reason}")
            self._pend(event)
        for report in self._board.look(now, self._machine.state):
            self._pend(FaultReported(report))
        if held is None and self._liveness.hold is not None:
            _log.warning("%s", self._liveness.hold.text(now))
        if self._liveness.heard_again:
            self._wire.hurry(now)

    def _watch_deadline(self, now: float) -> None:
        """Last in a turn, and only when all that came in time has been handled."""
        deadline = self._deadline(now)
        if self._pending or deadline is None or deadline > now or now < self._deadline_not_before_s:
            return
        self._deadline_not_before_s = now + DEADLINE_SPACING_S
        self._pend(DeadlinePassed())
        self._commit(now)

    def _deadline(self, now: float) -> float | None:
        """Return when the machine's next deadline is due, unless the answers to it cannot arrive at present."""
        deadline = self._machine.next_deadline()
        return None if deadline is not None and self._liveness.puts_off(deadline, now) else deadline

    def _commit(self, now: float) -> None:
        if not self._pending or self._trouble.blocks(now):
            return
        batch = self._pending[:BATCH_LIMIT]
        try:
            fresh = self._journal.append([pending.entry for pending in batch], now)
        except (JournalDamaged, JournalSuperseded):
            raise
        except JournalError as error:
            self._suffer(error, now)
            return
        self._trouble.end(now)
        del self._pending[: len(batch)]
        for together in in_runs(zip(batch, fresh, strict=True), lambda pair: pair[0].entry.event):
            actions = self._take_events([pending.entry.event for pending, new in together if new], now)
            for pending, _ in together:
                if pending.arrival is not None:
                    self._wire.acknowledge(pending.arrival)
                if pending.answer is not None:
                    pending.answer(self._requests.answer(pending.entry.event, actions))
            self._perform(actions, now)

    def _suffer(self, error: JournalError, now: float) -> None:
        """Keep reports and refuse requests while the journal cannot be written; try again later."""
        for pending in self._pending:
            if pending.answer is not None:
                pending.answer(regret(error))
        self._pending = [pending for pending in self._pending if pending.answer is None]
        self._trouble.suffer(error, now, len(self._pending))

    def _take_events(self, events: Sequence[Journaled], now: float) -> list[Action]:
        actions = self._learned.take_all(events, now)
        self._finish = self._learned.finish
        for event in events:
            if isinstance(event, NodeLost):
                self._wire.forget(node_address(event.node))  # its agent is gone, and acknowledges nothing
                self._told.forget(node_address(event.node))
        return actions

    def _perform(self, actions: list[Action], now: float) -> None:
        for action in actions:
            if isinstance(action, Send):
                self._wire.send(action.receiver, action.body, action.generation, now)
            elif isinstance(action, Forget):
                self._wire.forget(action.receiver)
            elif isinstance(action, Log):
                _log.info("%s", action.text)
            elif isinstance(action, Finish) and not self._drain_until_s:
                self._conclude(action, now)

    def _conclude(self, finish: Finish, now: float) -> None:
        self._drain_until_s = now + DRAIN_S
        _log.info("the job is over, exit code %d: %s", finish.exit_code, finish.reason)
        job = self._journal.founding.job.job
        self._result = JobResult(job, finish.exit_code, finish.reason, self._journal.term, now)
        if not self._learned.notices.owed:
            self._write_result()

    def _write_result(self) -> None:
        """Say that the job is over, once: a controller that is killed before has another one after it."""
        result, self._result = self._result, None
        if result is None:
            return
        try:
            write_result(self._job_directory, result)
        except MidstepError:
            _log.exception("the result is in the journal only")

    def _has_drained(self) -> bool:
        if self._pending and self._trouble.error is None:
            return False
        if self._learned.notices.owed and self._clock.now() < self._drain_until_s - DRAIN_S + NOTICES_S:
            return False
        return self._wire.next_due() is None or self._clock.now() >= self._drain_until_s

    def _longest_wait_s(self) -> float:
        now = self._clock.now()
        times = [now + LONGEST_SLEEP_S, self._liveness.next_check(now), self._deadline(now), self._wire.next_due()]
        times += [self._trouble.next_try_s, self._drain_until_s or None, self._control.next_due(now)]
        first = min(moment for moment in times if moment is not None)
        # Never zero: a deadline that has passed and waits for the journal must not make this a busy loop.
        return max(first - now, DEADLINE_SPACING_S / 2)
