"""Real MindSpore, four processes: what is killed is replaced, and every bit is as if nothing had happened.

What replaces a process begins with other initial values and another seed, so what it ends with has come from a peer.
"""

from pathlib import Path
from typing import Any

import pytest

from midstep.cli.demo import compare
from midstep.protocol.types import RestoreSource, Rung

from .jobs import RANKS, Job

STEPS = 28
PLACES = ("forward", "collective", "barrier", "update")
# A kind of fault for each place; over the modes each place has each kind.
KINDS = {
    "pynative": ("kill", "raise", "stop", "kill"),
    "jit": ("raise", "stop", "kill", "raise"),
    "graph": ("stop", "kill", "raise", "stop"),
}
VICTIMS = (1, 0, 3, 2)
SECOND: tuple[dict[str, Any], ...] = (
    {"rank": 2, "at": "rebuild"},
    {"rank": 3, "at": "repair"},
    {"rank": 1, "at": "rollback"},
)


def _faults(mode: str) -> list[dict[str, Any]]:
    """Four faults, and a second one, of another rank, in three of the recoveries."""
    faults: list[dict[str, Any]] = []
    lives = [1] * RANKS
    for index, (place, kind, rank) in enumerate(zip(PLACES, KINDS[mode], VICTIMS, strict=True)):
        step = 5 + 6 * index
        struck: list[dict[str, Any]] = [
            {"rank": rank, "do": kind, "at": place, "step": step, "incarnation": lives[rank]}
        ]
        if index < len(SECOND):
            second = SECOND[index]
            struck.append({**second, "do": "kill", "step": step, "incarnation": lives[second["rank"]]})
        for fault in struck:
            lives[fault["rank"]] += 1
        faults += struck
    return faults


@pytest.mark.timeout(700)
@pytest.mark.parametrize("mode", KINDS)
def test_faults_at_every_place_leave_no_trace_in_the_numbers(tmp_path: Path, mode: str) -> None:
    """Nor in the processes of healthy ranks, nor in the committed steps."""
    faults = _faults(mode)
    undisturbed = Job.of_the_demo(tmp_path / "undisturbed", mode=mode, steps=STEPS, faults=[])
    disturbed = Job.of_the_demo(tmp_path / "disturbed", mode=mode, steps=STEPS, faults=faults)
    assert undisturbed.finish() == []
    incidents = disturbed.finish()

    assert compare(undisturbed.records, disturbed.records, RANKS, STEPS).differences == ()
    assert [incident.rung for incident in incidents] == [Rung.RECOVER_IN_PLACE] * len(PLACES)
    assert [incident.steps_lost for incident in incidents] == [0] * len(PLACES)
    assert all(incident.healthy_pids_kept for incident in incidents)
    assert [set(incident.replaced) for incident in incidents] == [{1, 2}, {0, 3}, {3, 1}, {2}]
    assert {incident.restore for incident in incidents} == {RestoreSource.REPLICA}


@pytest.mark.timeout(700)
def test_with_no_replica_left_it_continues_from_the_checkpoint(tmp_path: Path) -> None:
    """All ranks are killed in step 13; the checkpoint of step 10 has everything, and the end is the same.

    In the update no order to stop reaches a rank before its own end does, as it may in a forward pass.
    """
    faults = [{"rank": rank, "do": "kill", "at": "update", "step": 13, "incarnation": 1} for rank in range(RANKS)]
    undisturbed = Job.of_the_demo(tmp_path / "undisturbed", mode="pynative", steps=STEPS, faults=[])
    disturbed = Job.of_the_demo(tmp_path / "disturbed", mode="pynative", steps=STEPS, faults=faults)
    assert undisturbed.finish() == []
    incidents = disturbed.finish()

    assert compare(undisturbed.records, disturbed.records, RANKS, STEPS).differences == ()
    assert [incident.rung for incident in incidents] == [Rung.RESCHEDULE_JOB]
    assert [incident.restore for incident in incidents] == [RestoreSource.CHECKPOINT]
    assert [incident.steps_lost for incident in incidents] == [3]
