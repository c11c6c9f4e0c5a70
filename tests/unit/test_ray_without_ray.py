"""A user without Ray, or without a directory for a job on it, reads what to do. Nothing is made then."""

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import midstep
from midstep.cli.main import main

SCRIPT = str(Path(__file__).resolve().parents[2] / "examples" / "train_resilient.py")


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed


def test_a_job_on_ray_names_the_extra_that_is_missing(tmp_path: Path) -> None:
    """On the command line."""
    done = CliRunner().invoke(main, ["run", "--platform", "ray", "--job-dir", str(tmp_path / "job"), SCRIPT])
    assert done.exit_code == 1
    assert "pip install 'midstep[ray]'" in done.output
    assert not (tmp_path / "job").exists()


def test_the_function_names_the_extra_that_is_missing(tmp_path: Path) -> None:
    """In Python."""
    with pytest.raises(midstep.MidstepError, match=r"midstep\[ray\]"):
        midstep.ray.run(SCRIPT, storage_path=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_job_on_ray_needs_a_directory_that_all_machines_see() -> None:
    """The default would be this machine's."""
    done = CliRunner().invoke(main, ["run", "--platform", "ray", SCRIPT])
    assert (done.exit_code, "--job-dir" in done.output) == (1, True)


def test_only_a_job_on_ray_loads_ray() -> None:
    """Neither the package nor its command line does."""
    code = "import sys, midstep, midstep.cli.run; sys.exit('ray' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
