"""One Ray cluster for all tests of this folder, on machines made of namespaces."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from ..chaos.jobs import Record
from ..machines.availability import require_machines
from ..machines.conftest import REPOSITORY, run_undisturbed
from ..machines.machines import Machines, why_not
from .cluster import RayCluster
from .environment import SUITE
from .job import RayJob

HERE = Path(__file__).parent
MACHINES = 6  # the head, three that nodes need, one to spare, and one in reserve
RANKS = 2
STEPS = 120

StartJob = Callable[..., RayJob]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder, the hook gets those of all folders."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("ray")
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    """Make the machines and a Ray cluster on them."""
    SUITE.require()
    require_machines(why_not())
    with Machines(MACHINES, (REPOSITORY, tmp_path_factory.getbasetemp())) as machines:
        yield RayCluster(machines)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """The record of the same training on this computer, to which nothing happens."""
    SUITE.require()
    return run_undisturbed(tmp_path_factory.mktemp("undisturbed") / "it", ranks=RANKS, steps=STEPS)


@pytest.fixture
def start_job(cluster: RayCluster, tmp_path: Path) -> Iterator[StartJob]:
    """Start a job of two nodes and a spare on the cluster, whose machines are all on."""
    with ExitStack() as made:

        def start(**options: Any) -> RayJob:
            cluster.mend()
            job = RayJob(cluster, tmp_path, **{"steps": STEPS, **options})
            made.callback(job.close)
            return job

        yield start
