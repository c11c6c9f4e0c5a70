"""MindSpeed-LLM's own program on torch-npu's own wheel: its queue, its allocator, its HCCL, on the fake CANN.

The environment is that of the other tests with torch-npu's wheel on top (tests/cann/environment.py).
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ..cann.environment import make, variables
from ..cann.releases import chosen
from ..chaos.comparing import assert_nobody_harmed
from ..chaos.losing import closing
from ..versions.environments import NotHere
from .conftest import HERE, Device, Fault, Programs, Saved, Start, calming, starting
from .environment import SUITE
from .test_pretrain import AFTER_THE_LOG, assert_replaced_alone, assert_same_end, incidents_of


@pytest.fixture(scope="module")
def device() -> Device:
    """Torch-npu's wheel of the torch of this environment."""
    try:
        place = make(chosen(SUITE.release), Path(sys.executable))
    except NotHere as reason:
        pytest.skip(f"no torch-npu on the fake CANN: {reason}")
    return Device("npu", (HERE / "on_cann",), str(place / "bin" / "python"), variables(place))


@pytest.fixture(scope="module")
def start(device: Device, programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Start pretrain_gpt.py on it, and kill what is left of it when the tests are over."""
    with closing() as keep:
        yield starting(keep, programs, tmp_path_factory, device)


@pytest.fixture(scope="module")
def calm(start: Start) -> Callable[..., Saved]:
    """Return what the undisturbed training of a layout saves at its end, each trained once."""
    return calming(start)


def test_killed_ranks_are_replaced_and_hccl_links_them(start: Start, calm: Callable[..., Saved]) -> None:
    """In the backward pass and in the update; survivors keep their processes, and no step is lost."""
    kills: list[Fault] = [(1, 5, "backward", "kill"), (0, 11, "update", "kill")]
    assert_replaced_alone(start(2, (), kills), kills, calm(2), ranks=2)


@pytest.mark.parametrize("how", ["memory", "link"])
def test_what_torch_npu_raises_replaces_no_process(how: str, start: Start, calm: Callable[..., Saved]) -> None:
    """Of damaged memory, and of a link that broke, by its own words."""
    training = start(2, (), [(1, 7, AFTER_THE_LOG, how)])
    (incident,) = incidents_of(training)
    assert_nobody_harmed(incident, set(), ranks=2)
    assert incident["rung"] == "retry_step", incident
    assert_same_end(training, calm(2))
