"""torch-npu's own Python, run on midstep's groups: what a real machine does before its library is called."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.contract.npu.wheels import RELEASES, NotReachable, wheel

SCRIPT = Path(__file__).with_name("own_python.py")
pytestmark = pytest.mark.timeout(300)
BATCH = "[\"batch ['isend', 'irecv'] [0, 0]\"]"


@pytest.mark.parametrize("version", RELEASES)
def test_torch_npus_python_works_on_midsteps_groups(version: str) -> None:
    """torch's default group and a sub-group are midstep's also where torch-npu has replaced how torch makes them.

    Stopping and restarting the device reaches the backend behind each group, and none where there is none yet (in a
    newcomer); resuming reaches all groups, rebuilding the one that is named. A batch of sends and receives reaches the
    library in both ways that torch-npu has, one for each kind of machine; the stand-in can only do the older one.
    """
    try:
        path = wheel(version).path
    except NotReachable as reason:
        pytest.skip(f"the package registry was not reached: {reason}")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(path)], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert said == {
        "helper": "True",
        "unconnected": "[]",
        "stop": "['watchdog 2', 'watchdog 2']",
        "restart": "['clear', 'watchdog 1', 'clear', 'watchdog 1']",
        "resume": "['resume', 'resume']",
        "rebuild": "['delete keys', 'abort reinit']",
        "Ascend310P3": BATCH,
        "Ascend910B2": BATCH if version == "2.6.0" else "['Backend gloo does not implement startCoalescing']",
    }
