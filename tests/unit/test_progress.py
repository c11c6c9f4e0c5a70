"""The progress board: which step clock counts."""

from midstep.controller.liveness import MOST_POINTS, ProgressBoard
from midstep.protocol.bounds import MOST_REPORTED
from midstep.protocol.incidents import JobStatus, RankStatus, ReportedSeries
from midstep.protocol.messages import NodeHeartbeat
from midstep.protocol.reports import ReportedValues
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


def test_of_what_a_node_says_between_two_looks_the_last_counts() -> None:
    """Beside another node's: of thousands most clocks are replaced before anything looks at them."""
    made = ProgressBoard(world_size=2)
    assert not made.is_heard
    for step in (40, 41):
        made.take(NodeHeartbeat("a", 0.0, (clock(0, 2, step),)))
    made.take(NodeHeartbeat("b", 0.0, (clock(1, 2, 39),)))
    assert (made.is_heard, made.reached()) == (True, 41)
    made.take(NodeHeartbeat("a", 0.0, (clock(0, 2, 42),)))
    assert [rank.step for rank in made.overlay(status()).ranks] == [42, 39]


def test_a_clock_of_another_incarnation_than_the_machines_is_not_shown() -> None:
    made = ProgressBoard(world_size=2)
    made.take(NodeHeartbeat("a", 0.0, (clock(0, 3, 40),)))
    assert made.overlay(status()).ranks[0].step == 5


def test_a_process_that_the_kernel_has_stopped_is_shown_as_suspended() -> None:
    made = ProgressBoard(world_size=2)
    made.take(NodeHeartbeat("a", 0.0, (clock(0, 2, 40, suspended=True),)))
    shown = made.overlay(status())
    assert (shown.ranks[0].activity, shown.committed, shown.median_step_s) == ("suspended", 40, 0.2)


def reported(rank: int, step: int, **values: float) -> NodeHeartbeat:
    """A node has told what a rank of it reported."""
    return NodeHeartbeat(f"node{rank}", 0.0, (), ReportedValues(rank, 1, step, values))


def test_of_each_value_the_lowest_rank_is_shown_and_another_one_when_that_is_quiet() -> None:
    made = ProgressBoard(world_size=8)
    for rank, step, now in ((2, 1, 0.0), (1, 2, 1.0), (2, 3, 2.0), (1, 4, 3.0)):
        made.take(reported(rank, step, loss=float(10 * rank + step)), now)
    assert made.overlay(status()).reported == (ReportedSeries("loss", 1, (1, 2, 4), (21.0, 12.0, 14.0)),)
    made.take(reported(0, 4, loss=4.0), 3.0)
    assert made.overlay(status()).reported == (ReportedSeries("loss", 0, (1, 2, 4), (21.0, 12.0, 4.0)),)
    made.take(reported(2, 9, loss=29.0), 14.0)
    assert made.overlay(status()).reported == (ReportedSeries("loss", 2, (1, 2, 4, 9), (21.0, 12.0, 4.0, 29.0)),)


def test_steps_that_are_repeated_are_shown_once() -> None:
    made = ProgressBoard(world_size=8)
    for step, loss in ((1, 5.0), (2, 4.0), (3, 3.0), (3, 3.0), (2, 7.0)):
        made.take(reported(0, step, loss=loss))
    assert made.overlay(status()).reported == (ReportedSeries("loss", 0, (1, 2), (5.0, 7.0)),)


def test_however_long_a_job_runs_its_values_are_a_few_points_from_its_first_step_to_its_last() -> None:
    """And of few values: a script may make up names without end."""
    made = ProgressBoard(world_size=8)
    for step in range(100_000):
        made.take(reported(0, step, loss=float(step)))
    for number in range(50):
        made.take(reported(0, 100_000, **{f"value{number}": 1.0}))
    told = made.overlay(status()).reported
    assert len(told) == MOST_REPORTED
    steps = told[0].steps
    assert MOST_POINTS / 4 < len(steps) <= MOST_POINTS
    assert (steps[0], steps[-1]) == (0, 99_999)
    assert told[0].values == tuple(map(float, steps))
