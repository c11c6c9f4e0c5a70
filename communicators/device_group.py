"""A process group whose collectives a device's library does (HCCL, NCCL), and its works.

The library queues a collective on the device and returns: that a work was waited for says nothing about its end. Until
the library's group is there, in a newcomer, collectives return this rank's own input. What torch and torch-npu look for
on the groups that they find (`_device_types`, `_get_backend`) is forwarded.
"""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

from ..protocol.errors import UnsupportedCollective
from ..protocol.wording import ranks_text
from .generation_scope import GenerationScope
from .kept_works import keep, release
from .process_group import GroupOwner, ReplaceableGroup

if TYPE_CHECKING:
    from .base import CollectiveObserver

_PAIRED = frozenset({"send", "recv"})  # outside of a batch the library has a communicator for each pair
_ALL = -1  # stands for the communicator of all members, beside those of pairs
_BATCH = "batch"  # of sends and receives


class DeviceGroupOwner(GroupOwner, Protocol):
    """The communicator of a device, as its groups see it."""

    def recording(self) -> bool:
        """Return whether what is called now is recorded into a graph of the device."""
        ...

    def build(self, group: "DeviceGroup", what: str, call: Callable[[], Any]) -> Any:
        """Return what `call` returns, which begins with building a communicator of the group: `what`, in words."""
        ...


class DeviceGroup(ReplaceableGroup):
    """A process group whose collectives a device's collective library does."""

    _owner: DeviceGroupOwner

    def __init__(  # noqa: PLR0917 - as its parent
        self,
        owner: DeviceGroupOwner,
        members: Sequence[int],
        group_rank: int,
        scope: GenerationScope,
        timeout: timedelta,
        device: torch.device,
        backend_name: str,
    ) -> None:
        """Make the group of the global ranks `members`. Not connected."""
        super().__init__(owner, members, group_rank, scope)
        self.backend_name = backend_name
        self.timeout = timeout
        self.given_options: Any = None  # of the library, by the script: `pg_options` of new_group
        self.backend: Any = None  # the library's, once there is one
        self._device = device
        self._batching = False
        self.used = False  # by this member since it was made, or by another one as it has told
        self.peers: set[int] = set()  # places in the group with which this rank shares a communicator of two
        self._begun: set[int] = set()  # communicators of the present backend that were used: places, or _ALL
        self._built: set[int] = set()  # of these, those that came up

    @property
    def connected(self) -> bool:
        """Return whether the library's group is made and the scope is open."""
        return self.backend is not None and self._scope.reason is None

    @property
    def half_built(self) -> bool:
        """Return whether this member has begun to build a communicator that did not come up, or not yet."""
        return self._begun != self._built

    def connect(self, process_group: Any, backend: Any, scope: GenerationScope, store: Any = None) -> None:
        """Let `process_group` do the collectives, in this scope.

        `store` is what both were given: a Python object must be kept for as long as C++ may call it.
        """
        self._store = store
        self._delegate, self.backend, self._scope, self._batching = process_group, backend, scope, False
        self.dropped()

    def dropped(self) -> None:
        """Take note that the backend has no communicator any more: it builds each at its next use."""
        self._begun, self._built = set(), set()

    def reconnect(self, scope: GenerationScope) -> None:
        """Open another scope with the same backend."""
        self._scope, self._batching = scope, False

    def require_open(self, op: str) -> None:
        """Raise CommunicatorAborted or CommunicatorFailed if the scope is over."""
        if self._scope.reason is not None:
            raise self._scope.error(op)

    def disconnect(self, scope: GenerationScope) -> None:
        """Let every collective raise as `scope`, which is over, says."""
        self._scope = scope

    def leave_backend(self) -> Any:
        """Return the library's group, for the last time; None if there is none. The scope has ended, or is about to."""
        left, self.backend = self.backend, None
        return left

    def start(self, op: str, futureless: bool, observed: bool, args: Any, kwargs: Any = None) -> dist.Work:
        """Queue the collective `op`. Raises CommunicatorAborted or CommunicatorFailed, and what the device raises.

        Raises UnsupportedCollective where it would be recorded into a graph.

        Returns None where the library does, which torch's types do not say: NCCL's group has no work for a caller
        that will not wait.
        """
        scope = self._scope
        if scope.reason is not None and not self._batching:
            raise scope.error(op)
        self._refuse_recording(op)
        communicator = self._communicator_of(op, args)
        observer = self._owner.observer if observed and not self._batching else None
        if observer is not None:
            observer.entered(op, self.members)
        try:
            work = self._use(communicator, lambda: getattr(self._delegate, op)(*args, **(kwargs or {})))
        except BaseException:
            if observer is not None:
                observer.left(op)
            raise
        watched: dist.Work = _watched(work, op, observer)
        return watched

    def _communicator_of(self, op: str, args: Any) -> int:
        """Return which communicator `op` needs, and take note that it is used. Before there is one, nothing is."""
        if op in _PAIRED and not self._batching:
            self.peers.add(args[1])
            return int(args[1])
        self.used = self.used or self.backend is not None
        return _ALL

    def _use(self, communicator: int, call: Callable[[], Any]) -> Any:
        """Return what `call` returns. The first call of a communicator builds it, which nothing can interrupt."""
        if self.backend is None or communicator in self._built:
            return call()
        begun, built = self._begun, self._built
        begun.add(communicator)
        ends = self.members if communicator == _ALL else [self.members[self.group_rank], self.members[communicator]]
        result = self._owner.build(self, f"the communicator of {ranks_text(ends)}", call)
        built.add(communicator)
        return result

    def link_check(self) -> tuple[torch.Tensor, Any]:
        """Start to add up a one of each rank; return the tensor and the work. The first one builds the communicator."""
        ones = torch.ones(1, device=self._device)
        return ones, self._use(_ALL, lambda: self._delegate.allreduce([ones]))

    def pair_check(self, peer: int) -> tuple[torch.Tensor, Any]:
        """Start to send this rank's place to `peer`, or to receive its place; return the tensor and the work.

        The lower one sends. The first one builds the communicator of the two.
        """
        self.peers.add(peer)
        place = torch.full((1,), float(self.group_rank), device=self._device)
        op = self._delegate.send if self.group_rank < peer else self._delegate.recv
        return place, self._use(peer, lambda: op([place], peer, 0))

    @property
    def _device_types(self) -> list[torch.device]:
        return [] if self.backend is None else [self._device]

    def _get_backend(self, device: torch.device) -> Any:
        return self._delegate if self.backend is None else self.backend

    def _start_coalescing(self, device: torch.device) -> None:
        """Begin a batch: torch-npu makes one of what `batch_isend_irecv` is given. Raises as `start`."""
        self.require_open(_BATCH)
        self._refuse_recording(_BATCH)
        self._communicator_of(_BATCH, ())
        self._delegate._start_coalescing(device)
        self._batching = True

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        """Start the batch. Raises as `start`, but not before the library's batch is closed: it would stay open."""
        observer, scope = self._owner.observer, self._scope
        self._batching = False
        if observer is not None:
            observer.entered(_BATCH, self.members)
        try:
            work = self._use(_ALL, lambda: self._delegate._end_coalescing(device))
            if scope.reason is not None:
                raise scope.error(_BATCH)
        except BaseException:
            if observer is not None:
                observer.left(_BATCH)
            raise
        watched: dist.Work = _watched(work, _BATCH, observer)
        return watched

    def batch(self, call: Callable[[], Any]) -> Any:
        """Return what `call` returns: the library makes a batch, perhaps past this group. Raises as `start`."""
        self.require_open(_BATCH)
        self._communicator_of(_BATCH, ())
        return self._use(_ALL, call)

    def _refuse_recording(self, op: str) -> None:
        if self._owner.recording():
            raise UnsupportedCollective(
                f"{op} is called while a graph of the device is recorded. The graph would keep a communicator that is "
                "gone after the next recovery. Record parts without collectives, or train without graphs"
            )

    def set_timeout(self, timeout: timedelta) -> None:
        """Let the library's collectives take `timeout` from the next reconnect on."""
        self.timeout = timeout


class WatchedWork(dist.Work):
    """A work of the library that tells the observer when its caller has waited for it."""

    def __init__(self, inner: dist.Work, op: str, observer: "CollectiveObserver") -> None:
        """Wrap `inner`."""
        super().__init__()
        self._inner: Any = inner
        self._op = op
        self._observer: CollectiveObserver | None = observer
        keep(self)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait as the library does: for the device's queue, not for its end. Raises what the library raises."""
        began_s = time.monotonic()
        try:
            return bool(self._inner.wait(timeout) if timeout else self._inner.wait())
        finally:
            if self._observer is not None:
                self._observer.waited(time.monotonic() - began_s)
            self._leave()

    def _leave(self) -> None:
        release(self)
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


def _watched(work: Any, op: str, observer: "CollectiveObserver | None") -> Any:
    """Return the work, which tells the observer of its end. Without a work the collective is queued, and has ended."""
    if observer is None:
        return work
    if work is None:
        observer.left(op)
        return None
    return WatchedWork(work, op, observer)


class Batch:
    """The works that make up a batch of sends and receives: one, or several."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._works = works

    def wait(self) -> bool:
        """Wait for all, as the library does. Raises what it raises."""
        for work in self._works:
            work.wait()
        return True

    def is_completed(self) -> bool:
        """Return whether all are over."""
        return all(work.is_completed() for work in self._works)


_own_batches = dist.batch_isend_irecv


def batch_isend_irecv(p2p_op_list: list[dist.P2POp]) -> list[dist.Work]:
    """As torch.distributed.batch_isend_irecv, which makes a batch for groups of torch's own class only."""
    group = p2p_op_list[0].group or c10d._get_default_group()
    if not isinstance(group, DeviceGroup):
        return _own_batches(p2p_op_list)
    with c10d._coalescing_manager(group, p2p_op_list[0].tensor.device, async_ops=True) as batch:
        for each in p2p_op_list:
            each.op(each.tensor, each.peer, each.group, each.tag)
    return list(batch.works)


def batch_for_device_groups() -> None:
    """Put `batch_isend_irecv` in the place of torch's, as torch-npu does with its own. Idempotent.

    One by one, sends and receives would have a communicator for each pair, and could wait for each other in a circle.
    """
    dist.batch_isend_irecv = c10d.batch_isend_irecv = batch_isend_irecv


_library_batches: Any = None


def _noted_batch(p2p_op_list: list[dist.P2POp]) -> Any:
    group = p2p_op_list[0].group or c10d._get_default_group()
    if not isinstance(group, DeviceGroup):
        return _library_batches(p2p_op_list)
    return group.batch(lambda: _library_batches(p2p_op_list))


def note_batches() -> None:
    """Have a group take note of each batch in it. Idempotent.

    On CANN before 9.0 torch-npu's own `batch_isend_irecv` calls the backend of a group, and no method of the group's.
    """
    global _library_batches  # noqa: PLW0603 - it stands in the place of a function of torch's
    if dist.batch_isend_irecv is not _noted_batch:
        _library_batches = dist.batch_isend_irecv
        dist.batch_isend_irecv = c10d.batch_isend_irecv = _noted_batch
