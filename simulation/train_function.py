"""A played train function: it computes, ends each step in the product's own order, and meets with what strikes it."""

import enum
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..processor.exceptions import Finding, Reaction, reaction
from ..processor.rank_actions import Ended
from ..processor.step_order import Act
from ..protocol.errors import CommunicatorError, Interrupted, MidstepError
from ..protocol.messages import StepCommitted
from ..protocol.types import Activity, FaultKind, FaultLevel
from .played_thread import Thread

if TYPE_CHECKING:
    from .process import Process

MEDIAN_STEP_S = 0.1
MENDABLE = frozenset({FaultKind.MEMORY, FaultKind.MEMORY_MULTI_BIT, FaultKind.LINK})


class Place(enum.Enum):
    """Where in a step something can strike."""

    COMPUTING = "while it computes"
    BARRIER = "at the commit barrier"
    MET = "between commit barrier and update"
    UPDATE = "in its update"


class Raised(MidstepError):
    """What a step raises: the fault behind it."""

    def __init__(self, kind: FaultKind) -> None:
        super().__init__("made up")
        self.kind = kind


class TrainFunction:
    """The train function of one process, and what it has left to be made complete on the disk."""

    def __init__(self, process: "Process", hold: Callable[[], Thread[bool]]) -> None:
        """`hold` says, at a broken commit barrier, whether to apply the update."""
        self._process = process
        self._world = process.world
        self._first_step = False
        self._to_publish = 0
        self._at_once: dict[Act, Callable[[], None]] = {
            Act.FINISH: lambda: None,
            Act.CAPTURE: self._capture,
            Act.PUBLISH: self.publish,
        }
        self._in_time: dict[Act, Callable[[], Thread[bool]]] = {
            Act.SWAP: self._swap,
            Act.MEET: self._meet,
            Act.HOLD: hold,
        }

    def run(self) -> Thread[Ended]:
        """Do the steps that are left. Raises what its process is to end with."""
        process = self._process
        self._first_step = True
        try:
            while process.standing.count < self._world.setting.total_steps:
                yield from self._step(process.steps.begin())
        except Interrupted:
            return Ended.INTERRUPTED
        except (CommunicatorError, Raised) as error:
            kind = error.kind if isinstance(error, Raised) else FaultKind.COMMUNICATION
            what_now = self._judge(kind)
            if what_now is Reaction.LEAVE:
                yield from process.flush()
                raise
            return Ended.FAILED if what_now is Reaction.REPORT else Ended.INTERRUPTED
        return Ended.RETURNED

    def publish(self) -> None:
        """What every rank has written for the last checkpoint is complete."""
        if self._to_publish:
            self._world.saving.complete(self._to_publish)
            self._to_publish = 0

    def forget_checkpoint(self) -> None:
        """Whether every rank has written for the last checkpoint is not known any more."""
        self._to_publish = 0

    # --- a step -------------------------------------------------------------------------------------------------

    def _step(self, index: int) -> Thread[None]:
        process, world = self._process, self._world
        process.doing(Activity.COMPUTING)
        process.step_since_s = world.timeline.now
        process.seat.agent.watch_step(process, first=self._first_step)
        world.watch.computing(process)
        yield process.sleep(world.chance.uniform(0.02, 0.1) * process.slowness)
        if process.raising:
            process.raising = False
            raise Raised(FaultKind.EXCEPTION)
        self._let_strike(Place.COMPUTING)
        group = yield from process.enter(Activity.COLLECTIVE)
        yield lambda go: group.enter(("gradients", index), process, lambda: go(None))
        process.in_collective = False
        process.memory.gradients = index + 1
        yield from self._end(index)
        yield from self._update()

    def _end(self, index: int) -> Thread[None]:
        """Do what the step order asks for, up to the update."""
        end = self._process.steps.end(index)
        act = next(end)
        while True:
            well = True
            if act in self._at_once:
                self._at_once[act]()
            else:
                well = yield from self._in_time[act]()
            try:
                act = end.send(well)
            except StopIteration:
                return

    def _capture(self) -> None:
        step = self._process.standing.count + 1
        self._process.seat.keep_local(step, step)

    def _swap(self) -> Thread[bool]:
        process, step = self._process, self._process.standing.count + 1
        self._world.reached("ready")
        self._let_strike(Place.BARRIER)
        ward = self._world.ward(process.rank, process.world_size)
        try:
            group = yield from process.enter(Activity.COMMITTING)
            group.post(("own", step, process.rank), step)
            if ward != process.rank:
                blob: int = yield lambda go: group.receive(("own", step, ward), go)
                process.seat.keep_ward(ward, step, blob)
        except CommunicatorError:
            return False
        return True

    def _meet(self) -> Thread[bool]:
        process, count = self._process, self._process.standing.count
        group = process.group
        assert group is not None
        self._world.watch.steps.meets(process)
        try:
            yield lambda go: group.enter(("commit", count), process, lambda: go(None))
        except CommunicatorError:
            return False
        process.in_collective = False
        self._let_strike(Place.MET)
        return True

    def _update(self) -> Thread[None]:
        process, world = self._process, self._world
        process.doing(Activity.UPDATING)
        world.watch.steps.updating(process)
        world.reached("updating")
        yield process.sleep(world.chance.uniform(0.001, 0.02))
        self._let_strike(Place.UPDATE)
        process.memory.update()
        goes_on = process.steps.commit()
        world.watch.committed(process)
        if not goes_on:
            return
        count = process.standing.count
        if process.loop.commits_first_step():
            self._first_step = False
            now, generation = process.seat.agent.wall_s, process.session.generation
            process.post(StepCommitted(process.rank, generation, process.incarnation, count, now, MEDIAN_STEP_S))
        every = world.setting.checkpoint_every
        if every and count % every == 0:
            process.doing(Activity.CHECKPOINTING)
            self._to_publish = count
            slow = world.setting.slow_checkpoints
            yield process.sleep(world.chance.choice((0.02, 0.05, 8.0 if slow else 0.3)))

    # --- what strikes -------------------------------------------------------------------------------------------

    def _let_strike(self, place: Place) -> None:
        """Let come what was to come at this place. Raises it."""
        process = self._process
        if place not in process.hits:
            return
        kind = process.hits.pop(place)
        if place is Place.UPDATE:
            process.memory.tear()
        if kind in {FaultKind.MEMORY, FaultKind.MEMORY_MULTI_BIT}:
            process.memory.strike()
        raise Raised(kind)

    def _judge(self, kind: FaultKind) -> Reaction:
        """Say what follows from what a step has raised, and report it if it is news."""
        process, mendable = self._process, kind in MENDABLE
        finding = Finding("made up", kind, FaultLevel.SOFTWARE, mendable, "", "made up")
        what_now = reaction(finding, collateral=process.interrupted() or process.failed is not None)
        if what_now is not Reaction.WAIT:
            process.report_fault(kind, "made up", mendable=mendable)
        return what_now
