"""Survivors of a fault write into a log that no terminal shows."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from midstep.processor.debug_log import DebugLog
from midstep.processor.exceptions import Reaction
from midstep.processor.runtime import Runtime
from midstep.processor.train_thread import ExceptionPolicy
from midstep.protocol.rank_logs import debug_log, show_once


class Rank:
    """A runtime, as far as an exception of its train function needs it."""

    def __init__(self, path: Path, *, interrupted: bool) -> None:
        self.debug_log = DebugLog(path)
        self.communicator = SimpleNamespace(failed=None)
        self.settings = SimpleNamespace(exceptions=(), retry_unknown_exceptions=False)
        self.reported: list[str] = []
        self._interrupted = interrupted

    def interrupted(self) -> bool:
        """Whether the controller wants the train thread to stop."""
        return self._interrupted

    def report_fault(self, kind: object, detail: str, level: object, **_: Any) -> None:
        """Take note of a report."""
        self.reported.append(detail)


def judge(rank: Rank, error: Exception) -> Reaction:
    """Say what an exception means that was raised in this rank's train function."""
    try:
        raise error
    except type(error) as caught:
        return ExceptionPolicy(cast(Runtime, rank)).in_training(caught)


@pytest.mark.parametrize(
    ("interrupted", "outcome"), [(True, (Reaction.WAIT, 0)), (False, (Reaction.REPORT, 1))], ids=["told", "not told"]
)
def test_a_survivor_prints_nothing_and_notes_its_traceback(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    interrupted: bool,
    outcome: tuple[Reaction, int],
) -> None:
    """Whether it was told to stop before its collective failed, or after."""
    rank = Rank(tmp_path / "logs" / "debug.log", interrupted=interrupted)

    with caplog.at_level(logging.DEBUG):
        found = judge(rank, RuntimeError("HCCL function error: HcclAllReduce, error code is 21"))

    assert (found, len(rank.reported)) == outcome
    assert (caplog.records, capfd.readouterr()) == ([], ("", ""))
    noted = (tmp_path / "logs" / "debug.log").read_text()
    assert "Traceback" in noted
    assert "HcclAllReduce" in noted


def test_the_traceback_of_a_failed_train_function_is_printed_before_it_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once it is reported the process may be killed at any moment. What ends it afterwards prints nothing more."""
    rank = Rank(tmp_path / "debug.log", interrupted=False)
    printed: list[str] = []
    rank.report_fault = lambda *_, **__: printed.append(capsys.readouterr().err)  # type: ignore[method-assign]
    error = ValueError("of the script")

    assert judge(rank, error) is Reaction.LEAVE
    show_once(error)

    assert [text.count("ValueError: of the script") for text in printed] == [1]
    assert capsys.readouterr().err == ""


def test_a_debug_log_that_cannot_be_written_costs_its_lines(tmp_path: Path) -> None:
    """Nothing of the rank fails with it."""
    path = tmp_path / "a directory"
    path.mkdir()
    DebugLog(path).note("something", ValueError("x"))
    assert list(path.iterdir()) == []


def test_the_terminal_does_not_follow_the_debug_log(tmp_path: Path) -> None:
    """Its name is none of those that are shown."""
    from midstep.cli.display.log_follower import LogFollower

    shown: list[bytes] = []
    path = debug_log(str(tmp_path), 0, 1)
    DebugLog(path).note("something")
    path.with_name("rank-0.1.log").write_text("step 0\n")

    LogFollower(path.parent, lambda _, line: shown.append(line)).look()

    assert shown == [b"step 0"]
