"""A training process: the real session, standing and step order under a played train thread."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..processor.session import Order, Session, Stage
from ..processor.standing import Standing
from ..protocol.mailbox import Mailbox
from ..protocol.messages import (
    ArmFault,
    CheckpointSaved,
    Envelope,
    FaultReported,
    Message,
    Quiesce,
    RankFinished,
    RankJoined,
    RankQuiesced,
    RankReady,
    Rejoin,
    Release,
    Resume,
    SaveCheckpoint,
    StartProcess,
)
from ..protocol.types import (
    CONTROLLER,
    Activity,
    FaultKind,
    FaultReport,
    Injury,
    RankProgress,
    ShardHold,
    StepReport,
    rank_address,
)
from .lies import Lie, tell
from .memory import Memory
from .network import Endpoint
from .plain_script import PlainScript
from .played_thread import PlayedThread
from .train_loop import Place, TrainLoop
from .way_back import WayBack

if TYPE_CHECKING:
    from .node import Seat
    from .world import World

START_LINK_UP_S = 60.0
ORDERS_S = 600.0
FLUSH_S = 5.0
EXIT_RAISED = 1
SIGKILL = -9
SHARD_BYTES = 40_000_000


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
        self.memory = Memory(world.shards(self.rank, self.world_size), seated=order.seated)
        self.standing = Standing(clean=order.seated)
        self.loop = TrainLoop(self)
        self.wayback = WayBack(self)
        self._seated, self._store, self._early = order.seated, order.store, order.early
        self._said: list[RankReady | RankQuiesced] = []
        self._waiting: Callable[[Order], None] | None = None
        self.later(world.chance.uniform(0.01, 0.3), self._boot)

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

    def injure(self, injury: Injury) -> None:
        """Suffer what an operator has injected."""
        self.harmed = True
        if injury is Injury.RAISE:
            self.raising = True
        elif injury is Injury.STOP:  # which may come later than it was asked for
            if not self.watched_by_nobody:
                self.suspend()
        else:
            self.end(SIGKILL)

    def suspend(self) -> None:
        """Be stopped by the kernel, for ever; the agent sees that."""
        self.suspended = True
        self.seat.agent.watch_suspended(self)

    def flush_and_exit(self, status: int) -> None:
        """Leave when the last words have arrived, or some seconds later."""
        deadline = self.world.timeline.now + FLUSH_S

        def look() -> None:
            if self.endpoint.quiet or self.world.timeline.now >= deadline:
                self.end(status)
            else:
                self.later(0.1, look)

        look()

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
            rank=self.rank, incarnation=self.incarnation, generation=self.session.generation, step=self.loop.count,
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
            self.injure(body.fault.injury)
        elif isinstance(body, Quiesce | Rejoin | Resume | Release | SaveCheckpoint):
            if isinstance(body, Quiesce):
                self.repeat_itself()
            heard = self.session.hear(body)
            if heard.abort:
                self.abort(f"generation {body.generation} is being opened")
            self._wake()
        return True

    def wait_order(self, obey: Callable[[Order], None]) -> None:
        """Wait for the controller's next order; leave when none comes for too long."""
        self._waiting = obey
        epoch = self.epoch = self.epoch + 1

        def overdue() -> None:
            if self.alive and self._waiting is obey and epoch == self.epoch and not self.hung and not self.suspended:
                self.end(EXIT_RAISED)

        self.world.timeline.after(ORDERS_S, overdue)
        self._wake()

    def _wake(self) -> None:
        if self._waiting is None:
            return

        def obey() -> None:
            waiting = self._waiting
            order = self.session.take_order() if waiting is not None else None
            if order is not None and waiting is not None:
                self._waiting = None
                waiting(order)

        self.later(0.0005, obey)

    def next_order(self) -> None:
        """The train thread is outside the train function."""
        held, self.loop.held = self.loop.held, None
        if held is not None:
            self.obey(held)
        else:
            self.wait_order(self.obey)

    def obey(self, order: Order) -> None:
        """Do as ordered."""
        if isinstance(order, Rejoin):
            self.loop.publish()  # of a boundary: all ranks have parked there, and have written their parts
            if self.loop.order.held:
                self.clean()
            self.wayback.begin(order)
        elif isinstance(order, Resume):
            self.session.reach(Stage.TRAINING)
            self.world.watch.resumed(self, order)
            self.loop.train()
        elif isinstance(order, Quiesce):
            if self.session.stage is Stage.FINISHED:
                self.abort("the step is given up")
                self.clean()
            self.report_quiesced(self.next_order)
        elif isinstance(order, Release):
            self.session.reach(Stage.RELEASED)
            self.loop.publish()
            self.doing(Activity.FINISHED)
            self.flush_and_exit(0)
        else:
            self.save(order, self.next_order)

    def report_quiesced(self, then: Callable[[], None]) -> None:
        """Park, and say where this rank stands."""
        self.session.reach(Stage.PARKED)
        self.post(RankQuiesced(self.rank, self.session.generation, self.incarnation, self.report(), {"stop": 0.01}))
        self.world.reached("quiesced")
        then()

    def save(self, order: SaveCheckpoint, then: Callable[[], None]) -> None:
        """Write an emergency checkpoint's part."""
        error = "no space left on device" if self.world.fail_save() else self.world.saving.write(self, order)
        self.post(CheckpointSaved(self.rank, order.generation, order.step, "/checkpoints", error))
        then()

    def finished(self) -> None:
        """The train function has returned."""
        self.session.reach(Stage.FINISHED)
        self.doing(Activity.FINISHED)
        self.world.watch.finished(self)
        self.post(RankFinished(self.rank, self.session.generation, self.incarnation, self.loop.count))
        self.next_order()

    def _boot(self) -> None:
        if not self._seated:
            self._join()
            return
        self.group = self.world.group(self.session.generation, self.world_size)
        epoch = self.epoch

        def give_up() -> None:
            if self.alive and epoch == self.epoch and self.session.stage is Stage.BOOTING:
                self.end(EXIT_RAISED)

        self.world.timeline.after(START_LINK_UP_S, give_up)
        self.broken = lambda: self.end(EXIT_RAISED)
        enter = PlainScript(self).run if self.world.setting.plain else self._join
        self.group.connect(self, self._store, self.still(enter))

    def _join(self) -> None:
        self.broken = None
        if self._seated or self.seat.own_is_empty:
            self.seat.keep_own(0, 0)
        self.doing(Activity.RECOVERING)
        self.session.reach(Stage.PARKED)
        if self._early:
            self.seat.agent.announce(self)
            self.wait_order(lambda _: self._take_over())
        else:
            self._take_over()

    def _take_over(self) -> None:
        report = self.report()
        self.post(RankJoined(self.rank, self.session.generation, self.incarnation, self.pid, report, 0.1))
        self.world.reached("joined")
        self.next_order()

    def report(self) -> StepReport:
        """Say where this rank stands, for barrier one."""
        shards, copies = [ShardHold(each, SHARD_BYTES) for each in self.memory.shards], self.seat.copies()
        checkpoints, trace = self.world.saving.survey()
        report = self.standing.report(shards, copies, checkpoints, trace)
        self.world.watch.steps.reports(self, report)
        return report

    def assess(self) -> None:
        """Ask the device what was struck."""
        self.standing.strike(self.memory.struck)

    def clean(self) -> None:
        """Drop what the interrupted step has left behind."""
        self.assess()
        self.memory.gradients = None
        self.standing.gradients_dropped()
