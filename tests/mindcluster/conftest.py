"""One API server and one ClusterD for all tests of this folder; jobs, and `midstep clusterd` for each."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ..chaos.conftest import device, start_job, undisturbed
from ..chaos.jobs import Job
from .api_server import ApiServer
from .availability import PATH, require_clusterd
from .bridge import Bridge
from .real_clusterd import RealClusterd, install

__all__ = ["device", "start_job", "undisturbed"]

HERE = Path(__file__).parent
StartBridge = Callable[[Job, str, str], Bridge]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder; the hook gets those of all folders."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("mindcluster")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """An API server with MindCluster's definitions."""
    _, checkout = require_clusterd()
    os.environ["PATH"] = PATH
    made = ApiServer(tmp_path_factory.mktemp("api"))
    install(made, checkout)
    yield made
    made.close()


@pytest.fixture(scope="session")
def clusterd(server: ApiServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealClusterd]:
    """ClusterD, which serves."""
    program, checkout = require_clusterd()
    made = RealClusterd(tmp_path_factory.mktemp("clusterd"), program, checkout, server).start()
    yield made
    made.kill()


@pytest.fixture
def bridge(tmp_path: Path) -> Iterator[StartBridge]:
    """Start `midstep clusterd` for a job; kill it when the test is over."""
    started: list[Bridge] = []

    def start(job: Job, where: str, task: str) -> Bridge:
        started.append(Bridge(job, where, task, tmp_path / f"clusterd-{len(started)}.log"))
        return started[-1]

    yield start
    for each in started:
        each.close()
