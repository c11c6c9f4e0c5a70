"""The record of a run to which nothing happens: made once, although several processes run the tests."""

import fcntl
import os
from collections.abc import Callable

import msgspec
import pytest

from .jobs import Record


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[], Record]) -> Record:
    """Return the record of this name; the first worker of pytest-xdist that asks makes it, and others wait for that."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return make()
    record = factory.getbasetemp().parent / f"{name}.json"  # the folder of this session, for all workers
    with record.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the time limit of the test is its deadline
        if not record.exists():
            made = msgspec.json.encode(make())
            record.write_bytes(made)
        return msgspec.json.decode(record.read_bytes(), type=Record)
