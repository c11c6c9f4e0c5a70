"""A listener takes as many connections as the descriptors of its process allow."""

import resource

import pytest

from midstep.protocol.connection import limits_by_descriptors

NODES = 1250  # of a job of 10,000 ranks


def test_all_nodes_of_a_large_job_may_connect_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also from one address: with fewer places each would push another one out in the middle of its handshake."""
    monkeypatch.setattr(resource, "getrlimit", lambda limit: (20_000, 20_000))
    limits = limits_by_descriptors()
    assert limits.connections >= limits.unproven >= limits.unproven_per_address >= NODES


def test_half_of_all_connections_stays_for_those_that_are_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """However few there are."""
    monkeypatch.setattr(resource, "getrlimit", lambda limit: (1024, 1024))
    limits = limits_by_descriptors()
    assert limits.unproven == limits.connections // 2
