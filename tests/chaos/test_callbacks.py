"""Lifecycle callbacks of a user's own take part in real recoveries, alone or all five, and a broken one is a fault."""

import json
from pathlib import Path

import pytest

from midstep.protocol.faults import InjectionPoint

from .comparing import assert_nobody_harmed, assert_same_numbers, finish
from .conftest import StartJob
from .jobs import ONE_NODE, STEP_S, STEPS, Job, Record, inject

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(240)]

OWN = Path(__file__).with_name("own_callbacks.py")
EXAMPLE = Path(__file__).parents[2] / "examples" / "train_with_callbacks.py"
BACK = ["rebuild", "repair", "rollback"]
PHASES = ["stop", "clean", *BACK]


def called(job: Job, rank: int) -> list[list[str]]:
    """Return phase, generation, step and thread of each call in a rank, in all its lives."""
    return [line.split() for line in (job.records / f"callbacks.{rank}").read_text().splitlines()]


@pytest.mark.both_devices(second_in_soak=True)
def test_all_five_callbacks_run_in_the_order_of_a_recovery(start_job: StartJob, undisturbed: Record) -> None:
    """Survivors stop, clean and come back; a newcomer only comes back; not one bit is another."""
    job = start_job(script=OWN, faults=[inject(1, InjectionPoint.COLLECTIVE, 12)], **ONE_NODE)
    (incident,) = finish(job)["incidents"]
    assert_nobody_harmed(incident, {1})
    assert_same_numbers(job.record(), undisturbed)
    for rank in (0, 2, 3):
        calls = called(job, rank)
        assert [phase for phase, *_ in calls[:3]] == BACK, "when the job starts"
        phases = list(dict.fromkeys(phase for phase, *_ in calls[3:]))
        assert phases == PHASES
        assert all(thread == "train" for phase, _, _, thread in calls if phase != "stop")
        assert [step for phase, _, step, _ in calls[3:] if phase in BACK] == ["12"] * 3
    assert [phase for phase, *_ in called(job, 1)] == [*BACK, *BACK], "its first life, and its second"


def test_a_callback_that_raises_is_a_fault_with_its_name_and_phase(
    start_job: StartJob, undisturbed: Record, tmp_path: Path
) -> None:
    """In whatever phase: the process that has it is replaced, the next one gets through, not one bit is another."""
    kills = dict(zip(PHASES, range(12, STEPS, 8), strict=False))
    given = [str(tmp_path / "0" / "records"), str(STEPS), str(STEP_S), "2"]
    given += [f"{phase}:{step - 4}" for phase, step in kills.items()]
    faults = [inject(1, InjectionPoint.FORWARD, step, life=life) for life, step in enumerate(kills.values(), start=1)]
    job = start_job(script=OWN, arguments=given, faults=faults, **ONE_NODE)
    incidents = finish(job)["incidents"]
    assert len(incidents) == len(PHASES), [(found["cause"], found["reasons"]) for found in incidents]
    for incident, phase in zip(incidents, PHASES, strict=True):
        assert set(incident["replaced"]) == {1, 2}, incident
        assert incident["steps_lost"] == 0
        told = " ".join(str(report) for report in incident["reports"])
        assert f"of {phase} raised ValueError: this callback does not work" in told, told
        assert "main.<locals>.callback" in told
    assert_same_numbers(job.record(), undisturbed)


@pytest.mark.soak
def test_the_callbacks_of_the_example_keep_its_thread_and_its_log_right(start_job: StartJob, tmp_path: Path) -> None:
    """With one rank killed, and the one that keeps the log, the log is that of an undisturbed run, line for line."""
    logs = []
    for name, faults in (
        ("calm", []),
        ("hurt", [inject(1, InjectionPoint.COLLECTIVE, 12), inject(0, InjectionPoint.UPDATE, 30)]),
    ):
        log = tmp_path / name
        job = start_job(script=EXAMPLE, arguments=[str(log)], faults=faults, **ONE_NODE)
        assert len(finish(job)["incidents"]) == len(faults), job.said()
        logs.append([json.loads(line) for line in log.read_text().splitlines()])
    calm, disturbed = logs
    assert [line["step"] for line in calm] == list(range(60))
    assert disturbed == calm
