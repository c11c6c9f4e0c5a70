"""Ranks for the contract of devices: each takes a device in a process of its own."""

from tests.contract.gloo.conftest import ranks

__all__ = ["ranks"]
