"""A training process: the real session under a played train thread.

The train thread is a chain of calls on the timeline. Each link of the chain is dropped when the thread has been torn
out of it (`epoch`), is stopped, hangs, or is dead. What a shard holds is played by one number, the count of updates in
it, so that mixed-up state shows.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..processor.session import Order, Session, Stage
from ..protocol.mailbox import Mailbox
from ..protocol.messages import (
    CheckpointSaved,
    Envelope,
    FaultReported,
    Message,
    Quiesce,
    RankFinished,
    RankJoined,
    RankQuiesced,
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
    RankProgress,
    ShardHold,
    StepReport,
    rank_address,
)
from .network import Endpoint
from .train_loop import TrainLoop
from .way_back import WayBack

if TYPE_CHECKING:
    from .communicators import Group
    from .node import Seat
    from .world import World

START_LINK_UP_S = 60.0
ORDERS_S = 600.0
FLUSH_S = 5.0
EXIT_RAISED = 1
SHARD_BYTES = 40_000_000


class Process:
    """One life of a rank."""

    def __init__(self, world: "World", seat: "Seat", order: StartProcess, pid: int) -> None:
        self.world, self.seat, self.rank, self.pid = world, seat, order.rank, pid
        self.incarnation = order.incarnation
        self.session = Session(order.rank, order.incarnation, order.generation)
        mailbox = Mailbox(job=world.job.job, address=rank_address(self.rank), session=order.incarnation)
        self.endpoint = Endpoint(mailbox, world.timeline, transmit=self._transmit, take=self._hear)
        self.alive, self.suspended, self.hung = True, False, False
        self.raising = False  # the next step raises
        self.harmed = False  # something was done to it, so it may be replaced
        self.epoch = 0
        self.group: Group | None = None
        self.failed: str | None = None
        self.broken: Callable[[], None] | None = None  # where the train thread goes when its collective fails
        self.activity = Activity.STARTING
        self.since_s = self.step_since_s = world.timeline.now
        self.collectives = 0
        self.clean = order.seated
        self.holds = dict.fromkeys(world.shards(self.rank), 0)
        self.own = 0
        self.loop = TrainLoop(self)
        self.wayback = WayBack(self)
        self._seated = order.seated
        self._waiting: Callable[[Order], None] | None = None
        self.later(world.chance.uniform(0.01, 0.3), self._boot)

    # --- threads ------------------------------------------------------------------------------------------------

    def later(self, delay_s: float, call: Callable[[], None]) -> None:
        """Have the train thread do something after a while, unless something comes between."""
        self.world.timeline.after(delay_s, self.still(call))

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
        self.activity, self.since_s = activity, self.world.timeline.now

    def block(self, activity: Activity, broken: Callable[[], None]) -> None:
        """Enter a collective: `broken` is where its failure leads."""
        self.doing(activity)
        self.collectives += 1
        self.broken = broken
        if self.failed is not None:
            self._tear(0.001)

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

    def end(self, status: int) -> None:
        """The process is gone, for whatever reason."""
        if not self.alive:
            return
        self.alive = self.endpoint.open = False
        if self.group is not None:
            self.group.leave(self)
        self.world.log(f"rank {self.rank}.{self.incarnation} pid {self.pid} ended with {status}")
        self.seat.ended(self, status)

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
        mailbox = self.endpoint.mailbox
        mailbox.generation = max(mailbox.generation, self.session.generation)
        self.endpoint.post(body, CONTROLLER)

    def report_fault(self, kind: FaultKind, detail: str) -> None:
        """Report something wrong in this rank."""
        now, name = self.world.timeline.now, rank_address(self.rank)
        node, generation = self.seat.agent.name, self.session.generation
        report = FaultReport(kind, now, name, detail, self.rank, node, generation, self.incarnation)
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
        if isinstance(body, Quiesce | Rejoin | Resume | Release | SaveCheckpoint):
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
            self.wayback.begin(order)
        elif isinstance(order, Resume):
            self.session.reach(Stage.TRAINING)
            self.world.watch.resumed(self, order)
            self.loop.train()
        elif isinstance(order, Quiesce):
            if self.session.stage is Stage.FINISHED:
                self.abort("the step is given up")
            self.report_quiesced(self.next_order)
        elif isinstance(order, Release):
            self.session.reach(Stage.RELEASED)
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
        self.post(CheckpointSaved(self.rank, order.generation, order.step, "/checkpoints"))
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
        self.group = self.world.group(self.session.generation)
        epoch = self.epoch

        def give_up() -> None:
            if self.alive and epoch == self.epoch and self.session.stage is Stage.BOOTING:
                self.end(EXIT_RAISED)

        self.world.timeline.after(START_LINK_UP_S, give_up)
        self.broken = lambda: self.end(EXIT_RAISED)
        self.group.connect(self, self.still(self._join))

    def _join(self) -> None:
        self.broken = None
        if self._seated or self.seat.own_is_empty:
            self.seat.keep_own(0, 0)
        self.doing(Activity.RECOVERING)
        self.session.reach(Stage.PARKED)
        report = self.report()
        self.post(RankJoined(self.rank, self.session.generation, self.incarnation, self.pid, report, 0.1))
        self.world.reached("joined")
        self.next_order()

    def report(self) -> StepReport:
        """Say where this rank stands, for barrier one."""
        shards = tuple(ShardHold(shard, SHARD_BYTES) for shard in self.holds)
        return StepReport(
            committed=self.loop.count, ready=self.loop.ready, clean=self.clean, holds=shards if self.clean else (),
            needs=tuple(self.holds), own_states=self.seat.copies(), checkpoints=tuple(sorted(self.world.disk)),
        )  # fmt: skip
