"""A collective that is queued on the fake chip, as its caller holds it."""

from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from ..devices.fake_chip import Task, told
from .gloo.work import Promise


class FakeWork(dist.Work):
    """A queued collective. The device computes in a thread, so `wait` waits for the result."""

    def __init__(self, task: Task, tensors: list[torch.Tensor]) -> None:
        """Wrap `task`."""
        super().__init__()
        self._task = task
        self._tensors = tensors

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the result. Raises RuntimeError with the device's text."""
        self._task.wait(timeout.total_seconds() or None)
        return True

    def get_future(self) -> "torch.futures.Future[Any]":
        """Return a future that completes with the collective. For DDP's reducer."""
        promise = Promise()

        def settle() -> None:
            promise.settle(self.exception(), self._tensors if self._task.result is None else self._task.result)

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
