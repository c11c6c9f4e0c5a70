"""midstep: process-level rescheduling for distributed training. Kill a rank, and only that rank comes back.

The face of the package. Names are looked up when they are first used, so that `import midstep` loads neither torch nor
zmq.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .adapters.ddp import TrainState
    from .launch import ray as ray
    from .launch.watching import JobView, watch
    from .processor.actions import register_action
    from .processor.building import building
    from .processor.callbacks import Lifecycle, Recovery
    from .processor.resilient import device, init_process_group, report, resilient
    from .processor.role import OwnRole, role
    from .processor.values import Value, replicated
    from .protocol.errors import MidstepError

__version__ = "0.1.0"

_HOMES = {
    "JobView": "launch.watching",
    "Lifecycle": "processor.callbacks",
    "MidstepError": "protocol.errors",
    "OwnRole": "processor.role",
    "Recovery": "processor.callbacks",
    "TrainState": "adapters.ddp",
    "Value": "processor.values",
    "building": "processor.building",
    "device": "processor.resilient",
    "init_process_group": "processor.resilient",
    "register_action": "processor.actions",
    "replicated": "processor.values",
    "report": "processor.resilient",
    "resilient": "processor.resilient",
    "role": "processor.role",
    "watch": "launch.watching",
}

__all__ = [
    "JobView",
    "Lifecycle",
    "MidstepError",
    "OwnRole",
    "Recovery",
    "TrainState",
    "Value",
    "__version__",
    "building",
    "device",
    "init_process_group",
    "register_action",
    "replicated",
    "report",
    "resilient",
    "role",
    "watch",
]


_ROOMS = {"ray": "launch.ray"}  # modules, under the names by which users know them


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f".{_ROOMS[name]}", __name__)
    if name in _HOMES:
        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
