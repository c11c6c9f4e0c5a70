"""MindIO's enumerations and return codes, whose conventions hold, and when updates began and ended.

The enumerations have MindIO's values: scripts compare numbers, and pass them on. MindSpore's conventions differ from
those of others in when handlers run and what they get. The times of an update, by the device's clock, say whether an
older memory error can have spread.
"""

import enum
import os
import re
import sys
from collections.abc import Mapping

RET_OK = 0
RET_ERROR = 1
RET_NO_REBUILD = 2  # of the clean handler: the damaged memory is no tensor's
MINDSPORE_VARIABLE = "MINDIO_FOR_MINDSPORE"
_SWITCHES = "MS_ENABLE_TFT"
_TIME_US = re.compile(r"time (?:us=|is )\s*(\d+)")
_times: dict[str, int] = {}


class ReportState(enum.Enum):
    """The state of a training process: the argument of `tft_report_error`."""

    RS_NORMAL = 0
    RS_RETRY = 1
    RS_UCE = 2
    RS_UCE_CORRUPTED = 3
    RS_HCCL_FAILED = 4
    RS_INIT_FINISH = 5
    RS_PREREPAIR_FINISH = 6
    RS_STEP_FINISH = 7
    RS_UNKNOWN = 8


class RepairType(enum.Enum):
    """A rank's part in a repair, in `repair_info["repair_type"]`."""

    RT_SEND = 0
    RT_UCE_HIGHLEVEL = 1
    RT_UCE_LOWLEVEL = 2
    RT_RECV_REPAIR = 3
    RT_ROLLBACK = 4
    RT_LOAD_CKPT = 5
    RT_LOAD_REBUILD = 6


class NextAction(enum.Enum):
    """The next action of the training thread."""

    RETRY = 0
    EXIT = 1


class OptimizerType(enum.Enum):
    """The optimizer that a replica is of: the place in the list that `tft_set_optimizer_replica` takes."""

    ATTENTION = 0
    MOE = 1


class RepairStrategy(str, enum.Enum):
    """The answers of `tft_get_repair_type`."""

    RETRY = "retry"
    RECOVER = "recover"
    DUMP = "dump"
    NONE = "unknow"


def is_mindspore(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether MindSpore's conventions hold, by MindIO's variable."""
    return environment.get(MINDSPORE_VARIABLE, "").lower() in {"true", "1"}


def pauses_after_update() -> bool:
    """Return whether MindSpore calls `tft_pause_train` after each update, by the variable that switches it on.

    It resets its optimizer's flag before that call, and the update is committed there. Without it the flag is reset
    after `tft_end_updating_os`, which commits then.
    """
    switched = os.environ.get(_SWITCHES, "")
    return any(each in switched for each in ("ARF:1", "TSP:1"))


def tft_set_update_start_time(start_time: int | None = None) -> None:
    """Note that an update begins; None: now, by the device's clock."""
    _times["start"] = _now_us() if start_time is None else start_time


def tft_set_update_end_time(end_time: int | None = None) -> None:
    """Note that an update has ended; None: now, by the device's clock."""
    _times["end"] = _now_us() if end_time is None else end_time


def tft_can_do_uce_repair(hbm_error_time: int, start_time: int | None = None, end_time: int | None = None) -> bool:
    """Return whether an error of this time has spread into no update: it came after the last one began."""
    start = _times.get("start") if start_time is None else start_time
    end = _times.get("end") if end_time is None else end_time
    if not (hbm_error_time and start and end):
        return False
    return max(start, end) < hbm_error_time or start < hbm_error_time < end


def get_l2_hbm_error_time(log_string: str) -> int | None:
    """Return the time stamp of the error that a text names; None if it names none."""
    found = _TIME_US.search(log_string)
    return None if found is None else int(found.group(1))


def _now_us() -> int:
    """Return the device's time; 0 where there is no torch-npu, or an old one."""
    library = sys.modules.get("torch_npu")
    if library is None:
        return 0
    event = library.npu.Event(enable_timing=True)
    event.record()
    return int(event.recorded_time()) if hasattr(event, "recorded_time") else 0
