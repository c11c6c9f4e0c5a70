"""One Slurm for all tests of this folder, on machines made of namespaces."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from ..chaos.jobs import Record
from ..machines.availability import require_machines
from ..machines.conftest import REPOSITORY, run_undisturbed
from ..machines.machines import Machines, why_not
from .cluster import SlurmCluster, require_slurm
from .job import SlurmJob

HERE = Path(__file__).parent
MACHINES = 4  # the one on which users type, two that nodes need, and one to spare
RANKS = 2
STEPS = 120

StartJob = Callable[..., SlurmJob]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder, the hook gets those of all folders."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("slurm")
            item.add_marker(pytest.mark.timeout(300))


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Make the machines, and a Slurm on them."""
    require_slurm()
    require_machines(why_not())
    root = tmp_path_factory.mktemp("slurm")
    with Machines(MACHINES, (REPOSITORY, tmp_path_factory.getbasetemp())) as machines:
        yield SlurmCluster(machines, root)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """The record of the same training on this computer, to which nothing happens."""
    require_slurm()
    return run_undisturbed(tmp_path_factory.mktemp("undisturbed") / "it", ranks=RANKS, steps=STEPS)


@pytest.fixture
def start_job(cluster: SlurmCluster, tmp_path: Path) -> Iterator[StartJob]:
    """Give Slurm a job of two nodes and a spare, when all of its machines are on and have nothing to do."""
    with ExitStack() as made:

        def start(**options: Any) -> SlurmJob:
            cluster.mend()
            job = SlurmJob(cluster, tmp_path, **{"steps": STEPS, **options})
            made.callback(job.close)
            return job

        yield start
