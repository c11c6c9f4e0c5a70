"""One cluster for all tests of this folder, and jobs in it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ..chaos.jobs import Record
from ..machines.conftest import run_undisturbed
from .availability import kubectl_of_user, require_kubernetes, uses_given_cluster
from .cluster.cluster import Cluster
from .joined import JoinedJob
from .managed import ManagedJob

StartJoined = Callable[..., JoinedJob]
StartManaged = Callable[..., ManagedJob]
Kubectl = Callable[..., str]
HERE = Path(__file__).parent
FIRST = {name: place for place, name in enumerate(("test_managed", "test_joined", "test_manifests", "test_rights"))}
NODES = 4
STEPS = 200
RANKS = 4


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder, those that tell most in front; the hook gets those of all folders."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("kubernetes")
    items.sort(key=lambda item: FIRST.get(item.path.stem, len(FIRST)) if item.path.parent == HERE else 0)


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all machines see, as they would a file system of the cluster."""
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="session")
def cluster(shared: Path) -> Iterator[Cluster]:
    """The cluster: m0, and four nodes that are all on when a test begins. Nothing is left of it."""
    require_kubernetes()
    with Cluster(NODES, (shared,)) as made:
        yield made
    assert not made.leftovers()


@pytest.fixture(scope="session")
def kubectl(request: pytest.FixtureRequest) -> Kubectl:
    """Run kubectl and return what it prints: on the cluster of the user's KUBECONFIG where that was chosen."""
    if uses_given_cluster():
        return kubectl_of_user
    cluster: Cluster = request.getfixturevalue("cluster")
    return cluster.kubectl


@pytest.fixture
def start_joined(cluster: Cluster, shared: Path) -> Iterator[StartJoined]:
    """Start a job whose pods are a user's own; they are deleted when the test is over."""
    started: list[JoinedJob] = []

    def start(name: str, **options: Any) -> JoinedJob:
        job = JoinedJob(cluster, shared / name, name, **{"steps": STEPS, **options})
        started.append(job)
        return job

    yield start
    for job in started:
        job.delete()


@pytest.fixture
def start_managed(cluster: Cluster, shared: Path) -> Iterator[StartManaged]:
    """Start a job that makes its pods itself; what is left of it is deleted when the test is over."""
    started: list[ManagedJob] = []

    def start(name: str, **options: Any) -> ManagedJob:
        job = ManagedJob(cluster, shared / name, name, **{"steps": STEPS, **options})
        started.append(job)
        return job

    yield start
    for job in started:
        job.delete()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """The record of the same training on this computer, to which nothing happens."""
    return run_undisturbed(tmp_path_factory.mktemp("undisturbed") / "it", ranks=RANKS, steps=STEPS)
