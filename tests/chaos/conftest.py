"""Jobs for the tests of this folder: started on demand, compared with an undisturbed run, cleared away."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from .comparing import finish
from .jobs import RANKS, STEPS, Job, Record

StartJob = Callable[..., Job]


@pytest.fixture
def start_job(tmp_path: Path) -> Iterator[StartJob]:
    """Start jobs, and kill what is left of them when the test is over."""
    with _starting(tmp_path) as start:
        yield start


@pytest.fixture(scope="module")
def start_shared_job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartJob]:
    """Start jobs whose many incidents are looked at by several tests."""
    with _starting(tmp_path_factory.mktemp("shared")) as start:
        yield start


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """The record of a run to which nothing happens."""
    with _starting(tmp_path_factory.mktemp("undisturbed")) as start:
        job = start()
        assert not finish(job)["incidents"], job.said()
        record = job.record()
    assert sorted(record.ends) == list(range(RANKS))
    assert all(len(record.steps[rank]) == STEPS for rank in range(RANKS))
    return record


@contextmanager
def _starting(root: Path) -> Iterator[StartJob]:
    jobs: list[Job] = []

    def start(**options: Any) -> Job:
        jobs.append(Job(root / str(len(jobs)), **options))
        return jobs[-1]

    try:
        yield start
    finally:
        for job in jobs:
            job.close()
