"""The cost of an incident grows with the number of ranks, not with its square. Counted in lines, so it is exact."""

import sys
from types import FrameType
from typing import Any

import pytest

from midstep.controller.recovery.events import ControllerStarted, StopRequested
from midstep.controller.recovery.state import Phase
from midstep.protocol.messages import CheckpointSaved
from midstep.protocol.types import FaultKind
from midstep.testing.fake_cluster import FakeCluster, job

RANKS_PER_NODE = 8


class Lines:
    """Counts the lines that run."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        """Count a line, also those inside comprehensions."""
        self.count += event == "line"
        return self

    def __enter__(self) -> "Lines":
        self._before = sys.gettrace()
        sys.settrace(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)


def lines_of_an_incident(ranks: int, *, echoes: bool, whole_node: bool) -> int:
    """Lines for a fault, all that is reported beside it, and all answers."""
    cluster = FakeCluster(job(nodes=ranks // RANKS_PER_NODE, ranks_per_node=RANKS_PER_NODE), checked=False)
    cluster.start()
    holders = range(ranks)
    with Lines() as lines:
        if echoes:
            cluster.feed(*(cluster.fault(rank, FaultKind.COMMUNICATION) for rank in holders))
        for rank in range(RANKS_PER_NODE if whole_node else 1):
            cluster.feed(cluster.exited(rank))
        lost = [rank for rank in holders if cluster.holder(rank).state == "starting"]
        answers = [cluster.quiesced(rank, 5) for rank in holders if rank not in lost]
        cluster.feed(*answers, *(cluster.joined(rank, own=5) for rank in lost))
        cluster.pass_barrier_two(5)
    return lines.count


def lines_of_a_stop(ranks: int) -> int:
    """Lines for a stop: all park, write an emergency checkpoint, and are asked once more by another controller."""
    cluster = FakeCluster(job(nodes=ranks // RANKS_PER_NODE, ranks_per_node=RANKS_PER_NODE), checked=False)
    cluster.start()
    with Lines() as lines:
        cluster.feed(StopRequested("Ctrl-C"))
        cluster.feed(*(cluster.quiesced(rank, 5) for rank in range(ranks)))
        cluster.feed(ControllerStarted(term=2))
        attempt = cluster.machine.generation
        cluster.feed(*(CheckpointSaved(rank, attempt, 5, "/ck") for rank in reversed(range(ranks))))
    cluster.expect(Phase.ENDED)
    return lines.count


def test_eight_times_the_ranks_are_eight_times_the_work_of_an_emergency_checkpoint() -> None:
    """Who writes what is decided once for all."""
    assert lines_of_a_stop(256) < 8 * 1.3 * lines_of_a_stop(32)


@pytest.mark.parametrize(("echoes", "whole_node"), [(False, False), (True, False), (False, True)])
def test_eight_times_the_ranks_are_eight_times_the_work(echoes: bool, whole_node: bool) -> None:
    """With what all ranks report of it, and with a whole node's processes ending one by one."""
    small, large = (lines_of_an_incident(ranks, echoes=echoes, whole_node=whole_node) for ranks in (32, 256))
    assert large < 8 * 1.3 * small
