"""A training process that ends by itself gives back what it holds."""

import json
from pathlib import Path

import pytest

from .conftest import StartJob
from .jobs import ROOMY

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(180)]

SCRIPT = Path(__file__).with_name("parting.py")


@pytest.mark.parametrize(
    ("way", "status"), [("return", 0), ("raise", 1), pytest.param("exit", 1, marks=pytest.mark.soak)]
)
def test_no_thread_and_no_line_of_midstep_is_left_when_a_process_ends(
    start_job: StartJob, tmp_path: Path, way: str, status: int
) -> None:
    """The train function returned, raised for good, or was never called: control thread and socket are closed."""
    records = tmp_path / "records"
    records.mkdir()
    policy = {**ROOMY, "ladder": [{"rung": "stop"}]}
    job = start_job(nodes=1, ranks_per_node=2, script=SCRIPT, arguments=[str(records), way], policy=policy)
    assert job.wait() == status, job.said()
    job.assert_nothing_left()
    left = json.loads((records / "parting.0.json").read_text())
    assert "MainThread" in left
    assert not [name for name in left if name.startswith("ZMQ") or name == "midstep-control"]
