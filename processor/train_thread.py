"""The train thread's side of a recovery, in one loop.

Train; when something breaks stop and clean, report, park; do as ordered; train again from the interrupted step.
"""

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from ..protocol.errors import CommunicatorAborted, Interrupted, MidstepError
from ..protocol.messages import (
    CheckpointSaved,
    Quiesce,
    RankFinished,
    RankJoined,
    RankQuiesced,
    RankReady,
    Rejoin,
    Release,
    Resume,
    SaveCheckpoint,
    StepCommitted,
)
from ..protocol.types import Activity, FaultKind, Moment
from .callbacks import Callbacks, Lifecycle
from .checkpoint_survey import JOINING_PATIENCE_S, PARKED_PATIENCE_S
from .checkpoints import Checkpoints
from .exceptions import Reaction
from .ledger import Ledger
from .own_parts import OwnParts
from .rejoining import Phases, Rejoining
from .runtime import Runtime
from .session import Order, Stage
from .standing import Standing
from .step_order import Leave
from .verdicts import Verdicts

if TYPE_CHECKING:
    from .lifecycle import Framework

Result = TypeVar("Result")

_log = logging.getLogger("midstep")


class TrainThread:
    """The train thread's life under midstep: one object per resilient call."""

    def __init__(self, runtime: Runtime, framework: "Framework", lifecycle: Lifecycle | None = None) -> None:
        self._runtime = runtime
        self._framework = framework
        self._standing = standing = Standing(clean=runtime.seated)
        self._ledger = Ledger(self, framework, runtime.moments, runtime.step_clock, standing=standing)
        runtime.callbacks = Callbacks(runtime.rank, lifecycle, lambda: standing.count)
        self._own = OwnParts(framework, runtime.device)
        self._rejoining = Rejoining(runtime, framework, self._own, standing=standing, step_order=self._ledger.order)
        self._checkpoints = Checkpoints(runtime, framework)
        self._verdicts = Verdicts(runtime)
        self._phases = self._new_phases()
        self._held: Order | None = None  # an order that was taken inside the commit barrier
        self._first_step = False
        self._at_boundary = False  # stopped between two steps, with all others: nothing is in flight

    # --- what the ledger asks for ------------------------------------------------------------------------------

    def interrupted(self) -> bool:
        """Whether the controller wants the train thread to stop."""
        return self._runtime.interrupted()

    def step_done(self) -> None:
        """Wait for the device: after that the gradients are final."""
        self._runtime.device.finish()

    def update_done(self) -> None:
        """Wait for the device: after that the update is applied. It may be stopped again."""
        self._runtime.device.finish()
        self._runtime.unshield()

    def begins(self, step: int) -> bool:
        """Whether a step may be begun; False at a boundary at which all ranks stop."""
        self._at_boundary = not self._runtime.begins(step)
        return not self._at_boundary

    def keep_own(self, step: int, blob: bytes) -> bytes:
        """The own state, with the device's part, goes to the black box."""
        whole = self._own.whole(blob)
        self._runtime.own_states.keep(step, whole)
        return whole

    def swap_own(self, step: int, blob: bytes) -> None:
        """The own state goes to the buddy, the ward's is kept."""
        self._runtime.own_states.swap(step, blob)

    def meet(self, index: int) -> None:
        """The commit barrier: everybody is here. From now on the update must not end halfway."""
        self._runtime.communicator.barrier()
        self._runtime.shield()
        self._verdicts.update_begins(index)

    def barrier_passed(self) -> None:
        """What every rank wrote for the last checkpoint is there: it can be made complete."""
        self._checkpoints.publish_pending()

    def committed(self, committed: int, median_step_s: float) -> None:
        """A step is committed: report the first after a resume, write a checkpoint where one is due."""
        runtime = self._runtime
        if self._first_step:
            self._first_step = False
            runtime.post(
                StepCommitted(
                    runtime.rank, runtime.generation, runtime.incarnation, committed, time.time(), median_step_s
                )
            )
        if self._checkpoints.due(committed):
            runtime.step_clock.doing(Activity.CHECKPOINTING)
            runtime.moments.reached(Moment.CHECKPOINT, committed - 1)
            self._checkpoints.save(committed)
            runtime.step_clock.doing(Activity.COMPUTING)

    def hold_at_barrier(self) -> bool:
        """The commit barrier broke while this rank held final gradients: report, and ask whether to apply them."""
        self._stop()
        with self._phases.phase(Moment.CLEAN):
            self._rejoining.assess(self._runtime.device.clean())  # the update may yet be applied
        while True:
            order = self._next_order()
            if isinstance(order, Quiesce):
                self._report_quiesced()
                continue
            if isinstance(order, Rejoin):
                self._held = order
                return order.part.finish_update
            self._obey_parked(order)

    # --- the loop ----------------------------------------------------------------------------------------------

    def run(self, train: Callable[[], Result]) -> Result:
        """Join the world, train, recover as often as ordered, and return what the train function returned."""
        runtime, result = self._runtime, None
        self._framework.bind(self._ledger)
        for finding in self._framework.audit():
            _log.warning("%s", finding)
        if runtime.seated or not runtime.black_box.copies():
            # A newcomer keeps what its predecessor left: it may be the last copy.
            runtime.own_states.keep(0, self._own.capture())
        self._join()
        while True:
            order = self._next_order()
            if isinstance(order, Rejoin):
                self._rejoin(order)
            elif isinstance(order, Resume):
                result = self._train(train, result)
            elif isinstance(order, Quiesce):
                self._report_quiesced()
            elif isinstance(order, Release):
                runtime.session.reach(Stage.RELEASED)
                self._checkpoints.publish_pending()
                runtime.step_clock.doing(Activity.FINISHED)
                runtime.flush()
                return result  # type: ignore[return-value]
            else:
                self._obey_parked(order)

    def _join(self) -> None:
        runtime = self._runtime
        runtime.moments.reached(Moment.JOIN, 0)
        runtime.step_clock.doing(Activity.RECOVERING)
        runtime.session.reach(Stage.PARKED)
        began_s = runtime.started_s
        if runtime.early:  # the rank is another process's until the controller says so, and speaks in its name
            while not isinstance(runtime.wait_order(), Quiesce):
                _log.warning("an order before the rank was taken over; ignored")
            began_s = time.monotonic()
        runtime.post(
            RankJoined(
                runtime.rank,
                runtime.generation,
                runtime.incarnation,
                pid=os.getpid(),
                report=self._rejoining.report(JOINING_PATIENCE_S),
                join_s=max(0.0, time.monotonic() - began_s),
            )
        )

    def _train(self, train: Callable[[], Result], last: Result | None) -> Result | None:
        """Call the train function once; leave it for whatever reason, and settle what follows."""
        runtime = self._runtime
        runtime.session.reach(Stage.TRAINING)
        self._first_step = True
        reported = False
        try:
            last = train()
            finished = True
        except Interrupted:
            finished = False
        except Exception as error:
            # Only texts are kept: the traceback would keep the dead step's tensors and groups alive.
            finished = False
            what_now = self._verdicts.in_training(error)
            if what_now is Reaction.LEAVE:
                runtime.flush()
                raise
            reported = what_now is Reaction.REPORT
        way = self._ledger.order.leave(finished=finished, failed=reported)
        if way is Leave.FINISHED:
            runtime.session.reach(Stage.FINISHED)
            runtime.step_clock.doing(Activity.FINISHED)
            runtime.post(RankFinished(runtime.rank, runtime.generation, runtime.incarnation, self._standing.count))
        elif way is Leave.STOP:
            self._held = None
            self._stop(reported=reported)
            self._clean()
        return last

    def _stop(self, *, reported: bool = False) -> None:
        """Everything in flight is dropped; say so if nobody has asked for it yet."""
        runtime = self._runtime
        self._phases = self._new_phases()
        reason = None
        if not self._at_boundary:
            self._checkpoints.forget_pending()
            failed = runtime.communicator.failed
            if not reported and not runtime.interrupted() and failed is not None:
                runtime.report_fault(FaultKind.COMMUNICATION, failed)
            reason = failed or "the step is given up"
        self._at_boundary = False  # there, others may still be in the step's end, and rebuild cuts the links
        with self._phases.phase(Moment.STOP), self._or_leave():
            runtime.unshield()
            runtime.stop(reason)
        runtime.step_clock.doing(Activity.RECOVERING)

    def _clean(self) -> None:
        with self._phases.phase(Moment.CLEAN), self._or_leave():
            self._runtime.callbacks.run(Moment.CLEAN, self._runtime.generation, self._rejoining.clean_up)
        self._standing.gradients_dropped()

    @contextmanager
    def _or_leave(self) -> Iterator[None]:
        """End the process if the device, or a callback of the user's, cannot be stopped or cleaned."""
        try:
            yield
        except MidstepError as error:
            self._runtime.report_not_stopped(error)
            self._runtime.flush()
            raise

    def _report_quiesced(self) -> None:
        runtime = self._runtime
        if runtime.session.stage is Stage.FINISHED:
            self._stop()
            self._clean()
        runtime.session.reach(Stage.PARKED)
        report, seconds = self._rejoining.report(PARKED_PATIENCE_S), self._phases.seconds
        runtime.post(RankQuiesced(runtime.rank, runtime.generation, runtime.incarnation, report, seconds))

    def _rejoin(self, order: Rejoin) -> None:
        runtime = self._runtime
        runtime.session.reach(Stage.REJOINING)
        self._phases = self._new_phases()
        self._checkpoints.publish_pending()  # of a boundary: all ranks have parked there, and have written their parts
        self._checkpoints.take_over(order.generation)
        if self._ledger.order.held:
            self._clean()  # held at the barrier until now, with the gradients
        received, failed = 0, True
        try:
            received = self._rejoining.rejoin(order, self._phases)
            failed = False
        except Exception as error:  # torch has no limit to the kinds that it raises
            if not isinstance(error, CommunicatorAborted):
                self._verdicts.on_the_way_back(error)
        if failed:
            runtime.device.stop()  # nothing of this attempt may go on behind the next one
            self._phases = self._new_phases()
            return
        if runtime.interrupted():
            return
        runtime.session.reach(Stage.READY)
        count, seconds = self._standing.count, self._phases.seconds
        runtime.post(RankReady(runtime.rank, order.generation, runtime.incarnation, count, seconds, received))

    def _obey_parked(self, order: Order) -> None:
        if not isinstance(order, SaveCheckpoint):
            _log.warning("%s has no meaning while parked; ignored", type(order).__name__)
            return
        path, error = self._checkpoints.save_emergency(
            order.step, order.generation, publish=order.publish, shards=order.shards
        )
        runtime = self._runtime
        runtime.post(CheckpointSaved(runtime.rank, order.generation, order.step, path, error))

    def _next_order(self) -> Order:
        held, self._held = self._held, None
        return held if held is not None else self._runtime.wait_order()

    def _new_phases(self) -> Phases:
        return Phases(lambda moment: self._runtime.moments.reached(moment, self._standing.count))
