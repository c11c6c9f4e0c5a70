"""The progress board: which step clock counts."""

from midstep.controller.liveness import ProgressBoard
from midstep.protocol.incidents import JobStatus, RankStatus
from midstep.protocol.messages import NodeHeartbeat
from midstep.protocol.types import Activity, RankProgress


def clock(rank: int, incarnation: int, step: int, *, suspended: bool = False) -> RankProgress:
    return RankProgress(rank, incarnation, 1, step, Activity.COLLECTIVE, 1, 0.0, 0.0, 0.2, suspended)


def status() -> JobStatus:
    ranks = tuple(RankStatus(rank, "a", 10, 2, "training", 5, "") for rank in range(2))
    return JobStatus("j", 1.0, "running", 1, 1, 5, 0.0, ranks, (), (), ())


def test_an_earlier_life_of_a_rank_does_not_hide_its_present_one() -> None:
    made = ProgressBoard(world_size=2)
    made.take(NodeHeartbeat("a", 0.0, (clock(0, 2, 40),)))
    made.take(NodeHeartbeat("b", 0.0, (clock(0, 1, 39), clock(7, 1, 99))))
    ranks = made.overlay(status()).ranks
    assert [(rank.step, rank.activity) for rank in ranks] == [(40, "collective"), (5, "")]


def test_a_clock_of_another_incarnation_than_the_machines_is_not_shown() -> None:
    made = ProgressBoard(world_size=2)
    made.take(NodeHeartbeat("a", 0.0, (clock(0, 3, 40),)))
    assert made.overlay(status()).ranks[0].step == 5


def test_a_process_that_the_kernel_has_stopped_is_shown_as_suspended() -> None:
    made = ProgressBoard(world_size=2)
    made.take(NodeHeartbeat("a", 0.0, (clock(0, 2, 40, suspended=True),)))
    shown = made.overlay(status())
    assert (shown.ranks[0].activity, shown.committed, shown.median_step_s) == ("suspended", 40, 0.2)
