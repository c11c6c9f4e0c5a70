"""A DDP run that was interrupted, with one rank built again from nothing, ends where an undisturbed plain DDP run "
"ends."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("ddp_world.py")
SAME = [
    *(f"k{k}-{kind}" for k in (0, 1, 2, 7) for kind in ("adamw", "sgd")),
    "every-step",
    "rank-0",
    "accumulate",
    "views",
    "unused",
    "static",
    "hook",
]


@pytest.fixture(scope="module")
def digests(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Train all scenarios once, in three real gloo ranks; per rank the digests of both runs of each."""
    results = tmp_path_factory.mktemp("ddp")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT), str(results)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(path.read_text()) for path in sorted(results.glob("rank-*.json"))]


@pytest.mark.parametrize("scenario", SAME)
def test_an_interrupted_run_equals_the_undisturbed_one_bit_for_bit(
    digests: list[dict[str, Any]], scenario: str
) -> None:
    """Parameters, optimizer state, buffers, losses and random numbers are equal on every rank."""
    assert len(digests) == 3
    for rank, found in enumerate(digests):
        assert found[scenario]["midstep"] == found[scenario]["plain"], f"rank {rank} went another way"


def test_the_bucket_layout_matters(digests: list[dict[str, Any]]) -> None:
    """Without the rebuilt layout the numbers differ: the scenarios would notice a wrong one."""
    assert digests[0]["layout-forgotten"]["midstep"] != digests[0]["layout-forgotten"]["plain"]
