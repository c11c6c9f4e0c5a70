"""`midstep doctor`: what would work on this machine, and a self-test of a recovery on its devices."""

import contextlib
import os
import platform
import sys
import tempfile
from collections.abc import Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import click
import msgspec
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version
from rich.text import Text

from ..devices.kinds import CUDA, FAKE, NPU, device_kind
from ..protocol.types import ArmedFault, FaultAction, InjectionPoint, Rung
from .demo import (
    REPEATABLE,
    WIDTH,
    DemoRun,
    Scenario,
    by_step,
    device_scenarios,
    perform,
    process_scenarios,
    say_problems,
)
from .display.terminal import Terminal
from .frame import Command
from .npu_examination import CheckResult, Examined
from .npu_examination import examine as examine_npus

SELF_TEST_STEPS, ACCEPTANCE_STEPS = 20, 100
TOY_RANKS, FAKE_RANKS, MOST_RANKS = 2, 4, 8
INSTEAD = "`midstep demo --mindspore` trains with MindSpore, and `midstep demo` says what it needs"
SHARED = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}  # two ranks on one GPU, where there is but one
PYTHON = "Python"
MIDSTEP, TORCH, TORCH_NPU, MEGATRON = "midstep", "torch", "torch-npu", "megatron-core"
MINDSPORE, NUMPY = "mindspore", "numpy"
# midstep's own checks ran with these together: Python, torch, megatron-core (docs/versions.md).
RUN_TOGETHER = (
    ("3.10", "2.6.0", "0.12.1"),
    ("3.10", "2.7.1", "0.12.1"),
    ("3.11", "2.13.0", "0.16.1"),
    ("3.12", "2.9.1", "0.14.0"),
    ("3.13", "2.15.0", "0.16.1"),
)
# As above, without torch: Python, mindspore.
RUN_WITH_MINDSPORE = (("3.11", "2.10.0"),)


@click.command("doctor", cls=Command)
@click.option(
    "--acceptance", is_flag=True, help="The long test: every process fault, on up to 8 devices (ten minutes)."
)
@click.option("--look-only", is_flag=True, help="Look, and try nothing: on a machine with a job on its devices.")
def command(*, acceptance: bool, look_only: bool) -> None:
    """Look for NPUs and GPUs, their libraries and settings, and recover a small training job on what is there.

    On a machine with NPUs, or else with GPUs, the self-test uses them: a job of two ranks loses one, its device is
    stopped and cleaned, the communicators are rebuilt, the state is handed over, and all numbers must be those of an
    undisturbed run. On one without it says so, and does the same on the fake device, with faults of the device
    besides.

    NPU 0 is stopped once before that, by a process of its own, as only that shows whether its firmware can abort
    tasks. By CANN's source an abort is of what the calling process has on the device, and leaves others alone; this was
    never seen on an NPU. The self-test takes the devices and their memory, too: give --look-only where a job trains.

    Exit code 0 if all of it went as it should, 1 otherwise.
    """
    console = Terminal(width=WIDTH)
    environment = {**device_kind(NPU).environment, **os.environ}
    with console.status("looking for devices and their libraries"):  # torch is imported; on a terminal only
        found = examine(environment, stop=not look_only)
        on_gpus, gpus = ([], 0) if found.ended else examine_gpus(os.environ)
    npus = found.devices if found.devices >= TOY_RANKS else 0
    kind, devices = NPU if npus else CUDA if gpus else FAKE, npus or gpus
    findings = [*found.findings, *on_gpus]
    for finding in findings:
        word, colour = {True: ("ok", "green"), False: ("not ok", "red"), None: ("", "")}[finding.good]
        console.print(Text.assemble((f"{word:7}", colour), f" {finding.what}: {finding.said}"), soft_wrap=True)
    bad = any(finding.good is False for finding in findings)
    if found.ended:
        console.print("torch imports torch-npu by itself, so no process that trains would live: nothing is tried")
        sys.exit(1)
    if find_spec(TORCH) is None and not look_only:
        console.print(f"the self-test trains with torch, which is not installed; {INSTEAD}")
        look_only = True
    if look_only or (bad and devices):
        sys.exit(1 if bad else 0)
    if not devices:
        console.print(
            "no NPU or GPU can be used here: the self-test runs on the fake device, and proves the logic only"
        )
    with tempfile.TemporaryDirectory(prefix="midstep-doctor-") as directory:
        steps = ACCEPTANCE_STEPS if acceptance else SELF_TEST_STEPS
        problems = perform(plan(kind, devices, steps, acceptance=acceptance), Path(directory), steps, None, console)
    sys.exit(1 if say_problems(problems, console) else 0)


def plan(kind: str, devices: int, steps: int, *, acceptance: bool) -> DemoRun:
    """Return the job of the self-test: one node, as its ranks take the devices by their local rank."""
    ranks = min(devices, MOST_RANKS) if devices else FAKE_RANKS
    policy, faked = ("npu.yaml" if kind == NPU else "demo.yaml"), (device_scenarios(steps) if kind == FAKE else ())
    if acceptance:
        scenarios = by_step(process_scenarios(steps, ranks), faked)
    else:
        ranks = TOY_RANKS
        kill, link = _kill(steps), _broken_link(steps)
        scenarios = (kill, link) if kind == FAKE else (kill,)
    environment = SHARED if kind == CUDA else REPEATABLE
    return DemoRun(
        scenarios, nodes=1, ranks_per_node=ranks, spares=0, device=kind, policy=policy, environment=environment
    )


def _kill(steps: int) -> Scenario:
    fault = ArmedFault(1, FaultAction.KILL, InjectionPoint.COLLECTIVE, step=int(steps * 0.4), incarnation=1)
    return Scenario("kill -9 of rank 1", fault, Rung.RECOVER_IN_PLACE)


def _broken_link(steps: int) -> Scenario:
    fault = ArmedFault(0, FaultAction.LINK_DOWN, InjectionPoint.COLLECTIVE, step=int(steps * 0.7))
    return Scenario("a broken link of rank 0", fault, Rung.RETRY_STEP)


def examine(environment: Mapping[str, str], *, stop: bool) -> Examined:
    """Return what is found here, NPUs and what belongs to them. `stop`: device 0 may be stopped."""
    mindspore = find_spec(MINDSPORE) is not None
    releases = (_version("torch", needed=not mindspore), _version("torch_npu", needed=False), *_releases())
    npus = examine_npus(environment, stop=stop)
    return msgspec.structs.replace(npus, findings=releases + npus.findings)


def examine_gpus(environment: Mapping[str, str]) -> tuple[list[CheckResult], int]:
    """Return what is found of GPUs, and how many ranks can use them: two may share one, where NCCL allows it."""
    if find_spec(TORCH) is None:
        return [], 0
    import torch

    if torch.version.cuda is None:
        return [CheckResult("GPU", None, f"torch {torch.__version__} is built without CUDA")], 0
    from ..communicators.nccl import SHARED_GPU_FROM, nccl_version
    from ..devices.cuda import problems

    gpus = torch.cuda.device_count()
    names = ", ".join(sorted({torch.cuda.get_device_name(index) for index in range(gpus)}))
    findings = [CheckResult("GPU", gpus > 0, f"{gpus} found{f': {names}' if gpus else ''}")]
    version = nccl_version()
    shares = version[:2] >= SHARED_GPU_FROM
    said = (
        "ranks may share a GPU" if shares else "each rank needs a GPU of its own (from NCCL 2.30 on they may share one)"
    )
    findings.append(CheckResult("NCCL", True, f"{'.'.join(map(str, version))}: {said}"))
    wrong = problems({**device_kind(CUDA).environment, **environment})
    findings += [CheckResult("environment", False, line) for line in wrong]
    return findings, gpus if gpus >= TOY_RANKS else TOY_RANKS * gpus * shares


def _releases() -> list[CheckResult]:
    """Return what is installed and does not fit together, and whether all of it has been run together."""
    installed = {PYTHON: platform.python_version()}
    of_mindspore = (MINDSPORE, NUMPY) if find_spec(MINDSPORE) is not None else ()
    for name in (MIDSTEP, TORCH, TORCH_NPU, MEGATRON, *of_mindspore):
        with contextlib.suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    wrong = misfits(installed)
    if wrong:
        return [CheckResult("releases", False, line) for line in wrong]
    what = ", ".join(f"{name} {version}" for name, version in installed.items())
    if was_run(installed):
        return [CheckResult("releases", True, f"{what}: midstep's checks ran with these")]
    text = f"{what}: nothing is known against these, but midstep's checks did not run with them"
    return [CheckResult("releases", None, text)]


def _version(package: str, *, needed: bool) -> CheckResult:
    try:
        return CheckResult(package, True, metadata.version(package))
    except metadata.PackageNotFoundError:
        return CheckResult(package, False if needed else None, "not installed")


class Fact(NamedTuple):
    """`package` in one of `releases` needs `other` in one of `needed`."""

    package: str
    releases: SpecifierSet
    other: str
    needed: SpecifierSet
    because: str


FACTS = (
    Fact(MIDSTEP, SpecifierSet(), PYTHON, SpecifierSet(">=3.10"), "older ones lack the syntax"),
    Fact(MIDSTEP, SpecifierSet(), TORCH, SpecifierSet(">=2.6"), "older ones were never tried"),
    Fact(MIDSTEP, SpecifierSet(), TORCH_NPU, SpecifierSet(">=2.6"), "older ones lack calls of a recovery"),
    Fact(MIDSTEP, SpecifierSet(), MEGATRON, SpecifierSet(">=0.12.1"), "older ones were never tried"),
    Fact(
        MINDSPORE, SpecifierSet(), NUMPY, SpecifierSet("<2"), "2.10.0 was tried with numpy 2 and fails in its operators"
    ),
    Fact(MEGATRON, SpecifierSet(">=0.12"), TORCH, SpecifierSet(">=2.6"), "its package asks for it"),
    Fact(TORCH_NPU, SpecifierSet("<2.7"), PYTHON, SpecifierSet("<3.12"), "it is published for Python 3.10 and 3.11"),
)


def misfits(installed: Mapping[str, str]) -> list[str]:
    """Return a sentence for each pair that does not fit. `installed`: versions by name, PYTHON among the names."""
    versions = {name: version for name, text in installed.items() if (version := _parsed(text)) is not None}
    found = []
    for fact in FACTS:
        this, other = versions.get(fact.package), versions.get(fact.other)
        if this is None or other is None or not fact.releases.contains(this, prereleases=True):
            continue
        if not fact.needed.contains(other.public, prereleases=True):
            found.append(f"{fact.package} {this} needs {fact.other} {fact.needed}, and this is {other}: {fact.because}")
    torch, npu = versions.get(TORCH), versions.get(TORCH_NPU)
    if torch is not None and npu is not None and torch.release[:3] != npu.release[:3]:
        of = ".".join(map(str, npu.release[:3]))
        found.append(
            f"{TORCH_NPU} {npu} is built for {TORCH} {of}, and this is {torch}: install the release of one number"
        )
    return found


def was_run(installed: Mapping[str, str]) -> bool:
    """Say whether midstep's checks have run with this Python, torch or MindSpore, and megatron-core if any."""
    versions = {name: _parsed(text) for name, text in installed.items()}
    if TORCH not in versions:
        return any(
            _same(versions.get(PYTHON), python, 2) and _same(versions.get(MINDSPORE), mindspore, 3)
            for python, mindspore in RUN_WITH_MINDSPORE
        )
    return any(
        _same(versions.get(PYTHON), python, 2)
        and _same(versions.get(TORCH), torch, 3)
        and (MEGATRON not in versions or _same(versions[MEGATRON], megatron, 3))
        for python, torch, megatron in RUN_TOGETHER
    )


def _same(version: Version | None, text: str, parts: int) -> bool:
    return version is not None and version.release[:parts] == Version(text).release[:parts]


def _parsed(text: str) -> Version | None:
    try:
        return Version(text)
    except InvalidVersion:  # a build of somebody's own: nothing is known about it
        return None
