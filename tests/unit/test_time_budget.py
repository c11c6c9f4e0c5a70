"""Tests that a run has no time for are skipped, and named."""

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


def test_those_that_had_no_time_are_named_and_others_are_not() -> None:
    assert summary([("a", "no root"), ("b", f"{SKIPPED}over"), ("c", f"{SKIPPED}over")]).split("\n")[1:] == ["b", "c"]
    assert summary([("a", "no root")]) == ""
