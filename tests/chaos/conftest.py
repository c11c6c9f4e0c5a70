"""Jobs for the tests of this folder: started on demand, compared with an undisturbed run, cleared away."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest

from midstep.launch.directories import HOME_VARIABLE

from .calm import made_once
from .comparing import finish
from .jobs import RANKS, STEPS, Job, Record
from .losing import closing

StartJob = Callable[..., Job]


DEVICES = ("cpu", "fake")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests that are marked so on both devices, unless the command line has chosen one."""
    marked = metafunc.definition.get_closest_marker("both_devices")
    if marked is not None and "device" in metafunc.fixturenames and chosen(metafunc.config) is None:
        first, second = DEVICES
        later = [pytest.mark.second_device, *([pytest.mark.soak] if marked.kwargs.get("second_in_soak") else [])]
        metafunc.parametrize("device", [first, pytest.param(second, marks=later)], indirect=True, scope="module")


def chosen(config: pytest.Config) -> str | None:
    """Return the device that the command line has chosen."""
    device: str | None = config.getoption("--device", default=None)
    return device


@pytest.fixture(scope="session", autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A home of jobs for these tests: that of a person may have isolated devices, and is to get none of theirs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(HOME_VARIABLE, str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(scope="module")
def device(request: pytest.FixtureRequest) -> str:
    """What the ranks compute on."""
    return str(getattr(request, "param", None) or chosen(request.config) or DEVICES[0])


@pytest.fixture
def start_job(tmp_path: Path, device: str) -> Iterator[StartJob]:
    """Start jobs, and kill what is left of them when the test is over."""
    with _starting(tmp_path, device) as start:
        yield start


@pytest.fixture(scope="module")
def start_shared_job(tmp_path_factory: pytest.TempPathFactory, device: str) -> Iterator[StartJob]:
    """Start jobs whose many incidents are looked at by several tests."""
    with _starting(tmp_path_factory.mktemp("shared"), device) as start:
        yield start


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Record:
    """The record of a run to which nothing happens; on the CPU, if no device was chosen for all."""
    return _undisturbed(tmp_path_factory, request, "undisturbed", RANKS)


@pytest.fixture(scope="session")
def undisturbed_pair(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Record:
    """The same of two ranks."""
    return _undisturbed(tmp_path_factory, request, "undisturbed-pair", 2)


def _undisturbed(factory: pytest.TempPathFactory, request: pytest.FixtureRequest, name: str, ranks: int) -> Record:
    def run() -> Record:
        with _starting(factory.mktemp(name), chosen(request.config) or DEVICES[0]) as start:
            job = start(nodes=1, ranks_per_node=ranks)  # the same bits as on two, with half the imports
            assert not finish(job)["incidents"], job.said()
            return job.record()

    record = made_once(factory, name, run)
    assert sorted(record.ends) == list(range(ranks))
    assert all(len(record.steps[rank]) == STEPS for rank in range(ranks))
    return record


@contextmanager
def _starting(root: Path, device: str) -> Iterator[StartJob]:
    with closing() as keep:
        number = count()
        yield lambda **options: keep(Job(root / str(next(number)), **{"device": device, **options}))
