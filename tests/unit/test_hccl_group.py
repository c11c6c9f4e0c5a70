"""What torch-npu asks of a group in front of HCCL's, beyond the collectives, reaches HCCL's."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from midstep.communicators.hccl_group import HcclGroup
from midstep.communicators.life import Life

BATCH = dist.Work()


class Face:
    """Takes note of what is called."""

    def __init__(self) -> None:
        self.called: list[Any] = []

    def _start_coalescing(self, device: torch.device) -> None:
        self.called.append(("start", device.type))

    def _end_coalescing(self, device: torch.device) -> object:
        self.called.append(("end", device.type))
        return BATCH


def test_a_batch_of_sends_and_receives_is_made_by_the_library() -> None:
    """Two ranks that each queued a send before its receive would wait for each other for ever."""
    life, face = Life(lambda: None), Face()
    group = HcclGroup(None, (0, 1), 0, life, timedelta(seconds=1), torch.device("cpu"))
    group.serve(face, object(), life)
    group._start_coalescing(torch.device("cpu"))
    assert group._end_coalescing(torch.device("cpu")) is BATCH
    assert face.called == [("start", "cpu"), ("end", "cpu")]
