"""The list of controllers has one leader, and an election of a user's own decides who that is."""

import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from midstep.controller.election.file_election import FileElection
from midstep.controller.election.presence import in_service
from midstep.controller.journal.reading import read_status
from midstep.controller.journal.sqlite_file import journal_path, lock_path
from midstep.controller.journal.sqlite_store import found_journal
from midstep.controller.keepalive import KeepAlive
from midstep.controller.opening import ELECTION_VARIABLE, ControllerPlace, Term, open_job
from midstep.launch.reached_job import in_journal
from midstep.policies.rules import job_settings
from midstep.policies.schema import default_policy
from midstep.protocol.errors import ConfigurationError
from midstep.protocol.incidents import ControllerPhase, ControllerStatus
from midstep.protocol.types import JobSpec

JOB = JobSpec("demo", ("t.py",), False, False, {}, "/", "/", 4, 2, 2, 0, 0, job_settings(default_policy(), "/"))
STOOD: list[tuple[str, float]] = []


def elect(*, journal: Path, name: str, lease_s: float, admitted: Callable[[], bool]) -> FileElection:
    """An election of a user's own, which notes who stands for the lead."""
    STOOD.append((name, lease_s))
    return FileElection(lock_path(journal), lease_s=lease_s, admitted=admitted)


@pytest.fixture
def place(tmp_path: Path) -> ControllerPlace:
    """A job in files, whose elections are those of an installed package."""
    for name in ("job", "run"):
        (tmp_path / name).mkdir(mode=0o700)
    found_journal(journal_path(tmp_path / "job"), JOB, default_policy())
    return ControllerPlace(tmp_path / "job", tmp_path / "run", tmp_path / "keys", "tcp://127.0.0.1:0")


def test_an_election_of_ones_own_decides_who_leads(
    place: ControllerPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = tmp_path / "packages" / "theirs-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[midstep.elections]\nours = {__name__}:elect\n")
    monkeypatch.setattr(sys, "path", [str(metadata.parent), *sys.path])
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    monkeypatch.setenv(ELECTION_VARIABLE, "ours")
    STOOD.clear()
    with contextlib.ExitStack() as stack:
        assert open_job(stack, place, Term(name="first", lease_s=3.0), KeepAlive()).journal.term == 1
    assert STOOD == [("first", 3.0)]


def test_an_election_that_is_not_installed_is_refused_by_name(
    place: ControllerPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ELECTION_VARIABLE, "missing")
    with contextlib.ExitStack() as stack, pytest.raises(ConfigurationError, match="MIDSTEP_ELECTION=missing"):
        open_job(stack, place, Term(), KeepAlive())


def test_a_status_from_the_journal_says_how_old_it_is(place: ControllerPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a controller restarts, ranks train on, and their steps are in no journal."""
    founded_s = read_status(place.job_directory).at_s
    monkeypatch.setattr(time, "time", lambda: founded_s + 45.0)
    status, note = in_journal(place.job_directory, "it restarts")
    assert status.exit_code is None
    assert "45 s ago, and steps since then are not in it (it restarts)" in note


def test_a_deposed_leader_that_is_frozen_is_listed_as_not_in_service() -> None:
    frozen = ControllerStatus("a", 1, "host", ControllerPhase.HOT, 1, 0.0)
    standby = ControllerStatus("c", 3, "host", ControllerPhase.COLD, 0, 0.0)
    leader = ControllerStatus("b", 2, "host", ControllerPhase.HOT, 2, 0.0)
    phases = {each.name: each.phase for each in in_service([standby, leader, frozen])}
    assert phases == {
        "a": ControllerPhase.OUT_OF_SERVICE,
        "b": ControllerPhase.HOT,
        "c": ControllerPhase.COLD,
    }
