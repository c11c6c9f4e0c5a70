"""A fake of the module `torch_npu`: the same names and signatures (tests/contract/npu), with a fake chip behind them.

It behaves as torch-npu's sources say. Where midstep has not run on an NPU, it tests the logic of a recovery and not the
device. It adds `inject`, which injects faults.
"""

import gc
import os
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from ..protocol.environment import INCARNATION, STARTED_S
from ..protocol.types import FaultAction
from . import fake_chip as texts
from .fake_chip import CHIP, told

__version__ = "2.13.0"
DEVICE = torch.device("cpu")
default_generators = (torch.Generator(),)  # a script that draws on the device draws from here, and not from torch's
_thread = threading.local()
_LATE_US = 150_000  # age of an error that is reported late
_STRESS_SIDE = 256
HELD_S = texts.HELD_S  # not part of torch-npu, of which device_busy.py knows how long it takes
_RUN, _STOP = 1, 2  # what torch-npu sets for the watchdog


def device_count() -> int:
    """As torch_npu.npu.device_count."""
    return 1


def current_device() -> int:
    """As torch_npu.npu.current_device: the calling thread's, and 0 in one that has not chosen."""
    return int(getattr(_thread, "device", 0))


def set_device(device: int) -> None:
    """As torch_npu.npu.set_device."""
    if not CHIP.taken and int(os.environ.get(INCARNATION, "1")) > 1:
        CHIP.free_s = float(os.environ[STARTED_S]) + HELD_S
    CHIP.taken = True
    CHIP.index = _thread.device = device


def synchronize(device: int | None = None) -> None:
    """As torch_npu.npu.synchronize: raises what has gone wrong in the queue."""
    CHIP.synchronize()


def get_device_name(device_name: object = None) -> str:
    """As torch_npu.npu.get_device_name."""
    return "Ascend910B2"


def get_allocator_backend() -> str:
    """As torch_npu.npu.get_allocator_backend."""
    return "native"


def empty_cache() -> None:
    """As torch_npu.npu.empty_cache: memory that nothing uses goes back to the device. Refused while it is stopped."""
    CHIP.check()
    CHIP.cache_emptied()


def get_rng_state(device: int | str | torch.device = "npu") -> torch.Tensor:
    """As torch_npu.npu.get_rng_state."""
    return default_generators[0].get_state()


def set_rng_state(new_state: torch.Tensor, device: int | str | torch.device = "npu") -> None:
    """As torch_npu.npu.set_rng_state."""
    default_generators[0].set_state(new_state)


def stop_device(device_id: int) -> int:
    """As torch_npu.npu.stop_device: aborts the queue; a thread that waits for it raises FORCE STOP."""
    CHIP.stop()
    for backend in _backends():
        backend.set_watchdog_status(_STOP)
    return 0


def restart_device(
    device_id: int, rebuild_all_resources: bool = False, disable_tensor_unsafe_check: bool = False
) -> None:
    """As torch_npu.npu.restart_device: repairs damaged memory, without its content, and takes work again."""
    if rebuild_all_resources and not disable_tensor_unsafe_check:
        mark_all_npu_tensor_unsafe(device_id)
        CHIP.check_unsafe = True
    CHIP.restart()
    for backend in _backends():
        backend.clear_workmeta_list()
        backend.set_watchdog_status(_RUN)


def _comm_switch_nic(ranks: list[int], useBackup: list[bool]) -> bool:  # noqa: N803
    """As torch_npu.npu._comm_switch_nic: tells all communicators; False if one has refused."""
    rank = int(os.environ["RANK"])
    answers = [each._set_switch_nic_comm(rank, len(ranks), ranks, useBackup) for each in _backends()]
    return all(answers)


def stress_detect(detect_type: str = "aic") -> int:
    """As torch_npu.npu.stress_detect, of the cores only: 0 well, 1 not to be executed."""
    CHIP.check()
    if detect_type != "aic":
        return 1
    side = torch.full((_STRESS_SIDE, _STRESS_SIDE), 1.0, dtype=torch.float64)
    return 0 if bool(((side @ side) == _STRESS_SIDE).all()) else 2


def check_uce_in_memory(device_id: int) -> int:
    """As torch_npu.npu.check_uce_in_memory: 0 nothing, 1 outside the allocator's memory, 2 temporary, 3 persistent.

    Of the last error that there was, however long ago: nothing makes it forget one, except the next. It empties the
    cache, so memory that was temporary once is not the allocator's any more when it is asked about again.
    """
    if CHIP.multi_bit:
        return 3
    if CHIP.corrupted_outside:
        return 1
    if CHIP.corrupted:
        CHIP.unsafe += CHIP.corrupted
        return 3
    temporary = CHIP.corrupted_unused
    CHIP.cache_emptied()
    return 2 if temporary else 0


def check_npu_tensor_is_safe(tensor_obj: torch.Tensor) -> bool:
    """As torch_npu.npu._recovery.check_npu_tensor_is_safe."""
    return not CHIP.is_unsafe(tensor_obj)


def update_npu_tensor_to_safe(tensor_obj: torch.Tensor) -> None:
    """As torch_npu.npu._recovery.update_npu_tensor_to_safe."""
    CHIP.make_safe(tensor_obj)


def mark_all_npu_tensor_unsafe(device: int) -> None:
    """As torch_npu.npu._recovery.mark_all_npu_tensor_unsafe."""
    CHIP.unsafe += [(tensor.data_ptr(), tensor.nbytes) for tensor in _tensors() if tensor.nbytes]


def reinit_process_group(group: Any = None, rebuild_link: bool = True) -> Any:
    """As torch_npu.distributed.reinit_process_group.

    With `rebuild_link` the communicator of `group` (default: the world) is dropped; the next collective builds another.
    Without it, those of all groups are resumed as they are, whatever `group` says.
    """
    group = group if group is not None else c10d._world.default_pg
    if not rebuild_link:
        for backend in _backends():
            backend.resume_hccl_comm(current_device())
        return None
    if "hccl" in c10d._world.pg_map[group][0]:
        group._get_backend(DEVICE)._delete_tcpstore_key()
        group._get_backend(DEVICE).abort_hccl_comm("reinit")
    return group


class Event:
    """As torch_npu.npu.Event, as far as its time goes: microseconds of this machine."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self._at_us = 0

    def record(self, stream: object = None) -> None:
        """Record the time."""
        self._at_us = _now_us()

    def synchronize(self) -> None:
        """Wait for the queue."""
        CHIP.check()

    def recorded_time(self) -> int:
        """Return the time that was recorded."""
        return self._at_us


def inject(action: FaultAction) -> None:
    """Inject a fault, in the train thread; raises RuntimeError where an operator would. Not part of torch-npu."""
    _FAULT_ACTIONS[action]()


def _backends() -> list[Any]:
    groups = [group for group in c10d._pg_map if DEVICE in getattr(group, "_device_types", ())]
    backends = [group._get_backend(DEVICE) for group in groups]
    return [backend for backend in backends if hasattr(backend, "abort_hccl_comm")]


def _tensors() -> list[torch.Tensor]:
    # By type first: to ask some of torch's deprecated objects for their class is a warning.
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    return [tensor for tensor in found if tensor.layout == torch.strided]


def _now_us() -> int:
    return time.monotonic_ns() // 1000


def _corrupt_parameter() -> None:
    parameters = [found for found in _tensors() if found.is_leaf and found.requires_grad and found.is_contiguous()]
    CHIP.forget_error()
    if parameters:
        CHIP.corrupt(max(parameters, key=lambda found: found.nbytes))
    else:
        CHIP.corrupted_unused = True


def _raises(text: str) -> Callable[[], None]:
    def fail() -> None:
        raise RuntimeError(told(text))

    return fail


def _temporary() -> None:
    CHIP.forget_error()
    CHIP.corrupted_unused = True
    raise RuntimeError(told(texts.UCE))


def _persistent() -> None:
    _corrupt_parameter()
    raise RuntimeError(told(texts.UCE))


def _outside() -> None:
    CHIP.forget_error()
    CHIP.corrupted_outside = True
    raise RuntimeError(told(texts.UCE))


def _multi_bit() -> None:
    _corrupt_parameter()
    CHIP.multi_bit = True
    raise RuntimeError(told(texts.MULTI_BIT_QUEUED.format(time_us=_now_us())))


def _multi_bit_late() -> None:
    CHIP.forget_error()
    CHIP.multi_bit = True
    raise RuntimeError(told(texts.MULTI_BIT.format(time_us=_now_us() - _LATE_US)))


def _broken() -> None:
    CHIP.link_broken = True
    raise RuntimeError(told(texts.RETRY_FAILED))


def _link_up_fails() -> None:
    CHIP.link_up_fails = True


def _hang() -> None:
    CHIP.hang_next = True


def _queue_dies() -> None:
    CHIP.queue_dies = True


def _drop() -> None:
    CHIP.lost = True
    CHIP.check()


_FAULT_ACTIONS: dict[FaultAction, Callable[[], None]] = {
    FaultAction.MEMORY_TEMPORARY: _temporary,
    FaultAction.MEMORY_PERSISTENT: _persistent,
    FaultAction.MEMORY_OUTSIDE: _outside,
    FaultAction.SUSPECT_MEMORY: _raises(texts.SUSPECT_MEMORY),
    FaultAction.MULTI_BIT: _multi_bit,
    FaultAction.MULTI_BIT_LATE: _multi_bit_late,
    FaultAction.UNSAFE_TENSOR: _raises(texts.UNSAFE),
    FaultAction.OUT_OF_MEMORY: _raises(texts.OUT_OF_MEMORY),
    FaultAction.LINK_DOWN: _raises(texts.RETRY_FAILED),
    FaultAction.LINK_BROKEN: _broken,
    FaultAction.LINK_UP_FAILS: _link_up_fails,
    FaultAction.REMOTE: _raises(texts.REMOTE),
    FaultAction.HANG_COLLECTIVE: _hang,
    FaultAction.TASK_QUEUE_DEAD: _queue_dies,
    FaultAction.DROP_DEVICE: _drop,
}

npu = SimpleNamespace(
    device_count=device_count,
    current_device=current_device,
    set_device=set_device,
    synchronize=synchronize,
    empty_cache=empty_cache,
    get_device_name=get_device_name,
    get_allocator_backend=get_allocator_backend,
    stop_device=stop_device,
    restart_device=restart_device,
    check_uce_in_memory=check_uce_in_memory,
    _comm_switch_nic=_comm_switch_nic,
    stress_detect=stress_detect,
    get_rng_state=get_rng_state,
    set_rng_state=set_rng_state,
    default_generators=default_generators,
    Event=Event,
    _recovery=SimpleNamespace(
        check_npu_tensor_is_safe=check_npu_tensor_is_safe,
        update_npu_tensor_to_safe=update_npu_tensor_to_safe,
        mark_all_npu_tensor_unsafe=mark_all_npu_tensor_unsafe,
    ),
)
distributed = SimpleNamespace(reinit_process_group=reinit_process_group)
