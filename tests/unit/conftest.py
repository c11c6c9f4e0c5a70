"""Fixtures of the unit tests."""

from ..fakes.cluster import cluster

__all__ = ["cluster"]
