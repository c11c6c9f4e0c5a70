"""The works of the fake HCCL: a collective that is queued on the chip, and a batch of sends and receives.

Apart from the group because they are about how something ends, and the group is about how its links come up.
"""

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import distributed as dist

from ..devices.fake_chip import CHIP, Task, told
from .gloo.work import FuturelessWork, Promise
from .kept_works import keep, release

PEER_GONE = "HCCL function error: HcclAllReduce, error code is 21"

# --- batches of sends and receives: one task of the queue, in which all start together --------------------------------
#
# torch-npu replaces torch's `batch_isend_irecv` for that; on an Ascend 910B it begins a batch in the group, makes each
# send and receive, and ends the batch. Between two ranks they are matched by their order.


class BatchedMessage(NamedTuple):
    """A send or receive of a batch, with the arguments of the group's method."""

    op: str
    tensors: list[torch.Tensor]
    peer: int
    tag: int


class Collected(dist.Work):
    """The handle of a send or receive in a batch that has not started. Its caller waits for the batch."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return at once."""
        return True


class Started:
    """Sends and receives under way. `refused`: not all could be started."""

    def __init__(self, works: Sequence[Any], *, refused: bool) -> None:
        self.works = works
        self.refused = refused
        self._left = len(works)
        self._lock = threading.Lock()
        self._over = threading.Event()
        for work in works:
            work.when_done(self._one_done)
        if refused or not works:
            self.release()

    def _one_done(self) -> None:
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self.release()

    def release(self) -> None:
        """Let the waiting thread continue: all are done, or their task is over."""
        self._over.set()

    def wait(self) -> None:
        """Wait until all are done, or released."""
        self._over.wait()


def start_all(comm: Any, batch: Sequence[BatchedMessage], timeout_s: float) -> Started:
    """Start the sends and receives of a batch over a group of gloo."""
    works: list[FuturelessWork] = []
    try:
        for m in batch:
            works.append(FuturelessWork(getattr(comm, m.op)(m.tensors, m.peer, m.tag), timeout_s))
    except RuntimeError:  # gloo's, of a peer that is gone
        return Started(works, refused=True)
    return Started(works, refused=False)


# --- a queued collective ----------------------------------------------------------------------------------------------


class FakeWork(dist.Work):
    """A queued collective. The device computes in a thread, so `wait` waits for the result."""

    def __init__(self, task: Task, tensors: list[torch.Tensor]) -> None:
        """Wrap `task`."""
        super().__init__()
        self._task = task
        self._tensors = tensors
        keep(self)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the result. Raises RuntimeError with the device's text."""
        try:
            self._task.wait(timeout.total_seconds() or None)
        finally:
            release(self)
        return True

    def get_future(self) -> "torch.futures.Future[Any]":
        """Return a future that completes with the collective. For DDP's reducer."""
        promise = Promise()

        def settle() -> None:
            promise.settle(self.exception(), self._tensors if self._task.result is None else self._task.result)
            release(self)

        self._task.when_over(settle)
        return promise.future

    def is_completed(self) -> bool:
        """Return whether it is over."""
        return self._task.over

    def is_success(self) -> bool:
        """Return whether it completed without an error."""
        return self._task.over and self._task.error is None

    def exception(self) -> Any:
        """Return its error, or None."""
        return None if self._task.error is None else RuntimeError(told(self._task.error))

    def result(self) -> list[torch.Tensor]:
        """Return the tensors."""
        return self._tensors

    def source_rank(self) -> int:
        """Return -1: the sender is not known."""
        return -1

    _source_rank = source_rank

    def synchronize(self) -> None:
        """Wait for the result."""
        self.wait()


def keep_leftover(inner: Any) -> None:
    """Register a work that is over for its caller, while it may still access its tensors."""
    if not inner.is_completed():
        CHIP.leftovers.append(inner.is_completed)


def outcome(inner: Any) -> str | None:
    """Return the error text of a complete collective of gloo; None if there is none."""
    try:
        inner.wait()
    except RuntimeError:  # gloo's, of any peer that is gone
        return PEER_GONE
    return None


def tensors_in(argument: Any) -> list[torch.Tensor]:
    if isinstance(argument, torch.Tensor):
        return [argument]
    if isinstance(argument, list | tuple):
        return [tensor for item in argument for tensor in tensors_in(item)]
    return []
