"""When the last update began and ended by the device's clock: whether an older memory error can have spread."""

import re
import sys

_TIME_US = re.compile(r"time (?:us=|is )\s*(\d+)")
_times: dict[str, int] = {}


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
