"""The train loop of a process: the acts of the real step order, played; computing, the update, and how it is left."""

import enum
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING

from ..processor.exceptions import Finding, Reaction, reaction
from ..processor.session import Order, Stage
from ..processor.step_order import Act, Leave, StepOrder
from ..protocol.errors import Interrupted
from ..protocol.messages import Quiesce, Rejoin, SaveCheckpoint, StepCommitted
from ..protocol.types import Activity, FaultKind, FaultLevel
from .invariants import Invariant

if TYPE_CHECKING:
    from .process import Process

CLEAN_S = 0.01
EXIT_RAISED = 1
MENDABLE = frozenset({FaultKind.MEMORY, FaultKind.MEMORY_MULTI_BIT, FaultKind.LINK})


class Place(enum.Enum):
    """Where in a step something can strike."""

    COMPUTING = "while it computes"
    BARRIER = "at the commit barrier"
    MET = "between commit barrier and update"
    UPDATE = "in its update"


class TrainLoop:
    """What happens between two orders of the controller, as a chain of calls. `order` says what comes next."""

    def __init__(self, process: "Process") -> None:
        self._process = process
        self._world = process.world
        self.order = StepOrder(process.standing, self)
        self.held: Order | None = None
        self._first_step = False
        self._at_boundary = False
        self._to_publish = 0
        self._end: Generator[Act, bool, None] | None = None
        self._acts: dict[Act, Callable[[], None]] = {
            Act.FINISH: lambda: self._done(True),
            Act.CAPTURE: self._capture,
            Act.SWAP: self._swap,
            Act.MEET: self._meet,
            Act.HOLD: self._hold,
            Act.PUBLISH: self._publish,
        }

    @property
    def count(self) -> int:
        """The updates that this process says it has applied."""
        return self._process.standing.count

    def interrupted(self) -> bool:
        """Whether the controller wants the train thread to stop."""
        return self._process.session.quiescing

    def begins(self, step: int) -> bool:
        """Whether a step may be begun; False at a boundary at which all ranks stop."""
        self._at_boundary = not self._process.session.begins(step)
        return not self._at_boundary

    def train(self) -> None:
        """The train function is called."""
        self._first_step = True
        self._begin()

    def publish(self) -> None:
        """What every rank has written for the last checkpoint is complete."""
        if self._to_publish:
            self._world.saving.complete(self._to_publish)
            self._to_publish = 0

    def _begin(self) -> None:
        process = self._process
        if self.count >= self._world.setting.total_steps:
            self._leave(finished=True)
            return
        try:
            self.order.begin()
        except Interrupted:
            self._leave()
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
            self._raise(FaultKind.EXCEPTION)
        elif not self._strikes(Place.COMPUTING) and process.block(Activity.COLLECTIVE, self._leave):
            assert process.group is not None
            process.group.enter(("gradients", self.count), process, process.still(self._reduced))

    def _reduced(self) -> None:
        process = self._process
        process.broken = None
        process.memory.gradients = self.count + 1
        self._end = self.order.end(self.count)
        self._go_on(next)

    # --- the end of a step: what is to be done, and how it went --------------------------------------------------

    def _done(self, well: bool) -> None:
        self._go_on(lambda end: end.send(well))

    def _go_on(self, next_of: Callable[[Generator[Act, bool, None]], Act]) -> None:
        assert self._end is not None
        try:
            act = next_of(self._end)
        except StopIteration:
            self._update()
        except Interrupted:
            self._leave()
        else:
            self._acts[act]()

    def _capture(self) -> None:
        step = self.count + 1
        self._process.seat.keep_own(step, step)
        self._done(True)

    def _swap(self) -> None:
        process, step = self._process, self.count + 1
        self._world.reached("ready")
        if self._strikes(Place.BARRIER):
            return
        if not process.block(Activity.COMMITTING, lambda: self._done(False)):
            return
        group = process.group
        assert group is not None
        group.post(("own", step, process.rank), step)
        ward = self._world.ward(process.rank, process.world_size)
        if ward == process.rank:
            self._done(True)
        else:
            group.receive(("own", step, ward), process.still_with(lambda blob: self._swapped(ward, step, blob)))

    def _swapped(self, ward: int, step: int, blob: int) -> None:
        self._process.seat.keep_ward(ward, step, blob)
        self._done(True)

    def _meet(self) -> None:
        process = self._process
        assert process.group is not None
        self._world.watch.steps.meets(process)
        process.group.enter(("commit", self.count), process, process.still(self._met))

    def _met(self) -> None:
        self._process.broken = None
        if not self._strikes(Place.MET):
            self._done(True)

    def _publish(self) -> None:
        self.publish()
        self._done(True)

    def _hold(self) -> None:
        self._stop()
        self._process.assess()
        self._process.wait_order(self._obey_held)

    def _obey_held(self, order: Order) -> None:
        process = self._process
        if isinstance(order, Quiesce):
            process.report_quiesced(lambda: process.wait_order(self._obey_held))
        elif isinstance(order, Rejoin):
            assert process.session.stage is Stage.PARKED
            self.held = order
            self._done(order.part.finish_update)
        elif isinstance(order, SaveCheckpoint):
            process.save(order, lambda: process.wait_order(self._obey_held))
        else:
            self._world.fail(
                Invariant.UNDERSTOOD, f"{type(order).__name__} reached a rank that holds at the commit barrier"
            )

    # --- the update ---------------------------------------------------------------------------------------------

    def _update(self) -> None:
        process = self._process
        process.doing(Activity.UPDATING)
        self._world.watch.steps.updating(process)
        self._world.reached("updating")
        process.later(self._world.chance.uniform(0.001, 0.02), self._updated)

    def _updated(self) -> None:
        process, world = self._process, self._world
        if self._strikes(Place.UPDATE):
            return
        process.memory.update()
        goes_on = self.order.commit()
        world.watch.committed(process)
        if goes_on:
            if self._first_step:
                self._first_step = False
                incarnation, generation = process.incarnation, process.session.generation
                now = process.seat.agent.wall_s
                process.post(StepCommitted(process.rank, generation, incarnation, self.count, now, 0.1))
            every = world.setting.checkpoint_every
            if every and self.count % every == 0:
                process.doing(Activity.CHECKPOINTING)
                self._to_publish = self.count
                slow = world.setting.slow_checkpoints
                process.later(world.chance.choice((0.02, 0.05, 8.0 if slow else 0.3)), self._begin)
                return
        self._begin()

    # --- the ways out -------------------------------------------------------------------------------------------

    def _strikes(self, place: Place) -> bool:
        """Let come what was to come at this place: the train function raises over it."""
        process = self._process
        if place not in process.hits:
            return False
        kind = process.hits.pop(place)
        if place is Place.UPDATE:
            process.memory.tear()
        if kind in {FaultKind.MEMORY, FaultKind.MEMORY_MULTI_BIT}:
            process.memory.strike()
        self._raise(kind)
        return True

    def _raise(self, kind: FaultKind) -> None:
        process = self._process
        mendable = kind in MENDABLE
        finding = Finding("made up", kind, FaultLevel.SOFTWARE, mendable, "", "made up")
        what_now = reaction(finding, collateral=process.session.quiescing or process.failed is not None)
        if what_now is not Reaction.WAIT:
            process.report_fault(kind, "made up", mendable=mendable)
        if what_now is Reaction.LEAVE:
            process.flush_and_exit(EXIT_RAISED)
        else:
            self._leave(reported=what_now is Reaction.REPORT)

    def _leave(self, *, finished: bool = False, reported: bool = False) -> None:
        process = self._process
        way = self.order.leave(finished=finished, failed=reported)
        if way is Leave.FINISHED:
            process.finished()
        elif way is Leave.HELD:
            process.next_order()
        else:
            self.held = None
            self._stop(reported=reported)
            process.later(CLEAN_S, self._clean)

    def _stop(self, *, reported: bool = False) -> None:
        process = self._process
        process.broken = None
        if self._at_boundary:  # nothing is in flight, and nothing is aborted
            self._at_boundary = False
        else:
            self._to_publish = 0
            failed = process.failed
            if not reported and not self.interrupted() and failed is not None:
                process.report_fault(FaultKind.COMMUNICATION, failed)
            process.abort(failed or "the step is given up")
        process.doing(Activity.RECOVERING)

    def _clean(self) -> None:
        self._process.clean()
        self._process.next_order()
