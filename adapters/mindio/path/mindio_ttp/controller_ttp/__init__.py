"""What an agent of the cluster calls, beside or instead of a training script."""

from midstep.adapters.mindio.controller import (
    tft_destroy_controller,
    tft_init_controller,
    tft_notify_controller_change_strategy,
    tft_notify_controller_dump,
    tft_notify_controller_on_global_rank,
    tft_notify_controller_prepare_action,
    tft_notify_controller_stop_train,
    tft_query_high_availability_switch,
    tft_register_mindx_callback,
    tft_start_controller,
)

__all__ = [
    "tft_destroy_controller",
    "tft_init_controller",
    "tft_notify_controller_change_strategy",
    "tft_notify_controller_dump",
    "tft_notify_controller_on_global_rank",
    "tft_notify_controller_prepare_action",
    "tft_notify_controller_stop_train",
    "tft_query_high_availability_switch",
    "tft_register_mindx_callback",
    "tft_start_controller",
]
