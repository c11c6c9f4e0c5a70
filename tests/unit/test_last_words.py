"""The end of a process's log, which goes with the report of its end."""

import os
from pathlib import Path

import pytest

from midstep.protocol.rank_logs import LAST_BYTES, LAST_LINES, last_words


def test_the_last_lines_are_taken_whole_and_in_bounds(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("".join(f"line {number}\n" for number in range(1000)))
    assert last_words(log).splitlines() == [f"line {number}" for number in range(1000 - LAST_LINES, 1000)]
    log.write_text("x" * 10 * LAST_BYTES)
    assert last_words(log) == "x" * LAST_BYTES  # one long line has no beginning here
    log.write_text("short")
    assert last_words(log) == "short"
    log.write_bytes(b"\xff\xfe no text\n")
    assert last_words(log).endswith(" no text")


@pytest.mark.parametrize("kind", ["nothing", "directory", "pipe", "link"])
def test_what_is_no_file_has_no_words_and_is_not_waited_for(tmp_path: Path, kind: str) -> None:
    log = tmp_path / "log"
    if kind == "directory":
        log.mkdir()
    elif kind == "pipe":
        os.mkfifo(log)
    elif kind == "link":
        (tmp_path / "secret").write_text("secret")
        log.symlink_to(tmp_path / "secret")
    assert last_words(log) == ""
