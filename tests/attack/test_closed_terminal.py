"""The terminal of `midstep run`, closed while the last checkpoint is being written"""

import os
import pty
import select
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from midstep.controller.endpoints.discovery_files import read_result
from midstep.launch.directories import run_directory_of
from midstep.processor.checkpoints import archive

from ..chaos.jobs import PATIENCE_S, TRAINING
from .attack import attack

pytestmark = [pytest.mark.chaos, pytest.mark.soak, pytest.mark.timeout(240)]

SCRIPT = f"""
import os, sys, time
from pathlib import Path
sys.path.insert(0, {str(TRAINING.parent)!r})
from training import train

def on_a_slow_disk(descriptor, fsync=os.fsync):
    time.sleep(1.5)
    fsync(descriptor)

os.fsync = on_a_slow_disk
train(Path(sys.argv[1]), 100_000, 0.03)
"""


class Terminal:
    """A terminal of its own, with `midstep run` in it."""

    def __init__(self, command: list[str]) -> None:
        self.shown = b""
        self.pid, self._end = pty.fork()
        if self.pid == 0:
            os.execv(command[0], command)

    def until(self, words: bytes) -> None:
        """Read until these words are shown."""
        deadline = time.monotonic() + PATIENCE_S
        while words not in self.shown:
            assert time.monotonic() < deadline, self.shown.decode(errors="replace")
            if select.select([self._end], [], [], 1.0)[0]:
                self.shown += os.read(self._end, 65536)

    def press_ctrl_c(self) -> None:
        """Type it, as the kernel turns it into a signal."""
        os.write(self._end, b"\x03")

    def close(self) -> None:
        """Close the window. Idempotent."""
        if self._end >= 0:
            os.close(self._end)
            self._end = -1


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    """A job of two ranks on a slow disk."""
    (tmp_path / "slow.py").write_text(SCRIPT)
    (tmp_path / "records").mkdir()
    options = ["--nproc-per-node", "2", "--job-dir", str(tmp_path / "job")]
    script = [str(tmp_path / "slow.py"), str(tmp_path / "records")]
    opened = Terminal([sys.executable, "-m", "midstep.cli.main", "run", *options, *script])
    yield opened
    opened.close()


@attack(
    "Ctrl-C at `midstep run`, and then its terminal is closed while the checkpoint is being written",
    holds="the checkpoint is completed, the exit code is 130, and nothing is left behind",
)
def test_a_closed_terminal_does_not_cost_the_checkpoint(terminal: Terminal, tmp_path: Path) -> None:
    """The terminal sends SIGHUP, and no write to it works any more."""
    terminal.until(b"running (generation 1)")
    terminal.press_ctrl_c()
    terminal.until(b"asking the job to stop")
    run_directory = run_directory_of(tmp_path / "job")
    deadline = time.monotonic() + PATIENCE_S
    while not list((tmp_path / "job").glob("checkpoints/step-*.tmp-*")) and time.monotonic() < deadline:
        time.sleep(0.02)
    terminal.close()
    assert os.waitstatus_to_exitcode(os.waitpid(terminal.pid, 0)[1]) == 130
    result = read_result(tmp_path / "job")
    assert result is not None
    assert "an emergency checkpoint of step" in result.reason
    assert archive.complete_steps(tmp_path / "job" / "checkpoints")
    assert run_directory is not None
    assert not run_directory.exists()
