"""Checkpoints of torch.distributed.checkpoint between worlds: of other sizes, other meshes, and with plain torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

WORLD = Path(__file__).with_name("dcp_world.py")
WRITERS = os.environ.get("MIDSTEP_DCP_WRITERS", "2x2")  # all that are promised: 4,2x2,ddp
READERS = "2,ddp"


@pytest.mark.soak
@pytest.mark.timeout(500)
def test_any_world_reads_what_any_other_has_written(tmp_path: Path) -> None:
    """FSDP, HSDP and DDP, by midstep and by torch, each with whole parameters, moments and rates bit for bit."""
    done = subprocess.run(
        [sys.executable, str(WORLD), str(tmp_path), WRITERS, READERS], stdout=subprocess.PIPE, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    pairs = 2 * len(WRITERS.split(",")) * 2 * len(READERS.split(","))  # each by midstep and by torch
    assert done.stdout.count("by torch: ") == 2 * pairs, done.stdout
