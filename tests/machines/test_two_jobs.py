"""Two jobs at once on the same machines: what happens to one of them is nothing to the other."""

from pathlib import Path

import pytest

from ..chaos.comparing import assert_nobody_harmed, assert_same_numbers
from ..chaos.jobs import Record
from .conftest import RANKS, STEPS, StartMachines
from .job import PATIENCE_S, PORT, Job

pytestmark = [pytest.mark.machines, pytest.mark.timeout(600)]

KILLED, CUT, END = 40, 80, STEPS - 1
PATIENT = {"stall": {"grace_s": PATIENCE_S}}  # a gate is no stall


def test_a_job_whose_rank_dies_and_whose_machine_is_cut_off_does_not_disturb_another_one(
    start_machines: StartMachines, tmp_path: Path, undisturbed: Record
) -> None:
    """The process that is killed has one of the other job beside it, and so has the spare that takes over."""
    machines = start_machines(4)
    places = [tmp_path / name for name in ("hurt", "other")]
    for place in places:
        place.mkdir()
    hurt = Job(machines, places[0], steps=STEPS, step_s=0.01, gates=(KILLED, CUT, END), policy=PATIENT)
    hurt.held_at(KILLED)
    alone = hurt.machine_of(1)  # of the first job alone: its cable will be cut
    both = [number for number in hurt.agents if number != alone.number]
    other = Job(
        machines, places[1], steps=STEPS, step_s=0.01, gates=(KILLED, END), policy=PATIENT, on=both, port=PORT + 1
    )
    pids = {rank.rank: (rank.node, rank.pid) for rank in other.held_at(KILLED).ranks}
    assert {node for node, _ in pids.values()} == {machines[number].name for number in both}

    hurt.kill_rank(0)
    hurt.open_gate(KILLED)
    other.open_gate(KILLED)
    hurt.held_at(CUT)
    alone.cut()
    hurt.open_gate(CUT)
    assert {rank.node for rank in hurt.held_at(END).ranks} == {machines[number].name for number in both}
    assert {rank.rank: (rank.node, rank.pid) for rank in other.held_at(END).ranks} == pids
    for job in (hurt, other):
        job.open_gate(END)

    incidents = hurt.finish()["incidents"]
    assert [incident["rung"] for incident in incidents] == ["recover_in_place", "recover"]
    for incident, rank in zip(incidents, (0, 1), strict=True):
        assert_nobody_harmed(incident, {rank}, ranks=RANKS)
    assert other.finish()["incidents"] == []
    for job in (hurt, other):
        assert_same_numbers(job.record(), undisturbed, ranks=RANKS)
