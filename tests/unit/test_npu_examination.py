"""NPUs are looked at and stopped in processes of their own: what torch-npu does to such a process is a finding."""

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner

from midstep.cli import doctor
from midstep.cli.npu_examination import Examined, NpuWork, ask, examine
from midstep.devices.kinds import NPU_DEFAULTS

# A torch-npu whose devices are the fake one, without the CANN that the real one is looked for in.
LIBRARY = """
import torch
from midstep.devices import fake, npu_symbols
from midstep.devices.fake import distributed  # noqa

class npu(type("Npu", (), vars(fake.npu))):
    @staticmethod
    def device_count():
        return 1

    @staticmethod
    def get_device_name(device_name=None):
        return "Ascend910B2"

    {stop}

npu_symbols.missing.__defaults__ = (lambda library, name: True,)
torch.Tensor.npu = lambda self: self
"""
REFUSES = "stop_device = staticmethod(lambda device_id: 1)"
HANGS = "stop_device = staticmethod(lambda device_id: __import__('time').sleep(600))"
ENDS = """
import os, sys
print("terminate called after throwing an instance of 'c10::Error'", file=sys.stderr)
print("  what():  Duplicated key 'pinned_reserve_segment_size_mb'", file=sys.stderr)
print("Exception raised from parse at allocator.cpp", file=sys.stderr, flush=True)
os.abort()
"""

pytestmark = pytest.mark.timeout(180)
Environment = Mapping[str, str]


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Environment]:
    """Install a torch-npu with this source; return the environment of processes that find it."""

    def install(source: str) -> Environment:
        (tmp_path / "torch_npu.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
        return {**os.environ, **NPU_DEFAULTS, "PYTHONPATH": str(tmp_path)}

    return install


def firmware(examined: Examined) -> tuple[bool | None, str]:
    (found,) = [each for each in examined.findings if each.what == "firmware"]
    return found.good, found.said


def test_a_device_that_can_be_stopped_is_found_good(library: Callable[[str], Environment]) -> None:
    examined = examine(library(LIBRARY.format(stop="")), stop=True)
    assert [each for each in examined.findings if each.good is False] == []
    assert examined.devices == 1
    assert firmware(examined)[0]


def test_firmware_that_cannot_abort_tasks_is_found_before_a_job_needs_it(
    library: Callable[[str], Environment],
) -> None:
    """Its functions are all there: CANN asks the firmware when it is to abort something."""
    good, said = firmware(examine(library(LIBRARY.format(stop=REFUSES)), stop=True))
    assert good is False
    assert "stop_device returned 1" in said
    assert "TS_FEATURE_TASK_ABORT" in said
    assert "driver and firmware" in said


def test_a_stop_that_does_not_come_back_is_ended(library: Callable[[str], Environment]) -> None:
    began_s = time.monotonic()
    examined = ask(NpuWork.STOP, library(LIBRARY.format(stop=HANGS)), limit_s=20.0)
    assert time.monotonic() - began_s < 60.0
    good, said = firmware(examined)
    assert good is False
    assert "not come back within 20 s" in said


def test_a_device_is_left_alone_where_something_else_is_wrong(library: Callable[[str], Environment]) -> None:
    environment = {**library(LIBRARY.format(stop=REFUSES)), "HCCL_ASYNC_ERROR_HANDLING": "1"}
    examined = examine(environment, stop=True)
    assert any(each.good is False for each in examined.findings)
    assert all(each.what != "firmware" for each in examined.findings)


def test_looking_stops_no_device(library: Callable[[str], Environment]) -> None:
    examined = examine(library(LIBRARY.format(stop=REFUSES)), stop=False)
    assert all(each.good is not False for each in examined.findings)


def test_a_torch_npu_that_ends_its_process_is_a_finding(library: Callable[[str], Environment]) -> None:
    examined = examine(library(ENDS), stop=True)
    assert examined.ended
    (said,) = [each.said for each in examined.findings if each.good is False]
    assert "SIGABRT" in said
    assert "Duplicated key 'pinned_reserve_segment_size_mb'" in said
    assert "CPU build of torch" in said


def test_the_doctor_tries_nothing_where_torch_would_end_it(
    library: Callable[[str], Environment], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch imports torch-npu by itself."""
    for name, value in library(ENDS).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(doctor, "examine_gpus", lambda environment: pytest.fail("torch was imported"))
    done = CliRunner().invoke(doctor.command, [])
    assert done.exit_code == 1, done.output
    assert "Duplicated key" in done.output
    assert "nothing is tried" in done.output
