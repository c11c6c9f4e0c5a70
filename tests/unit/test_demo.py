"""Which faults the demo has on which device, and what it says where a library for it is missing."""

import sys
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from midstep.cli.demo import npu_run, titan_run
from midstep.cli.main import main
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


@pytest.mark.parametrize("library", ["megatron", "mindspore", "torchtitan"])
def test_the_demo_of_a_library_that_is_missing_says_what_to_install(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("midstep.cli.demo.find_spec", lambda _: None)
    said = CliRunner().invoke(main, ["demo", "--titan" if library == "torchtitan" else f"--{library}"])
    assert said.exit_code == 1
    assert f"{library} is not installed: pip install 'midstep[{library}]'" in said.output


def test_the_demo_of_torchtitan_knows_one_release_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another one the program has other arguments."""
    monkeypatch.setattr("midstep.cli.demo.version", lambda _: "0.2.2")
    with pytest.raises(
        ConfigurationError, match=r"torchtitan 0\.2\.2 is installed.*pip install 'torchtitan==0\.3\.\*'"
    ):
        titan_run(STEPS)


@pytest.mark.parametrize(
    "options", [("--titan", "--megatron"), ("--titan", "--mindspore"), ("--titan", "--device", "fake")]
)
def test_the_demo_of_torchtitan_is_on_the_cpu_and_alone(
    options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("midstep.cli.demo.find_spec", lambda _: object())
    said = CliRunner().invoke(main, ["demo", *options])
    assert said.exit_code == 2, said.output
    assert "Traceback" not in said.output
