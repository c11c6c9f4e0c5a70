"""Look at the NPUs of a machine, and stop one, each in a process of its own.

Some releases of torch-npu end a process that imports them, and CANN's abort has no time limit. Neither may end
`midstep doctor` or hold it. The process itself is `python -m midstep.cli.npu_examination WORK RESULT`, which writes
what it has found to the file RESULT.
"""

import contextlib
import enum
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from ..protocol.errors import ConfigurationError, RecoveryError
from ..protocol.own_programs import own_program

TORCH_NPU = "torch_npu"
LOOK_S, STOP_S = 180.0, 120.0  # the import alone takes 11 s on a busy machine
END_S = 10.0  # for a process that was killed, and may be inside the driver
ABORTS = "Duplicated key"  # the last words of a torch-npu that registers a setting of the allocator a second time


class CheckResult(msgspec.Struct, frozen=True):
    """One thing that was looked at. `good` None: neither good nor bad."""

    what: str
    good: bool | None
    said: str


class Examined(msgspec.Struct, frozen=True):
    """The findings, how many NPUs there are, and whether torch-npu ends a process that imports it."""

    findings: tuple[CheckResult, ...]
    devices: int = 0
    ended: bool = False


class NpuWork(enum.Enum):
    """One process and its work."""

    LOOK = "look"
    STOP = "stop"


def examine(environment: Mapping[str, str], *, stop: bool) -> Examined:
    """Return what is found of NPUs. `stop`: stop device 0, if there is one and nothing else is wrong."""
    if find_spec(TORCH_NPU) is None:
        return Examined((_not_imported(f"No module named '{TORCH_NPU}'"),))
    looked = ask(NpuWork.LOOK, environment, LOOK_S)
    if not stop or not looked.devices or any(each.good is False for each in looked.findings):
        return looked
    tried = ask(NpuWork.STOP, environment, STOP_S)
    return msgspec.structs.replace(looked, findings=looked.findings + tried.findings)


def ask(work: NpuWork, environment: Mapping[str, str], limit_s: float) -> Examined:
    """Return what a process finds; that it ended, or was ended as its time was over, is a finding, too."""
    with tempfile.TemporaryDirectory(prefix="midstep-npu-") as directory:
        result, words = Path(directory, "result"), Path(directory, "words")
        command = [*own_program(__spec__.name), work.value, str(result)]
        with words.open("wb") as output:
            process = subprocess.Popen(command, env=dict(environment), stdout=output, stderr=subprocess.STDOUT)
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
            return _late(work, limit_s)
        if process.returncode == 0:
            return msgspec.json.decode(result.read_bytes(), type=Examined)
        return _dead(work, process.returncode, words.read_text(errors="replace"))


def look(environment: Mapping[str, str]) -> Examined:
    """Import torch-npu, and return what is found. In a process of its own."""
    try:
        library: Any = import_module(TORCH_NPU)
    except Exception as error:  # torch-npu without CANN fails in its own ways, all of them news
        return Examined((_not_imported(str(error)),))
    from ..devices.npu import NpuDevice
    from ..devices.npu_environment import problems
    from ..devices.npu_symbols import chip_problem, missing

    findings = []
    try:
        NpuDevice(library)
        findings.append(CheckResult("calls of torch-npu", True, "all that midstep makes are there"))
    except ConfigurationError as error:
        findings.append(CheckResult("calls of torch-npu", False, str(error)))
    devices = int(library.npu.device_count())
    findings.append(CheckResult("NPU", devices > 0, f"{devices} found"))
    lacking = missing()
    findings += [CheckResult("CANN", False, line) for line in lacking]
    if not lacking:
        findings.append(CheckResult("CANN", True, "has the functions that a recovery needs"))
    if devices:
        chip = str(library.npu.get_device_name(0))
        problem = chip_problem(chip)
        findings.append(CheckResult("chip", problem is None, problem or chip))
    wrong = problems(environment, 0.0, library.npu.get_allocator_backend())
    findings += [CheckResult("environment", False, line) for line in wrong]
    if not wrong:
        findings.append(CheckResult("environment", True, "allows a recovery (`midstep run` sets what is not set)"))
    return Examined(tuple(findings), devices)


def try_stop() -> Examined:
    """Stop device 0 as a recovery does, have it work again, and use it. In a process of its own."""
    from ..devices.npu import npu_device

    device = npu_device()
    try:
        _use()
    except RuntimeError as error:
        first = next(iter(str(error).splitlines()), "")
        return _firmware(False, f"device 0 cannot be used, so it was not stopped: {first}")
    try:
        device.stop()
        device.clean()
        _use()
    except (RuntimeError, RecoveryError) as error:
        return _firmware(False, _cannot_abort(str(error)))
    return _firmware(True, "device 0 was stopped and works again")


def _use() -> None:
    """Have the device compute something. CANN stops nothing in a process that has not used the device."""
    import torch

    found = torch.ones(1).npu().add(1).item()  # type: ignore[attr-defined]  # torch-npu's
    if found != 2:
        raise RuntimeError(f"1 + 1 gave {found}")


def _firmware(good: bool, said: str) -> Examined:
    return Examined((CheckResult("firmware", good, said),))


def _cannot_abort(what: str) -> str:
    return (
        f"{what}. The firmware of the device cannot abort tasks then (CANN asks it for TS_FEATURE_TASK_ABORT), and "
        "every process that a fault touches is replaced. Install the driver and firmware that belong to this CANN "
        "(`npu-smi info` names what is there), or leave retry_step out of the ladder"
    )


def _not_imported(why: str) -> CheckResult:
    return CheckResult("NPU", None, f"{TORCH_NPU} cannot be imported: {why}")


def _late(work: NpuWork, limit_s: float) -> Examined:
    if work is NpuWork.STOP:
        return _firmware(False, _cannot_abort(f"the stop of device 0 has not come back within {limit_s:.0f} s"))
    said = f"{TORCH_NPU} was not imported, or found no device, within {limit_s:.0f} s; the process that tried was ended"
    return Examined((CheckResult("NPU", False, said),), ended=True)


def _dead(work: NpuWork, code: int, words: str) -> Examined:
    """Say how a process has ended, in its own last words."""
    lines = [line.strip() for line in words.splitlines() if line.strip()] or ["it said nothing"]
    last = next((line for line in lines if line.startswith("what():")), lines[-1])
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    if work is NpuWork.STOP:
        return _firmware(False, _cannot_abort(f"the process that stopped device 0 has ended ({how}): {last}"))
    advice = (
        "From 2.10 on torch-npu does so beside a torch with CUDA's packages: install the CPU build of torch, of the "
        "same release"
        if ABORTS in words
        else "Mend the installation of torch, torch-npu and CANN first"
    )
    said = f"{TORCH_NPU} ends a process that imports it ({how}): {last}. {advice}"
    return Examined((CheckResult("NPU", False, said),), ended=True)


if __name__ == "__main__":
    asked, path = NpuWork(sys.argv[1]), Path(sys.argv[2])
    path.write_bytes(msgspec.json.encode(look(os.environ) if asked is NpuWork.LOOK else try_stop()))
