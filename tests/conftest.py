"""Options of the whole suite."""

import gc
import signal
from collections.abc import Generator
from pathlib import Path

import pytest

from .machines.availability import summary

SLOW = Path(__file__).with_name("slow.txt")


def slow_tests() -> list[str]:
    """Return the tests that `make test` leaves to the suite of their folder, without parameters."""
    return [line for line in SLOW.read_text().splitlines() if line and not line.startswith("#")]


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--device` has every job of the chaos tests run on one device, and every contract; else each has its own."""
    parser.addoption("--without-slow", action="store_true", help=f"leave out the tests that {SLOW.name} names")
    parser.addoption(
        "--device",
        choices=("cpu", "fake", "npu"),
        help="what the ranks of the chaos tests compute on, by default the CPU, and both where a test asks for both; "
        "and what the contracts of devices and communicators are run on (npu: them alone, over the fake CANN)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Have the jobs of a run that a script has put into the background hear Ctrl-C: they inherit that it is ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("markers", "makers(*names): what keeps the contract (tests/contract/makers.py)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out slow tests, if that is asked for."""
    if not config.getoption("without_slow"):
        return
    slow, kept, left_out = {*slow_tests()}, list[pytest.Item](), list[pytest.Item]()
    for item in items:
        (left_out if item.nodeid.partition("[")[0] in slow else kept).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage while tests are collected, and not again in what was imported for them: it stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say it when tests were skipped for want of machines: among thousands nobody sees it otherwise."""
    said = summary([str(report.longrepr) for report in terminalreporter.stats.get("skipped", [])])
    if said:
        terminalreporter.write_line(said, yellow=True)
