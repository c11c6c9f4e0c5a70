"""Machines made of Linux namespaces, for the tests of this folder, and jobs on them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from ..chaos.jobs import Job as LocalJob
from ..chaos.jobs import Record
from .availability import require_machines
from .job import PATIENCE_S, Job
from .machines import Machines, cables_are_bad, why_not

HERE = Path(__file__).parent
CABLES = HERE / "test_machines.py"
LONGER = 4  # with cables on which each step of the training takes a second
StartMachines = Callable[..., Machines]
StartJob = Callable[..., Job]
REPOSITORY = Path(__file__).resolve().parents[2]
RANKS = 2
STEPS = 300


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the tests of this folder the time that bad cables take, if all of them are bad."""
    for item in items if cables_are_bad() else ():
        limit = item.get_closest_marker("timeout")
        if item.path == CABLES:
            item.add_marker(pytest.mark.skip("counts frames on good cables"))
        elif HERE in item.path.parents and limit is not None:
            item.add_marker(pytest.mark.timeout(LONGER * limit.args[0]), append=False)


@pytest.fixture(scope="session")
def reason_against() -> str:
    """Why this computer makes no machines; the empty string where it does."""
    return why_not()


@pytest.fixture
def start_machines(reason_against: str, tmp_path: Path) -> Iterator[StartMachines]:
    """Make machines, `start_machines(3)`, which are gone when the test is over. They share the test's folder."""
    require_machines(reason_against)
    with ExitStack() as made:

        def start(count: int, shared: Sequence[Path] = (), *, user: bool | None = None) -> Machines:
            return made.enter_context(Machines(count, (REPOSITORY, tmp_path, *shared), user=user))

        yield start


@pytest.fixture
def start_job(start_machines: StartMachines, tmp_path: Path) -> StartJob:
    """Start a job of two ranks on machines of its own: one for the controller, and one for each node."""

    def start(machines: int, **options: Any) -> Job:
        return Job(start_machines(machines), tmp_path, **{"steps": STEPS, **options})

    return start


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """The record of the same training on this computer, to which nothing happens."""
    return run_undisturbed(tmp_path_factory.mktemp("undisturbed") / "it", ranks=RANKS, steps=STEPS)


def run_undisturbed(root: Path, *, ranks: int, steps: int) -> Record:
    """Run a training on this computer, to which nothing happens, and return its record."""
    job = LocalJob(root, nodes=1, ranks_per_node=ranks, steps=steps, step_s=0)
    try:
        assert job.wait(PATIENCE_S + steps) == 0, job.said()
        assert not job.report()["incidents"], job.said()
        return job.record()
    finally:
        job.close()
