"""Fixtures of the unit tests."""

import pytest

from midstep.testing.fake_cluster import FakeCluster


@pytest.fixture
def cluster() -> FakeCluster:
    """A running job on two nodes of two ranks, with a spare node."""
    return FakeCluster().start()
