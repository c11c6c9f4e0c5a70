"""A training process in virtual time: the product's session, rank state, step order and loop, on a played thread."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from ...processor.session import Order
from ...protocol import messages as m
from ...protocol.mailbox import Mailbox
from ...protocol.types import CONTROLLER, Activity, FaultAction, FaultKind, FaultReport, RankProgress, rank_address
from .byzantine import Byzantine, falsified
from .fake_process import FakeProcess
from .network import Endpoint
from .played_thread import PlayedThread, Thread
from .rank_thread import thread_of
from .scripts import StepPoint
from .storage import Memory

if TYPE_CHECKING:
    from .node import SimulatedAgent
    from .world import SimulatedWorld

ORDERS_S = 600.0
FLUSH_S = 5.0
EXIT_RAISED = 1
SIGKILL = -9


class Process(FakeProcess, PlayedThread):
    """One incarnation of a rank."""

    def __init__(self, world: "SimulatedWorld", agent: "SimulatedAgent", order: m.StartProcess, pid: int) -> None:
        FakeProcess.__init__(self, order, pid)
        PlayedThread.__init__(self, order.rank, world.timeline)
        self.world, self.agent = world, agent
        self.place = agent.places[order.rank]
        mailbox = Mailbox(job=world.job.job, address=rank_address(self.rank), session=order.incarnation)
        self.endpoint = Endpoint(mailbox, world.timeline, transmit=self._transmit, take=self._hear, complain=world.fail)
        self.raising = False  # the next step raises
        self.armed: dict[StepPoint, FaultKind] = {}  # what will go wrong in the next step, and where
        self.faulty = False  # a fault was injected into it, so it may be replaced
        self.byzantine: Byzantine | None = None  # what will be wrong with what it says next
        self.memory = Memory(world.shards(self.rank, self.world_size), connected=order.connected)
        self.copied_rank: int | None = None  # the rank whose buddy this one is
        self._said: list[m.RankReady | m.RankQuiesced] = []
        self._waiting: Callable[[Order], None] | None = None  # what lets the train thread go on with an order
        self.play(thread_of(self, order))

    def end(self, status: int) -> None:
        """The process is gone, for whatever reason."""
        if not self.alive:
            return
        self.alive = self.endpoint.open = False
        if self.group is not None:
            self.group.leave(self)
        self.world.log(f"rank {self.rank}.{self.incarnation} pid {self.pid} ended with {status}")
        self.agent.report_exit(self, status)

    @property
    def unwatched(self) -> bool:
        """Whether it may stand still for ever: in a checkpoint, or at its end when no other rank is there to end."""
        return self.activity is Activity.CHECKPOINTING or (self.activity is Activity.FINISHED and self.world_size == 1)

    def inject(self, action: FaultAction) -> None:
        """Do what an operator has injected."""
        self.faulty = True
        if action is FaultAction.RAISE:
            self.raising = True
        elif action is FaultAction.STOP:  # which may come later than it was asked for
            if not self.unwatched:
                self.suspend()
        else:
            self.end(SIGKILL)

    def suspend(self) -> None:
        """Be stopped by the operating system, for ever; the agent sees that."""
        self.suspended = True
        self.agent.watch_suspended(self)

    def flush(self) -> Thread[None]:
        """Give the last words a few seconds to arrive."""
        deadline = self.world.timeline.now + FLUSH_S
        while not self.endpoint.quiet and self.world.timeline.now < deadline:
            yield self.sleep(0.1)

    # --- messages -----------------------------------------------------------------------------------------------

    def post(self, body: m.Message) -> None:
        """Report to the controller."""
        if isinstance(body, m.RankReady | m.RankQuiesced):
            self._said.append(body)
        if self.byzantine is not None:
            wrong = falsified(body, self.byzantine, self.world.chance)
            if wrong is not None:
                body, self.byzantine = wrong, None
        mailbox = self.endpoint.mailbox
        mailbox.generation = max(mailbox.generation, self.session.generation)
        self.endpoint.post(body, CONTROLLER)

    def repeat_itself(self) -> None:
        """Say again what it said in earlier generations, where that is what is wrong with it."""
        if self.byzantine is Byzantine.REPEATED and self.world.chance.random() < 0.5:
            self.byzantine = None
            for body in self._said:
                self.endpoint.post(body, CONTROLLER)

    def report_fault(self, kind: FaultKind, detail: str, *, mendable: bool = False) -> None:
        """Report something wrong in this rank."""
        now, name = self.agent.wall_s, rank_address(self.rank)
        node, generation = self.agent.name, self.session.generation
        report = FaultReport(kind, now, name, detail, self.rank, node, generation, self.incarnation, mendable=mendable)
        self.post(m.FaultReported(report))

    def progress(self) -> RankProgress:
        """Read the step clock."""
        now = self.world.timeline.now
        return RankProgress(
            rank=self.rank, incarnation=self.incarnation, generation=self.session.generation, step=self.standing.count,
            activity=self.activity, collectives=self.collectives, activity_age_s=now - self.since_s,
            step_age_s=now - self.step_since_s, median_step_s=0.1, suspended=self.suspended,
        )  # fmt: skip

    def _transmit(self, envelope: m.Envelope) -> None:
        self.world.network.carry(envelope, lambda each: self.agent.relay(self, each))

    def _hear(self, envelope: m.Envelope) -> bool:
        if self.suspended:
            return False
        body = envelope.body
        if isinstance(body, m.ArmFault):
            self.inject(body.fault.action)
        elif isinstance(body, Order):
            if isinstance(body, m.Quiesce):
                self.repeat_itself()
            if self.session.hear(body).abort:
                self.abort(f"generation {body.generation} is being opened")
            self._wake()
        return True

    def await_order(self, go: Callable[[Order], None]) -> None:
        """Have the train thread wait for the controller's next order; the process ends when none comes for too long."""
        self._waiting = go
        give_up = self.still(lambda _: self.end(EXIT_RAISED))
        self.world.timeline.after(ORDERS_S, lambda: give_up(None))
        self._wake()

    def _wake(self) -> None:
        if self._waiting is None:
            return

        def take(_: object) -> None:
            go = self._waiting
            order = self.session.take_order() if go is not None else None
            if order is not None and go is not None:
                self._waiting = None
                go(order)

        look = self.still(take)
        self.world.timeline.after(0.0005, lambda: look(None))
