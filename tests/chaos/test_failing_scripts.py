"""Scripts that fail before they train: the user reads why, first, wherever the end of the job is told."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from midstep.agent.fork_server import PRELOAD_STORE
from midstep.cli.main import main
from midstep.protocol import environment as names

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(180)]

MIDSTEP = str(Path(sys.executable).parent / "midstep")
MISSING = "there is no torch_npu here: install it"
FAILS = """
import os, sys, time
from midstep.protocol.errors import ConfigurationError
if os.environ["RANK"] == "1":
    {}
time.sleep(1)
raise RuntimeError("the connection to rank 1 was closed by its peer")
"""


def run(*words: str) -> str:
    """Return what `midstep run` prints. Its node imports no more than these scripts do, which train nothing."""
    environment = {**os.environ, names.PRELOAD: PRELOAD_STORE}
    done = subprocess.run(
        [MIDSTEP, "run", "--quiet", *words], capture_output=True, text=True, check=False, env=environment
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (f"raise ConfigurationError({MISSING!r})", f"rank 1: the process ended with status 1: {MISSING}"),
        ("sys.exit('no data in /data')", "rank 1: the process ended with status 1: no data in /data"),
        ("print('no data'); sys.exit(3)", "rank 1: the process ended with status 3: no data"),
        (
            "raise ValueError('first line\\nsecond line')",
            "rank 1: the process ended with status 1: ValueError: first line",
        ),
    ],
)
def test_the_cause_stands_first_in_run_status_and_report(failure: str, said: str, tmp_path: Path) -> None:
    """It is that of the first rank that failed, with its exit status and its last words."""
    script, directory = tmp_path / "train.py", tmp_path / "job"
    script.write_text(FAILS.format(failure))
    ran = run("--nproc-per-node", "2", "--job-dir", str(directory), str(script))
    *_, pointer, end = ran.splitlines()
    assert pointer == f"midstep: see `midstep report {directory}`"
    assert end.startswith(f"midstep: {said}"), ran
    for word in ("status", "report"):
        shown = CliRunner().invoke(main, [word, str(directory)], catch_exceptions=False).output
        assert said in " ".join(shown.split()), shown


RECORDED = """
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    raise ValueError("what torchrun would show")

main()
"""


def test_an_exception_under_torchs_record_is_written_to_a_file_beside_the_log(tmp_path: Path) -> None:
    """`@record` writes where TORCHELASTIC_ERROR_FILE says."""
    script, directory = tmp_path / "train.py", tmp_path / "job"
    script.write_text(RECORDED)
    run("--job-dir", str(directory), str(script))
    written = json.loads((directory / "logs" / "rank-0.1.error.json").read_text())
    assert written["message"]["message"] == "ValueError: what torchrun would show"
