"""Which faults the demo has on which device."""

import sys
from types import SimpleNamespace

import pytest

from midstep.cli.demo import npu_run
from midstep.devices.kinds import NPU
from midstep.protocol.errors import ConfigurationError
from midstep.protocol.types import Rung

STEPS = 100


def with_npus(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace(npu=SimpleNamespace(device_count=lambda: number)))


@pytest.mark.parametrize(("devices", "ranks"), [(2, 2), (3, 3), (4, 4), (16, 4)])
def test_the_demo_on_npus_is_one_node_that_no_fault_takes_away(
    devices: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_npus(monkeypatch, devices)
    run = npu_run(STEPS)
    assert (run.nodes, run.ranks_per_node, run.spares, run.device) == (1, ranks, 0, NPU)
    assert [scenario.rung for scenario in run.scenarios] == [Rung.RECOVER_IN_PLACE] * 4
    assert all(fault.rank < ranks for scenario in run.scenarios for fault in scenario.faults)


def test_the_demo_on_npus_says_when_there_are_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    with_npus(monkeypatch, 1)
    with pytest.raises(ConfigurationError, match="1 NPU found here; the demo needs 2"):
        npu_run(STEPS)


def test_the_demo_on_npus_says_that_torch_npu_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    with pytest.raises(ConfigurationError, match="torch_npu cannot be imported"):
        npu_run(STEPS)
