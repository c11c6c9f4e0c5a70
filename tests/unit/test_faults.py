"""Step clocks and exit statuses alone tell which rank is to blame."""

from typing import Any

import pytest

from midstep.controller.recovery.blame import excused_ranks, moved_on, stalled_ranks
from midstep.protocol.types import Activity, RankProgress
from midstep.protocol.wording import describe_clock, describe_exit

WAITING = Activity.COLLECTIVE


def clock(rank: int, activity: Activity = WAITING, *, collectives: int = 40, **changes: Any) -> RankProgress:
    """A step clock that has stood for 9 s."""
    values = {"step": 5, "step_age_s": 9.0, "activity_age_s": 8.0} | changes
    return RankProgress(
        rank=rank, incarnation=1, generation=1, activity=activity, collectives=collectives, median_step_s=0.1, **values
    )  # fmt: skip


def test_a_stopped_rank_is_at_fault_whatever_it_was_doing() -> None:
    """The kernel's word is certain; nobody else is looked at."""
    assert stalled_ranks([clock(0), clock(1, suspended=True), clock(2, Activity.COMPUTING, step=4)]) == (1,)


def test_the_ranks_of_a_silent_node_are_at_fault() -> None:
    """With those that are stopped elsewhere."""
    assert stalled_ranks([clock(0), clock(1, suspended=True)], silent=[3, 2]) == (1, 2, 3)


def test_who_has_entered_fewer_collectives_holds_up_the_others() -> None:
    """The others wait inside the next one."""
    assert stalled_ranks([clock(0), clock(1, Activity.COMPUTING, collectives=39), clock(2)]) == (1,)


def test_an_older_step_weighs_more_than_collectives() -> None:
    """A rank of the step before is behind, however many it has entered."""
    assert stalled_ranks([clock(0), clock(1, Activity.UPDATING, step=4, collectives=90)]) == (1,)


def test_nobody_who_waits_is_blamed() -> None:
    """All wait in the same collective: it hangs, and no rank is at fault."""
    assert stalled_ranks([clock(0), clock(1), clock(2)]) == ()


def test_nobody_is_blamed_where_all_are_alike() -> None:
    """A world that computes as one does not stand still because of one."""
    assert stalled_ranks([clock(rank, Activity.COMPUTING) for rank in range(3)]) == ()


@pytest.mark.parametrize("activity", [Activity.CHECKPOINTING, Activity.PAUSED])
def test_who_takes_long_with_good_reason_is_excused(activity: Activity) -> None:
    """It is behind, and that is as it should be."""
    clocks = [clock(0), clock(1, activity, collectives=39)]
    assert stalled_ranks(clocks) == ()
    assert excused_ranks(clocks) == (1,)


def test_a_finished_rank_is_not_behind() -> None:
    """Its clock stands for good."""
    assert stalled_ranks([clock(0, Activity.FINISHED, step=1), clock(1), clock(2, Activity.COMPUTING, step=4)]) == (2,)


def test_who_has_just_begun_what_it_does_is_not_blamed() -> None:
    """Its step may be old because it had to wait in it."""
    assert (
        stalled_ranks([clock(0), clock(1, Activity.COMPUTING, collectives=39, activity_age_s=0.01)], limit_s=1.3) == ()
    )


def test_who_does_nothing_at_all_is_blamed_however_old_its_step_is() -> None:
    """Its agent knows for how long it may; among those that are behind, and while another waits."""
    computes = clock(1, Activity.COMPUTING, collectives=39, activity_age_s=0.3)
    rests = clock(2, Activity.COMPUTING, collectives=39, activity_age_s=0.4, rest_s=0.35)
    assert stalled_ranks([clock(0), computes, rests], limit_s=1.3) == (2,)
    assert stalled_ranks([computes, rests], limit_s=1.3) == ()
    assert stalled_ranks([clock(0, step=4), rests], limit_s=1.3) == ()


def test_without_clocks_nobody_is_blamed() -> None:
    """No reading, no verdict."""
    assert stalled_ranks([]) == ()


@pytest.mark.parametrize(
    ("clocks", "gone_on"),
    [
        ([clock(0), clock(1, Activity.COMPUTING, collectives=39, activity_age_s=0.1)], True),
        ([clock(0), clock(1, Activity.COMPUTING, collectives=39)], False),
        ([clock(0), clock(1)], False),
        ([clock(0, activity_age_s=0.2), clock(1, activity_age_s=0.2)], True),
        ([clock(0), clock(1, Activity.COMMITTING, collectives=41, activity_age_s=0.01)], True),
        ([clock(0), clock(1, Activity.COMMITTING, collectives=41)], False),
        ([clock(0), clock(1, Activity.COMPUTING, collectives=39, activity_age_s=0.1, suspended=True)], False),
    ],
)
def test_a_stall_is_over_when_those_behind_are_at_work_again(clocks: list[RankProgress], gone_on: bool) -> None:
    """Or when no rank has waited for long, or all others have just left what the last one waits in.

    Never while a rank is stopped.
    """
    assert moved_on(clocks, 1.3) is gone_on


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (0, "the process ended with status 0"),
        (3, "the process ended with status 3"),
        (-9, "the process was ended by SIGKILL"),
        (-11, "the process was ended by SIGSEGV"),
        (-200, "the process was ended by signal 200"),
    ],
)
def test_an_exit_is_said_in_words(status: int, words: str) -> None:
    """Signals by their names where they have one."""
    assert describe_exit(status) == words


def test_a_kill_for_lack_of_memory_is_named_as_such() -> None:
    """And not by the signal, which tells nothing."""
    assert describe_exit(-9, out_of_memory=True) == "the process was killed by the kernel for lack of memory"


def test_a_clock_is_said_in_words() -> None:
    """Also that it is stopped, and that there is none."""
    assert describe_clock(clock(0)) == "in collective for 8.0 s"
    assert describe_clock(clock(0, suspended=True)) == "in collective for 8.0 s, stopped by a signal"
    assert describe_clock(clock(0, rest_s=0.42)) == "in collective for 8.0 s, at rest for 0.4 s"
    assert describe_clock(None) == "its node does not answer"
