"""Every call into torch-npu that midstep makes, as data. No other call is made.

The NPU device checks at its start that the installed version has them. The fake device has the same. The contract tests
check that published packages have them, with these parameters.
"""

import inspect
from typing import Any

import msgspec

from ..protocol.errors import ConfigurationError

OLDEST = "2.6.0"  # the first version for a torch that midstep supports; every call below is in it


class Call(msgspec.Struct, frozen=True):
    """A function, method or class of `torch_npu`. `parameters` are those that midstep passes, in order."""

    name: str
    use: str
    parameters: tuple[str, ...] = ()
    since: str = OLDEST


CALLS = (
    Call("npu.device_count", "know how many devices there are"),
    Call("npu.current_device", "know its own device"),
    Call("npu.set_device", "take the device of its local rank", ("device",)),
    Call("npu.synchronize", "wait for the device before a step is committed", ("device",)),
    Call("npu.stop_device", "abort what the device is executing", ("device_id",)),
    Call("npu.restart_device", "make a stopped device usable again", ("device_id", "rebuild_all_resources")),
    Call("npu.check_uce_in_memory", "learn which memory an error has damaged", ("device_id",)),
    Call("npu.get_device_name", "know whether communicators can be resumed on the chip", ("device_name",)),
    Call("npu.empty_cache", "give memory back that an interrupted step has left"),
    Call("npu.get_allocator_backend", "see that memory errors can be located"),
    Call("npu.Event", "read the device's own clock", ("enable_timing",)),
    Call("npu.Event.record", "read the device's own clock", ("stream",)),
    Call("npu.Event.recorded_time", "read the device's own clock"),
    Call("npu.Event.synchronize", "read the device's own clock"),
    Call("npu.get_rng_state", "capture the device's random numbers", ("device",)),
    Call("npu.set_rng_state", "put the device's random numbers back", ("new_state", "device")),
    Call("npu._recovery.check_npu_tensor_is_safe", "find the tensors that an error has damaged", ("tensor_obj",)),
    Call("npu._recovery.update_npu_tensor_to_safe", "use a tensor again once it is repaired", ("tensor_obj",)),
    Call("npu._comm_switch_nic", "have communicators use other network cards", ("ranks", "useBackup")),
    Call("npu.stress_detect", "test the device's cores under load"),
    Call("distributed.reinit_process_group", "rebuild communicators in place", ("group", "rebuild_link")),
)

# What torch-npu's own Python calls on the backend of a process group meanwhile. midstep's groups pass these calls on,
# and the fake's backend has them too.
BACKEND_METHODS = (
    "abort_hccl_comm",
    "clear_workmeta_list",
    "resume_hccl_comm",
    "_set_switch_nic_comm",
    "set_watchdog_status",
    "_delete_tcpstore_key",
)


def require(library: Any, version: str) -> None:
    """Check that `library` (torch_npu, or a module with its calls) has every call.

    Called at the start of each training process. Raises ConfigurationError with the version that has what is missing.
    """
    missing = [call for call in CALLS if not _has(library, call)]
    if missing:
        needed = max((call.since for call in missing), key=_as_numbers)
        lines = [f"{call.name}({', '.join(call.parameters)}), to {call.use}" for call in missing]
        raise ConfigurationError(
            f"torch-npu {version} lacks {'; '.join(lines)}. Install torch-npu {needed} or newer, for your torch."
        )


def _has(library: Any, call: Call) -> bool:
    found = library
    for part in call.name.split("."):
        found = getattr(found, part, None)
        if found is None:
            return False
    try:
        known = inspect.signature(found).parameters
    except (TypeError, ValueError):  # compiled; only its name can be seen
        return True
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in known.values())
    return takes_any or all(name in known for name in call.parameters)


def _as_numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())
