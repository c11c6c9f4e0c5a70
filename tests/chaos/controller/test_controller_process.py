"""The controller is killed and started again: the job goes on, an incident ends, nothing is done twice or forgotten."""

import random
import signal
import subprocess
from typing import TYPE_CHECKING

import pytest

from midstep.controller.endpoints.control_requests import Accepted, StopJobRequest
from midstep.controller.endpoints.discovery_files import read_result
from midstep.controller.endpoints.local_sockets import socket_path
from midstep.protocol.discovery import read_endpoint
from midstep.protocol.incidents import Outcome
from midstep.protocol.messages import RankJoined, RankQuiesced, RankReady, StepCommitted
from midstep.protocol.types import Rung

if TYPE_CHECKING:
    from tests.chaos.controller.conftest import Cluster

pytestmark = pytest.mark.chaos
FIRST_LIVES = [(rank, 1) for rank in range(4)]


@pytest.mark.parametrize(
    ("held", "phase"),
    [
        ((RankQuiesced, RankJoined), "quiescing"),
        ((RankReady,), "rejoining"),
        ((StepCommitted,), "resuming"),
    ],
)
def test_an_incident_ends_although_its_controller_was_killed(
    cluster: "Cluster", held: tuple[type, ...], phase: str
) -> None:
    cluster.start()
    cluster.hold(*held)
    cluster.host(1).kill(1)
    cluster.until(lambda: cluster.phase() == phase)
    cluster.kill_controller()
    cluster.start_controller()
    cluster.until(lambda: cluster.phase() == phase)
    cluster.release()
    cluster.until(lambda: cluster.phase() == "running")
    status = cluster.status()
    assert [(i.outcome, i.rung, i.generations, i.replaced) for i in status.incidents] == [
        (Outcome.RESUMED, Rung.RECOVER_IN_PLACE, (2,), (1,))
    ]
    assert (status.generation, status.term) == (2, 2)
    assert cluster.starts() == sorted([*FIRST_LIVES, (1, 2)])
    assert {rank.committed for rank in cluster.ranks().values()} == {2}


def test_training_goes_on_while_there_is_no_controller(cluster: "Cluster") -> None:
    cluster.start()
    endpoint = read_endpoint(cluster.run_directory)
    cluster.kill_controller()
    cluster.host(3).kill(3)  # nobody hears it now
    cluster.play(1.0)
    cluster.start_controller()
    cluster.until(cluster.recovered)
    status = cluster.status()
    assert [(i.outcome, i.replaced) for i in status.incidents] == [(Outcome.RESUMED, (3,))]
    assert cluster.starts() == sorted([*FIRST_LIVES, (3, 2)])
    assert read_endpoint(cluster.run_directory) == endpoint


def test_budgets_are_not_reset_by_a_restart(cluster: "Cluster") -> None:
    cluster.start()
    for _ in range(2):
        cluster.host(0).kill(0)
        cluster.until(lambda: 0 in cluster.ranks() and cluster.phase() == "running")
        cluster.kill_controller()
        cluster.start_controller()
        cluster.until(lambda: cluster.phase() == "running")
    used = {budget.name: budget.used for budget in cluster.status().budgets}
    assert [count for name, count in used.items() if "recover_in_place" in name and "job" in name] == [2]


def test_a_controller_killed_at_any_moment_again_and_again_forgets_nothing(cluster: "Cluster") -> None:
    chance = random.Random(7)
    cluster.start()
    for turn in range(6):
        cluster.host(turn % 4).kill(turn % 4)
        cluster.play(chance.uniform(0.0, 0.1))
        cluster.kill_controller()
        cluster.start_controller()
        cluster.until(lambda: len(cluster.ranks()) == 4 and cluster.phase() == "running")
    status = cluster.status()
    assert status.term == 7
    assert [(i.outcome, i.replaced) for i in status.incidents] == [(Outcome.RESUMED, (turn % 4,)) for turn in range(6)]
    assert len(set(cluster.starts())) == len(cluster.starts())
    generations = {number: rank.generation for number, rank in cluster.ranks().items()}
    assert generations == dict.fromkeys(range(4), status.generation)
    assert len({rank.committed for rank in cluster.ranks().values()}) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_job_in_order_and_leaves_no_socket(cluster: "Cluster", number: signal.Signals) -> None:
    cluster.start()
    cluster.hold(RankQuiesced)  # the emergency checkpoint does not come about
    cluster.controllers[-1].send_signal(number)
    cluster.until(lambda: cluster.phase() == "saving")
    cluster.controllers[-1].send_signal(number)  # does not wait for it
    cluster.until(lambda: cluster.controllers[-1].poll() is not None)
    assert cluster.controllers[-1].returncode == 130
    assert all(node.ended for node in cluster.nodes)
    assert not socket_path(cluster.run_directory).exists()
    result = read_result(cluster.job_directory)
    assert result is not None
    assert (result.exit_code, number.name in result.reason) == (130, True)


def test_an_operator_stops_the_job(cluster: "Cluster") -> None:
    cluster.start()
    for _ in range(2):  # the second does not wait for a checkpoint
        assert isinstance(cluster.ask(StopJobRequest("enough of it")), Accepted)
        if cluster.controllers[-1].poll() is not None or cluster.status().exit_code is not None:
            break
    cluster.until(lambda: cluster.controllers[-1].poll() is not None)
    status = cluster.status()
    assert status.exit_code == 130
    assert "enough of it" in status.reason


def test_a_second_controller_gives_up_and_the_first_goes_on(cluster: "Cluster") -> None:
    cluster.start()
    second = subprocess.run(cluster.command("--wait", "0.3"), capture_output=True, text=True, timeout=60, check=False)
    assert second.returncode == 70
    assert f"another controller is active on this journal (pid {cluster.controllers[0].pid}" in second.stderr
    assert cluster.phase() == "running"
    assert cluster.status().term == 1


def test_a_standby_takes_over_when_the_active_controller_dies(cluster: "Cluster") -> None:
    cluster.start()
    cluster.start_controller()  # stands by
    cluster.play(1.0)
    assert cluster.status().term == 1
    cluster.controllers[0].kill()
    cluster.controllers[0].wait(10)
    cluster.host(1).kill(1)
    cluster.until(cluster.recovered)
    status = cluster.status()
    assert (status.term, status.incidents[0].outcome) == (2, Outcome.RESUMED)
