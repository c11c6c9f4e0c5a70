"""The progress board: who has gone silent, and which step clock counts. Time is an argument."""

from midstep.controller.progress import ProgressBoard
from midstep.protocol.incidents import JobStatus, RankStatus
from midstep.protocol.messages import NodeHeartbeat, NodeJoined, NodeLost
from midstep.protocol.types import Activity, RankProgress, StoreEndpoint

INTERVAL_S = 0.5
MISSED = 6
SILENT_S = INTERVAL_S * MISSED


def board(*nodes: str, now: float = 0.0) -> ProgressBoard:
    made = ProgressBoard(world_size=2, interval_s=INTERVAL_S, missed=MISSED)
    for node in nodes:
        made.learn(NodeJoined(node, "rack", StoreEndpoint("h", 1)), now)
    made.start(now)
    return made


def run(made: ProgressBoard, began_s: float, ended_s: float, talking: tuple[str, ...] = ()) -> list[tuple[str, float]]:
    """Ask every quarter of a second, as a driver does; return who was lost when."""
    lost = []
    now = began_s
    while now < ended_s:
        now += 0.25
        for node in talking:
            made.hear(node, now)
        lost += [(event.node, now) for event in made.silent(now)]
    return lost


def clock(rank: int, incarnation: int, step: int, *, suspended: bool = False) -> RankProgress:
    return RankProgress(rank, incarnation, 1, step, Activity.COLLECTIVE, 1, 0.0, 0.0, 0.2, suspended)


def status() -> JobStatus:
    ranks = tuple(RankStatus(rank, "a", 10, 2, "training", 5, "") for rank in range(2))
    return JobStatus("j", 1.0, "running", 1, 1, 5, 0.0, ranks, (), (), ())


def test_a_node_is_lost_after_the_missed_heartbeats_and_only_once() -> None:
    lost = run(board("a", "b"), 0.0, 10.0, talking=("a",))
    assert [node for node, _ in lost] == ["b"]
    assert SILENT_S < lost[0][1] <= SILENT_S + INTERVAL_S


def test_a_node_that_is_lost_or_let_go_is_not_watched_any_more() -> None:
    made = board("a", "b")
    made.learn(NodeLost("a", "the platform says so", 1.0), 1.0)
    made.unwatch("b")
    assert run(made, 0.0, 10.0) == []
    assert made.next_check(10.0) is None


def test_time_in_which_the_controller_itself_stood_still_is_nobodys_silence() -> None:
    made = board("a", "b")
    assert run(made, 0.0, 1.0, talking=("a", "b")) == []
    assert made.silent(101.0) == ()
    lost = run(made, 101.0, 120.0, talking=("b",))
    assert [node for node, _ in lost] == ["a"]
    assert lost[0][1] <= 101.0 + SILENT_S + INTERVAL_S


def test_a_slow_controller_still_finds_a_silent_node() -> None:
    made = board("a")
    now = 0.0
    lost: list[NodeLost] = []
    while now < 60.0 and not lost:
        now += 3 * INTERVAL_S  # every turn is late
        lost = list(made.silent(now))
    assert lost


def test_after_a_restart_nodes_get_the_whole_time_again() -> None:
    made = board("a", now=0.0)
    made.start(1000.0)
    assert made.silent(1000.1) == ()
    assert [node for node, _ in run(made, 1000.1, 1010.0)] == ["a"]


def test_a_new_controller_gives_nodes_time_to_find_it_and_those_that_have_no_more_than_others() -> None:
    made = board("a", "b")
    made.start(1000.0, 5.0)
    made.hear("b", 1000.5)
    lost = dict(run(made, 1000.0, 1020.0))
    assert 1000.5 + SILENT_S < lost["b"] <= 1000.5 + SILENT_S + INTERVAL_S
    assert 1005.0 + SILENT_S < lost["a"] <= 1005.0 + SILENT_S + INTERVAL_S


def test_a_controller_that_stood_still_at_its_start_takes_no_time_to_be_found_away() -> None:
    made = board("a")
    made.start(1000.0, 5.0)
    assert made.silent(1000.25) == ()
    assert made.silent(1003.0) == ()
    assert run(made, 1003.0, 1007.5) == []


def test_an_earlier_life_of_a_rank_does_not_hide_its_present_one() -> None:
    made = board("a")
    made.take(NodeHeartbeat("a", 0.0, (clock(0, 2, 40),)))
    made.take(NodeHeartbeat("b", 0.0, (clock(0, 1, 39), clock(7, 1, 99))))
    ranks = made.overlay(status()).ranks
    assert [(rank.step, rank.activity) for rank in ranks] == [(40, "collective"), (5, "")]


def test_a_clock_of_another_incarnation_than_the_machines_is_not_shown() -> None:
    made = board("a")
    made.take(NodeHeartbeat("a", 0.0, (clock(0, 3, 40),)))
    assert made.overlay(status()).ranks[0].step == 5


def test_a_process_that_the_kernel_has_stopped_is_shown_as_suspended() -> None:
    made = board("a")
    made.take(NodeHeartbeat("a", 0.0, (clock(0, 2, 40, suspended=True),)))
    shown = made.overlay(status())
    assert (shown.ranks[0].activity, shown.committed, shown.median_step_s) == ("suspended", 40, 0.2)
