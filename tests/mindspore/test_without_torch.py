"""What needs no torch works without it, and what MindSpore needs is as the product counts on it."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from midstep.agent.channel import THREAD_LIMITS


def _run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_this_environment_has_no_torch() -> None:
    """Otherwise the tests of this folder would say less than they seem to."""
    assert find_spec("torch") is None


def test_a_plain_script_runs(tmp_path: Path) -> None:
    """Agent, fork server and rendezvous store come up without torch."""
    script = tmp_path / "plain.py"
    script.write_text("import os\nprint('here', os.environ['RANK'], flush=True)\n")
    command = [sys.executable, "-m", "midstep.cli.main", "run", "--job-dir", str(tmp_path / "job")]
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", str(script)], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert {"[rank 0] here 0", "[rank 1] here 1"} <= set(done.stdout.splitlines())
    assert "torch" not in done.stdout + done.stderr


def test_importing_mindspore_starts_no_thread() -> None:
    """So that the fork server can import it ahead: `standby.preload: [mindspore]`."""
    code = "import mindspore; from midstep.agent.linux import thread_count; print('threads', thread_count())"
    assert "threads 1" in _run(code, **dict.fromkeys(THREAD_LIMITS, "1"))


AUDIT = """
from mindspore import nn
from midstep.adapters.mindspore import MindSporeState

class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.layers = nn.SequentialCell(nn.Dense(2, 2), nn.Dropout(p=0.5), nn.LayerNorm((2,)), nn.Dropout(p=0.0))

print(*MindSporeState(Net()).audit(), sep="\\n")
"""

DRAWS = """
import mindspore as ms, numpy as np
from mindspore import ops
from midstep.adapters.mindspore.state import RandomNumbers

ms.set_context(mode=ms.PYNATIVE_MODE)
ms.set_seed(3)
numbers, other = RandomNumbers(0), RandomNumbers(1)

def draw(which, step):
    which.begin(step)
    return ops.dropout(ms.Tensor(np.ones(64, np.float32)), p=0.5).asnumpy().tobytes()

np.random.seed(5)
assert draw(numbers, 7) == draw(numbers, 7)
assert len({draw(numbers, 7), draw(numbers, 8), draw(other, 7)}) == 3
assert np.random.rand() == np.random.RandomState(5).rand()
print("as it should be")
"""


def test_the_audit_names_what_draws_and_cannot_be_restored() -> None:
    """A live nn.Dropout, by its path; not one that never drops, and no layer without random numbers."""
    [finding] = [line for line in _run(AUDIT).splitlines() if "draws" in line]

    assert "layers.1 is a Dropout" in finding


def test_a_repeated_step_draws_what_it_drew() -> None:
    """Functional operators of PyNative mode, by the seed of the step; numpy's generator is left as it is."""
    assert "as it should be" in _run(DRAWS)
