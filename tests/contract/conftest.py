"""Runs a contract on the makers that it is marked for, or on the one of `--device`."""

import pytest

from .makers import MAKERS, ON_DEVICE, Maker

FIRST = "gloo"


def _makers(item: pytest.Function) -> tuple[str, ...]:
    marked = item.get_closest_marker("makers")
    return (FIRST,) if marked is None else marked.args


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that is marked so on the chosen maker, or on each that needs no environment of its own."""
    if "maker" not in metafunc.fixturenames or metafunc.definition.get_closest_marker("makers") is None:
        return
    chosen = metafunc.config.getoption("--device")
    names = [name for name in _makers(metafunc.definition) if name == ON_DEVICE.get(chosen, name)]
    if chosen is None:
        names = [name for name in names if name != "npu"]
    metafunc.parametrize("maker", names, indirect=True, scope="module")


@pytest.fixture(scope="module")
def maker(request: pytest.FixtureRequest) -> Maker:
    """What makes the devices and communicators of this test."""
    made = MAKERS[getattr(request, "param", FIRST)]
    made.require()
    return made


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `--device npu`, leave out what says nothing of it: another run has that."""
    if config.getoption("--device") != "npu":
        return
    here = [each for each in items if isinstance(each, pytest.Function) and "maker" in each.fixturenames]
    left_out = [each for each in here if "npu" not in _makers(each)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [each for each in items if each not in left_out]
