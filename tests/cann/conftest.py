"""Tests on the fake CANN run in an environment of their own, and on the device `npu`."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.chaos.conftest import own_home
from tests.contract.gloo.conftest import Ranks
from tests.contract.makers import MAKERS

from .environment import require_cann

__all__ = ["own_home"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder: they are skipped where there is no fake CANN."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.cann)


@pytest.fixture(autouse=True)
def _require_cann() -> None:
    require_cann()


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    """Processes that are forked from this one, and a store."""
    made = Ranks(MAKERS["npu"])
    yield made
    made.end()
