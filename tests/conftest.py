"""Options of the whole suite."""

import gc
from collections.abc import Generator

import pytest

from . import time_budget
from .machines.availability import summary


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--device` has every job of the chaos tests run on one device; without it each test has its own."""
    parser.addoption(
        "--device",
        choices=("cpu", "fake"),
        help="what the ranks of the chaos tests compute on. By default the CPU, and both where a test asks for both",
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage while tests are collected, and not again in what was imported for them: it stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Begin no test when the time of a run is over."""
    time_budget.skip_if_over()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say it when tests were skipped for want of machines or time: among thousands nobody sees it otherwise."""
    skipped = {report.nodeid: str(report.longrepr) for report in terminalreporter.stats.get("skipped", [])}
    for said in (summary([*skipped.values()]), time_budget.summary([*skipped.items()])):
        if said:
            terminalreporter.write_line(said, yellow=True)
