"""A link-up names a rank as missing only if it has found out that this rank is missing."""

from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import DistStoreError

from midstep.communicators.background import Abandoned
from midstep.communicators.rendezvous import GenerationStore

MISSING = "has not come to group world"


class Store:
    """A store in which the messages of some ranks are; `stages`: what the task said while it was waited for."""

    def __init__(self, task: Any, there: int) -> None:
        self._task, self._there = task, there
        self.stages: list[str] = []

    def wait(self, keys: Sequence[str], limit: timedelta) -> None:
        self.stages.append(self._task.stage)
        if len(keys) > self._there:
            raise DistStoreError("timeout")

    def check(self, keys: Sequence[str]) -> bool:
        return len(keys) <= self._there


def test_while_ranks_are_waited_for_none_is_named_and_then_the_first_that_is_missing_is() -> None:
    """The time of the whole link-up may be over before it was found out which rank it is."""
    task: Any = SimpleNamespace(stage="", remaining_s=lambda: 1.0)
    store: Any = Store(task, there=1)
    with pytest.raises(Abandoned):
        GenerationStore._await(task, store, (1, 2, 3), MISSING)
    assert store.stages == [f"a rank {MISSING}"]
    assert task.stage == f"rank 2 {MISSING}"
