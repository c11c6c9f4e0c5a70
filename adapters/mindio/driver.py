"""The driver thread: midstep's loop of this rank and MindIO's handlers, beside the thread that trains.

MindIO's handlers run beside the thread that trains, which may hang in a collective. So midstep's loop of the rank has a
thread of its own, the driver. The training thread asks it at each update, and waits where it would else train on.
"""

import logging
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...processor.group_arguments import GroupArguments
from ...processor.train_thread import TrainThread
from ...protocol.compat import StrEnum
from ...protocol.errors import Interrupted, RecoveryError
from ...protocol.types import FaultKind, FaultLevel
from .device import GroupNames, HandledDevice, await_free_device
from .recovery import HandlerRecovery
from .state import HandledState, OptimizerReplicas, offset_in, replicas_in
from .values import ReportState

if TYPE_CHECKING:
    from ...processor.ledger import Step, Update
    from ...processor.runtime import Runtime
    from .handlers import Handlers

NOT_ANNOUNCED = "it had not been announced, and not all ranks have come so far. This process is to be replaced"
FORCE_STOP = "FORCE STOP. midstep stops this step: it is repeated"
ANNOUNCEMENT_S = 10.0  # that a device may say later than its host that an update has begun
ENDLESS = sys.maxsize  # the script knows how many steps there are
# What the states of MindIO say, in the words that the exception patterns know.
_TEXTS = {
    ReportState.RS_UCE: "UCE ERROR",
    ReportState.RS_HCCL_FAILED: "HCCL OP RETRY FAILED",
}
# A consequence of being stopped, or no error at all.
_NO_FAULT = frozenset({ReportState.RS_NORMAL, ReportState.RS_PREREPAIR_FINISH, ReportState.RS_STEP_FINISH})
_CORRUPTED = "several bits of device memory flipped before the last update"
_WRONG = "the script has found its numbers to be wrong"
_log = logging.getLogger("midstep")


class HandlerDriver:
    """Everything of one process. Its methods are called by the thread that trains."""

    def __init__(self, runtime: "Runtime", handlers: "Handlers", device_index: int | None) -> None:
        self._runtime = runtime
        self._handlers = handlers
        self._device_index = device_index
        self._conversation = Conversation()
        self._state = HandledState(runtime.rank)
        self._device = HandledDevice(runtime.device)
        self._names = GroupNames()
        self._thread: threading.Thread | None = None
        self._noted: int | None = None
        self.error: BaseException | None = None  # with which the driver ended
        self.recovery = HandlerRecovery(
            runtime,
            handlers=handlers,
            state=self._state,
            device=self._device,
            conversation=self._conversation,
            names=self._names,
        )
        self._state.save = self.recovery.save
        self._state.noted_offset = lambda: offset_in(runtime)
        self._state.noted_replicas = lambda: replicas_in(runtime)
        self.recovery.use_device = self._use_device
        runtime.device = self._device
        self._names.install()

    @property
    def is_replacement(self) -> bool:
        """True if this process takes the place of another one."""
        return not self._runtime.connected and self.recovery.newcomer

    @property
    def is_early(self) -> bool:
        """True if it was started ahead of a planned change."""
        return self._runtime.early

    @property
    def stops_at_boundary(self) -> bool:
        """True if training has been stopped between two steps, by plan."""
        return self._thread is not None and self._conversation.stopped

    def connect(self) -> None:
        """Open the links between hosts."""
        self._runtime.init_process_group(GroupArguments())

    def set_replicas(self, replicas: "tuple[OptimizerReplicas, ...]") -> None:
        """Set who holds copies of whose optimizer state."""
        self._state.replicas = replicas

    def begin(self) -> None:
        """Start the driver thread, once; wait until the whole world trains, unless it has to be joined first."""
        if self._thread is not None:
            return
        self._start()
        if not self.is_replacement and not self._conversation.await_go():
            raise self.error or RecoveryError("the job ended before it began")

    def _start(self) -> None:
        await_free_device()
        self._thread = threading.Thread(target=self._run, name="midstep-driver", daemon=True)
        self.recovery.driver = self._thread
        self._thread.start()

    def update_begins(self) -> bool:
        """Pass the commit barrier; return False when the step is to be repeated."""
        return self._conversation.ask(Question(Ask.UPDATE))

    def note(self, step: int) -> None:
        """Remember how the script counts, for `update_ended`."""
        self._noted = step

    def update_ended(self, step: int) -> None:
        """Commit. What is to be stopped is stopped after it."""
        noted, self._noted = self._noted, None
        self._conversation.await_announcement(ANNOUNCEMENT_S)
        if not self._conversation.ask(Question(Ask.COMMIT, step=step if noted is None else noted)):
            # Repeated, it would be applied twice.
            raise SystemExit(f"the update of step {step} was applied, but cannot be committed: {NOT_ANNOUNCED}")

    def loaded(self, step: int) -> None:
        """Take note of the step that a checkpoint was of, that the script has loaded: at its start, or in a repair."""
        if self._thread is None:
            self._state.agreed(step)
        self.recovery.loaded_step = step

    def finish(self) -> bool:
        """Say that the training function has returned; return False when it has to be called again."""
        if self._thread is None or self._conversation.over is not None:
            return True
        self._conversation.ask(Question(Ask.FINISH))
        return not self._conversation.await_go()

    def report(
        self, state: ReportState, detail: str = "", error: BaseException | None = None, *, back_to: int | None = None
    ) -> None:
        """Say how the training function was left. Returns at once.

        `back_to`: by the script's count, the step of the checkpoint that all are to load, of RS_RETRY.
        """
        if self._thread is None:  # of a newcomer: it is ready now
            self._start()
        self.recovery.memory_fault = state in {ReportState.RS_UCE, ReportState.RS_UCE_CORRUPTED}
        if state in _NO_FAULT:  # if midstep has not stopped it, something else has
            self._conversation.park(RuntimeError(FORCE_STOP))
            return
        if state is ReportState.RS_RETRY:
            self._go_back(back_to)
            self._conversation.park(RuntimeError(FORCE_STOP))
            return
        if state is ReportState.RS_UCE_CORRUPTED:
            self._distrust(f"{_CORRUPTED} {detail}".strip())
        text = _TEXTS.get(state)
        self._conversation.park(
            (error or RuntimeError(f"the script reported {state.name} {detail}".strip()))
            if text is None
            else RuntimeError(f"{text} {detail}".strip())
        )

    def _distrust(self, why: str) -> None:
        """Report that no rank's state can be trusted: only a start from the script's checkpoint helps."""
        self._runtime.report_fault(
            FaultKind.MEMORY_MULTI_BIT, why, FaultLevel.RESTART_BUSINESS, mendable=False, trusted_step=0
        )

    def _go_back(self, step: int | None) -> None:
        """Report that the updates since a checkpoint are wrong. All load it, if this process can tell which it is."""
        self._state.chosen = step
        why = _WRONG if step is None else f"{_WRONG}, and names the checkpoint of step {step}"
        loadable = self._state.loadable()
        back_to = loadable[:1] if step is None else {step - self._state.likely_offset}.intersection(loadable)
        if back_to:
            self._runtime.report_fault(FaultKind.MEMORY_MULTI_BIT, why, mendable=True, trusted_step=min(back_to))
        else:
            self._distrust(why)

    def await_clean(self) -> bool:
        """Wait until the device is clean."""
        return self._conversation.await_clean()

    def await_go(self) -> bool:
        """Wait until training continues."""
        return self._conversation.await_go()

    # --- the driver thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        why = "the driver ended"
        try:
            self._use_device()
            TrainThread(self._runtime, self._state, self.recovery.lifecycle()).run(self._drive)
            why = ""
        except BaseException as error:
            self.error, why = error, f"{type(error).__name__}: {error}"
            _log.error("the recovery of this rank has ended: %s", why, exc_info=error)
        finally:
            self._conversation.end(why)

    def _use_device(self) -> None:
        """Have handlers that this thread calls find the device of this process: they use that of their thread."""
        library = sys.modules.get("torch_npu")
        if library is not None and self._device_index is not None:
            library.npu.set_device(self._device_index)

    def _drive(self) -> None:
        """Stand for the training function: one step after the other, as the training thread asks."""
        self.recovery.resumed()
        self._conversation.go()
        try:
            for step in self._state.ledger.steps(ENDLESS):
                question = self._take()
                while question.ask is not Ask.FINISH and not self._commits(step, question):
                    question = self._take()
                if question.ask is Ask.FINISH:
                    self._conversation.leave()
                    return
        finally:
            self._conversation.leave()

    def _take(self) -> "Question":
        """Wait for the next question that is not an exception, which is raised here as it was there."""
        question = self._conversation.next()
        if question.ask is Ask.FAIL:
            assert question.error is not None
            raise question.error
        return question

    def _commits(self, step: "Step", question: "Question") -> bool:
        """Do what is asked in a step, and return whether that has committed it.

        What is bracketed as an update may change nothing but the form of the parameters (MindSpeed-LLM's
        --reuse-fp32-param): its end then has the number of the step that was committed last.
        """
        update, announced = step.update(), question.ask is Ask.UPDATE
        if announced:
            self._pass_barrier(update)
            self._conversation.answer(allowed=True)
            question = self._within_update()
        count = step.index + 1
        if self._state.offset is not None and question.step < self._state.offset + count:
            if announced:
                self._state.ledger.void_update()
            self._conversation.answer(allowed=True)
            return False
        if not announced:
            self._pass_barrier_late(update)
        self._state.counted(question.step - count)
        update.__exit__(None, None, None)
        self._conversation.answer(allowed=True)
        return True

    def _pass_barrier_late(self, update: "Update") -> None:
        """Pass the commit barrier with an update that is applied already. Raises SystemExit if others do not follow."""
        try:
            self._pass_barrier(update)
        except (Interrupted, Exception) as error:
            raise SystemExit(f"an update was applied that cannot be committed: {NOT_ANNOUNCED}") from error

    def _pass_barrier(self, update: "Update") -> None:
        self.recovery.at_barrier = True
        try:
            update.__enter__()
        finally:
            self.recovery.at_barrier = False

    def _within_update(self) -> "Question":
        """Wait for the end of the update, which nothing interrupts but an exception in it."""
        while True:
            try:
                return self._take()
            except Interrupted:
                self._conversation.await_question()


class Ask(StrEnum):
    """The questions of the training thread."""

    UPDATE = "update"  # may the update begin?
    COMMIT = "commit"  # the update is applied
    FINISH = "finish"  # the training function has returned
    FAIL = "fail"  # an exception came out of it


@dataclass(frozen=True)
class Question:
    """One question. `step`: by the script's count, of COMMIT. `error`: of FAIL."""

    ask: Ask
    step: int = 0
    error: BaseException | None = None


class Conversation:
    """Between the training thread, the driver thread and, in `interrupt`, the control thread."""

    def __init__(self) -> None:
        """Begin before the first step: the driver has not said go."""
        self._changed = threading.Condition()
        self._question: Question | None = None
        self._answers = 0  # given so far
        self._replies: dict[int, bool | None] = {}  # to the questions of threads that wait
        self._announced = False  # an update is asked for that is not committed yet
        self._announces = False  # updates are announced here
        self._driving = False  # the driver takes questions
        self._interrupted = False
        self._parked = False  # the training thread is out of the training function
        self._cleaned = False  # since the last stop
        self._goes = 0
        self._seen_goes = 0
        self._over: str | None = None

    # --- the training thread ------------------------------------------------------------------------------------------

    def ask(self, question: "Question") -> bool:
        """Ask, and return whether training continues as asked; False: stop here, and report.

        What another thread has asked is answered first: an update may be announced from beside the training thread.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._question is None or not self._driving or self._over is not None)
            if not self._driving or self._over is not None:
                return False
            self._question, mine = question, self._answers + 1
            if question.ask is Ask.UPDATE:
                self._announced = self._announces = True
            self._changed.notify_all()
            self._replies[mine] = None
            self._changed.wait_for(lambda: self._replies[mine] is not None or self._over is not None)
            return bool(self._replies.pop(mine))

    def await_announcement(self, limit_s: float) -> None:
        """Wait until the update that is to be committed is announced, where updates are: from beside this thread."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._announced or not (self._announces and self._driving) or self._over is not None, limit_s
            )

    def park(self, error: BaseException | None) -> None:
        """Say that this thread has left the training function, and why if that is no consequence of a stop."""
        with self._changed:
            self._parked = True
            if error is not None and self._driving:
                self._question = Question(Ask.FAIL, error=error)
            self._changed.notify_all()

    def await_clean(self) -> bool:
        """Wait until the device is clean; return False if this process is to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._cleaned or self._goes > self._seen_goes or self._over is not None)
            return self._over is None

    def await_go(self) -> bool:
        """Wait until training continues; return False if this process is to end, or the job is over."""
        with self._changed:
            self._parked = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._goes > self._seen_goes or self._over is not None)
            self._seen_goes, self._parked = self._goes, False
            return self._over is None

    @property
    def over(self) -> str | None:
        """Why the driver has ended: empty when the job is over, None while it lives."""
        return self._over

    @property
    def stopped(self) -> bool:
        """True if the training thread is to stop where it is."""
        with self._changed:
            return not self._driving

    # --- the driver thread --------------------------------------------------------------------------------------------

    def go(self) -> None:
        """Let the training thread train, and take its questions from now on."""
        with self._changed:
            self._driving, self._interrupted, self._cleaned, self._announced = True, False, False, False
            self._question = None
            self._goes += 1
            self._changed.notify_all()

    def next(self) -> "Question":
        """Wait for the next question. Raises Interrupted."""
        with self._changed:
            self._changed.wait_for(lambda: self._question is not None or self._interrupted)
            if self._question is None:
                raise Interrupted
            return self._question

    def await_question(self) -> None:
        """Wait for the next question, interrupted or not."""
        with self._changed:
            self._changed.wait_for(lambda: self._question is not None)

    def answer(self, *, allowed: bool) -> None:
        """Answer the question that was taken last."""
        with self._changed:
            if self._question is not None and self._question.ask is Ask.COMMIT:
                self._announced = False
            self._question = None
            self._answers += 1
            if self._answers in self._replies:  # an exception is told, and waits for no answer
                self._replies[self._answers] = allowed
            self._changed.notify_all()

    def leave(self) -> None:
        """Take no more questions; one that waits is answered with a stop."""
        with self._changed:
            self._driving = False
            if self._question is not None:
                self.answer(allowed=False)

    def await_parked(self, limit_s: float, give_up: Callable[[], bool] = lambda: False) -> None:
        """Wait until the training thread has left the training function. Raises RecoveryError after `limit_s`."""
        deadline = time.monotonic() + limit_s
        with self._changed:
            while not self._parked:
                left_s = deadline - time.monotonic()
                if left_s <= 0 or give_up():
                    raise RecoveryError(
                        "the training thread did not return after the stop handler had run. It has to raise in the "
                        f"operator that it waits for (waited {limit_s:g} s; TTP_NORMAL_ACTION_TIME_LIMIT)"
                    )
                self._changed.wait(min(left_s, 1.0))

    def cleaned(self) -> None:
        """Say that the device is clean."""
        with self._changed:
            self._cleaned = True
            self._changed.notify_all()

    def end(self, why: str) -> None:
        """Say that the driver ends; empty when the job is over."""
        with self._changed:
            self._over, self._driving = why, False
            self._changed.notify_all()

    # --- the control thread -------------------------------------------------------------------------------------------

    def interrupt(self) -> None:
        """Have `next` raise, unless a question is there, which is answered first."""
        with self._changed:
            self._interrupted = True
            self._changed.notify_all()
