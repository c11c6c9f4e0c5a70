"""`midstep doctor --acceptance` from beginning to end: without NPUs it runs on the fake device, and says so."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [pytest.mark.chaos, pytest.mark.soak, pytest.mark.timeout(900)]

LIMIT_S = 800.0  # on two busy cores; ten minutes are for eight NPUs


@pytest.mark.skipif(find_spec("torch_npu") is not None, reason="there is torch-npu here: run the acceptance by hand")
def test_the_acceptance_passes_on_the_fake_device_and_says_that_it_was_there(tmp_path: Path) -> None:
    """Seven faults, each on its rung, nobody harmed, nothing lost, bit for bit: exit code 0, and nothing is left."""
    done = subprocess.run(
        [sys.executable, "-m", "midstep.cli.main", "doctor", "--acceptance"],
        env={**os.environ, "TMPDIR": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path.parent / "inductor")},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no NPU or GPU can be used here: the self-test runs on the fake device" in done.stdout
    assert "7 incidents (7 resumed), no steps lost" in done.stdout, done.stdout + done.stderr
    assert done.stdout.count("equal, bit for bit") == 4
    assert list(tmp_path.iterdir()) == []
