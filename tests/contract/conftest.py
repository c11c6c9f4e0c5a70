"""Runs a contract on the makers that it is marked for, or on the one of `--device`."""

import pytest

from .makers import MAKERS, ON_DEVICE, Maker

FIRST = "gloo"


def _makers(item: pytest.Function) -> tuple[str, ...]:
    marked = item.get_closest_marker("makers")
    return (FIRST,) if marked is None else marked.args


def _chosen(item: pytest.Function, config: pytest.Config) -> list[str]:
    """Return the makers that a test runs on: that of `--device`, or all that need no environment of their own."""
    device = config.getoption("--device")
    return [name for name in _makers(item) if (name != "npu" if device is None else name == ON_DEVICE[device])]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that is marked so on the chosen maker, or on each that needs no environment of its own."""
    if "maker" not in metafunc.fixturenames or metafunc.definition.get_closest_marker("makers") is None:
        return
    names = _chosen(metafunc.definition, metafunc.config)
    metafunc.parametrize("maker", names, indirect=True, scope="module")


@pytest.fixture(scope="module")
def maker(request: pytest.FixtureRequest) -> Maker:
    """What makes the devices and communicators of this test."""
    made = MAKERS[getattr(request, "param", FIRST)]
    made.require()
    return made


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what the chosen makers do not have to keep: another run has that."""
    here = [each for each in items if isinstance(each, pytest.Function) and "maker" in each.fixturenames]
    left_out = [each for each in here if not _chosen(each, config)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [each for each in items if each not in left_out]
