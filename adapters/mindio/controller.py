"""`mindio_ttp.controller_ttp`: midstep's controller is a process of its own, so these start and steer nothing.

What an agent of the cluster would tell MindIO's controller, midstep hears from its own detectors (docs/faults.md), and
decides by the policy. A request that it would have to refuse is answered with an error, and is never merely ignored.
"""

import logging
from collections.abc import Callable
from typing import Any

from .values import RET_ERROR, RET_OK

ACTIONS = ("report_fault_ranks", "report_stop_complete", "report_strategies", "report_result")

_log = logging.getLogger("midstep")
_callbacks: dict[str, Callable[..., Any]] = {}


def tft_init_controller(
    rank: int, world_size: int, enable_local_copy: bool, enable_arf: bool = False, enable_zit: bool = False
) -> None:
    """Do nothing: the job has its controller."""


def tft_start_controller(bind_ip: str, port: int, enable_tls: bool = True, tls_info: str = "") -> None:
    """Do nothing: the job has its controller, and its lines are encrypted."""


def tft_destroy_controller() -> None:
    """Do nothing: the controller ends with the job."""


def tft_query_high_availability_switch() -> bool:
    """Return True: a rank of `midstep run` is always under a controller."""
    return True


def tft_register_mindx_callback(action: str, func: Callable[..., Any]) -> int:
    """Keep a callback of the cluster's agent; return 1 for an action that MindIO does not have."""
    if action not in ACTIONS or not callable(func):
        return RET_ERROR
    _callbacks[action] = func
    return RET_OK


def tft_notify_controller_stop_train(
    fault_ranks: dict[int, int], stop_type: str = "stop", timeout: int | None = None
) -> int:
    """Return 1: midstep hears of faults by its detectors, and stops by its policy."""
    return _not_steered("tft_notify_controller_stop_train", "midstep detect, or midstep inject")


def tft_notify_controller_on_global_rank(fault_ranks: dict[int, int], time: int = 1) -> int:
    """Return 1: midstep knows where its ranks are."""
    return _not_steered("tft_notify_controller_on_global_rank", "midstep detect")


def tft_notify_controller_prepare_action(action: str, fault_ranks: dict[int, int] | None = None) -> int:
    """Return 1: a node is left by `midstep detect` and the policy's `sub_health`."""
    return _not_steered("tft_notify_controller_prepare_action", "midstep detect, with sub_health in the policy")


def tft_notify_controller_change_strategy(strategy: str, params: str = "") -> int:
    """Return 1: the ladder of the policy decides."""
    return _not_steered("tft_notify_controller_change_strategy", "the ladder of the policy")


def tft_notify_controller_dump() -> int:
    """Return 1: a job is ended by `midstep stop`."""
    return _not_steered("tft_notify_controller_dump", "midstep stop")


def _not_steered(name: str, instead: str) -> int:
    _log.warning("%s has no effect under midstep: use %s (docs/mindio.md)", name, instead)
    return RET_ERROR
