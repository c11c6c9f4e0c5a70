"""A training process: the real session, standing, step order and loop of its rank, under a played train thread."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..processor.rank_loop import RankLoop
from ..processor.session import Order, Session
from ..processor.step_order import StepOrder
from ..processor.step_state import StepState
from ..protocol.mailbox import Mailbox
from ..protocol.messages import (
    ArmFault,
    Envelope,
    FaultReported,
    Message,
    Quiesce,
    RankQuiesced,
    RankReady,
    Rejoin,
    Release,
    Resume,
    SaveCheckpoint,
    StartProcess,
)
from ..protocol.types import CONTROLLER, Activity, FaultAction, FaultKind, FaultReport, RankProgress, rank_address
from .lies import Lie, tell
from .memory import Memory
from .network import Endpoint
from .played_thread import PlayedThread, Thread
from .rank_thread import life_of
from .train_function import Place

if TYPE_CHECKING:
    from .node import Seat
    from .world import World

ORDERS_S = 600.0
FLUSH_S = 5.0
EXIT_RAISED = 1
SIGKILL = -9


class Process(PlayedThread):
    """One life of a rank."""

    def __init__(self, world: "World", seat: "Seat", order: StartProcess, pid: int) -> None:
        super().__init__(order.rank, world.timeline)
        self.world, self.seat, self.pid = world, seat, pid
        self.incarnation, self.world_size = order.incarnation, order.world_size
        self.session = Session(order.rank, order.incarnation, order.generation)
        mailbox = Mailbox(job=world.job.job, address=rank_address(self.rank), session=order.incarnation)
        self.endpoint = Endpoint(mailbox, world.timeline, transmit=self._transmit, take=self._hear, complain=world.fail)
        self.raising = False  # the next step raises
        self.hits: dict[Place, FaultKind] = {}  # what strikes it in the next step, and where
        self.harmed = False  # something was done to it, so it may be replaced
        self.lie: Lie | None = None  # what will be wrong with what it says next
        self.memory = Memory(world.shards(self.rank, self.world_size), connected=order.connected)
        self.standing = StepState(clean=order.connected)
        self.steps = StepOrder(self.standing, self)
        self.loop = RankLoop(self.session, self.standing, self.steps, early=order.early)
        self._said: list[RankReady | RankQuiesced] = []
        self._waiting: Callable[[Order], None] | None = None  # what lets the train thread go on with an order
        self.play(life_of(self, order))

    def end(self, status: int) -> None:
        """The process is gone, for whatever reason."""
        if not self.alive:
            return
        self.alive = self.endpoint.open = False
        if self.group is not None:
            self.group.leave(self)
        self.world.log(f"rank {self.rank}.{self.incarnation} pid {self.pid} ended with {status}")
        self.seat.ended(self, status)

    @property
    def watched_by_nobody(self) -> bool:
        """Whether it may stand still for ever: in a checkpoint, or at its end when nobody else is there to end."""
        return self.activity is Activity.CHECKPOINTING or (self.activity is Activity.FINISHED and self.world_size == 1)

    def inject(self, action: FaultAction) -> None:
        """Suffer what an operator has injected."""
        self.harmed = True
        if action is FaultAction.RAISE:
            self.raising = True
        elif action is FaultAction.STOP:  # which may come later than it was asked for
            if not self.watched_by_nobody:
                self.suspend()
        else:
            self.end(SIGKILL)

    def suspend(self) -> None:
        """Be stopped by the kernel, for ever; the agent sees that."""
        self.suspended = True
        self.seat.agent.watch_suspended(self)

    def flush(self) -> Thread[None]:
        """Give the last words a few seconds to arrive."""
        deadline = self.world.timeline.now + FLUSH_S
        while not self.endpoint.quiet and self.world.timeline.now < deadline:
            yield self.sleep(0.1)

    def interrupted(self) -> bool:
        """Whether the controller wants the train thread to stop."""
        return self.session.quiescing

    def begins(self, step: int) -> bool:
        """Whether a step may be begun; False at a boundary at which all ranks stop."""
        return self.session.begins(step)

    # --- messages -----------------------------------------------------------------------------------------------

    def post(self, body: Message) -> None:
        """Report to the controller."""
        if isinstance(body, RankReady | RankQuiesced):
            self._said.append(body)
        if self.lie is not None:
            falsified = tell(body, self.lie, self.world.chance)
            if falsified is not None:
                body, self.lie = falsified, None
        mailbox = self.endpoint.mailbox
        mailbox.generation = max(mailbox.generation, self.session.generation)
        self.endpoint.post(body, CONTROLLER)

    def repeat_itself(self) -> None:
        """Say again what it said in earlier generations, where it is about to lie."""
        if self.lie is Lie.OLD_WORDS and self.world.chance.random() < 0.5:
            self.lie = None
            for body in self._said:
                self.endpoint.post(body, CONTROLLER)

    def report_fault(self, kind: FaultKind, detail: str, *, mendable: bool = False) -> None:
        """Report something wrong in this rank."""
        now, name = self.seat.agent.wall_s, rank_address(self.rank)
        node, generation = self.seat.agent.name, self.session.generation
        report = FaultReport(kind, now, name, detail, self.rank, node, generation, self.incarnation, mendable=mendable)
        self.post(FaultReported(report))

    def progress(self) -> RankProgress:
        """Read the step clock."""
        now = self.world.timeline.now
        return RankProgress(
            rank=self.rank, incarnation=self.incarnation, generation=self.session.generation, step=self.standing.count,
            activity=self.activity, collectives=self.collectives, activity_age_s=now - self.since_s,
            step_age_s=now - self.step_since_s, median_step_s=0.1, suspended=self.suspended,
        )  # fmt: skip

    def _transmit(self, envelope: Envelope) -> None:
        self.world.network.carry(envelope, lambda each: self.seat.agent.relay(self, each))

    def _hear(self, envelope: Envelope) -> bool:
        if self.suspended:
            return False
        body = envelope.body
        if isinstance(body, ArmFault):
            self.inject(body.fault.action)
        elif isinstance(body, Quiesce | Rejoin | Resume | Release | SaveCheckpoint):
            if isinstance(body, Quiesce):
                self.repeat_itself()
            heard = self.session.hear(body)
            if heard.abort:
                self.abort(f"generation {body.generation} is being opened")
            self._wake()
        return True

    def await_order(self, go: Callable[[Order], None]) -> None:
        """Have the train thread wait for the controller's next order; the process ends when none comes for too long."""
        self._waiting = go

        def overdue(_: object) -> None:
            self.end(EXIT_RAISED)

        give_up = self.still(overdue)
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
