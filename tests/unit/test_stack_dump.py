"""The stacks of a process that does not follow an order, in its debug log."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from midstep.processor.stack_dump import StackDump

AFTER_S = 0.05
PATIENCE_S = 30.0


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "logs" / "rank-0.1.debug.log"


@pytest.fixture
def dump(log: Path) -> Iterator[StackDump]:
    made = StackDump(log, AFTER_S)
    yield made
    made.close()


def test_a_thread_that_does_not_follow_an_order_is_found_in_the_log(dump: StackDump, log: Path) -> None:
    done = threading.Event()

    def stands_in_a_library() -> None:
        done.wait(PATIENCE_S)

    thread = threading.Thread(target=stands_in_a_library)
    thread.start()
    dump.arm()
    until_s = time.monotonic() + PATIENCE_S
    while "stands_in_a_library" not in log.read_text() and time.monotonic() < until_s:
        time.sleep(0.01)
    done.set()
    thread.join()
    assert "Timeout" in log.read_text()
    assert "stands_in_a_library" in log.read_text()


def test_an_order_that_was_followed_leaves_no_dump(dump: StackDump, log: Path) -> None:
    for _ in range(3):
        dump.arm()
    dump.disarm()
    time.sleep(4 * AFTER_S)
    assert log.read_text() == ""


def test_a_log_that_cannot_be_written_costs_no_step(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file")
    dump = StackDump(tmp_path / "logs" / "rank-0.1.debug.log")
    dump.arm()
    dump.disarm()
    dump.close()
    dump.close()
    assert (tmp_path / "logs").read_text() == "a file"
