"""When an update began and ended, by the device's clock."""

from midstep.adapters.mindio.update_times import (
    get_l2_hbm_error_time,
    tft_can_do_uce_repair,
    tft_set_update_end_time,
    tft_set_update_start_time,
)

__all__ = [
    "get_l2_hbm_error_time",
    "tft_can_do_uce_repair",
    "tft_set_update_end_time",
    "tft_set_update_start_time",
]
