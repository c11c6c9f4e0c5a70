"""The state says where it contradicts itself. Each event that a unit test hands to a machine is checked so, too."""

from collections.abc import Callable

import pytest

from midstep.controller.recovery.events import StopRequested
from midstep.controller.recovery.machine import UNSETTLED
from midstep.controller.recovery.state import JobState, Phase, Result
from midstep.controller.recovery.world import AheadOrder, RankEvent
from midstep.protocol.types import FaultKind, FaultReport, Rung
from midstep.testing.fake_cluster import FakeCluster
from midstep.testing.invariants import contradictions

REPORT = FaultReport(FaultKind.EXIT, 0.0, "node/node0", "ended", rank=1)


def lose_a_rank(state: JobState) -> None:
    """A process is gone, and nothing was decided."""
    state.world.lose(state.world.holders[1])


def miscount(state: JobState) -> None:
    """A rank stands in two states."""
    state.world._standing[state.world.holders[1].state].pop(1)


def blame(state: JobState) -> None:
    """A rank is at fault, and nothing was decided."""
    state.incident = state.incident.blame(1, REPORT)


def suspect(state: JobState) -> None:
    """Something is suspected, and not looked into: nothing ends that."""
    state.incident = state.incident.suspect(REPORT)


def take_a_rung(state: JobState) -> None:
    """An attempt is under way, and no incident is on record."""
    state.incident = state.incident.take(Rung.RETRY_STEP, ())


def keep_the_incident(state: JobState) -> None:
    """The job has resumed, and its incident is not over."""
    state.incident = state.incident.take(Rung.RETRY_STEP, ())


def quiesce_while_it_trains(state: JobState) -> None:
    """A rank was asked to stop, and the job runs."""
    state.world.take(state.world.holders[1], RankEvent.QUIESCE_ORDERED)


def save_while_it_trains(state: JobState) -> None:
    """A rank is to save, and the job runs."""
    state.saving.outstanding = {1: ()}


def hold_while_it_trains(state: JobState) -> None:
    """The next process of a rank waits for its device, and the present one trains."""
    state.due.held.add(1)


def wait_without_a_deadline(state: JobState) -> None:
    """A checkpoint before the stop is waited for, however long it takes."""
    state.saving.then = Result(130, "Ctrl-C")


def build_ahead_where_ranks_are(state: JobState) -> None:
    """A node in use builds processes for another one."""
    state.world.nodes["node0"].ahead = AheadOrder(("node1",), (2, 3))


def build_ahead_for_a_spare(state: JobState) -> None:
    """No rank is there that could fail."""
    state.world.nodes["node2"].ahead = AheadOrder(("node2",))


def go_round_in_circles(state: JobState) -> None:
    """Rules that follow from each other did not come to an end."""
    state.ignore(UNSETTLED)


@pytest.mark.parametrize(
    "tamper",
    [
        lose_a_rank,
        miscount,
        blame,
        suspect,
        take_a_rung,
        keep_the_incident,
        quiesce_while_it_trains,
        save_while_it_trains,
        hold_while_it_trains,
        wait_without_a_deadline,
        go_round_in_circles,
        build_ahead_where_ranks_are,
        build_ahead_for_a_spare,
    ],
)
def test_a_state_that_contradicts_itself_says_so(cluster: FakeCluster, tamper: Callable[[JobState], None]) -> None:
    """In words, and not before it does."""
    state = cluster.machine.state
    assert contradictions(state) == []
    tamper(state)
    assert contradictions(state) != []


def test_nobody_is_to_save_when_the_job_has_ended(cluster: FakeCluster) -> None:
    """Not even where it was ended in the middle of that, as it was asked for twice."""
    cluster.feed(cluster.exited(1))
    cluster.recover(5)
    cluster.feed(StopRequested("Ctrl-C"))
    cluster.feed(*(cluster.quiesced(rank, 5) for rank in range(4)))
    assert cluster.machine.state.saving.outstanding
    cluster.feed(StopRequested("Ctrl-C"))
    cluster.expect(Phase.ENDED)
    assert not cluster.machine.state.saving.outstanding
