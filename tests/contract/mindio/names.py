"""The names of mindio_ttp: parameters, defaults, values of enumerations, and who imports which.

Facts of MindIO's published sources (Ascend/mind-cluster, commit 22bb3d98, component/mindio/tft/src) and of what calls
it. A test holds the table against the sources where a checkout is named, and always against midstep's package.
"""

MIND_CLUSTER_COMMIT = "22bb3d987bc0208c3eb7395e222b661276133c58"
MINDSPEED_LLM_COMMIT = "c77308a14bfcb1aa7ca61da9c1aa24a893cb1b91"

_HANDLER = "func, ctx=None"
_TTP = "mindio_ttp.framework_ttp"
_DECORATOR = f"{_TTP}.ttp_decorator"
_UTILS = "mindio_ttp.utils"
_CONTROLLER = "mindio_ttp.controller_ttp"

# The functions of each module with their parameters and defaults.
OF_FRAMEWORK = {
    "tft_init_processor": (
        "rank, world_size, enable_local_copy, enable_tls=True, tls_info='', enable_uce=True, enable_arf=False, "
        "enable_zit=False"
    ),
    "tft_start_processor": "master_ip, port, local_ip=''",
    "tft_destroy_processor": "",
    "tft_is_reboot_node": "",
    "tft_get_reboot_type": "",
    "tft_set_optimizer_replica": "rank, replica_info",
    "tft_set_dp_group_info": "rank, dp_rank_list",
    "tft_set_step_args": "args",
    "tft_start_copy_os": "",
    "tft_start_updating_os": "backup_step=-1",
    "tft_end_updating_os": "step",
    "tft_pause_train": "cur_step",
    "tft_report_error": "error_type, error_code=''",
    "tft_report_load_ckpt_step": "step",
    "tft_reset_limit_step": "",
    "tft_wait_next_action": "",
    "tft_get_repair_step": "",
    "tft_get_repair_type": "",
    "tft_exception_handler": "func",
    "tft_register_exception_handler": "fault_pattern, fault_type, fault_handle",
    "tft_register_save_ckpt_handler": _HANDLER,
    "tft_register_rename_handler": _HANDLER,
    "tft_register_exit_handler": _HANDLER,
    "tft_register_stop_handler": _HANDLER,
    "tft_register_clean_handler": _HANDLER,
    "tft_register_repair_handler": _HANDLER,
    "tft_register_rollback_handler": _HANDLER,
    "tft_register_rebuild_group_handler": _HANDLER,
    "tft_register_stream_sync_handler": _HANDLER,
    "tft_register_zit_upgrade_rollback_handler": _HANDLER,
    "tft_register_zit_upgrade_repair_handler": _HANDLER,
    "tft_register_zit_upgrade_rebuild_handler": _HANDLER,
    "tft_register_zit_downgrade_rebuild_handler": _HANDLER,
    "tft_register_decrypt_handler": "decryptor",
    "set_mindio_export_version": "framework_type",
}
OF_CONTROLLER = {
    "tft_init_controller": "rank, world_size, enable_local_copy, enable_arf=False, enable_zit=False",
    "tft_start_controller": "bind_ip, port, enable_tls=True, tls_info=''",
    "tft_destroy_controller": "",
    "tft_query_high_availability_switch": "",
}
OF_CLUSTER_AGENT = {
    "tft_register_mindx_callback": "action, func",
    "tft_notify_controller_stop_train": "fault_ranks, stop_type='stop', timeout=None",
    "tft_notify_controller_on_global_rank": "fault_ranks, time=1",
    "tft_notify_controller_prepare_action": "action, fault_ranks=None",
    "tft_notify_controller_change_strategy": "strategy, params=''",
    "tft_notify_controller_dump": "",
}
OF_UTILS = {
    "tft_set_update_start_time": "start_time=None",
    "tft_set_update_end_time": "end_time=None",
    "tft_can_do_uce_repair": "hbm_error_time, start_time=None, end_time=None",
    "get_l2_hbm_error_time": "log_string",
}
ONLY_OF_DECORATOR = {
    "tft_wait_repair_action": "",
    "get_device": "",
    "get_mindio_export_version": "",
}
SIGNATURES = {
    _TTP: {
        **OF_FRAMEWORK,
        "tft_can_do_uce_repair": OF_UTILS["tft_can_do_uce_repair"],
        **{name: OF_CONTROLLER[name] for name in OF_CONTROLLER if name != "tft_query_high_availability_switch"},
    },
    _DECORATOR: {**OF_FRAMEWORK, **ONLY_OF_DECORATOR},
    _UTILS: OF_UTILS,
    _CONTROLLER: {**OF_CONTROLLER, **OF_CLUSTER_AGENT},
}

VALUES = {
    "ReportState": {
        "RS_NORMAL": 0,
        "RS_RETRY": 1,
        "RS_UCE": 2,
        "RS_UCE_CORRUPTED": 3,
        "RS_HCCL_FAILED": 4,
        "RS_INIT_FINISH": 5,
        "RS_PREREPAIR_FINISH": 6,
        "RS_STEP_FINISH": 7,
        "RS_UNKNOWN": 8,
    },
    "RepairType": {
        "RT_SEND": 0,
        "RT_UCE_HIGHLEVEL": 1,
        "RT_UCE_LOWLEVEL": 2,
        "RT_RECV_REPAIR": 3,
        "RT_ROLLBACK": 4,
        "RT_LOAD_CKPT": 5,
        "RT_LOAD_REBUILD": 6,
    },
    "Action": {"RETRY": 0, "EXIT": 1},
    "OptimizerType": {"ATTENTION": 0, "MOE": 1},
}

# Where the sources lie in a checkout of Ascend/mind-cluster, and which of the tables above is of which.
SOURCES = "component/mindio/tft/src/python"
HOMES = {
    f"{SOURCES}/framework_ttp/ttp_decorator.py": {**OF_FRAMEWORK, **ONLY_OF_DECORATOR},
    f"{SOURCES}/controller_ttp/ttp_controller.py": OF_CONTROLLER,
    f"{SOURCES}/controller_ttp/ttp_mindx_api.py": OF_CLUSTER_AGENT,
    f"{SOURCES}/utils/uce_utils.py": OF_UTILS,
}
# The C++ enumerations that give the values, and in which order they name them.
ENUMERATIONS = {
    "component/mindio/tft/src/csrc/framework/processor/processor.h": "ReportState",
    "component/mindio/tft/src/csrc/common/common_constants.h": "RepairType",
}

# What those that call mindio_ttp take from it, module by module.
_OF_MINDSPORE = (
    "tft_destroy_controller tft_destroy_processor tft_init_controller tft_start_controller tft_init_processor "
    "tft_start_processor tft_is_reboot_node tft_report_error tft_get_reboot_type tft_wait_next_action "
    "tft_register_stream_sync_handler tft_get_repair_type tft_reset_limit_step tft_set_optimizer_replica "
    "tft_register_save_ckpt_handler tft_register_rename_handler tft_register_exit_handler tft_register_stop_handler "
    "tft_register_clean_handler tft_register_repair_handler tft_register_rebuild_group_handler tft_pause_train "
    "tft_end_updating_os tft_set_step_args tft_get_repair_step tft_can_do_uce_repair Action RepairType ReportState"
)
IMPORTED: dict[str, dict[str, str]] = {
    "MindSpeed-LLM c77308a1": {
        _TTP: (
            "tft_exception_handler tft_init_controller tft_start_controller tft_init_processor tft_start_processor "
            "tft_register_rename_handler set_mindio_export_version tft_register_save_ckpt_handler "
            "tft_set_optimizer_replica tft_set_dp_group_info tft_register_stop_handler tft_register_clean_handler "
            "tft_register_repair_handler tft_register_rollback_handler tft_register_rebuild_group_handler "
            "tft_is_reboot_node tft_register_stream_sync_handler tft_register_exception_handler tft_pause_train "
            "tft_start_updating_os tft_end_updating_os OptimizerType RepairType "
            "tft_register_zit_downgrade_rebuild_handler tft_register_zit_upgrade_rollback_handler "
            "tft_register_zit_upgrade_repair_handler tft_register_zit_upgrade_rebuild_handler"
        ),
        _DECORATOR: "tft_get_repair_type get_device tft_report_load_ckpt_step get_mindio_export_version",
        _UTILS: "tft_set_update_start_time tft_set_update_end_time",
    },
    "MindSpore 2.10.0": {
        _TTP: _OF_MINDSPORE,
        _CONTROLLER: (
            "tft_register_mindx_callback tft_notify_controller_stop_train tft_notify_controller_prepare_action "
            "tft_notify_controller_on_global_rank tft_notify_controller_change_strategy"
        ),
    },
    "TaskD 22bb3d98": {
        _CONTROLLER: (
            "tft_init_controller tft_start_controller tft_notify_controller_dump tft_notify_controller_stop_train "
            "tft_register_mindx_callback tft_notify_controller_on_global_rank tft_notify_controller_change_strategy "
            "tft_destroy_controller tft_query_high_availability_switch tft_notify_controller_prepare_action"
        ),
    },
}
