"""The train loop of a process: computing, collectives, the commit barrier, the update; and how it is left."""

from typing import TYPE_CHECKING

from ..processor.session import Order, Stage
from ..protocol.messages import Quiesce, Rejoin, SaveCheckpoint, StepCommitted
from ..protocol.types import Activity, FaultKind
from .invariants import Invariant

if TYPE_CHECKING:
    from .process import Process

CLEAN_S = 0.01
GONE = -1  # the count of updates in a shard that was struck


class TrainLoop:
    """What the ledger and the resilient loop do, as a chain of calls."""

    def __init__(self, process: "Process") -> None:
        self._process = process
        self._world = process.world
        self.count = 0
        self.ready = False
        self.held: Order | None = None
        self.leave_after_update = False
        self._first_step = False
        self._to_publish = 0

    def reset(self, count: int) -> None:
        """Stand at `count` updates, in rollback."""
        self.count, self.ready, self.leave_after_update = count, False, False
        self._to_publish = 0

    def train(self) -> None:
        """The train function is called."""
        self._first_step = True
        self._begin()

    def _begin(self) -> None:
        process = self._process
        if self.count >= self._world.setting.total_steps:
            if self.held is None and not process.session.quiescing:
                process.finished()
            else:
                self._leave()
            return
        if self.leave_after_update or process.session.quiescing:
            self._leave()
            return
        if not process.session.begins(self.count):
            process.doing(Activity.RECOVERING)  # nothing is in flight, and nothing is aborted
            process.later(CLEAN_S, process.next_order)
            return
        process.doing(Activity.COMPUTING)
        process.step_since_s = self._world.timeline.now
        process.seat.agent.watch_step(process, first=self._first_step)
        self._world.watch.computing(process)
        process.later(self._world.chance.uniform(0.02, 0.1) * process.slowness, self._computed)

    def _computed(self) -> None:
        process = self._process
        if process.raising:
            process.raising = False
            if process.session.quiescing or process.failed is not None:
                self._leave()  # collateral
                return
            process.report_fault(FaultKind.EXCEPTION, "ValueError: made up")
            process.flush_and_exit(1)
            return
        if process.hit is not None:
            self._strike(process.hit)
            return
        process.block(Activity.COLLECTIVE, self._leave)
        assert process.group is not None
        process.group.enter(("gradients", self.count), process, process.still(self._reduced))

    def _strike(self, kind: FaultKind) -> None:
        """Something hits the process that it outlives; what memory held is gone."""
        process = self._process
        process.hit = None
        if kind is not FaultKind.LINK:
            process.struck = set(process.holds)
            process.holds = dict.fromkeys(process.holds, GONE)
        if not process.session.quiescing:
            process.report_fault(kind, "made up", mendable=True)
        self._leave()

    def _reduced(self) -> None:
        process, step = self._process, self.count + 1
        process.broken = None
        if process.session.quiescing:
            self._leave()
            return
        self.ready = True
        process.seat.keep_own(step, step)
        self._world.reached("ready")
        process.block(Activity.COMMITTING, self._hold)
        group = process.group
        assert group is not None
        group.post(("own", step, process.rank), step)
        ward = self._world.ward(process.rank, process.world_size)
        if ward == process.rank:
            self._enter_barrier()
        else:
            group.receive(("own", step, ward), process.still_with(lambda blob: self._swapped(ward, step, blob)))

    def _swapped(self, ward: int, step: int, blob: int) -> None:
        self._process.seat.keep_ward(ward, step, blob)
        self._enter_barrier()

    def _enter_barrier(self) -> None:
        process = self._process
        assert process.group is not None
        process.group.enter(("commit", self.count), process, process.still(self._passed))

    def _passed(self) -> None:
        self._process.broken = None
        self._publish()
        self._update()

    def _update(self) -> None:
        process = self._process
        process.doing(Activity.UPDATING)
        self._world.reached("updating")
        process.later(self._world.chance.uniform(0.001, 0.02), self._updated)

    def _updated(self) -> None:
        process, world = self._process, self._world
        self.count, self.ready = self.count + 1, False
        process.holds = dict.fromkeys(process.holds, self.count)
        process.own = self.count
        world.watch.committed(process)
        if not self.leave_after_update:
            if self._first_step:
                self._first_step = False
                incarnation, generation = process.incarnation, process.session.generation
                process.post(StepCommitted(process.rank, generation, incarnation, self.count, world.timeline.now, 0.1))
            every = world.setting.checkpoint_every
            if every and self.count % every == 0:
                process.doing(Activity.CHECKPOINTING)
                self._to_publish = self.count
                slow = world.setting.slow_checkpoints
                process.later(world.chance.choice((0.02, 0.05, 8.0 if slow else 0.3)), self._begin)
                return
        self._begin()

    def _publish(self) -> None:
        if self._to_publish:
            self._world.disk.add(self._to_publish)
            self._to_publish = 0

    # --- the ways out -------------------------------------------------------------------------------------------

    def _leave(self) -> None:
        """The train function is left: stop, clean, wait for orders (if none is held already)."""
        if self.held is not None:
            self._process.next_order()
            return
        self._stop()
        self._process.later(CLEAN_S, self._process.next_order)

    def _stop(self) -> None:
        process = self._process
        process.broken = None
        failed = process.failed
        if not process.session.quiescing and failed is not None:
            process.report_fault(FaultKind.COMMUNICATION, failed)
        process.abort(failed or "the step is given up")
        process.doing(Activity.RECOVERING)

    def _hold(self) -> None:
        """The commit barrier broke while this rank had final gradients."""
        self._stop()
        self._process.wait_order(self._obey_held)

    def _obey_held(self, order: Order) -> None:
        process = self._process
        if isinstance(order, Quiesce):
            process.report_quiesced(lambda: process.wait_order(self._obey_held))
        elif isinstance(order, Rejoin):
            assert process.session.stage is Stage.PARKED
            self.held = order
            if order.part.finish_update:
                self.leave_after_update = True
                self._update()
            else:
                process.next_order()
        elif isinstance(order, SaveCheckpoint):
            process.save(order, lambda: process.wait_order(self._obey_held))
        else:
            self._world.fail(
                Invariant.UNDERSTOOD, f"{type(order).__name__} reached a rank that holds at the commit barrier"
            )
