"""The doctor says what it finds on a machine, and which job it tries there."""

import sys
from typing import Any

import pytest
from click.testing import CliRunner

from midstep.cli.doctor import command as doctor
from midstep.cli.doctor import examine, plan
from midstep.cli.npu_examination import look
from midstep.devices import fake
from midstep.devices.kinds import FAKE, NPU, NPU_DEFAULTS
from midstep.protocol.faults import DEVICE_FAULT_ACTIONS


class Library:
    """A torch-npu with eight devices."""

    distributed = fake.distributed

    class npu(type("Npu", (), vars(fake.npu))):  # type: ignore[misc]  # noqa: N801 - torch-npu's name
        @staticmethod
        def device_count() -> int:
            return 8

        @staticmethod
        def get_device_name(device_name: object = None) -> str:
            return "Ascend910B2"


@pytest.fixture
def with_npus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", Library)


def test_a_machine_without_torch_npu_is_told_so() -> None:
    found = examine(NPU_DEFAULTS, stop=True)
    assert found.devices == 0
    assert any("cannot be imported" in finding.said for finding in found.findings)
    assert all(finding.good is not False for finding in found.findings)


@pytest.mark.usefixtures("with_npus")
def test_a_machine_with_npus_is_found_good() -> None:
    found = look(NPU_DEFAULTS)
    assert found.devices == 8
    good = {finding.what for finding in found.findings if finding.good}
    assert good >= {"calls of torch-npu", "NPU", "environment", "chip"}


@pytest.mark.usefixtures("with_npus")
def test_a_cann_that_is_not_there_or_too_old_is_found() -> None:
    """torch-npu would only warn, in the middle of a recovery, and go on as if the device had been stopped."""
    findings = look(NPU_DEFAULTS).findings
    assert any(finding.what == "CANN" and finding.good is False for finding in findings)


@pytest.mark.usefixtures("with_npus")
def test_wrong_settings_are_found() -> None:
    findings = look({"HCCL_ASYNC_ERROR_HANDLING": "1"}).findings
    assert any(finding.good is False and "Set it to 0" in finding.said for finding in findings)


def test_a_torch_npu_that_lacks_a_call_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    old: Any = type("Old", (Library,), {"distributed": object()})
    monkeypatch.setitem(sys.modules, "torch_npu", old)
    findings = look(NPU_DEFAULTS).findings
    assert any(finding.good is False and "reinit_process_group" in finding.said for finding in findings)


def test_looking_tries_nothing() -> None:
    done = CliRunner().invoke(doctor, ["--look-only"])
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize("devices", [2, 3, 8, 16])
def test_the_acceptance_fits_as_many_devices_as_there_are(devices: int) -> None:
    """Four faults in ranks that are there, each in the life that the rank has by then; never more than eight ranks."""
    show = plan(NPU, devices, 100, acceptance=True)
    assert show.ranks == min(devices, 8)
    faults = [scenario.fault for scenario in show.scenarios]
    assert len(faults) == 4
    assert all(fault.rank < show.ranks for fault in faults)
    for index, fault in enumerate(faults):
        assert fault.incarnation == 1 + sum(earlier.rank == fault.rank for earlier in faults[:index])


def test_what_is_compared_is_asked_to_repeat_itself() -> None:
    assert plan(NPU, 8, 100, acceptance=True).environment == {"HCCL_DETERMINISTIC": "true"}


def test_only_the_fake_device_is_harmed() -> None:
    """A real one is tried by what can happen to processes."""
    real = plan(NPU, 8, 100, acceptance=True)
    faked = plan(FAKE, 0, 100, acceptance=True)
    assert real.ranks == 8
    assert not {scenario.fault.action for scenario in real.scenarios} & DEVICE_FAULT_ACTIONS
    assert {scenario.fault.action for scenario in faked.scenarios} & DEVICE_FAULT_ACTIONS
    assert real.nodes == faked.nodes == 1
