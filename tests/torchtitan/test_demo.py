"""`midstep demo --titan`: torchtitan's own program under the four faults of the demo, with the bits of a calm run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.chaos

STEPS = 20
PATIENCE_S = 900.0


def test_the_demo_loses_processes_and_a_node_and_ends_with_the_same_bits(tmp_path: Path) -> None:
    """An exception, a kill, a SIGSTOP and a lost node: exit code 0 says that all went as it should."""
    result = tmp_path / "result.json"
    command = ["-m", "midstep.cli.main", "demo", "--titan", "--steps", str(STEPS), "--json", str(result)]
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=PATIENCE_S, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads(result.read_text())
    assert data["bit_exact"], data["differences"]
    assert [incident["rung"] for incident in data["incidents"]] == ["recover_in_place"] * 3 + ["recover"]
    assert "tokens seen     equal, bit for bit" in done.stdout
