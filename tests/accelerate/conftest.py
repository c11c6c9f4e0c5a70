"""Everything in this folder needs Hugging Face Accelerate: a script with it under `midstep run`."""

from pathlib import Path

import pytest

from .environment import SUITE

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder, the hook gets those of all folders."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("accelerate")
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope="session", autouse=True)
def _accelerate() -> None:
    SUITE.require()
