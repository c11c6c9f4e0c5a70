"""The stacks of a process that does not follow an order, in its debug log."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from midstep.processor.debug_log import DebugLog, StackDump

AFTER_S = 0.05
PATIENCE_S = 30.0
HEADING = "an order has not been followed"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "logs" / "rank-0.1.debug.log"


@pytest.fixture
def dump(log: Path) -> Iterator[StackDump]:
    made = StackDump(DebugLog(log), AFTER_S)
    yield made
    made.close()


def wait_for(log: Path, text: str) -> str:
    """Read the log until it has the text; a process that runs must not be harmed by a dump of its threads."""
    until_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < until_s:
        if log.exists() and text in log.read_text():
            break
    return log.read_text()


def test_a_thread_that_does_not_follow_an_order_is_found_in_the_log_by_its_name(dump: StackDump, log: Path) -> None:
    done = threading.Event()

    def stands_in_a_library() -> None:
        done.wait(PATIENCE_S)

    thread = threading.Thread(target=stands_in_a_library, name="data-loader")
    thread.start()
    dump.arm()
    found = wait_for(log, "stands_in_a_library")
    done.set()
    thread.join()
    assert "an order has not been followed for 0.05 s" in found
    assert "Thread data-loader:" in found
    assert "stands_in_a_library" in found


def test_each_order_that_is_not_followed_is_dumped_once(dump: StackDump, log: Path) -> None:
    dump.arm()
    wait_for(log, HEADING)
    dump.arm()
    until_s = time.monotonic() + PATIENCE_S
    while log.read_text().count(HEADING) < 2 and time.monotonic() < until_s:
        time.sleep(AFTER_S)
    time.sleep(4 * AFTER_S)
    assert log.read_text().count(HEADING) == 2


def test_an_order_that_was_followed_leaves_no_log(dump: StackDump, log: Path) -> None:
    for _ in range(3):
        dump.arm()
    dump.disarm()
    time.sleep(4 * AFTER_S)
    assert not log.exists()


def test_a_log_that_cannot_be_written_costs_no_step(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file")
    dump = StackDump(DebugLog(tmp_path / "logs" / "rank-0.1.debug.log"), 0.0)
    dump.arm()
    dump.disarm()
    dump.close()
    dump.close()
    dump.arm()
    assert (tmp_path / "logs").read_text() == "a file"
