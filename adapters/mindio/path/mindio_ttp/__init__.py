"""MindIO's names over midstep, for the ranks of `midstep run --mindio`, and for TaskD. See docs/mindio.md.

MindIO's package has modules of these names. They hold nothing but names, so they are made here, in one table. A process
of TaskD's own trains nothing: it gets the names that it calls, and imports no torch.
"""

import os
import sys
from importlib import import_module
from types import ModuleType

from midstep.adapters.mindio import controller, values

_CONTROLLER = "tft_init_controller tft_start_controller tft_destroy_controller"
_HANDLERS = (
    "tft_register_clean_handler tft_register_decrypt_handler tft_register_exit_handler "
    "tft_register_rebuild_group_handler tft_register_rename_handler tft_register_repair_handler "
    "tft_register_rollback_handler tft_register_save_ckpt_handler tft_register_stop_handler "
    "tft_register_stream_sync_handler tft_register_zit_downgrade_rebuild_handler "
    "tft_register_zit_upgrade_rebuild_handler tft_register_zit_upgrade_repair_handler "
    "tft_register_zit_upgrade_rollback_handler"
)
_FRAMEWORK = (
    f"{_CONTROLLER} {_HANDLERS} set_mindio_export_version tft_can_do_uce_repair tft_destroy_processor "
    "tft_end_updating_os tft_exception_handler tft_get_reboot_type tft_get_repair_step tft_get_repair_type "
    "tft_init_processor tft_is_reboot_node tft_pause_train tft_register_exception_handler tft_report_error "
    "tft_report_load_ckpt_step tft_reset_limit_step tft_set_dp_group_info tft_set_optimizer_replica tft_set_step_args "
    "tft_start_copy_os tft_start_processor tft_start_updating_os tft_wait_next_action OptimizerType RepairType "
    "ReportState"
)
_NAMES = {
    # What a training script calls, and the same by its other address, with a few more.
    "framework_ttp": _FRAMEWORK,
    "framework_ttp.ttp_decorator": f"{_FRAMEWORK} get_device get_mindio_export_version tft_wait_repair_action",
    # What an agent of the cluster calls, beside or instead of a training script.
    "controller_ttp": (
        f"{_CONTROLLER} tft_notify_controller_change_strategy tft_notify_controller_dump "
        "tft_notify_controller_on_global_rank tft_notify_controller_prepare_action tft_notify_controller_stop_train "
        "tft_query_high_availability_switch tft_register_mindx_callback"
    ),
    # When an update began and ended, by the device's clock.
    "utils": ("get_l2_hbm_error_time tft_can_do_uce_repair tft_set_update_end_time tft_set_update_start_time"),
}
_OF_TASKD = "controller_ttp"
_HOMES: list[ModuleType] = [controller, values]
if controller.job_named(os.environ) is None:
    _HOMES += [import_module(f"midstep.adapters.mindio.{each}") for each in ("processor", "handlers")]
else:
    _NAMES = {_OF_TASKD: _NAMES[_OF_TASKD]}
_RENAMED = {"Action": values.NextAction}

__all__: list[str] = []


def _make(name: str, names: str) -> None:
    module = ModuleType(f"{__name__}.{name}", __doc__)
    module.__path__ = []
    for each in names.split():
        home = next(home for home in _HOMES if hasattr(home, each))
        setattr(module, each, getattr(home, each))
    if "ReportState" in names:
        vars(module).update(_RENAMED)
    vars(module)["__all__"] = [each for each in vars(module) if not each.startswith("_")]
    sys.modules[module.__name__] = module
    parent = sys.modules[module.__name__.rpartition(".")[0]]
    setattr(parent, name.rpartition(".")[2], module)


for _name, _names in _NAMES.items():
    _make(_name, _names)
