"""Faults of the fake CANN, under the names that `midstep inject` has for them.

Each comes as on a device: in an operator that torch-npu has queued, with the code and the text of CANN, and torch-npu
makes of it what it makes of it.
"""

# torch.npu is there once torch_npu was imported, which no type checker sees.
# mypy: disable-error-code="attr-defined, import-not-found, unused-ignore"

import ctypes
import gc
from collections.abc import Callable
from functools import partial

import torch

from midstep.protocol.faults import FaultAction

# Codes of CANN and of HCCL.
MEMORY, MULTI_BIT, SUSPECT_MEMORY, LINK, REMOTE = 507053, 507054, 507055, 507056, 507057
RETRY_FAILED, LOST, REFUSED, INTERNAL = 507904, 507010, 500002, 4
DAMAGED_BYTES = 64
MORE_THAN_THERE_IS = 1 << 37

_CANN = ctypes.CDLL("libascendcl.so")
_CANN.fake_cann_damage.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_CANN.fake_cann_used_bytes.restype = ctypes.c_size_t
_OUTSIDE = ctypes.create_string_buffer(DAMAGED_BYTES)


def used_bytes() -> int:
    """Return how much of the device's memory is in use."""
    return int(_CANN.fake_cann_used_bytes())


def inject(action: FaultAction) -> None:
    """Inject a fault; raises where an operator would."""
    _ACTIONS[action]()


def refuse_operator() -> None:
    """Have the host refuse the next operator, with an error that torch-npu knows no way back from."""
    _CANN.fake_cann_fail_call(REFUSED)


def _operator_fails(code: int) -> None:
    _CANN.fake_cann_fail_operator(code)
    torch.zeros(1, device="npu")
    torch.npu.synchronize()


def _parameter_damaged(code: int) -> None:
    found = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    parameters = [each for each in found if each.device.type == "npu" and each.is_leaf and each.requires_grad]
    _CANN.fake_cann_damage(max(parameters, key=lambda each: each.nbytes).data_ptr(), DAMAGED_BYTES)
    _operator_fails(code)


def _unused_damaged() -> None:
    # With a segment of its own. What is free in a segment with tensors in it torch-npu takes for a tensor's.
    unused = torch.empty(1 << 24, device="npu")
    address = unused.data_ptr()
    del unused
    _CANN.fake_cann_damage(address, DAMAGED_BYTES)
    _operator_fails(MEMORY)


def _outside_damaged() -> None:
    _CANN.fake_cann_damage(ctypes.addressof(_OUTSIDE), DAMAGED_BYTES)
    _operator_fails(MEMORY)


_ACTIONS: dict[FaultAction, Callable[[], object]] = {
    FaultAction.MEMORY_TEMPORARY: _unused_damaged,
    FaultAction.MEMORY_PERSISTENT: partial(_parameter_damaged, MEMORY),
    FaultAction.MEMORY_OUTSIDE: _outside_damaged,
    FaultAction.MULTI_BIT: partial(_parameter_damaged, MULTI_BIT),
    FaultAction.SUSPECT_MEMORY: partial(_operator_fails, SUSPECT_MEMORY),
    FaultAction.OUT_OF_MEMORY: partial(torch.empty, MORE_THAN_THERE_IS, device="npu"),
    FaultAction.LINK_DOWN: partial(_CANN.fake_cann_fail_collective, RETRY_FAILED),
    FaultAction.LINK_BROKEN: _CANN.fake_cann_break_link,
    FaultAction.LINK_UP_FAILS: _CANN.fake_cann_fail_link_up,
    FaultAction.REMOTE: partial(_CANN.fake_cann_fail_collective, REMOTE),
    FaultAction.HANG_COLLECTIVE: _CANN.fake_cann_hang_collective,
    FaultAction.TASK_QUEUE_DEAD: partial(_CANN.fake_cann_fail_call, INTERNAL),
    FaultAction.DROP_DEVICE: partial(_operator_fails, LOST),
}
