"""Everything in this folder needs MindSpeed-LLM: its own program under `midstep run --mindio`, undisturbed and hurt."""

import contextlib
import json
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from ..cann.environment import make, variables
from ..cann.releases import chosen
from ..chaos.jobs import ROOMY, Job
from ..chaos.losing import closing
from ..versions.environments import NotHere
from .environment import SUITE, VARIABLES, checkouts, missing, put_together, release_of

HERE = Path(__file__).parent
PATIENCE_S = 600.0
ITERATIONS = 18
POLICY: dict[str, Any] = {
    **ROOMY,
    "stall": {"grace_s": 120.0, "suspended_s": 120.0},
    "deadlines": {**ROOMY["deadlines"], "quiesce_s": 60.0, "start_s": 240.0, "rejoin_s": 120.0},
}
MODEL = (HERE / "options.txt").read_text().split()
Fault = tuple[int, int, str, str]  # rank, iteration, moment, how: see stand_in/faults.py
Saved = dict[str, Any]


class Programs(NamedTuple):
    """A MindSpeed-LLM with Megatron-LM in it, and its MindSpeed."""

    program: Path
    mindspeed: Path

    def has(self, module: str) -> bool:
        """Return whether there is this module of its high availability: releases differ in them."""
        return (self.program / "mindspeed_llm" / "core" / "high_availability" / f"{module}.py").is_file()


class Device(NamedTuple):
    """What ranks compute on: midstep's name of it, what is imported first, the Python, and variables."""

    name: str
    path: tuple[Path, ...]
    python: str
    variables: Mapping[str, str]


class Training(NamedTuple):
    """One job, and where it saves."""

    job: Job
    saves: Path

    def saved(self) -> Saved:
        """Return what the last checkpoint holds, by file.

        All but the program's arguments, and a count of operations that MindSpeed-LLM begins again.
        """
        place = self.saves / f"iter_{ITERATIONS:07d}"
        found: Saved = {}
        for path in sorted(place.rglob("*.pt")):
            content = torch.load(path, weights_only=False, pickle_module=_PICKLES)
            if isinstance(content, dict):
                content = {key: each for key, each in content.items() if key not in _OTHERWISE}
            found[str(path.relative_to(place))] = content
        assert found, f"nothing is in {place}"
        return found


class _Unknown:
    """Something of the program's arguments, which are not compared."""

    def __init__(self, *args: Any) -> None:
        pass


def _of_device(storage: Any, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: Any) -> torch.Tensor:
    """Return a tensor that torch-npu has saved."""
    tensor: torch.Tensor = torch._utils._rebuild_tensor(storage, offset, size, stride)  # type: ignore[no-untyped-call]
    return tensor


class _Unpickler(pickle.Unpickler):
    """Reads checkpoints without Megatron-LM and torch-npu."""

    def find_class(self, module: str, name: str, /) -> Any:
        """Find what is installed."""
        if name == "_rebuild_npu_tensor":
            return _of_device
        try:
            return super().find_class(module, name)
        except ImportError:
            return _Unknown


_PICKLES: Any = SimpleNamespace(Unpickler=_Unpickler, load=pickle.load, __name__="pickle")
_OTHERWISE = frozenset({"args", "num_floating_point_operations_so_far"})
Start = Callable[..., Training]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder, the hook gets those of all folders."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("mindspeed")
            item.add_marker(pytest.mark.timeout(1800))


@pytest.fixture(scope="session", autouse=True)
def _mindspeed() -> None:
    if missing():
        pytest.skip(f"{', '.join(VARIABLES)} name checkouts (docs/mindio.md), and {missing()} are not set")
    SUITE.require()


@pytest.fixture(scope="session", params=checkouts(), ids=lambda each: release_of(each[0]))
def programs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Programs:
    """Each of the checkouts that are named."""
    program, mindspeed = request.param
    return Programs(put_together(program, tmp_path_factory.mktemp("programs") / program.name), mindspeed)


@contextlib.contextmanager
def surroundings(programs: Programs, device: Device) -> Iterator[pytest.MonkeyPatch]:
    """Set what a job of MindSpeed-LLM's is started with."""
    path = [*device.path, HERE / "common", programs.mindspeed, programs.program, os.environ.get("PYTHONPATH", "")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", device.python)
        for name, value in device.variables.items():
            patch.setenv(name, value)
        patch.setenv("PYTHONPATH", os.pathsep.join(str(each) for each in path if each))
        patch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        yield patch


def starting(keep: Callable[[Job], Job], programs: Programs, factory: pytest.TempPathFactory, device: Device) -> Start:
    """Return what starts pretrain_gpt.py on a device."""

    def start(
        ranks: int,
        layout: Sequence[str] = (),
        faults: Sequence[Fault] = (),
        *,
        folder: Path | None = None,
        gate: bool = False,
        **options: Any,
    ) -> Training:
        root = factory.mktemp("job")
        (root / "records").mkdir()
        if gate:
            (root / "records" / "gate").touch()
        saves = root / "saved" if folder is None else folder
        arguments = ["--train-iters", str(ITERATIONS), "--save", str(saves), "--load", str(saves), *MODEL, *layout]
        if "--save-interval" not in layout:
            arguments += ["--save-interval", "1000"]
        with surroundings(programs, device) as patch:
            patch.setenv("MIDSTEP_TEST_FAULTS", json.dumps(faults))
            patch.setenv("MIDSTEP_TEST_RECORDS", str(root / "records"))
            given = {"nodes": 1, "ranks_per_node": ranks, "policy": POLICY, "device": device.name, **options}
            script = programs.program / "pretrain_gpt.py"
            job = Job(root, script=script, arguments=arguments, options=["--mindio"], **given)
        keep(job)
        return Training(job, saves)

    return start


def on_cann() -> Device:
    """Return torch-npu's own wheel over the fake CANN, on top of this environment; skip the test where it is not."""
    try:
        place = make(chosen(SUITE.release), Path(sys.executable))
    except NotHere as reason:
        pytest.skip(f"no torch-npu on the fake CANN: {reason}")
    return Device("npu", (HERE / "on_cann",), str(place / "bin" / "python"), variables(place))


@pytest.fixture(scope="session", params=["stand-in", "cann"])
def device(request: pytest.FixtureRequest) -> Device:
    """The fake device as torch_npu, and torch-npu's own."""
    if request.param == "cann":
        return on_cann()
    return Device("cpu", (HERE / "stand_in", HERE.parent / "chaos" / "mindio"), sys.executable, {})


@pytest.fixture(scope="session")
def start(device: Device, programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Start pretrain_gpt.py on each device, and kill what is left of it when the tests are over."""
    with closing() as keep:
        yield starting(keep, programs, tmp_path_factory, device)


@pytest.fixture(scope="session")
def calm(start: Start) -> Callable[..., Saved]:
    """Return what trains a layout undisturbed, each once, and returns what it saves at its end."""
    known: dict[tuple[int, ...], Saved] = {}

    def trained(ranks: int, layout: Sequence[str] = ()) -> Saved:
        key = (ranks, *map(hash, layout))
        if key not in known:
            training = start(ranks, layout)
            assert training.job.wait(PATIENCE_S) == 0, training.job.said()
            assert not training.job.report()["incidents"], training.job.said()
            known[key] = training.saved()
        return known[key]

    return trained
