"""Checkpoints of torch.distributed.checkpoint between worlds: of other sizes, other meshes, and with plain torch."""

import subprocess
import sys
from pathlib import Path

import pytest

WORLD = Path(__file__).with_name("dcp_world.py")


@pytest.mark.soak
@pytest.mark.timeout(500)
def test_any_world_reads_what_any_other_has_written(tmp_path: Path) -> None:
    """FSDP, HSDP and DDP, by midstep and by torch, each with whole parameters, moments and rates bit for bit."""
    done = subprocess.run(
        [sys.executable, str(WORLD), str(tmp_path), "4,2x2", "2,ddp"], stdout=subprocess.PIPE, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("True") + done.stdout.count("False") == 16 * 3, done.stdout
