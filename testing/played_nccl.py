"""NCCL as its communicator sees it, played on a CPU: a queue that drains without an error when it is aborted.

A collective is queued and returns at once, as on a stream. A thread of the group does it with gloo. `synchronize` waits
for the queue. An abort empties the queue: whoever waits returns, and the tensors hold whatever they held.
"""

import queue
import threading
import weakref
from datetime import timedelta
from typing import Any, cast

import torch
from torch import distributed as dist

from ..communicators.device_group import DeviceGroup

OPS = frozenset({"allreduce", "broadcast", "send", "recv", "allgather", "barrier"})
GLOO_S = 30.0


class QueuedWork(dist.Work):
    """A collective that was queued. Whoever waits for it waits for the device later."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Return True: it is queued."""
        return True

    def get_future(self) -> "torch.futures.Future[Any]":
        """Return a completed future."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result([])
        return future


class PlayedGroup:
    """One communicator of NCCL, with its queue."""

    def __init__(self, store: Any, group: DeviceGroup) -> None:
        """Connect nothing: that is for the first collective to do."""
        self._store = weakref.ref(store)  # as C++: the Python part of a store is for others to keep alive
        self._place = group.group_rank, len(group.members)
        self._queue: queue.SimpleQueue[tuple[str, Any] | None] = queue.SimpleQueue()
        self._left = 0
        self._changed = threading.Condition()
        self.aborted = False
        threading.Thread(target=self._serve, daemon=True).start()

    def __getattr__(self, op: str) -> Any:
        if op not in OPS:
            raise AttributeError(op)
        return lambda *args: self._start(op, args)

    def _start(self, op: str, args: Any) -> QueuedWork | None:
        with self._changed:
            if self._store() is None:
                raise RuntimeError("fn INTERNAL ASSERT FAILED: Not implemented.")
            if self.aborted:
                raise dist.DistBackendError("NCCL communicator was aborted on rank 0. ")
            self._left += 1
        self._queue.put((op, args))
        is_async = getattr(args[-1], "asyncOp", True) if args else True
        return QueuedWork() if is_async else None  # as torch's, which has no work for a caller that will not wait

    def _serve(self) -> None:
        group = None
        while (item := self._queue.get()) is not None:
            op, args = item
            try:
                group = group or dist.ProcessGroupGloo(
                    cast(Any, self._store()), *self._place, timedelta(seconds=GLOO_S)
                )
                getattr(group, op)(*args).wait()
            except Exception:  # a peer is gone: as NCCL does, wait until somebody aborts
                return
            with self._changed:
                self._left -= 1
                self._changed.notify_all()

    def drain(self) -> None:
        """Wait until the queue is empty, by its own work or by an abort."""
        with self._changed:
            self._changed.wait_for(lambda: self._left == 0 or self.aborted)

    def abort(self) -> None:
        """Empty the queue."""
        with self._changed:
            self.aborted = True
            self._changed.notify_all()
        self._queue.put(None)


class LoadedGroup:
    """A communicator of one process, which loads NCCL."""

    def abort(self) -> None:
        """Do nothing: nothing is under way."""


class PlayedNccl:
    """See NcclLibrary."""

    device_type = "cpu"

    def __init__(self) -> None:
        self.groups: list[PlayedGroup] = []
        self.records = False  # what is queued goes into a graph

    def recording(self) -> bool:
        """Return what the test has set."""
        return self.records

    def take_device(self) -> None:
        """Do nothing: there is one CPU."""

    def load(self) -> Any:
        """Return what can be aborted. gloo has nothing to load."""
        return LoadedGroup()

    def make(self, store: Any, group: DeviceGroup, name: str) -> tuple[Any, Any]:
        """Return a played group, twice: it does the collectives and is aborted."""
        made = PlayedGroup(store, group)
        self.groups = [each for each in self.groups if not each.aborted] + [made]
        return made, made

    def abort(self, backend: Any) -> None:
        """Abort it."""
        backend.abort()

    def leave(self, backend: Any) -> None:
        """Abort it, as there is nothing left in it."""
        backend.abort()

    def use_device(self) -> None:
        """Do nothing: there is one CPU."""

    def synchronize(self) -> None:
        """Wait for all queues."""
        for group in list(self.groups):
            group.drain()
