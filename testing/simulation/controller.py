"""The driver's part: what arrives is recorded, then handled, then acted on; a crash may come between any two.

A controller that is taken for dead may also go on: it sends what it had decided, under its old term, while the next one
is in charge. What it has not recorded it can never record, as the journal belongs to the next one by then.
"""

from collections.abc import Callable, Sequence
from itertools import count, groupby
from typing import TYPE_CHECKING

import msgspec

from ...controller.admission import believed_of, refusal
from ...controller.clock import said_at, stamped
from ...controller.journaled import handled_with
from ...controller.liveness import Liveness
from ...controller.recovery.events import (
    Action,
    ControllerStarted,
    DeadlinePassed,
    Event,
    Finish,
    Forget,
    NodeReturned,
    Send,
)
from ...controller.recovery.machine import RecoveryMachine
from ...controller.recovery.state import Phase
from ...controller.routes import Routes, TurnOrders
from ...controller.slow_ranks import SlowRanks
from ...controller.time_account import TimeAccount
from ...protocol.mailbox import Mailbox
from ...protocol.messages import (
    Envelope,
    FaultReported,
    NodeHeartbeat,
    NodeLost,
    ProcessesStarted,
    RanksReported,
    Report,
)
from ...protocol.types import CONTROLLER, PLATFORM, node_address, rank_of
from ..invariants import Invariant
from ..transitions import is_known
from .network import Endpoint

if TYPE_CHECKING:
    from .world import SimulatedWorld

DEADLINE_SPACING_S = 0.02
ROUNDED_S = 1e-6
PUT_OFF_S = 0.25  # until a deadline that is put off is looked at again
Entry = tuple[Event, float, str, int, int]


class Controller:
    """One controller after the other, over one journal."""

    def __init__(self, world: "SimulatedWorld") -> None:
        self._world = world
        self._timeline = world.timeline
        self.journal: list[Entry] = []
        self.done: list[list[Action]] = []  # what followed from each entry
        self.term = 0
        self.up = False
        self.finish: Finish | None = None
        self.crash_next: int | None = None  # die over the next event: recorded, and so many actions done
        self.crash_at: tuple[int, int] | None = None  # the same, over the entry of this number
        self.times = TimeAccount()
        self._seen_s: float | None = None  # when the last one died
        self.outlives_s = 0.0  # how long the next one to die goes on, taken for dead
        self._recorded: set[tuple[str, int, int]] = set()
        self._crash_over: dict[int, int] = {}  # by the place of an entry: how many of its actions are done

    def start(self) -> None:
        """Replay the journal and take over."""
        self.term += 1
        world = self._world
        self.machine, self.times = self._new_machine(), TimeAccount()
        self._routes, self._liveness = Routes(), Liveness(world.policy.heartbeat)
        self._orders = TurnOrders(self._routes)
        mailbox = Mailbox(job=world.job.job, address=CONTROLLER, session=world.next_session())
        self._endpoint = Endpoint(
            mailbox, self._timeline, transmit=self._transmit, take=self._take, complain=world.fail
        )  # fmt: skip
        self._endpoint.mailbox.term = self.term
        last_s = 0.0
        for index, (event, at_s, sender, session, number) in enumerate(self.journal):
            actions = self.machine.handle(event, at_s)
            if index < len(self.done) and actions != self.done[index]:
                what = f"in a replay {event} leads to {actions}, and led to {self.done[index]}"
                world.fail(Invariant.JOURNAL_IS_TRUTH, what)
            if index >= len(self.done):
                self.done.append(actions)
            self._learn(event, actions, at_s)
            self._endpoint.mailbox.remember(sender, session, number)
            last_s = at_s
        assert last_s <= self._timeline.now
        self._liveness.start(self._timeline.now)
        self._slow = SlowRanks()
        self.up = True
        self._deadline_s: float | None = None
        world.log(f"controller of term {self.term} starts in {self.machine.phase}")
        self.tell(ControllerStarted(self.term, self._seen_s))
        self._look_for_silence()

    def _new_machine(self) -> RecoveryMachine:
        world = self._world
        return RecoveryMachine(world.policy, world.job, can_create_nodes=world.setting.can_create_nodes)

    def replay(self) -> None:
        """Fold the journal into a fresh machine: it must act and remember the same.

        What ranks answered at one time is handled at once, as the driver does; while the job was played, each answer
        was handled by itself.
        """
        world, machine = self._world, self._new_machine()
        assert len(self.done) == len(self.journal) or not self.up  # it died over what came after the job's end
        place = 0
        for _, group in groupby(self.journal, _handled_at_once()):
            entries = list(group)
            events, at_s = [event for event, *_ in entries], entries[0][1]
            actions, place = machine.handle(events[0], at_s, *events[1:]), place + len(events)
            done = [action for each in self.done[place - len(events) : place] for action in each]
            if place <= len(self.done) and actions != done:
                world.fail(Invariant.JOURNAL_IS_TRUTH, f"in a replay {events} lead to {actions}, and led to {done}")
        if machine.incidents != self.machine.incidents or machine.state.spent != self.machine.state.spent:
            world.fail(Invariant.JOURNAL_IS_TRUTH, "a replay remembers other incidents or budgets")

    def crash(self) -> None:
        """Die, or be taken for dead; the next one starts later."""
        if not self.up:
            return
        self.up, self._seen_s = False, self._timeline.now
        outlives_s, self.outlives_s = self.outlives_s, 0.0
        self._world.log(f"controller of term {self.term} {'is taken for dead' if outlives_s else 'crashes'}")
        if outlives_s:
            self._endpoint.deaf = True
            self._timeline.after(outlives_s, self._endpoint.close)
        else:
            self._endpoint.close()
        self._timeline.after(self._world.chance.choice((0.05, 0.5, 5.0, 40.0)), self.start)

    def receive(self, envelope: Envelope, connection: str) -> bool:
        """Take in what has arrived; say whether it was believed."""
        identity = connection if connection == PLATFORM else node_address(connection)
        refused = refusal(identity, envelope, self._world.setting.size, self._routes)
        if not self.up or refused is not None:
            return False
        self._hear(connection)
        if isinstance(envelope.body, RanksReported):
            body, _ = believed_of(envelope.body, identity, self._world.setting.size, self._routes.placement)
            if body is None:
                self._endpoint.receive(envelope, void=True)
                return False
            envelope = msgspec.structs.replace(envelope, body=body)
        self._endpoint.receive(envelope)
        return True

    def tell(self, event: Event) -> None:
        """Hand in what arises in the controller itself, or is asked by an operator; nothing, if it is dead."""
        if self.up:
            self._handle([event], CONTROLLER, 0, 0)

    # --- inside -------------------------------------------------------------------------------------------------

    def _take(self, envelope: Envelope) -> bool:
        body = envelope.body
        at_s = said_at(envelope, self._timeline.now)
        if isinstance(body, ProcessesStarted):
            return self._handle(body.started, envelope.sender, envelope.session, envelope.number)
        if not isinstance(body, RanksReported):
            assert isinstance(body, Report)
            return self._handle([stamped(body, at_s)], envelope.sender, envelope.session, envelope.number)
        events = [stamped(report.word, at_s - report.age_s) for report in body.reports]
        return self._handle(events, envelope.sender, envelope.session, envelope.number)

    def _handle(self, events: Sequence[Event], sender: str, session: int, number: int) -> bool:
        """Record all, then handle each, and act. False: it died on the way."""
        first = len(self.journal)
        self._record(events, sender, session, number)
        return all(self._handle_recorded(event, first + index) for index, event in enumerate(events))

    def _handle_recorded(self, event: Event, index: int) -> bool:
        now, world = self._timeline.now, self._world
        acts = self._crash_over.pop(index, None)
        if acts == 0:
            world.log(f"recorded, and not acted on: {event}")
            world.controller_watch.recorded(now)
            self.crash()
            return False
        before = self.machine.phase
        actions = self.machine.handle(event, now)
        self.done.append(actions)
        if not is_known(before, type(event), self.machine.phase):
            what = f"no way from {before} to {self.machine.phase} by {type(event).__name__}"
            world.fail(Invariant.BY_THE_TABLE, what)
        world.handled(event, before, actions)
        world.controller_watch.handled(event, before, actions)
        self._learn(event, actions, now)
        for number_of_action, action in enumerate(actions):
            if number_of_action == acts:
                self._flush_orders()
                self._die_while_acting(actions[number_of_action:])
                return False
            self._act(action)
        self._flush_orders()
        if acts is not None:
            self.crash()
            return False
        self._plan_deadline()
        return self.up

    def _record(self, events: Sequence[Event], sender: str, session: int, number: int) -> None:
        key = (sender, session, number)
        if number and key in self._recorded:
            self._world.fail(Invariant.AT_MOST_ONCE, f"{events} of {sender} are recorded a second time")
        self._recorded.add(key)
        if self.crash_next is not None:
            self._crash_over[len(self.journal)], self.crash_next = self.crash_next, None
        for event in events:
            self.journal.append((event, self._timeline.now, sender, session, number))
            self._world.allowed.recorded(event)
            if self.crash_at is not None and len(self.journal) == self.crash_at[0]:
                self._crash_over[len(self.journal) - 1] = self.crash_at[1]

    def _die_while_acting(self, rest: list[Action]) -> None:
        """Some actions are done. The rest is lost, or done much later by a controller that is no longer in office."""
        self._world.log(f"{len(rest)} actions are not done")
        endpoint, outlives_s = self._endpoint, self.outlives_s
        self.crash()

        orders = self._orders

        def go_on() -> None:
            for action in rest:
                if not isinstance(action, Send):
                    continue
                if not orders.take(action.receiver, action.body, action.generation):
                    endpoint.post(action.body, action.receiver)
            for connection, message in orders.flush():
                endpoint.post(message, connection)

        self._timeline.after(outlives_s * self._world.chance.random(), go_on)

    def _act(self, action: Action) -> None:
        if isinstance(action, Send):
            self._endpoint.mailbox.generation = action.generation
            if self._orders.take(action.receiver, action.body, action.generation):
                return
            for message in self._orders.close(action.receiver):
                self._endpoint.post(message, action.receiver)
            self._endpoint.post(action.body, action.receiver)
        elif isinstance(action, Forget):
            rank = rank_of(action.receiver)
            if rank is not None:
                self._orders.forget(rank)
        elif isinstance(action, Finish) and self.finish is None:
            self.finish = action

    def _flush_orders(self) -> None:
        for connection, message in self._orders.flush():
            self._endpoint.post(message, connection)

    def _learn(self, event: Event, actions: list[Action], now: float) -> None:
        if isinstance(event, NodeLost):
            self._orders.forget_node(node_address(event.node))
            self._endpoint.mailbox.forget(node_address(event.node))
        self._routes.learn(event, actions)
        self._liveness.learn(event, now)
        self.times.follow(self.machine.state, event, now)
        self._time_adds_up(now)
        for action in actions:
            if isinstance(action, Send):
                self._liveness.ordered(action.receiver, action.body)

    def _time_adds_up(self, now: float) -> None:
        """Times are true: every second of the job is spent on one thing, and none on less than nothing."""
        spent = self.times.until(now)
        assert spent is not None
        apart_s = abs(sum(spent.seconds.values()) - spent.wall_s)
        if apart_s > ROUNDED_S or min(self.times.seconds.values(), default=0.0) < 0.0:
            self._world.fail(Invariant.TIMES_ARE_TRUE, f"of {spent.wall_s} s were spent {spent.seconds}")

    def _hear(self, node: str) -> None:
        if self._liveness.hear(node, self._timeline.now):
            self.tell(NodeReturned(node))

    def _compare_ranks(self, now: float) -> None:
        """Take in the times of ranks, and what follows from them."""
        for name, agent in self._world.agents.items():
            if agent.is_heard:
                clocks = tuple(process.progress() for process in agent.processes())
                self._slow.take(NodeHeartbeat(name, now, clocks))
        for report in self._slow.look(now, self.machine.state):
            self.tell(FaultReported(report))

    def _transmit(self, envelope: Envelope) -> None:
        connection = self._routes.connection(envelope.receiver)
        if connection is not None:
            self._world.network.carry(envelope, lambda each: self._world.deliver(connection, each))

    def _plan_deadline(self) -> None:
        due_s = self.machine.next_deadline()
        if due_s is None or not self.up or (self._deadline_s is not None and self._deadline_s <= due_s):
            return
        self._deadline_s = due_s
        endpoint = self._endpoint

        def look() -> None:
            if not self.up or endpoint is not self._endpoint or self._deadline_s != due_s:
                return
            self._deadline_s = None
            again_s = self.machine.next_deadline()
            if again_s is not None and self._liveness.puts_off(again_s, self._timeline.now):
                self._timeline.after(PUT_OFF_S, self._plan_deadline)
            elif again_s is not None and again_s <= self._timeline.now:
                self.tell(DeadlinePassed())
            else:
                self._plan_deadline()

        self._timeline.after(max(due_s - self._timeline.now, DEADLINE_SPACING_S), look)

    def _look_for_silence(self) -> None:
        """Take in heartbeats, which are not played one by one, and give up the nodes that have gone silent."""
        if not self.up or self.machine.phase is Phase.ENDED:
            return
        now, endpoint = self._timeline.now, self._endpoint
        for name, agent in list(self._world.agents.items()):
            if self.up and agent.is_heard:
                self._hear(name)
        if self.up and self._world.plays_times:
            self._compare_ranks(now)
        for event in self._liveness.judge(now) if self.up else ():
            self.tell(event)  # unless it has died over the one before
        if self._liveness.heard_again:
            endpoint.hurry()
        if self._world.busy:
            wait_s = self._world.policy.heartbeat.interval_s / 2
            self._timeline.after(wait_s, lambda: self._look_for_silence() if endpoint is self._endpoint else None)


def _handled_at_once() -> Callable[[Entry], object]:
    """Return a key that is the same for what is handled at once, and else another one for each entry."""
    numbers = count()

    def key(entry: Entry) -> object:
        event, at_s, *_, number = entry
        kind = handled_with(event)
        return (kind, at_s) if kind is not None and number else next(numbers)

    return key
