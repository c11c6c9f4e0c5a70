"""NVIDIA GPUs: what can be said without one. What a GPU does is in tests/cuda, which needs one."""

import ast
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from midstep.communicators.device_group import DeviceGroup
from midstep.communicators.nccl import NcclCommunicator, sharing_problem
from midstep.communicators.process_group import BackendRegistration
from midstep.devices import cuda as module
from midstep.devices import device_named, kinds
from midstep.devices.base import Damage
from midstep.devices.cuda import CudaDevice, problems, train_small_step
from midstep.devices.kinds import CUDA, DeviceKind, device_kind, device_names
from midstep.launch.job import Start, policy_of
from midstep.policies.schema import Policy, default_policy
from midstep.protocol.errors import ConfigurationError, RecoveryError
from midstep.protocol.types import FaultAction
from midstep.testing.played_nccl import PlayedNccl

STUB = Path(torch.__file__).parent / "_C" / "_distributed_c10d.pyi"
SCRIPT = str(Path(__file__))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> CudaDevice:
    """A device whose calls into torch.cuda return at once, as on an idle GPU."""
    for name in ("synchronize", "empty_cache", "set_device"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    return CudaDevice()


def never_ends(_: object) -> None:
    """Wait as long as a kernel that does not end."""
    time.sleep(5)


def is_lost(_: object) -> None:
    """Raise as every call does in a lost context."""
    raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore words")


# --- the device -------------------------------------------------------------------------------------------------------


def test_an_idle_device_is_clean_after_a_stop(device: CudaDevice) -> None:
    device.stop()
    assert device.stopped
    assert device.clean() is Damage.NONE
    assert not device.stopped


def test_a_kernel_that_does_not_end_replaces_its_process(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can end it from outside, and a process must not train on beside it."""
    monkeypatch.setattr(torch.cuda, "synchronize", never_ends)
    monkeypatch.setattr(module, "DRAIN_S", 0.1)
    device.stop()
    with pytest.raises(RecoveryError, match="GPU 0 is still busy"):
        device.clean()


def test_a_lost_context_is_found_when_the_device_is_cleaned(
    device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", is_lost)
    device.stop()
    with pytest.raises(RecoveryError, match="cannot be used any more: CUDA error: an illegal memory access"):
        device.clean()


def test_a_device_that_was_not_stopped_is_not_waited_for(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", is_lost)
    assert device.clean() is Damage.NONE


@pytest.mark.parametrize(("local_rank", "index"), [(0, 0), (1, 1), (2, 0), (3, 1)])
def test_ranks_take_the_gpus_in_turn_and_share_them_where_there_are_too_few(
    device: CudaDevice, local_rank: int, index: int
) -> None:
    device.prepare(local_rank, {}, 1.0)
    assert device.torch_device == torch.device("cuda", index)


def test_without_a_gpu_a_process_says_so(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigurationError, match="no GPU can be used here"):
        device.prepare(0, {}, 1.0)


def test_a_torch_that_is_not_built_for_cuda_is_named() -> None:
    if torch.version.cuda is not None:
        pytest.skip("this torch is built for CUDA")
    with pytest.raises(ConfigurationError, match=r"built for CUDA, and torch .* is not"):
        device_named(CUDA)


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}, "torch ends every process that has lost a peer"),
        ({"TORCH_NCCL_ENABLE_MONITORING": "1"}, "whose watchdog waits"),
        ({"TORCH_NCCL_BLOCKING_WAIT": "1"}, "could not be ended before its timeout"),
    ],
)
def test_a_setting_under_which_a_gpu_cannot_be_recovered_is_named(
    device: CudaDevice, environment: dict[str, str], named: str
) -> None:
    with pytest.raises(ConfigurationError, match=named):
        device.prepare(0, environment, 1.0)


def test_the_variables_that_the_launcher_sets_are_right() -> None:
    assert problems(device_kind(CUDA).environment) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_are_loaded_without_a_random_number_and_an_import(dtype: torch.dtype) -> None:
    """A thread does so beside the script, whose numbers must not change, and whose imports may be half done."""
    before, modules = torch.get_rng_state(), set(sys.modules)
    train_small_step(torch.device("cpu"), dtype)
    assert torch.equal(torch.get_rng_state(), before)
    assert set(sys.modules) == modules


def test_kernels_are_loaded_as_soon_as_the_device_is_taken(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a thread, for each dtype that models train in: the script does not wait for it."""
    loaded, last = list[tuple[torch.device, torch.dtype]](), threading.Event()

    def note(taken: torch.device, dtype: torch.dtype) -> None:
        assert threading.current_thread() is not threading.main_thread()
        loaded.append((taken, dtype))
        if dtype is torch.bfloat16:
            last.set()

    monkeypatch.setattr(module, "train_small_step", note)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    device.prepare(1, {}, 1.0)
    assert last.wait(10)
    assert loaded == [(torch.device("cuda", 1), torch.float32), (torch.device("cuda", 1), torch.bfloat16)]


def test_a_fault_that_a_gpu_cannot_have_is_refused_with_those_that_it_can(device: CudaDevice) -> None:
    with pytest.raises(ConfigurationError, match="possible here: out_of_memory, task_queue_dead"):
        device.inject(FaultAction.MEMORY_TEMPORARY)


# --- its communicator -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "gpus", "version", "shared", "fits"),
    [
        (2, 2, (2, 21, 5), None, True),
        (4, 1, (2, 30, 7), "1", True),
        (4, 1, (2, 30, 7), None, False),
        (4, 1, (2, 28, 9), "1", False),
        (3, 2, (3, 0, 0), "1", True),
    ],
)
def test_ranks_share_a_gpu_from_one_release_of_nccl_on_if_that_is_asked_for(
    ranks: int, gpus: int, version: tuple[int, ...], shared: str | None, fits: bool
) -> None:
    problem = sharing_problem(ranks, gpus, version, shared)
    assert (problem is None) is fits
    assert problem is None or "communicator.name to gloo" in problem


def test_an_abort_returns_at_once_and_releases_in_threads() -> None:
    """NCCL needs half a second to let go of what it holds; threads that wait for the device need to go on before."""
    communicator, released = played()
    began_s = time.monotonic()
    communicator.abort("a peer is gone")
    assert time.monotonic() - began_s < 0.5
    assert communicator.failed == "a peer is gone"
    assert not released.is_set()
    assert released.wait(5)


def test_what_loaded_nccl_is_released_while_the_groups_are_linked() -> None:
    """Each process makes a communicator of its own first; the release of that one is waited for by nothing."""
    communicator, released = played()
    began_s = time.monotonic()
    communicator._load()
    assert time.monotonic() - began_s < 0.5
    assert not released.is_set()
    assert released.wait(5)


def test_a_group_of_a_dead_generation_refuses_collectives() -> None:
    communicator, _ = played()
    (group,) = communicator._groups
    communicator.abort("a peer is gone")
    with pytest.raises(Exception, match="a peer is gone"):
        group.start("allreduce", False, False, ([torch.ones(1)],))


def played() -> tuple[NcclCommunicator, threading.Event]:
    """Return a communicator with one group, whose abort takes its time, and what is set when that is done."""
    released = threading.Event()

    class Slow(PlayedNccl):
        def abort(self, backend: Any) -> None:
            time.sleep(1)
            released.set()

    communicator = NcclCommunicator(Slow(), BackendRegistration("midstep_played_here"))
    options = SimpleNamespace(global_ranks_in_group=[0, 1], group_rank=0, timeout=None)
    group: DeviceGroup = communicator.make_group(options)
    group.connect(SimpleNamespace(), object(), communicator._scope)
    return communicator, released


def test_what_is_asked_of_torchs_nccl_is_there_as_its_stubs_say() -> None:
    """The stubs of torch's CUDA builds and of the CPU build are one file. Run with each release that is promised."""
    (kind,) = [
        node
        for node in ast.walk(ast.parse(STUB.read_text()))
        if isinstance(node, ast.ClassDef) and node.name == "ProcessGroupNCCL"
    ]
    stubs = ast.unparse(kind)
    made = next(node for node in kind.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    assert [each.arg for each in made.args.args] == ["self", "store", "rank", "size", "options"]
    assert "def abort(self)" in stubs
    assert "is_high_priority_stream: bool" in stubs
    assert hasattr(torch.distributed.ProcessGroup.BackendType, "NCCL")


# --- a third device is one file and an entry point --------------------------------------------------------------------


class AnotherDevice:
    """A device of another package."""

    name = "another"


KIND = DeviceKind("another", f"{__name__}:AnotherDevice", device_kind("cpu").communicators)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Have a package be installed that names a device in its entry points."""

    def install(value: str) -> None:
        found = EntryPoint("another", value, kinds.GROUP)
        monkeypatch.setattr(kinds, "entry_points", lambda group: [found] if group == kinds.GROUP else [])
        kinds._kinds.cache_clear()

    yield install
    monkeypatch.undo()
    kinds._kinds.cache_clear()


def test_a_device_of_another_package_is_found_by_its_entry_point(installed: Callable[[str], None]) -> None:
    """A policy may name it, and a training process gets it: nothing else of midstep has to know of it."""
    installed(f"{__name__}:KIND")
    assert "another" in device_names()
    assert device_named("another").name == "another"
    assert policy_of(Start((SCRIPT,), device="another")).device == "another"


@pytest.mark.parametrize("value", [f"{__name__}:SCRIPT", "nowhere.at.all:KIND"])
def test_an_entry_point_that_is_no_kind_of_device_is_refused_with_its_value(
    installed: Callable[[str], None], value: str
) -> None:
    installed(value)
    with pytest.raises(ConfigurationError, match="the device another"):
        device_names()


# --- the policy of a job on GPUs --------------------------------------------------------------------------------------


def test_a_job_that_names_no_policy_gets_the_times_of_its_device() -> None:
    """NCCL takes a second to link up, which the default policy does not give it."""
    policy = policy_of(Start((SCRIPT,), device=CUDA))
    assert (policy.device, policy.communicator.name) == (CUDA, "nccl")
    assert policy.communicator.link_up_s > default_policy().communicator.link_up_s
    assert policy.deadlines.rejoin_s > policy.communicator.link_up_s * policy.communicator.link_up_attempts


def test_a_policy_for_the_device_is_taken_as_it_is() -> None:
    own = Policy(device=CUDA, communicator=default_policy().communicator)
    assert policy_of(Start((SCRIPT,), device=CUDA, policy=own)).communicator.name == "gloo"
