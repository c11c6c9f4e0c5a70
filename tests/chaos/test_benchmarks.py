"""Each benchmark runs, as short as it can be: nothing else would notice that what it measures has another name."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import midstep

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300), pytest.mark.soak]

BENCHMARKS = Path(midstep.__file__).parent / "benchmarks"
LIMIT_S = 240.0
SHORT = {
    "controller_restart": "--events 1000 --repeats 1",
    "failover": "--repeats 1",
    "false_alarms": "--steps 30 --policies tuned --jobs random",
    "policy_cost": "audits --repeat 1 --steps 4",
    "fsdp": "recovery --mesh 2x1 --repeat 1 --size 4M",
    "link_ups": "--link-ups 10 --minutes 2",
    "long_job": "--incidents 20",
    "machine": "--ranks 100 --repeats 1",
    "megatron": "--repeat 1 --steps 20 --size tiny --kind buddy_host --no-recovery",
    "metrics": "--nodes 4 --ranks-per-node 2 --times 3",
    "overhead": "--ranks 2 --repeat 1 --steps 4 --no-jobs",
    "reconfigure": "--ranks 2 --repeat 1",
    "recovery": "--ranks 2 --repeat 1 --steps 12 --only midstep",
    "rendezvous": "--ranks 4,8",
    "repair": "--sizes 10 --sources 2 --repeat 1",
    "scale": "--ranks 16 --repeat 1 --idle 1",
    "scale_forecast": "--ranks 16",
    "turns": "--ranks 16 --repeat 1",
}


@pytest.mark.parametrize("name", SHORT)
def test_a_benchmark_measures(name: str, tmp_path: Path) -> None:
    """It ends well, and leaves its figures."""
    figures = tmp_path / "figures.json"
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), *SHORT[name].split(), "--json", str(figures)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert figures.stat().st_size > 0


WHOLE = {
    "peers": "--peers midstep,torchrun --settings default --faults kill --ranks 2 --repeat 1 --limit 110",
    "peers, sharded": "--peers hsdp.midstep,hsdp.torchrun --settings default --faults kill --ranks 4 --repeat 1",
    "peers, scheduled": "--peers midstep --schedule 1 --settings tuned --faults-per-run 2 --steps 20 --ranks 2",
    "regression": "--only repair,machine --short",
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_comparison_measures(name: str, tmp_path: Path) -> None:
    """Those that run others. midstep and torchrun need no environment of their own; what got worse does not matter."""
    figures = tmp_path / "figures.json"
    module = name.partition(",")[0]
    command = [sys.executable, "-m", f"benchmarks.{module}", *WHOLE[name].split(), "--json", str(figures)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False, cwd=BENCHMARKS.parent)
    assert run.returncode in {0, 1}, run.stdout + run.stderr
    assert "Traceback" not in run.stderr
    assert figures.stat().st_size > 0
    if module == "peers":
        found = json.loads(figures.read_text())["attempts"]
        assert [attempt["why"] for attempt in found] == ["", ""]


def test_no_benchmark_is_left_out() -> None:
    """Those with a command line of their own."""
    assert {path.stem for path in BENCHMARKS.glob("*.py") if "__main__" in path.read_text()} == {
        *SHORT,
        *("false_alarms_job", "fsdp_job", "overhead_job", "recovery_job", "repair_job"),  # which others run
        "watched",  # its turns say nothing while other tests run, and take minutes
    }
