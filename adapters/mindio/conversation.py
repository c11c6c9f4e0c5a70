"""How the thread that trains and the driver thread talk: the one asks, the other answers, or says that all is stopped.

MindIO's handlers run beside the thread that trains, which may hang in a collective. So midstep's loop of the rank has a
thread of its own, the driver. The training thread asks it at each update, and waits where it would else train on.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ...protocol.enums import StrEnum
from ...protocol.errors import Interrupted, RecoveryError


class Ask(StrEnum):
    """What the training thread asks."""

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

    def ask(self, question: Question) -> bool:
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
        """Whether the training thread is to stop where it is."""
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

    def next(self) -> Question:
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
