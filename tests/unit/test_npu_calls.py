"""A torch-npu that lacks a call is refused at start, with the version that has it."""

from types import SimpleNamespace
from typing import Any

import pytest

from midstep.devices.npu_calls import CALLS, require
from midstep.protocol.errors import ConfigurationError


def library() -> Any:
    """Return something with every call, as torch-npu has them."""

    class Event:
        def __init__(self, enable_timing: bool = False) -> None: ...

        def record(self, stream: object = None) -> None: ...

        def recorded_time(self) -> int:
            return 0

        def synchronize(self) -> None: ...

    def restart_device(device_id: int, rebuild_all_resources: bool = False) -> None: ...

    recovery = SimpleNamespace(
        check_npu_tensor_is_safe=lambda tensor_obj: True, update_npu_tensor_to_safe=lambda tensor_obj: None
    )

    def switch_nic(ranks: list[int], useBackup: list[bool]) -> bool:  # noqa: N803
        return True

    npu = SimpleNamespace(
        Event=Event,
        restart_device=restart_device,
        _recovery=recovery,
        device_count=lambda: 1,
        current_device=lambda: 0,
        set_device=lambda device: None,
        synchronize=lambda device=None: None,
        stop_device=lambda device_id: 0,
        check_uce_in_memory=lambda device_id: 0,
        get_device_name=lambda device_name=None: "Ascend910B2",
        empty_cache=lambda: None,
        get_allocator_backend=lambda: "native",
        get_rng_state=lambda device="npu": None,
        _comm_switch_nic=switch_nic,
        stress_detect=lambda: 0,
        set_rng_state=lambda new_state, device="npu": None,
    )
    return SimpleNamespace(
        npu=npu, distributed=SimpleNamespace(reinit_process_group=lambda group=None, rebuild_link=True: group)
    )


def test_a_library_with_every_call_is_taken() -> None:
    require(library(), "2.13.0")


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_a_missing_call_is_named_with_its_use_and_the_version_that_has_it(call: Any) -> None:
    old = library()
    parent, _, name = call.name.rpartition(".")
    owner = old
    for part in parent.split("."):
        owner = getattr(owner, part)
    delattr(owner, name)
    with pytest.raises(ConfigurationError) as caught:
        require(old, "2.1.0")
    assert call.name in str(caught.value)
    assert call.use in str(caught.value)
    assert "torch-npu 2.1.0 lacks" in str(caught.value)
    assert f"torch-npu {call.since} or newer" in str(caught.value)


def test_a_call_without_a_parameter_that_midstep_passes_is_missing() -> None:
    old = library()
    old.npu.restart_device = lambda device_id: None
    with pytest.raises(ConfigurationError, match=r"npu\.restart_device\(device_id, rebuild_all_resources\)"):
        require(old, "2.1.0")
