"""Jobs for the tests of this folder: started on demand, compared with an undisturbed run, cleared away."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .jobs import RANKS, STEPS, Job, Record

StartJob = Callable[..., Job]


@pytest.fixture
def start_job(tmp_path: Path) -> Iterator[StartJob]:
    """Start jobs, and kill what is left of them when the test is over."""
    yield from _starting(tmp_path)


@pytest.fixture(scope="module")
def start_shared_job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartJob]:
    """Start jobs whose many incidents are looked at by several tests."""
    yield from _starting(tmp_path_factory.mktemp("shared"))


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Record]:
    """The record of a run to which nothing happens."""
    starting = _starting(tmp_path_factory.mktemp("undisturbed"))
    job = next(starting)()
    assert job.wait() == 0, job.said()
    job.assert_nothing_left()
    assert not job.report()["incidents"]
    record = job.record()
    assert sorted(record.ends) == list(range(RANKS))
    assert all(len(record.steps[rank]) == STEPS for rank in range(RANKS))
    yield record
    starting.close()


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
