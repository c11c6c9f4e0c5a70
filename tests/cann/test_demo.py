"""The demo's four faults on torch-npu's own device, bits compared: `make demo DEMO="--device cann"`."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

STEPS = 20
DEMO_S = 540.0

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]


def test_the_demo_ends_with_the_bits_of_an_undisturbed_run(tmp_path: Path) -> None:
    said = tmp_path / "said.json"
    command = [sys.executable, "-m", "midstep.cli.main", "demo", "--device", "npu", "--steps", str(STEPS)]
    demo = subprocess.Popen(
        [*command, "--json", str(said)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = demo.communicate(timeout=DEMO_S)
    finally:
        if demo.poll() is None:
            os.killpg(demo.pid, signal.SIGKILL)
            demo.wait()
    assert demo.returncode == 0, output
    rungs = [incident["decisions"][-1]["rung"] for incident in json.loads(said.read_text())["incidents"]]
    assert rungs == ["recover_in_place"] * 4
