"""Each setting under which an NPU cannot be recovered is named, with the way out."""

import pytest

from midstep.devices.kinds import NPU_DEFAULTS, device_kind
from midstep.devices.npu_environment import doubts, problems

GOOD = {"HCCL_ASYNC_ERROR_HANDLING": "0"}


def test_what_midstep_run_sets_is_all_that_is_needed() -> None:
    assert problems(NPU_DEFAULTS, 1.5, "native") == []
    assert device_kind("npu").environment == device_kind("fake").environment == NPU_DEFAULTS
    assert device_kind("cpu").environment == {}


@pytest.mark.parametrize(
    ("changes", "named", "advice"),
    [
        ({"HCCL_ASYNC_ERROR_HANDLING": "1"}, "HCCL_ASYNC_ERROR_HANDLING=1", "Set it to 0"),
        ({"TORCH_HCCL_ASYNC_ERROR_HANDLING": "2"}, "TORCH_HCCL_ASYNC_ERROR_HANDLING=2", "Set it to 0"),
        ({"HCCL_DESYNC_DEBUG": "1"}, "HCCL_DESYNC_DEBUG=1", "Unset it"),
        ({"TORCH_HCCL_DESYNC_DEBUG": "1"}, "TORCH_HCCL_DESYNC_DEBUG=1", "Unset it"),
        ({"HCCL_CONNECT_TIMEOUT": "60"}, "HCCL_CONNECT_TIMEOUT=60", "Unset it"),
        ({"HCCL_CONNECT_TIMEOUT": "soon"}, "HCCL_CONNECT_TIMEOUT=soon", "Unset it"),
        ({"PYTORCH_NO_NPU_MEMORY_CACHING": "1"}, "PYTORCH_NO_NPU_MEMORY_CACHING=1", "Unset it"),
        ({"RANK_TABLE_FILE": "/user/hccl.json"}, "RANK_TABLE_FILE=/user/hccl.json", "Unset it"),
        ({"ROOTINFO_SUBCOMM_ENABLE": "1"}, "ROOTINFO_SUBCOMM_ENABLE=1", "Unset it"),
        ({"HCCL_ZERO_COPY": "1"}, "HCCL_ZERO_COPY=1", "Unset it"),
    ],
)
def test_a_wrong_setting_is_named_with_the_way_out(changes: dict[str, str], named: str, advice: str) -> None:
    (line,) = problems({**GOOD, **changes}, 1.5, "native")
    assert named in line
    assert advice in line


def test_a_watchdog_that_nobody_switched_off_is_named() -> None:
    (line,) = problems({}, 1.5, "native")
    assert "HCCL_ASYNC_ERROR_HANDLING is not set" in line


def test_a_link_up_that_hccl_would_give_up_first_is_named() -> None:
    (line,) = problems(GOOD, 300.0, "native")
    assert "link_up_s" in line
    assert problems({**GOOD, "HCCL_CONNECT_TIMEOUT": "600"}, 300.0, "native") == []


def test_an_allocator_that_cannot_locate_errors_is_named() -> None:
    (line,) = problems(GOOD, 1.5, "pluggable")
    assert "allocator is pluggable" in line


def test_all_problems_are_told_at_once() -> None:
    wrong = {"HCCL_ASYNC_ERROR_HANDLING": "3", "HCCL_CONNECT_TIMEOUT": "0", "PYTORCH_NO_NPU_MEMORY_CACHING": "1"}
    assert len(problems(wrong, 1.5, "other")) == 4


def test_a_link_up_that_hccl_would_hold_for_an_hour_is_warned_of() -> None:
    """It is no reason to refuse: without a fault in a link-up nothing of it is noticed."""
    wanted = {**GOOD, "HCCL_CONNECT_TIMEOUT": "3600"}
    (line,) = doubts(wanted, 120.0)
    assert "HCCL_CONNECT_TIMEOUT=3600" in line
    assert "Set it to 120" in line
    assert problems(wanted, 120.0, "native") == doubts({**GOOD, "HCCL_CONNECT_TIMEOUT": "3600"}, 1800.0) == []
    assert doubts(NPU_DEFAULTS, 1.5) == []


def test_a_fixed_port_of_link_ups_is_warned_of() -> None:
    (line,) = doubts({"HCCL_IF_BASE_PORT": "60000"}, 120.0)
    assert "HCCL_IF_BASE_PORT=60000" in line
