"""Options of the whole suite."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--device` has every job of the chaos tests run on one device; without it each test has its own."""
    parser.addoption(
        "--device",
        choices=("cpu", "fake"),
        help="what the ranks of the chaos tests compute on. By default the CPU, and both where a test asks for both",
    )
