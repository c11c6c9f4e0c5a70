"""Everything in this folder needs a real MindSpore."""

from pathlib import Path

import pytest

from .environment import SUITE

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder, the hook gets those of all folders."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("mindspore")


@pytest.fixture(autouse=True)
def _mindspore() -> None:
    SUITE.require()
