"""A run directory goes as a whole, whatever is made in it meanwhile."""

import os
from pathlib import Path

import pytest

from midstep.protocol.run_directories import MOST_LATE, claim


def late(monkeypatch: pytest.MonkeyPatch, path: Path, times: int) -> None:
    """Have a process make a file in the directory in front of each of the first attempts to remove it."""
    rmdir, left = os.rmdir, iter(range(times))

    def after_a_late_file(name: str, *, dir_fd: int) -> None:
        if next(left, None) is not None:
            (path / "late.sock").touch()
        rmdir(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "rmdir", after_a_late_file)


def test_what_a_process_makes_while_a_directory_is_removed_goes_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its mark no launcher would remove the directory later."""
    held = claim(tmp_path / "base", "job")
    late(monkeypatch, held.path, 2)
    assert held.remove() == []
    assert not held.path.exists()


def test_a_directory_in_which_things_are_made_all_the_time_is_said_to_be_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = claim(tmp_path / "base", "job")
    late(monkeypatch, held.path, MOST_LATE)
    assert held.remove() == [str(held.path)]


def test_the_directory_of_the_next_launcher_of_that_name_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is put in the place of the empty one at the last moment."""
    held = claim(tmp_path / "base", "job")
    rmdir = os.rmdir

    def after_the_next(name: str, *, dir_fd: int) -> None:
        monkeypatch.setattr(os, "rmdir", rmdir)
        claim(tmp_path / "base", "job").close()
        rmdir(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "rmdir", after_the_next)
    assert held.remove() == []
    assert (held.path / "launcher.lock").exists()
