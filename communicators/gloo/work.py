"""torch Work objects of gloo collectives, whose wait an abort can end.

The backend's own wait cannot be ended from another thread, so no caller waits there. Callers wait for an event that is
set by whichever comes first, the backend's completion or the end of the scope.
"""

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from ...protocol.errors import MidstepError, UnsupportedCollective
from ..background import COMPLETION_THREADS
from ..base import CollectiveObserver
from ..generation_scope import GenerationScope, error_text
from ..kept_works import keep, release

# What torch says before gloo has sent anything: of the operation, and of the dtype.
_REFUSALS = ("Cannot use ReduceOp", "Unhandled ReduceOp", "Invalid scalar type")
OVERDUE_S = 5.0  # how much later than the backend's own timeout a missing completion is given up


def failure(scope: GenerationScope, op: str, error: BaseException) -> MidstepError:
    """Return what the caller of `op` must raise. Ends the scope, unless gloo has only refused the arguments."""
    text = error_text(error)
    if text.startswith(_REFUSALS):
        return UnsupportedCollective(f"{op} is nothing that gloo does: {text}. Choose another operation or dtype")
    return scope.fail(op, error)


class FuturelessWork:
    """A work of the backend that has no future, with a callback for its completion."""

    def __init__(self, inner: dist.Work, timeout_s: float) -> None:
        """Wrap `inner`. Its wait starts with the first call that asks for completion, and takes at most `timeout_s`."""
        self.inner = inner
        self._timeout_s = timeout_s
        self._done = threading.Event()
        self._started = False
        self._error: BaseException | None = None
        self._then: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def _wait(self) -> None:
        try:
            self.inner.wait(timedelta(seconds=self._timeout_s))
        except Exception as error:  # raised in the thread that waits
            self._error = error
        with self._lock:
            self._done.set()
            then, self._then = self._then, []
        for call in then:
            call()

    def _start(self) -> None:
        with self._lock:
            if self._started:
                return
            self._started = True
        COMPLETION_THREADS.run(self._wait)

    def when_done(self, call: Callable[[], None]) -> None:
        """Call `call`, in any thread, once the work is complete."""
        with self._lock:
            late = self._done.is_set()
            if not late:
                self._then.append(call)
        if late:
            call()
        else:
            self._start()

    def is_completed(self) -> bool:
        """Return whether the backend has completed it."""
        self._start()
        return self._done.is_set()

    def wait(self) -> None:
        """Raise what the backend raised. Only after `is_completed`."""
        if self._error is not None:
            raise self._error

    def exception(self) -> BaseException | None:
        """Return what the backend raised."""
        return self._error

    def __getattr__(self, name: str) -> Any:
        """Forward the rest of torch's Work."""
        return getattr(self.inner, name)


class GroupWork(dist.Work):
    """The work of one collective of a connected group. Made for each of them, so it does little."""

    _woken: threading.Event | None = None
    _promise: "Promise | None" = None
    _backend_future: "torch.futures.Future[Any] | None" = None  # the backend's future, once a caller waits for it

    def __init__(
        self, scope: GenerationScope, inner: dist.Work, op: str, observer: CollectiveObserver | None, timeout_s: float
    ) -> None:
        """Wrap `inner`, the backend's work of `op`, until `scope` ends."""
        super().__init__()
        self._scope = scope
        self._inner: Any = inner
        self._op = op
        self._observer = observer
        self._timeout_s = timeout_s
        keep(self)

    def _when_done(self, call: Callable[[], None]) -> None:
        """Call `call`, in any thread, once the backend has completed."""
        self._backend_future = future = self._inner.get_future()
        future.add_done_callback(lambda _: call())

    def _done(self) -> bool:
        # Gloo completes the future a moment before the work itself; a caller that was woken must not see another state.
        return self._inner.is_completed() or (self._backend_future is not None and self._backend_future.done())

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the completion or the end of the scope. Raises CommunicatorAborted or CommunicatorFailed.

        A `timeout` other than 0 leaves the collective under way and raises RuntimeError.
        """
        try:
            if not self._done():
                self._stand_still(timeout.total_seconds())
            return self._outcome()
        finally:
            self._leave()

    def _stand_still(self, timeout_s: float) -> None:
        began_s = time.monotonic()
        try:
            self._await(timeout_s)
        finally:
            if self._observer is not None:
                self._observer.waited(time.monotonic() - began_s)

    def _await(self, timeout_s: float) -> None:
        if self._woken is None:
            self._woken = threading.Event()
            self._scope.add(self)
            self._when_done(self._woken.set)
        if not self._woken.wait(timeout_s if timeout_s > 0 else self._timeout_s + OVERDUE_S):
            if timeout_s > 0:
                raise RuntimeError(f"{self._op}: Operation timed out! It is still under way.")
            raise self._scope.fail(self._op, TimeoutError(f"no completion within {self._timeout_s:.0f} s"))

    def _outcome(self) -> bool:
        if not self._done():
            raise self._scope.error(self._op)
        if self._woken is not None:
            self._scope.discard(self)
        try:
            self._inner.wait()
        except RuntimeError as error:
            raise failure(self._scope, self._op, error) from error
        return True

    def _leave(self) -> None:
        release(self)
        observer, self._observer = self._observer, None
        if observer is not None:
            observer.left(self._op)

    def scope_ended(self) -> None:
        """Wake the waiting thread and fail the future, if there is one. Any thread."""
        if self._woken is not None:
            self._woken.set()
        if self._promise is not None:
            self._promise.settle(self._scope.error(self._op), None)

    def finished(self) -> bool:
        """Return whether the backend has released the tensors."""
        return self._done()

    def get_future(self) -> "torch.futures.Future[Any]":
        """Return a future that completes with the collective or fails with the scope. For DDP's reducer."""
        promise = self._promise
        if promise is None:
            self._promise = promise = Promise()
            self._scope.add(self)
            self._backend().get_future().add_done_callback(self._completed)
        return promise.future

    def _backend(self) -> Any:
        return self._inner

    def _completed(self, completed: "torch.futures.Future[Any]") -> None:
        promise, observer = self._promise, self._observer
        assert promise is not None
        self._scope.discard(self)
        failed, value = None, None
        try:
            value = completed.value()
        except Exception as error:  # the backend's; the reducer's thread gets the collective that failed
            failed = failure(self._scope, self._op, error)
        if observer is not None:
            self._observer = None
            observer.left(self._op)
        release(self)
        promise.settle(failed, value)  # last: the thread that waits for it needs the interpreter next

    def is_completed(self) -> bool:
        """Return whether `wait` would return or raise at once."""
        return self._done() or self._scope.reason is not None

    def is_success(self) -> bool:
        """Return whether the collective completed without an error."""
        return self._done() and self._inner.exception() is None

    def exception(self) -> Any:
        """Return the backend's error; None if there is none."""
        return self._inner.exception()

    def result(self) -> list[torch.Tensor]:
        """Return the tensors of the collective."""
        return self._inner.result()  # type: ignore[no-any-return]

    def source_rank(self) -> int:
        """Return the sender of what was received."""
        return self._inner._source_rank()  # type: ignore[no-any-return]

    _source_rank = source_rank

    def synchronize(self) -> None:
        """Wait, as torch's Work does on a CPU."""
        self.wait()


class FuturelessGroupWork(GroupWork):
    """The work of a collective that has no future in the backend."""

    def __init__(
        self, scope: GenerationScope, inner: dist.Work, op: str, observer: CollectiveObserver | None, timeout_s: float
    ) -> None:
        """See GroupWork."""
        super().__init__(scope, inner, op, observer, timeout_s)
        self._inner = FuturelessWork(inner, timeout_s)

    def _when_done(self, call: Callable[[], None]) -> None:
        self._inner.when_done(call)

    def _done(self) -> bool:
        return bool(self._inner.is_completed())

    def _backend(self) -> Any:
        return self._inner.inner


class Promise:
    """A torch future that can fail with an exception. Made for each of DDP's buckets in each step, so it does little.

    Future.set_exception would store the exception as the value, and DDP's reducer would read it as tensors and crash.
    So a failed future holds a Failure, which raises whenever its value is read.
    """

    def __init__(self) -> None:
        self.future: torch.futures.Future[Any] = torch.futures.Future()
        self.future._set_unwrap_func(_check)  # for callers in Python
        self._unsettled = [self.future]

    def settle(self, error: BaseException | None, value: Any) -> None:
        """Complete the future; the first call counts. Any thread."""
        try:
            future = self._unsettled.pop()  # one of two threads gets it
        except IndexError:
            return
        # No exception object goes into the future: its traceback would hold frames that hold the future, a circle
        # through C++ that no garbage collector sees, with the collective's tensors in it.
        future.set_result(value if error is None else Failure(type(error), str(error)))


class Failure:
    """The value of a failed future, in place of tensors. Every access to the tensors raises the error.

    DDP's reducer finds tensors in a value by pickling it, in torch's own pickler.
    """

    def __init__(self, kind: type[BaseException], text: str) -> None:
        """Stand for an error of type `kind`."""
        self._kind = kind
        self._text = text

    def fail(self, *_: Any) -> Any:
        """Raise the error."""
        raise self._kind(self._text)

    __reduce_ex__ = __iter__ = __getitem__ = __len__ = fail


def _check(value: Any) -> None:
    if type(value) is Failure:
        value.fail()
