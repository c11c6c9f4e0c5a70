"""`tft_exception_handler`: the training function is called again after a fault, and MindIO's patterns of exceptions."""

import functools
import gc
import re
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from .handlers import HANDLERS, HandlerKind
from .processor import FRAMEWORKS, driver, get_mindio_export_version, tft_wait_repair_action
from .update_times import get_l2_hbm_error_time, tft_can_do_uce_repair
from .values import NextAction, ReportState

Result = TypeVar("Result")
OTHER = "OTHER"
_CAN_REPAIR, _CANNOT_REPAIR = "HBM MULTI BIT ECC can repair", "HBM MULTI BIT ECC can't repair"
_CODE = re.compile(r"\bdevice error type\s*([0-9a-f]+)\b", re.IGNORECASE)


def _of_two(text: str) -> str:
    found = get_l2_hbm_error_time(text)
    return _CAN_REPAIR if found is not None and tft_can_do_uce_repair(found) else _CANNOT_REPAIR


# A pattern, and what its text becomes; then what that is to `tft_report_error`. In the order in which they are tried.
_readings: dict[str, Callable[[str], str]] = {"HBM MULTI BIT ECC": _of_two}
_states: dict[str, str] = {
    "FORCE STOP": "RS_NORMAL",
    "UCE ERROR": "RS_UCE",
    _CAN_REPAIR: "RS_UCE",
    _CANNOT_REPAIR: "RS_UCE_CORRUPTED",
    "ARF FINISH": "RS_PREREPAIR_FINISH",
    "STEP FINISH": "RS_STEP_FINISH",
    "HCCL OP RETRY FAILED": "RS_HCCL_FAILED",
    "SUSPECT REMOTE ERROR": "RS_HCCL_FAILED",
    "UB LINK ERROR": "RS_HCCL_FAILED",
    "HCCS LINK ERROR": "RS_HCCL_FAILED",
    OTHER: "RS_UNKNOWN",
}
_WITHOUT_CLEAN = frozenset({"ARF FINISH", "STEP FINISH"})
for _pattern in _states:
    if _pattern not in {OTHER, _CAN_REPAIR, _CANNOT_REPAIR}:
        _readings[_pattern] = lambda text, found=_pattern: found  # type: ignore[misc]


def tft_register_exception_handler(fault_pattern: str, fault_type: str, fault_handle: Callable[[str], str]) -> None:
    """Add a pattern: `fault_handle(text)` names it, `fault_type` is the name of a `ReportState`."""
    _states[fault_pattern] = fault_type
    _readings[fault_pattern] = fault_handle


def tft_exception_handler(func: Callable[..., Result]) -> Callable[..., Result]:
    """Call a training function again after each fault that this process survives.

    Its arguments are the `args` of the handlers. Raises what it raised when this process is to be replaced.
    """
    if not callable(func):
        raise TypeError("tft_exception_handler takes a function")

    @functools.wraps(func)
    def train(*args: Any, **kwargs: Any) -> Result:
        given: Any = args if get_mindio_export_version() in FRAMEWORKS else list(args)
        HANDLERS.arguments = given
        processor = driver()
        if not processor.is_replacement:
            processor.begin()
        while True:
            try:
                result = func(*given, **kwargs)
            except Exception as error:
                _report_and_wait(error)
            else:
                if processor.finish():
                    return result
            _free_memory()

    return train


def reading_of(error: BaseException) -> tuple[str, ReportState]:
    """Return which pattern fits an exception, and what it is to be reported as."""
    text = str(error)
    if isinstance(error, RuntimeError):
        for pattern, read in _readings.items():
            if pattern in text:
                name = read(text)
                return name, ReportState[_states[name]]
    return OTHER, ReportState.RS_UNKNOWN


def _report_and_wait(error: Exception) -> None:
    """Report, and return when training continues. Raises `error` when it does not."""
    name, state = reading_of(error)
    processor = driver()
    code = _CODE.search(str(error))
    processor.report(state, code.group(1) if code else "", error if name == OTHER else None)
    if name not in _WITHOUT_CLEAN and not processor.await_clean():
        _leave(error)
    _free_memory()
    if tft_wait_repair_action() != NextAction.RETRY.value:
        _leave(error)


def _leave(error: Exception) -> None:
    HANDLERS.call(HandlerKind.EXIT)
    raise error


def _free_memory() -> None:
    gc.collect()
    library = sys.modules.get("torch_npu")
    if library is not None and hasattr(library.npu, "empty_cache"):
        library.npu.empty_cache()
