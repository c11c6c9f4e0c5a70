"""Tests that a run has no time for are skipped, and named."""

import os
import subprocess
import sys
import time

import pytest

from ..time_budget import SKIPPED, VARIABLE, skip_if_over, summary


def test_a_test_begins_while_there_is_time_and_is_skipped_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    skip_if_over()
    monkeypatch.setenv(VARIABLE, str(time.time() + 60.0))
    skip_if_over()
    monkeypatch.setenv(VARIABLE, str(time.time() - 60.0))
    with pytest.raises(pytest.skip.Exception, match=SKIPPED):
        skip_if_over()


def test_a_run_whose_time_is_over_skips_its_tests_and_names_them() -> None:
    """And succeeds: on a slow machine that is no fault of what is tested."""
    command = [sys.executable, "-m", "pytest", __file__, "-k", "a_test_begins", "-p", "no:cacheprovider"]
    ended = {**os.environ, VARIABLE: str(time.time() - 60.0)}
    run = subprocess.run(command, env=ended, capture_output=True, text=True, timeout=60.0, check=False)
    assert run.returncode == 0, run.stdout
    assert "1 skipped" in run.stdout
    assert "NO TIME was left for 1 tests:" in run.stdout
    assert "::test_a_test_begins_while_there_is_time" in run.stdout


def test_those_that_were_skipped_for_another_reason_are_not_named() -> None:
    assert summary([("a", "no root"), ("b", f"{SKIPPED}over"), ("c", f"{SKIPPED}over")]).split("\n")[1:] == ["b", "c"]
    assert summary([("a", "no root")]) == ""
