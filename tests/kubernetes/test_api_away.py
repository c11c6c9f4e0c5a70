"""The API server is away: training and recovery go on, and what Kubernetes has to do for them is done later."""

import os
import time

import pytest

from ..chaos.comparing import assert_nobody_harmed, assert_same_numbers
from ..chaos.jobs import Record
from .conftest import RANKS, STEPS, StartManaged
from .managed import pid_on, victim

pytestmark = pytest.mark.timeout(1500)

KILLED, OFF, BACK, END = 20, 60, 100, STEPS - 1
AWAY_S = float(os.environ.get("MIDSTEP_API_AWAY_S", "10"))


def test_a_killed_rank_and_a_lost_machine_are_recovered_from_without_an_api_server(
    start_managed: StartManaged, undisturbed: Record
) -> None:
    """The spare takes over. When the API server is back, another spare is made, and the job is followed to its end.

    Two controllers are elected by a Lease, which cannot be renewed meanwhile: the one that leads continues to.
    """
    gates, two = (KILLED, OFF, BACK, END), ("--controllers", "2")
    job = start_managed("apiless", spares=1, step_s=0.05, gates=gates, options=two)
    cluster, hit = job.cluster, []
    status = job.held_at(KILLED)
    job.until_spare()
    node, (rank, *_) = victim(job, status)
    hit.append({rank})
    machine = cluster.machine_of(job.pod_of(node))
    job.ask_through_runtime()
    cluster.stop_api()
    away_since = time.monotonic()
    machine.run("kill", "-9", pid_on(machine, status["ranks"][rank]["pid"]))
    job.open_gate(KILLED)
    status = job.held_at(OFF)
    hit.append({rank["rank"] for rank in status["ranks"] if rank["node"] == node})
    cluster.power_off(machine.number)
    job.open_gate(OFF)
    job.held_at(BACK)
    time.sleep(max(0.0, away_since + AWAY_S - time.monotonic()))

    cluster.start_api()
    cluster.power_on(machine.number)
    job.ask_through_api()
    job.until_spare()
    job.open_gate(BACK)
    job.held_at(END)
    job.open_gate(END)

    # A gate that holds all ranks for minutes is taken for a stall, and that is dismissed.
    incidents = [each for each in job.finish()["incidents"] if each["outcome"] != "dismissed"]
    assert [each["rung"] for each in incidents] == ["recover_in_place", "recover"]
    for incident, replaced in zip(incidents, hit, strict=True):
        assert_nobody_harmed(incident, replaced, ranks=RANKS)
        assert incident["steps_lost"] == 0
    assert_same_numbers(job.record(), undisturbed, ranks=RANKS)
    assert job.left() == []
