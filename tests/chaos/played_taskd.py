"""TaskD as MindIO's controller meets it, played: what its manager says comes by stdin, what it hears goes to stdout.

The calls, their arguments and their order are those of MindCluster 26.1 (taskd/python/framework/manager/controller.py):
callbacks are registered, the controller is initialised and started, and each action of a message is one call.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

from mindio_ttp.controller_ttp import (
    tft_destroy_controller,
    tft_init_controller,
    tft_notify_controller_change_strategy,
    tft_notify_controller_dump,
    tft_notify_controller_on_global_rank,
    tft_notify_controller_stop_train,
    tft_register_mindx_callback,
    tft_start_controller,
)

PAUSE_S = 600


def tell(action: str, **fields: Any) -> None:
    print(json.dumps({"action": action, **fields}), flush=True)


def report_stop_complete(code: int, msg: str, fault_ranks: dict[int, int]) -> None:
    tell("stop_complete", code=code, msg=msg, fault_ranks=fault_ranks)


def report_recover_strategy(fault_ranks: dict[int, int], strategy_list: list[str]) -> None:
    tell("recover_strategy", fault_ranks=fault_ranks, strategy_list=strategy_list)


def report_recover_status(code: int, msg: str, fault_ranks: dict[int, int], strategy: str) -> None:
    tell("recover_status", code=code, msg=msg, fault_ranks=fault_ranks, strategy=strategy)


def report_process_fault(fault_ranks: dict[int, int], fault_codes: dict[int, str] | None = None) -> None:
    tell("process_fault", fault_ranks=fault_ranks)


CALLBACKS: dict[str, Callable[..., None]] = {
    "report_fault_ranks": report_process_fault,
    "report_stop_complete": report_stop_complete,
    "report_strategies": report_recover_strategy,
    "report_result": report_recover_status,
}


def act(action: str, message: dict[str, Any]) -> None:
    ranks = {int(rank): int(kind) for rank, kind in message.get("fault_ranks", {}).items()}
    if action == "destroy_controller":
        tft_destroy_controller()
    elif action == "save_and_exit":
        tft_notify_controller_dump()
    elif action == "pause_train":
        tft_notify_controller_stop_train(ranks, "pause", message.get("timeout") or PAUSE_S)
    elif action == "stop_train":
        tft_notify_controller_stop_train(ranks, "stop")
    elif action == "on_global_rank":
        tft_notify_controller_on_global_rank(ranks)
    elif action == "change_strategy":
        tft_notify_controller_change_strategy(message["strategy"], message.get("params", ""))


def main() -> None:
    for action, function in CALLBACKS.items():
        assert tft_register_mindx_callback(action, function) == 0
    tft_init_controller(-1, 4, False, True, False)
    tft_start_controller("127.0.0.1", 8000, False, "")
    tell("started")
    for line in sys.stdin:
        message = json.loads(line)
        for action in message["actions"]:
            act(action, message)
    tft_destroy_controller()


main()
