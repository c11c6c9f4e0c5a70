"""Batches of sends and receives on the fake device: one task of the queue, in which all start together.

torch-npu replaces torch's `batch_isend_irecv` for that; on an Ascend 910B it begins a batch in the group, makes each
send and receive, and ends the batch. Between two ranks they are matched by their order.
"""

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import distributed as dist

from .gloo.work import FuturelessWork


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
