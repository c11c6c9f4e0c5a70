"""Environments that tests make for themselves are whole, or made from nothing."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.versions import environments

WISHES = ("a-library==1.0",)


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Have commands only be noted; `venv` makes the folder, and pip fails where a test has put a reason for it."""
    noted: list[list[str]] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        noted.append(command)
        if command[1:3] == ["-m", "venv"]:
            (Path(command[3]) / "bin").mkdir(parents=True, exist_ok=True)
        elif "slow-library" in command:
            raise subprocess.TimeoutExpired(command, options["timeout"])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    return noted


def provided(place: Path, *wishes: str) -> Path:
    """Make an environment of these wishes."""
    return environments._provided(place, "python3", wishes, None, 1.0)


def test_one_whose_installation_was_stopped_is_made_from_nothing(tmp_path: Path, commands: list[list[str]]) -> None:
    """What pip left behind half way is not there afterwards: it would take it for installed."""
    place = tmp_path / "environment"
    with pytest.raises(environments.NotHere, match="took more than 1 s"):
        provided(place, "slow-library")
    (place / "half-a-package").touch()
    assert provided(place, *WISHES) == place / "bin"
    assert not (place / "half-a-package").exists()


def test_one_that_is_whole_is_taken_as_it_is(tmp_path: Path, commands: list[list[str]]) -> None:
    """Nothing is run for the same wishes; for others pip is asked in the same environment, and it counts as stopped."""
    place = tmp_path / "environment"
    provided(place, *WISHES)
    made = len(commands)
    (place / "a-package").touch()
    provided(place, *WISHES)
    assert len(commands) == made
    with pytest.raises(environments.NotHere):
        provided(place, "slow-library")
    assert (place / "a-package").exists()
    provided(place, *WISHES)
    assert not (place / "a-package").exists()
