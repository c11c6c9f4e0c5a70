"""Machines made of Linux namespaces, for the tests of this folder."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from .availability import require_machines
from .machines import Machines, why_not

StartMachines = Callable[..., Machines]
REPOSITORY = Path(__file__).resolve().parents[2]


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
