"""Several controllers of one job: one leads, the others stand by; one that dies or freezes is replaced."""

import os
import signal
from typing import TYPE_CHECKING

import pytest

from midstep.controller.election.presence import controllers_of_host
from midstep.controller.endpoints.control_requests import (
    Accepted,
    PauseFailoverRequest,
    PromoteRequest,
    StatusReply,
    StatusRequest,
)
from midstep.protocol.incidents import ControllerPhase, Outcome

if TYPE_CHECKING:
    from tests.chaos.controller.conftest import Cluster

pytestmark = pytest.mark.chaos
COLD, HOT, OUT_OF_SERVICE = ControllerPhase.COLD, ControllerPhase.HOT, ControllerPhase.OUT_OF_SERVICE
FIRST_LIVES = [(rank, 1) for rank in range(4)]


def phases(cluster: "Cluster") -> dict[int, ControllerPhase]:
    """Where each living controller stands, by its process id."""
    return {each.pid: each.phase for each in controllers_of_host(cluster.run_directory)}


def shown(cluster: "Cluster") -> dict[int, ControllerPhase]:
    """What `midstep status` shows of each controller, by its process id."""
    reply = cluster.ask(StatusRequest())
    assert isinstance(reply, StatusReply)
    return {each.pid: each.phase for each in reply.status.controllers}


def two(cluster: "Cluster") -> tuple[int, int]:
    """One that leads, and one that stands by."""
    cluster.start()
    cluster.start_controller("--standby")
    active, standby = (each.pid for each in cluster.controllers)
    cluster.until(lambda: phases(cluster) == {active: HOT, standby: COLD})
    return active, standby


def test_a_frozen_controller_is_deposed_and_leaves_when_it_wakes_up(cluster: "Cluster") -> None:
    """A fault that only the frozen one has heard of is dealt with by the other; nothing is done twice."""
    active, standby = two(cluster)
    os.kill(active, signal.SIGSTOP)
    cluster.host(1).kill(1)
    cluster.until(cluster.recovered)
    cluster.until(lambda: cluster.phase() == "running")
    before = cluster.status()
    assert (before.term, before.incidents[0].outcome) == (2, Outcome.RESUMED)
    assert phases(cluster)[standby] is HOT
    assert shown(cluster) == {active: OUT_OF_SERVICE, standby: HOT}
    os.kill(active, signal.SIGCONT)
    cluster.until(lambda: cluster.controllers[0].poll() is not None)
    assert cluster.controllers[0].returncode == 70
    cluster.play(0.5)
    assert cluster.phase() == "running"
    assert cluster.status().term == 2
    assert cluster.status().incidents == before.incidents
    assert cluster.starts() == sorted([*FIRST_LIVES, (1, 2)])
    assert phases(cluster) == {standby: HOT}
    cluster.log.seek(0)
    assert "another controller leads the job by now" in cluster.log.read()


def test_a_standby_waits_without_a_limit_and_takes_over_from_one_that_is_killed(cluster: "Cluster") -> None:
    active, standby = two(cluster)
    cluster.play(3.0)  # longer than a lease: one that lives is left alone
    assert phases(cluster) == {active: HOT, standby: COLD}
    reply = cluster.ask(StatusRequest())
    assert isinstance(reply, StatusReply)
    assert sorted((each.phase, each.term) for each in reply.status.controllers) == [(COLD, 0), (HOT, 1)]
    cluster.controllers[0].kill()
    cluster.controllers[0].wait(10)
    cluster.until(lambda: phases(cluster) == {standby: HOT})
    cluster.until(lambda: cluster.phase() == "running")
    assert cluster.status().term == 2


def test_of_two_that_stand_by_one_takes_over(cluster: "Cluster") -> None:
    active, first = two(cluster)
    cluster.start_controller("--standby", "--name", "third")
    third = cluster.controllers[2].pid
    cluster.until(lambda: phases(cluster) == {active: HOT, first: COLD, third: COLD})
    os.kill(active, signal.SIGSTOP)
    cluster.until(lambda: sorted(phases(cluster)[each] for each in (first, third)) == [COLD, HOT])
    cluster.play(3.0)
    assert cluster.status().term == 2
    leader = first if phases(cluster)[first] is HOT else third
    os.kill(leader, signal.SIGKILL)
    last = third if leader == first else first
    cluster.until(lambda: phases(cluster).get(last) is HOT)
    cluster.until(lambda: cluster.phase() == "running")
    assert cluster.status().term == 3
    os.kill(active, signal.SIGCONT)
    cluster.until(lambda: cluster.controllers[0].poll() == 70)


def test_a_controller_that_is_stopped_again_and_again_at_any_moment_harms_nothing(cluster: "Cluster") -> None:
    """Also in the middle of a write: then it is ended by its successor, which could not write otherwise."""
    cluster.start()
    for turn in range(3):
        cluster.start_controller("--standby", "--lease", "1")
        active = cluster.controllers[-2].pid
        cluster.until(lambda: len(phases(cluster)) == 2)
        cluster.host(turn).kill(turn)
        cluster.play(0.01 * turn)
        os.kill(active, signal.SIGSTOP)
        term = turn + 2
        cluster.until(lambda: cluster.status().term == term)  # noqa: B023
        cluster.until(lambda: len(cluster.ranks()) == 4 and cluster.phase() == "running")
        if cluster.controllers[-2].poll() is None:
            os.kill(active, signal.SIGCONT)
        cluster.until(lambda: cluster.controllers[-2].poll() is not None)
    assert [(i.outcome, i.replaced) for i in cluster.status().incidents] == [
        (Outcome.RESUMED, (turn,)) for turn in range(3)
    ]
    assert len({rank.committed for rank in cluster.ranks().values()}) == 1


def test_a_promoted_controller_finishes_the_recovery_of_the_one_that_stands_by_then(cluster: "Cluster") -> None:
    """And back again: a controller that has handed over can be promoted itself."""
    active, standby = two(cluster)
    names = {each.pid: each.name for each in controllers_of_host(cluster.run_directory)}
    cluster.host(1).kill(1)
    for turn, (leader, other) in enumerate([(active, standby), (standby, active)]):
        assert isinstance(cluster.ask(PromoteRequest(names[other])), Accepted)
        cluster.until(lambda: phases(cluster) == {other: HOT, leader: COLD})  # noqa: B023
        cluster.until(lambda: cluster.status().term == turn + 2)  # noqa: B023
    cluster.until(cluster.recovered)
    cluster.until(lambda: cluster.phase() == "running")
    assert cluster.starts() == sorted([*FIRST_LIVES, (1, 2)])
    assert [incident.outcome for incident in cluster.status().incidents] == [Outcome.RESUMED]
    assert [controller.poll() for controller in cluster.controllers] == [None, None]


def test_no_standby_takes_over_while_the_failover_is_paused(cluster: "Cluster") -> None:
    active, standby = two(cluster)
    assert isinstance(cluster.ask(PauseFailoverRequest(600)), Accepted)
    reply = cluster.ask(StatusRequest())
    assert isinstance(reply, StatusReply)
    assert reply.status.failover_paused_until_s > 0
    os.kill(active, signal.SIGSTOP)
    cluster.play(3.0)  # longer than a lease
    assert phases(cluster) == {active: HOT, standby: COLD}
    os.kill(active, signal.SIGCONT)
    assert isinstance(cluster.ask(PauseFailoverRequest(0)), Accepted)
    os.kill(active, signal.SIGSTOP)
    cluster.until(lambda: phases(cluster).get(standby) is HOT)
    os.kill(active, signal.SIGCONT)
