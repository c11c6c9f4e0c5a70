"""MindSpeed-LLM's own files for high availability, unmodified, under midstep: three ranks are killed.

They and Megatron-LM's training are in no package. Check both out (MindSpeed-LLM 2.3.0, c77308a1 or both; Megatron-LM
core_v0.12.1), name the places in MIDSTEP_MINDSPEED_LLM (two with a colon between them) and
MIDSTEP_MEGATRON_LM_0_12, and these tests run.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ..comparing import assert_nobody_harmed, assert_same_numbers, finish
from ..jobs import ROOMY, Job

CHECKOUTS = ("MIDSTEP_MINDSPEED_LLM", "MIDSTEP_MEGATRON_LM_0_12")
SCRIPT = Path(__file__).with_name("mindspeed_training.py")
STEPS = 16
LIMIT_S = 280.0  # each process imports Megatron-LM
KILLS = ((1, 3, "before"), (0, 7, "collective"), (2, 11, "update"))
PATIENT: dict[str, Any] = {**ROOMY, "stall": {"grace_s": 60.0, "suspended_s": 90.0}}

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        any(name not in os.environ for name in CHECKOUTS), reason=f"{' and '.join(CHECKOUTS)} name no checkouts"
    ),
]


def run(root: Path, kills: tuple[tuple[int, int, str], ...] = ()) -> tuple[Job, dict[str, Any]]:
    """Run a job to its end."""
    root.mkdir()
    arguments = [str(root / "records"), str(STEPS), json.dumps(kills)]
    job = Job(root, script=SCRIPT, arguments=arguments, policy=PATIENT, options=["--mindio"])
    try:
        job.wait(LIMIT_S)
        return job, finish(job)
    finally:
        job.close()


@pytest.mark.parametrize("checkout", os.environ.get(CHECKOUTS[0], "").split(os.pathsep))
def test_its_handlers_replace_killed_ranks_and_no_bit_changes(
    checkout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters, both halves of the optimizer, losses, random numbers, and what Megatron counts."""
    monkeypatch.setenv(CHECKOUTS[0], checkout)
    places = os.environ["MIDSTEP_MEGATRON_LM_0_12"], os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, places)))
    calm, report = run(tmp_path / "calm")
    assert not report["incidents"], calm.said()

    job, report = run(tmp_path / "job", KILLS)

    assert len(report["incidents"]) == len(KILLS), job.said()
    for incident, (rank, _, _) in zip(report["incidents"], KILLS, strict=True):
        assert_nobody_harmed(incident, {rank})
    assert [each["resumed_step"] for each in report["incidents"]] == [3, 7, 12]
    assert_same_numbers(job.record(), calm.record())
