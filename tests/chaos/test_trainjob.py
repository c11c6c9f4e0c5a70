"""The progress of a real job in a TrainJob, at a server as strict as the trainer's: reported beside the training."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from midstep.protocol.types import InjectionPoint

from .comparing import finish
from .conftest import StartJob
from .jobs import ROOMY, inject
from .status_server import StatusServerOfTrainer, has_openssl
from .test_notify import until

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not has_openssl, reason="there is no openssl to make a certificate with"),
]

STEPS, GATE = 40, 20
SMALL = {"nodes": 1, "ranks_per_node": 2}
POLICY = {**ROOMY, "trainjob": {"report": True, "total_steps": STEPS, "every_s": 1.0}}
LOOKS = """
import os, runpy, sys
from pathlib import Path
seen = [name for name in os.environ if name.startswith("KUBEFLOW_TRAINER_SERVER")]
(Path(sys.argv[1]) / ("seen." + os.environ["RANK"])).write_text(repr(seen))
sys.path.insert(0, {folder!r})
runpy.run_path({folder!r} + "/ruled.py", run_name="__main__")
"""


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StatusServerOfTrainer]:
    """One that takes reports of the job, as its environment says."""
    made = StatusServerOfTrainer(tmp_path / "trainer")
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    yield made
    made.close()


def script(root: Path) -> Path:
    """A script that reports its loss, and writes down which of the trainer's variables its ranks see."""
    written = root / "script.py"
    written.write_text(LOOKS.format(folder=str(Path(__file__).parent)))
    return written


def test_progress_is_reported_over_faults_of_ranks_server_token_and_controller(
    start_job: StartJob, tmp_path: Path, trainer: StatusServerOfTrainer
) -> None:
    """The server answers 503 first; a rank dies; the token is another one; the controller dies; the job ends."""
    trainer.ill = True
    job = start_job(
        policy=POLICY,
        faults=[inject(1, InjectionPoint.FORWARD, 6)],
        gates=[GATE],
        script=script(tmp_path),
        steps=STEPS,
        more_arguments=["{}"],
        **SMALL,
    )
    before = job.held_at(GATE, 200.0)
    until(lambda: len(trainer.refused) >= 2, "the second try")
    assert {code for code, _ in trainer.refused} == {503}
    trainer.ill = False
    until(lambda: trainer.taken and trainer.taken[-1].get("progressPercentage") == 100 * GATE // STEPS, "half of it")
    assert trainer.metrics()["step"] == str(GATE)
    assert trainer.metrics()["total_steps"] == str(STEPS)
    assert trainer.metrics()["incidents"] == "1"
    assert 0.0 < float(trainer.metrics()["goodput"]) < 1.0
    assert 0.0 < float(trainer.metrics()["loss"]) < 10.0
    assert trainer.taken[-1]["estimatedRemainingSeconds"] > 0

    trainer.rotate()
    taken = len(trainer.taken)
    until(lambda: len(trainer.taken) > taken + 1, "reports with the other token")
    os.kill(job.controller_pid(), signal.SIGKILL)
    job.until(lambda status: status.term > before.term, "the next controller")
    taken = len(trainer.taken)
    until(lambda: len(trainer.taken) > taken + 1, "reports of the next controller")
    assert trainer.metrics()["incidents"] == "1"

    job.open_gate(GATE)
    assert finish(job)["exit_code"] == 0
    assert trainer.taken[-1]["progressPercentage"] == 100
    assert trainer.taken[-1]["estimatedRemainingSeconds"] == 0
    assert {code for code, _ in trainer.refused} <= {403, 503}, "each report was valid"
    steps = [int(each["value"]) for told in trainer.taken for each in told["metrics"] if each["name"] == "step"]
    assert steps == sorted(steps)
    seen = {path.name: path.read_text() for path in job.records.glob("seen.*")}
    assert set(seen.values()) == {"[]"}, "a script that found them would report as well"
    left = [path for path in job.directory.rglob("*") if path.is_file() and trainer.token.encode() in path.read_bytes()]
    assert not left, "the token stands in a file of the job"


def test_a_server_that_does_not_answer_holds_up_neither_training_nor_the_end(
    start_job: StartJob, tmp_path: Path, trainer: StatusServerOfTrainer
) -> None:
    """A rank is made up for as fast as ever, and the end waits for seconds."""
    trainer.hangs = True
    job = start_job(
        policy=POLICY, faults=[inject(1, InjectionPoint.FORWARD, 6)], steps=STEPS, script=script(tmp_path),
        more_arguments=["{}"], **SMALL,
    )  # fmt: skip
    job.until(lambda status: status.committed > 0, "its first steps", 200.0)
    until((job.directory / "result.json").exists, "the end of the job")
    ended_s = time.monotonic()
    report = finish(job)
    assert report["exit_code"] == 0
    assert time.monotonic() - ended_s < 30.0
    assert [incident["steps_lost"] for incident in report["incidents"]] == [0]
    assert not trainer.taken
    assert trainer.refused, "it was asked"
    assert "has not taken the progress" in (job.directory / "logs" / "controller.log").read_text()


def test_without_the_key_nothing_is_reported_and_the_script_finds_the_variables(
    start_job: StartJob, tmp_path: Path, trainer: StatusServerOfTrainer
) -> None:
    job = start_job(policy=ROOMY, steps=10, script=script(tmp_path), more_arguments=["{}"], **SMALL)
    assert finish(job)["exit_code"] == 0
    assert not trainer.taken
    assert not trainer.refused
    seen = [path.read_text() for path in job.records.glob("seen.*")]
    assert all(len(json.loads(each.replace("'", '"'))) == 3 for each in seen)
    assert seen
