"""The repository's own AscendJob with the repository's own Megatron example, from the translation to a recovery."""

from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from midstep.cli.main import main
from midstep.protocol.types import InjectionPoint

from ..comparing import assert_nobody_harmed, finish
from ..jobs import Job, inject
from .conftest import PATIENCE_S

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

EXAMPLES = Path(__file__).parents[3] / "examples"


def test_the_policy_of_an_acjob_recovers_a_megatron_job(tmp_path: Path) -> None:
    """`midstep policy from-acjob`, then `midstep run --device fake --policy`: a killed rank comes back."""
    file = tmp_path / "ac.yaml"
    made = CliRunner().invoke(main, ["policy", "from-acjob", str(EXAMPLES / "acjob.yaml"), "-o", str(file)])
    assert made.exit_code == 0, made.output
    script = EXAMPLES / "megatron" / "train_resilient.py"
    policy = yaml.safe_load(file.read_text())
    fault = inject(1, InjectionPoint.COLLECTIVE, 20)
    job = Job(
        tmp_path, script=script, arguments=[], policy=policy, device="fake", faults=[fault], nodes=1, ranks_per_node=4
    )
    try:
        assert job.wait(PATIENCE_S) == 0, job.said()
        (incident,) = finish(job)["incidents"]
        assert_nobody_harmed(incident, {1})
    finally:
        job.close()
