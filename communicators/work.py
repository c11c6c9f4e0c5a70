"""A collective under way, as its caller sees it: a wait that an abort can end.

The backend's own wait cannot be ended from another thread, so nobody waits there. Callers wait for an event that is
set by whichever comes first, the backend's completion or the end of the scope.
"""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from .base import CollectiveObserver
from .completion_threads import COMPLETION_THREADS
from .generation_scope import GenerationScope

OVERDUE_S = 5.0  # how much later than the backend's own timeout a missing completion is given up


class FuturelessWork:
    """A work of the backend that has no future, made to tell when it is complete."""

    def __init__(self, inner: dist.Work, timeout_s: float) -> None:
        """Wrap `inner`; its wait is started when somebody asks, and is given `timeout_s`."""
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
        except Exception as error:  # handed to the thread that asks
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
        """Say whether the backend is done with it."""
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
        """Hand on the rest of torch's Work."""
        return getattr(self.inner, name)


class GroupWork(dist.Work):
    """What the collectives of a seated group return. Runs for each of them, so it does little."""

    _woken: threading.Event | None = None
    _promise: "Promise | None" = None
    _told_by: "torch.futures.Future[Any] | None" = None  # the backend's future, once somebody waits for it

    def __init__(
        self, scope: GenerationScope, inner: dist.Work, op: str, observer: CollectiveObserver | None, timeout_s: float
    ) -> None:
        """Take charge of `inner`, the backend's side of `op`, for the rest of `scope`."""
        super().__init__()
        self._scope = scope
        self._inner: Any = inner
        self._op = op
        self._observer = observer
        self._timeout_s = timeout_s

    def _when_done(self, call: Callable[[], None]) -> None:
        """Call `call`, in any thread, once the backend is done."""
        self._told_by = told_by = self._inner.get_future()
        told_by.add_done_callback(lambda _: call())

    def _done(self) -> bool:
        # Gloo completes the future a moment before the work itself; a caller that was told must not be told otherwise.
        return self._inner.is_completed() or (self._told_by is not None and self._told_by.done())

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the completion or the end of the scope. Raises CommunicatorAborted or CommunicatorFailed.

        A `timeout` other than 0 leaves the collective under way and raises RuntimeError.
        """
        try:
            if not self._done():
                self._await(timeout.total_seconds())
            return self._outcome()
        finally:
            self._leave()

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
            raise self._scope.fail(self._op, error) from error
        return True

    def _leave(self) -> None:
        observer, self._observer = self._observer, None
        if observer is not None:
            observer.left(self._op)

    def scope_ended(self) -> None:
        """Wake the waiting thread and settle the future, if there is one. Any thread."""
        if self._woken is not None:
            self._woken.set()
        if self._promise is not None:
            self._promise.settle(self._scope.error(self._op), None)

    def finished(self) -> bool:
        """Say whether the backend has let go of the tensors."""
        return self._done()

    def get_future(self) -> "torch.futures.Future[Any]":
        """Return a future that completes with the collective or fails with the scope. For DDP's reducer."""
        promise = self._promise
        if promise is None:
            self._promise = promise = Promise()
            self._scope.add(self)
            self._backend().get_future().add_done_callback(self._told)
        return promise.future

    def _backend(self) -> Any:
        return self._inner

    def _told(self, told: "torch.futures.Future[Any]") -> None:
        promise, observer = self._promise, self._observer
        assert promise is not None
        self._scope.discard(self)
        failure, value = None, None
        try:
            value = told.value()
        except Exception as error:  # the backend's; what the reducer's thread gets says which collective
            failure = self._scope.fail(self._op, error)
        if observer is not None:
            self._observer = None
            observer.left(self._op)
        promise.settle(failure, value)  # last: whoever waits for it wants the interpreter next

    def is_completed(self) -> bool:
        """Say whether `wait` would return or raise at once."""
        return self._done() or self._scope.reason is not None

    def is_success(self) -> bool:
        """Say whether the collective was done, and well."""
        return self._done() and self._inner.exception() is None

    def exception(self) -> Any:
        """Return the backend's error, if there is one."""
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
    """The same for what has no future in the backend."""

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
    """A future that can be failed. One is made for each of DDP's buckets in each step, so it does little.

    Future.set_exception would store the exception as the value, and DDP's reducer would read it as tensors and crash.
    So a failed future holds a Failure, at which nobody can look without being told.
    """

    def __init__(self) -> None:
        self.future: torch.futures.Future[Any] = torch.futures.Future()
        self.future._set_unwrap_func(_look)  # for those that ask from Python
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
    """What a failed future holds in place of tensors. Every way to get at the tensors raises what went wrong.

    DDP's reducer finds tensors in a value by pickling it, in torch's own pickler.
    """

    def __init__(self, kind: type[BaseException], text: str) -> None:
        """Stand for an error of this kind."""
        self._kind = kind
        self._text = text

    def tell(self, *_: Any) -> Any:
        """Raise it."""
        raise self._kind(self._text)

    __reduce_ex__ = __iter__ = __getitem__ = __len__ = tell


def _look(value: Any) -> None:
    if type(value) is Failure:
        value.tell()
