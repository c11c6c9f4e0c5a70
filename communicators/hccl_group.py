"""A process group of a device's collective library, behind the handle that models and reducers hold.

The library's own group stays for the scope of the process; what is rebuilt is the communicator inside it. So a seating
does not replace what is behind the handle, but the first one puts it there: until then, in a newcomer, collectives
return what this rank put in. What torch-npu looks for on the groups that it finds (`_device_types`, `_get_backend`) is
handed on.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist

from .generation_scope import GenerationScope
from .process_group import Group

if TYPE_CHECKING:
    from .base import CollectiveObserver

BACKEND = "midstep_hccl"  # torch-npu looks for hccl in the name
_BATCH = "batch"  # of sends and receives


class HcclGroup(Group):
    """A process group that a device's collective library serves."""

    def __init__(  # noqa: PLR0917 - as its parent
        self,
        owner: Any,
        members: Sequence[int],
        group_rank: int,
        scope: GenerationScope,
        timeout: timedelta,
        device: torch.device,
    ) -> None:
        """Make the group of the global ranks `members`. Not seated."""
        super().__init__(owner, members, group_rank, scope, timeout)
        self.timeout = timeout
        self.backend: Any = None  # the library's, once there is one
        self._device = device
        self._batching = False

    @property
    def connected(self) -> bool:
        """Whether the library serves the group, and nothing has gone wrong with it."""
        return self.backend is not None and self._scope.reason is None

    def serve(self, process_group: Any, backend: Any, scope: GenerationScope) -> None:
        """Have `process_group` do the collectives, in this scope."""
        self._delegate, self.backend, self._scope, self._batching = process_group, backend, scope, False

    def revive(self, scope: GenerationScope) -> None:
        """Begin another scope with the same backend."""
        self._scope, self._batching = scope, False

    def end(self, scope: GenerationScope) -> None:
        """Let every collective raise as `scope` has it, from now on."""
        self._scope = scope

    def start(self, op: str, silent: bool, observed: bool, args: Any, kwargs: Any = None) -> dist.Work:
        """Queue the collective `op`. Raises CommunicatorAborted or CommunicatorFailed, and what the device raises."""
        scope = self._scope
        if scope.reason is not None and not self._batching:
            raise scope.error(op)
        observer = self._owner.observer if observed and not self._batching else None
        if observer is not None:
            observer.entered(op, self.members)
        try:
            work = getattr(self._delegate, op)(*args, **(kwargs or {}))
        except BaseException:
            if observer is not None:
                observer.left(op)
            raise
        return work if observer is None else WatchedWork(work, op, observer)

    def link_check(self) -> tuple[torch.Tensor, Any]:
        """Start to add up ones; return them and the work. The first collective builds the communicator."""
        ones = torch.ones(1, device=self._device)
        return ones, self._delegate.allreduce([ones])

    @property
    def _device_types(self) -> list[torch.device]:
        return [] if self.backend is None else [self._device]

    def _get_backend(self, device: torch.device) -> Any:
        return self.backend

    def _start_coalescing(self, device: torch.device) -> None:
        """Begin a batch: torch-npu makes one of what `batch_isend_irecv` is given. Raises as `start`."""
        if self._scope.reason is not None:
            raise self._scope.error(_BATCH)
        self._delegate._start_coalescing(device)
        self._batching = True

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        """Start the batch. Raises as `start`, but not before the library's batch is closed: it would stay open."""
        observer, scope = self._owner.observer, self._scope
        self._batching = False
        if observer is not None:
            observer.entered(_BATCH, self.members)
        try:
            work = self._delegate._end_coalescing(device)
            if scope.reason is not None:
                raise scope.error(_BATCH)
        except BaseException:
            if observer is not None:
                observer.left(_BATCH)
            raise
        return work if observer is None else WatchedWork(work, _BATCH, observer)

    def set_timeout(self, timeout: timedelta) -> None:
        """Let the library's collectives take `timeout` from the next seating on."""
        self.timeout = timeout

    def getBackendName(self) -> str:  # noqa: N802
        return BACKEND


class WatchedWork(dist.Work):
    """A collective of the library, that tells the observer when its caller has waited for it."""

    def __init__(self, inner: dist.Work, op: str, observer: "CollectiveObserver") -> None:
        """Watch `inner`."""
        super().__init__()
        self._inner: Any = inner
        self._op = op
        self._observer: CollectiveObserver | None = observer

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait as the library does: for the device's queue, not for its end. Raises what the library raises."""
        try:
            return bool(self._inner.wait(timeout) if timeout else self._inner.wait())
        finally:
            self._leave()

    def _leave(self) -> None:
        observer, self._observer = self._observer, None
        if observer is not None:
            observer.left(self._op)

    def get_future(self) -> "torch.futures.Future[Any]":
        """Return the library's future."""
        future: torch.futures.Future[Any] = self._inner.get_future()
        future.add_done_callback(lambda _: self._leave())
        return future

    def is_completed(self) -> bool:
        """As the library's."""
        return bool(self._inner.is_completed())

    def is_success(self) -> bool:
        """As the library's."""
        return bool(self._inner.is_success())

    def exception(self) -> Any:
        """As the library's."""
        return self._inner.exception()

    def result(self) -> list[torch.Tensor]:
        """As the library's."""
        return self._inner.result()  # type: ignore[no-any-return]

    def source_rank(self) -> int:
        """As the library's."""
        return int(self._inner._source_rank())

    _source_rank = source_rank

    def synchronize(self) -> None:
        """As the library's."""
        self._inner.synchronize()
