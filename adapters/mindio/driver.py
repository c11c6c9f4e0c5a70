"""The driver thread: midstep's loop of this rank and MindIO's handlers, beside the thread that trains."""

import logging
import sys
import threading
from typing import TYPE_CHECKING

from ...processor.group_arguments import GroupArguments
from ...processor.train_thread import TrainThread
from ...protocol.errors import Interrupted, RecoveryError
from ...protocol.types import FaultKind, FaultLevel
from .conversation import Ask, Conversation, Question
from .device import HandledDevice
from .process_groups import GroupNames, await_free_device
from .recovery import HandlerRecovery
from .state import HandledState
from .values import ReportState

if TYPE_CHECKING:
    from ...processor.ledger import Step, Update
    from ...processor.runtime import Runtime
    from .handlers import Handlers
    from .replicas import OptimizerReplicas

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
_UNTRUSTED = {
    ReportState.RS_UCE_CORRUPTED: "several bits of device memory flipped before the last update",
    ReportState.RS_RETRY: "the script has found its numbers to be wrong",
}


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
        self.recovery.use_device = self._use_device
        runtime.device = self._device
        self._names.install()

    @property
    def is_replacement(self) -> bool:
        """Whether this process takes the place of another one."""
        return not self._runtime.connected and self.recovery.newcomer

    @property
    def is_early(self) -> bool:
        """Whether it was started ahead of a planned change."""
        return self._runtime.early

    @property
    def stops_at_boundary(self) -> bool:
        """Whether training has been stopped between two steps, by plan."""
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
        if self._runtime.incarnation > 1:
            await_free_device(self._runtime.rank)
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
        """Take note of the step that a checkpoint was of."""
        if self._thread is None:
            self._state.agreed(step)

    def finish(self) -> bool:
        """Say that the training function has returned; return False when it has to be called again."""
        if self._thread is None or self._conversation.over is not None:
            return True
        self._conversation.ask(Question(Ask.FINISH))
        return not self._conversation.await_go()

    def report(self, state: ReportState, detail: str = "", error: BaseException | None = None) -> None:
        """Say how the training function was left. Returns at once."""
        if self._thread is None:  # of a newcomer: it is ready now
            self._start()
        self.recovery.memory_fault = state in {ReportState.RS_UCE, ReportState.RS_UCE_CORRUPTED}
        if state in _NO_FAULT:  # if midstep has not stopped it, something else has
            self._conversation.park(RuntimeError(FORCE_STOP))
            return
        if state in _UNTRUSTED:
            self._distrust(f"{_UNTRUSTED[state]} {detail}".strip())
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

    def _take(self) -> Question:
        """Wait for the next question that is not an exception, which is raised here as it was there."""
        question = self._conversation.next()
        if question.ask is Ask.FAIL:
            assert question.error is not None
            raise question.error
        return question

    def _commits(self, step: "Step", question: Question) -> bool:
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

    def _within_update(self) -> Question:
        """Wait for the end of the update, which nothing interrupts but an exception in it."""
        while True:
            try:
                return self._take()
            except Interrupted:
                self._conversation.await_question()
