"""The driver's part: what arrives is recorded, then handled, then acted on; a crash may come between any two.

A controller that is taken for dead may also go on: it sends what it had decided, under its old term, while the next one
is in charge. What it has not recorded it can never record, as the journal belongs to the next one by then.
"""

from typing import TYPE_CHECKING

from ...controller.admission import refusal
from ...controller.clock import said_at, stamped
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
from ...controller.routes import Routes
from ...controller.slow_ranks import SlowRanks
from ...controller.time_account import TimeAccount
from ...protocol.mailbox import Mailbox
from ...protocol.messages import Envelope, FaultReported, NodeHeartbeat, NodeLost, Report
from ...protocol.types import CONTROLLER, PLATFORM, node_address
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

    def start(self) -> None:
        """Replay the journal and take over."""
        self.term += 1
        world = self._world
        self.machine, self.times = self._new_machine(), TimeAccount()
        self._routes, self._liveness = Routes(), Liveness(world.policy.heartbeat)
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
        """Fold the journal into a fresh machine: it must act and remember the same."""
        world, machine = self._world, self._new_machine()
        for (event, at_s, *_), actions in zip(self.journal, self.done, strict=True):
            if machine.handle(event, at_s) != actions:
                world.fail(Invariant.JOURNAL_IS_TRUTH, f"in a replay {event} leads to something else than {actions}")
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
        self._routes.relayed(envelope.sender, node_address(connection))
        self._endpoint.receive(envelope)
        return True

    def tell(self, event: Event) -> None:
        """Hand in what arises in the controller itself, or is asked by an operator; nothing, if it is dead."""
        if self.up:
            self._handle(event, CONTROLLER, 0, 0)

    # --- inside -------------------------------------------------------------------------------------------------

    def _take(self, envelope: Envelope) -> bool:
        body = envelope.body
        assert isinstance(body, Report)
        event = stamped(body, said_at(envelope, self._timeline.now))
        return self._handle(event, envelope.sender, envelope.session, envelope.number)

    def _handle(self, event: Event, sender: str, session: int, number: int) -> bool:
        """Record, handle, act. False: it died on the way."""
        now, world = self._timeline.now, self._world
        self._record(event, now, sender, session, number)
        acts, self.crash_next = self.crash_next, None
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
                self._die_while_acting(actions[number_of_action:])
                return False
            self._act(action)
        if acts is not None:
            self.crash()
            return False
        self._plan_deadline()
        return self.up

    def _record(self, event: Event, now: float, sender: str, session: int, number: int) -> None:
        key = (sender, session, number)
        if number and key in self._recorded:
            self._world.fail(Invariant.AT_MOST_ONCE, f"{event} of {sender} is recorded a second time")
        self._recorded.add(key)
        self.journal.append((event, now, sender, session, number))
        self._world.allowed.recorded(event)
        if self.crash_at is not None and len(self.journal) == self.crash_at[0]:
            self.crash_next = self.crash_at[1]

    def _die_while_acting(self, rest: list[Action]) -> None:
        """Some actions are done. The rest is lost, or done much later by a controller that is no longer in office."""
        self._world.log(f"{len(rest)} actions are not done")
        endpoint, outlives_s = self._endpoint, self.outlives_s
        self.crash()

        def go_on() -> None:
            for action in rest:
                if isinstance(action, Send):
                    endpoint.post(action.body, action.receiver)

        self._timeline.after(outlives_s * self._world.chance.random(), go_on)

    def _act(self, action: Action) -> None:
        if isinstance(action, Send):
            self._endpoint.mailbox.generation = action.generation
            self._endpoint.post(action.body, action.receiver)
        elif isinstance(action, Forget):
            self._endpoint.mailbox.forget(action.receiver)
        elif isinstance(action, Finish) and self.finish is None:
            self.finish = action

    def _learn(self, event: Event, actions: list[Action], now: float) -> None:
        if isinstance(event, NodeLost):
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
