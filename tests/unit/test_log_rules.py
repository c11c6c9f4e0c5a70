"""Lines of a rank's log are held against rules, whatever is printed, and never more of it than fits into its time."""

import asyncio
import threading
import time
from pathlib import Path

import pytest

from midstep.agent.log_rules import (
    AGAIN_S,
    BEHIND_BYTES,
    END_S,
    LAST_BYTES,
    READ_BYTES,
    FollowedLog,
    LineFound,
    Lines,
    LinesReported,
    LogRules,
    Patterns,
)
from midstep.protocol.line_patterns import LONGEST_LINE
from midstep.protocol.rules import JobRule, RuleAction

DOWN = JobRule("down", RuleAction.REPORT, line=r"link .* down")
FULL = JobRule("full", RuleAction.STOP, line="disk full")
OF_A_VALUE = JobRule("a_number", RuleAction.STOP, value="loss", not_finite=True)
PATTERNS = Patterns([DOWN, FULL, OF_A_VALUE])
LONG_S = 60.0


def follow(path: Path, begin: int = 0) -> FollowedLog:
    return FollowedLog(path, begin, lambda found: None)


def names(found: list[LineFound]) -> list[str]:
    return [each.rule.name for each in found]


def read(log: FollowedLog, *, ended: bool = False, within_s: float = LONG_S) -> list[str]:
    return names(log.read(PATTERNS, time.monotonic() + within_s, ended=ended))


# --- lines ------------------------------------------------------------------------------------------------------------


def test_a_line_is_whole_however_it_is_written() -> None:
    lines = Lines()
    assert lines.take(b"link 3 ") == []
    assert lines.take(b"is down\nnext") == ["link 3 is down"]
    assert lines.take(b"\r10 %\r\n\n20 %\r") == ["next", "10 %", "20 %"]
    assert lines.take(b"the last") == []
    assert lines.end() == ["the last"]
    assert lines.end() == []


def test_of_a_line_that_is_too_long_the_beginning_is_looked_at_once() -> None:
    lines = Lines()
    found = [line for _ in range(50) for line in lines.take(b"x" * 1000)]
    assert found == ["x" * LONGEST_LINE]
    assert lines.take(b"end\nshort\n") == ["short"]
    assert lines.take(b"y" * 10_000 + b"\nshort\n") == ["y" * LONGEST_LINE, "short"]


def test_what_is_no_text_is_a_line_as_well() -> None:
    assert Lines().take(b"\xff\xfe link\n") == ["\ufffd\ufffd link"]


# --- a log ------------------------------------------------------------------------------------------------------------


def test_a_log_is_read_from_where_it_stood_and_each_line_once(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("disk full, long ago\n")
    log = follow(path, path.stat().st_size)
    assert read(log) == []
    with path.open("a") as file:
        file.write("link 1 is down\nlink 2 is down\ndisk ")
    assert read(log) == ["down"]
    assert read(log) == []
    with path.open("a") as file:
        file.write("full")
    assert read(log) == []
    assert read(log, ended=True) == ["full"]


def test_the_first_line_of_those_that_break_a_rule_is_told(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("all is well\nlink 1 is down\nlink 2 is down\n")
    (found,) = follow(path).read(PATTERNS, time.monotonic() + LONG_S)
    assert found == LineFound(DOWN, "link 1 is down")


@pytest.mark.parametrize(("ended", "most"), [(False, BEHIND_BYTES), (True, LAST_BYTES)])
def test_of_a_log_that_grows_too_fast_the_latest_is_read(tmp_path: Path, *, ended: bool, most: int) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"disk full\n" + b"x\n" * most + b"link 1 is down\n")
    log = follow(path)
    assert read(log, ended=ended) == ["down"]
    assert 0 < log.passed_over < 2 * most


def test_no_more_is_read_than_fits_into_the_time(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"x\n" * READ_BYTES + b"disk full\n")
    log = follow(path)
    assert read(log, within_s=-1.0) == []
    assert read(log) == ["full"]


def test_a_log_that_was_cut_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("a long line at first\n" * 10)
    log = follow(path)
    assert read(log) == []
    path.write_text("disk full\n")
    assert read(log) == ["full"]


def test_a_log_that_is_no_file_or_is_away_is_nothing(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/etc/passwd")
    for path in (tmp_path / "away", tmp_path, tmp_path / "link"):
        assert read(follow(path)) == []


# --- what is told -----------------------------------------------------------------------------------------------------


def test_a_rule_that_reports_is_told_of_once_in_a_while() -> None:
    told = LinesReported()
    assert told.is_news(DOWN, 1, 0.0)
    assert not told.is_news(DOWN, 1, AGAIN_S - 1)
    assert not told.is_news(DOWN, 2, AGAIN_S - 1)
    assert told.is_news(DOWN, 2, AGAIN_S + 1)


def test_a_rule_that_acts_is_told_of_in_each_generation() -> None:
    told = LinesReported()
    assert told.is_news(FULL, 1, 0.0)
    assert not told.is_news(FULL, 1, 1.0)
    assert told.is_news(FULL, 2, 2.0)
    assert told.is_news(DOWN, 2, 2.0)


# --- the end of a process ---------------------------------------------------------------------------------------------


def test_what_a_process_printed_last_is_told_before_its_end(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("link 1 is down\nall is well\ndisk full")
    heard: list[str] = []

    async def play() -> None:
        rules = LogRules("node", lambda report: None)
        rules._patterns = PATTERNS
        log = FollowedLog(path, 0, lambda found: heard.append(found.rule.name))
        rules.end(log, lambda: "its last words", heard.append)
        began_s = time.monotonic()
        while len(heard) < 3 and time.monotonic() - began_s < LONG_S:
            await asyncio.sleep(END_S / 10)

    asyncio.run(play())
    assert heard == ["down", "full", "its last words"]


def test_a_file_system_that_hangs_holds_neither_the_agent_nor_the_end_of_a_process(tmp_path: Path) -> None:
    """Its end is reported once, without last words."""
    heard: list[str] = []
    hangs, hung = threading.Event(), threading.Event()

    def words() -> str:
        hung.set()
        hangs.wait(LONG_S)
        return "too late"

    async def play() -> None:
        loop = asyncio.get_running_loop()
        rules = LogRules("node", lambda report: None)
        began_s = loop.time()
        rules.end(follow(tmp_path / "log"), words, heard.append)
        assert loop.time() - began_s < LONG_S / 2
        assert heard == []
        while not heard and loop.time() - began_s < LONG_S / 2:
            await asyncio.sleep(END_S / 10)
        assert heard == [""]
        assert hung.is_set()
        hangs.set()
        while rules._ends and loop.time() - began_s < LONG_S / 2:
            await asyncio.sleep(END_S / 10)

    asyncio.run(play())
    assert heard == [""]
