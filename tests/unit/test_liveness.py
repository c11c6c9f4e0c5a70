"""Liveness: which nodes have gone silent, and when the silence is held as the controller's own. Time is an argument."""

import math
from collections.abc import Iterable

import pytest

from midstep.controller.liveness import Liveness, beats_spacing
from midstep.controller.recovery.events import HoldEnded
from midstep.policies.schema import HeartbeatPolicy
from midstep.protocol.messages import DeleteNode, EndJob, NodeJoined, NodeLost
from midstep.protocol.types import StoreEndpoint

POLICY = HeartbeatPolicy()
INTERVAL_S = POLICY.interval_s
SILENT_S = INTERVAL_S * POLICY.missed
RACK = ("a", "b", "c", "d")


def watching(*nodes: str, now: float = 0.0, policy: HeartbeatPolicy = POLICY) -> Liveness:
    made = Liveness(policy)
    for node in nodes:
        made.learn(NodeJoined(node, "rack", StoreEndpoint("h", 1)), now)
    made.start(now)
    return made


def run(
    made: Liveness, began_s: float, ended_s: float, talking: Iterable[str] = ()
) -> list[tuple[HoldEnded | NodeLost, float]]:
    """Ask every quarter of a second, as a driver does; return what followed when. Each node has its own beat."""
    told: list[tuple[HoldEnded | NodeLost, float]] = []
    now = began_s
    while now < ended_s:
        now += 0.25
        for node in talking:
            if (now + ord(node) / 8) % INTERVAL_S < 0.25:
                made.hear(node, now)
        told += [(event, now) for event in made.judge(now)]
    return told


def lost(told: list[tuple[HoldEnded | NodeLost, float]]) -> list[str]:
    return [event.node for event, _ in told if isinstance(event, NodeLost)]


def holds(told: list[tuple[HoldEnded | NodeLost, float]]) -> list[HoldEnded]:
    return [event for event, _ in told if isinstance(event, HoldEnded)]


def test_a_node_is_lost_after_the_missed_heartbeats_and_only_once() -> None:
    told = run(watching("a", "b"), 0.0, 10.0, talking=("a",))
    assert lost(told) == ["b"]
    assert SILENT_S < told[0][1] <= SILENT_S + INTERVAL_S


def test_a_node_that_is_lost_or_told_to_end_is_not_watched_any_more() -> None:
    made = watching("a", "b", "c")
    made.learn(NodeLost("a", "the platform says so", 1.0), 1.0)
    made.ordered("platform", DeleteNode("b"))
    made.ordered("node/c", EndJob(0, "done"))
    assert run(made, 0.0, 100.0) == []
    assert made.next_check(10.0) is None


def test_time_in_which_the_controller_itself_stood_still_is_no_nodes_silence() -> None:
    made = watching("a", "b")
    assert run(made, 0.0, 1.0, talking=("a", "b")) == []
    assert made.judge(101.0) == ()
    told = run(made, 101.0, 120.0, talking=("b",))
    assert lost(told) == ["a"]
    assert told[0][1] <= 101.0 + SILENT_S + INTERVAL_S


def test_a_slow_controller_still_finds_a_silent_node() -> None:
    made = watching("a", "b")
    now = 0.0
    told: list[tuple[HoldEnded | NodeLost, float]] = []
    while now < 60.0 and not told:
        now += 3 * INTERVAL_S  # every turn is late
        made.hear("b", now)
        told += [(event, now) for event in made.judge(now)]
    assert lost(told) == ["a"]


def test_after_a_restart_nodes_get_the_whole_time_again() -> None:
    made = watching("a", "b", now=0.0)
    made.start(1000.0)
    assert made.judge(1000.1) == ()
    assert lost(run(made, 1000.1, 1010.0, talking=("b",))) == ["a"]


@pytest.mark.parametrize("nodes", [("a",), ("a", "b"), RACK], ids=len)
@pytest.mark.parametrize("cut_s", [3.5, 5.0, 30.0])
def test_an_isolated_controller_gives_no_node_up(nodes: tuple[str, ...], cut_s: float) -> None:
    made = watching(*nodes)
    assert run(made, 0.0, 5.0, talking=nodes) == []
    assert run(made, 5.0, 5.0 + cut_s) == []
    assert made.hold is not None
    assert "holding" in made.holding(5.0 + cut_s)
    told = run(made, 5.0 + cut_s, 50.0, talking=nodes)
    assert not lost(told)
    assert not made.holding(50.0)
    (ended,) = holds(told)
    assert (set(ended.nodes), ended.watched, ended.lost) == (set(nodes), len(nodes), ())


def test_half_of_the_nodes_are_lost_as_usual() -> None:
    """More than half are needed to take it for the controller's own isolation."""
    assert sorted(lost(run(watching(*RACK), 0.0, 5.0, talking=("a", "b")))) == ["c", "d"]


def test_one_node_of_two_is_lost_as_usual() -> None:
    assert lost(run(watching("a", "b"), 0.0, 5.0, talking=("b",))) == ["a"]


def test_a_rack_that_is_really_lost_is_given_up_together_when_the_hold_is_over() -> None:
    told = run(watching(*RACK), 0.0, 120.0, talking=("a",))
    assert sorted(lost(told)) == ["b", "c", "d"]
    assert len({now for _, now in told}) == 1
    assert 0 <= told[0][1] - SILENT_S - POLICY.hold_s <= 2 * INTERVAL_S
    assert sorted(holds(told)[0].lost) == ["b", "c", "d"]


def test_the_only_node_is_given_up_when_the_hold_is_over() -> None:
    told = run(watching("a"), 0.0, 120.0)
    assert lost(told) == ["a"]
    assert told[-1][1] > SILENT_S + POLICY.hold_s


def test_a_node_that_stays_silent_when_the_others_are_heard_again_is_lost_then() -> None:
    made = watching(*RACK)
    assert run(made, 0.0, 10.0) == []
    told = run(made, 10.0, 15.0, talking=("a", "b", "c"))
    assert lost(told) == ["d"]
    assert 10.0 + SILENT_S < told[-1][1] <= 10.0 + SILENT_S + 3 * INTERVAL_S, "it had time to find its way back"
    assert [ended.lost for ended in holds(told)] == [()]


def test_a_certain_loss_counts_at_once_while_others_are_held() -> None:
    """The platform saw it: it is not watched, and not held."""
    made = watching(*RACK)
    assert run(made, 0.0, 10.0) == []
    made.learn(NodeLost("a", "its agent ended with signal 9", 10.0), 10.0)
    assert run(made, 10.0, 11.0) == []
    assert made.hold is not None
    assert sorted(made.hold.nodes) == ["b", "c", "d"]


@pytest.mark.parametrize("policy", [HeartbeatPolicy(hold_share=1.0), HeartbeatPolicy(hold_s=0.0)])
def test_without_a_hold_all_silent_nodes_are_lost(policy: HeartbeatPolicy) -> None:
    assert sorted(lost(run(watching(*RACK, policy=policy), 0.0, 5.0))) == list(RACK)


def test_deadlines_are_put_off_while_most_nodes_are_quiet_and_until_the_answers_can_have_come() -> None:
    made = watching(*RACK)
    run(made, 0.0, 5.0, talking=RACK)
    assert not made.puts_off(5.0, 5.0)
    run(made, 5.0, 6.5)
    assert made.hold is None, "nobody is silent yet"
    assert made.puts_off(6.0, 6.5)
    run(made, 6.5, 9.0)
    run(made, 9.0, 9.5, talking=RACK)
    assert made.puts_off(6.0, 9.5)
    run(made, 9.5, 15.0, talking=RACK)
    assert not made.puts_off(6.0, 15.0)


def test_no_deadline_is_put_off_for_longer_than_a_hold_lasts() -> None:
    made = watching(*RACK)
    run(made, 0.0, 50.0)
    assert made.puts_off(10.0, 50.0)
    assert not made.puts_off(10.0, 10.0 + POLICY.hold_s)
    assert not made.puts_off(-math.inf, 50.0), "what waits for no answer"


def test_one_silent_node_of_several_puts_no_deadline_off() -> None:
    made = watching(*RACK)
    run(made, 0.0, 2.5, talking=("a", "b", "c"))
    assert not made.puts_off(2.0, 2.5)


def test_a_new_controller_gives_nodes_time_to_find_it_and_those_that_have_no_more_than_others() -> None:
    """What each of them owes is counted from when it was found, or from the end of the time to find it."""
    made = watching("a", "b", "c", now=1000.0)
    made.start(1000.0, 5.0)
    made.hear("b", 1000.5)
    told = {
        event.node: at_s for event, at_s in run(made, 1000.0, 1020.0, talking=("c",)) if isinstance(event, NodeLost)
    }
    assert 1000.5 + SILENT_S < told["b"] <= 1000.5 + SILENT_S + INTERVAL_S
    assert 1005.0 + SILENT_S < told["a"] <= 1005.0 + SILENT_S + INTERVAL_S


def test_a_controller_that_stood_still_at_its_start_takes_no_time_to_be_found_away() -> None:
    """The pause is its own, and ends before the time in which nodes look for it does."""
    made = watching("a", "b", "c", now=1000.0)
    made.start(1000.0, 5.0)
    made.judge(1000.25)
    made.judge(1003.0)
    assert run(made, 1003.0, 1007.5, talking=("b", "c")) == []


def test_a_controller_of_more_nodes_takes_more_heartbeats_together() -> None:
    """In a small job it hardly waits for others; in the largest, news may have to wait for a fiftieth of a second."""
    assert beats_spacing(2) == beats_spacing(300) == 0.005
    assert 0.005 < beats_spacing(600) < beats_spacing(1200) <= beats_spacing(100_000) == 0.02


def test_a_node_is_not_lost_while_its_silence_may_be_that_of_its_proxy() -> None:
    made, now, tolerated_until_s = watching("a", "b", "c"), 0.0, 2 * SILENT_S
    lost_at: dict[str, float] = {}
    while now < 3 * SILENT_S:
        now += INTERVAL_S / 2
        for node in ("b", "c"):
            made.hear(node, now)
        tolerated = {"a"} if now < tolerated_until_s else set()
        lost_at |= {event.node: now for event in made.judge(now, tolerated.__contains__) if isinstance(event, NodeLost)}
    assert lost_at == {"a": tolerated_until_s}
